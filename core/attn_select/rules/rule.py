"""One ``[[rules]]`` table, checked and compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attn_select.errors import UnknownNameError, shorten, show
from attn_select.layer.config import PHASES, Phase
from attn_select.rules.conditions import Condition, compile_when
from attn_select.rules.predicates import ConditionError

Effect = Literal["priority", "prefer", "avoid", "deny", "evidence"]
EFFECTS: tuple[Effect, ...] = ("priority", "prefer", "avoid", "deny", "evidence")
_KEYS = ("name", "phase", "when", *EFFECTS, "only", "because", "enabled")
PACKAGED = 0
"""The layer of the packaged rules; users' files are above it."""
_LONGEST_NAME = 100
_LONGEST_REASON = 1000


class RuleError(ValueError):
    """A rule that breaks the format."""

    def __init__(self, problems: Sequence[tuple[tuple[str, ...], str]], backends: Sequence[str] = ()) -> None:
        super().__init__("; ".join(text for _, text in problems))
        self.problems, self.backends = tuple(problems), tuple(backends)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One rule."""

    name: str  # unique within a file; a later layer's rule of the same name replaces this one
    # ``priority``, ``prefer``, ``avoid``, ``deny``, or ``evidence``, which keeps times out; None for a rule that only
    # switches another off
    effect: Effect | None
    backends: tuple[str, ...]  # the names that the effect lists, in order; ``evidence`` lists none
    phase: Phase | None  # the one phase it speaks of, or None for both
    when: tuple[Condition, ...]
    because: str | None  # the author's reason, shown by explain, as one line
    file: str  # path of the file as a user would write it; ``<packaged>`` rules carry their real path
    line: int  # line of the rule's header, from 1
    layer: int  # position of the file among the layers, from ``PACKAGED`` on; later beats earlier
    enabled: bool = True  # False removes the rule of this name from earlier layers
    warnings: tuple[str, ...] = ()  # problems that do not stop the rule from working
    # whether a priority shuts out the backends that it does not list; None where the rule does not say
    only: bool | None = None

    @property
    def origin(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


def parse_rule(table: Mapping[str, Any], *, file: str, line: int, layer: int) -> Rule:
    """Check one table and compile it."""
    name = table.get("name")
    problems: list[tuple[tuple[str, ...], str]] = []
    if name is None:
        problems.append(((), "a rule needs a name, so that later files can replace or disable it"))
    elif not _is_name(name):
        text = f"name = {show(name)}: expected a string of 1 to {_LONGEST_NAME} printable characters"
        problems.append((("name",), text))
    title = f"rule {name.strip()!r}: " if name is not None and not problems else ""
    found: list[tuple[tuple[str, ...], str]] = []
    rule = _parse(table, name.strip() if isinstance(name, str) else "", found, file, line, layer)
    problems += [(key, f"{title}{text}") for key, text in found]
    if problems:
        listed = [table[effect] for effect in EFFECTS if isinstance(table.get(effect), list)]
        raise RuleError(problems, [*dict.fromkeys(name for names in listed for name in names if _is_name(name))])
    return rule


def _parse(
    table: Mapping[str, Any],
    name: str,
    problems: list[tuple[tuple[str, ...], str]],
    file: str,
    line: int,
    layer: int,
) -> Rule:
    """Return the rule, which is sound only where nothing was added to ``problems``."""
    for key in table:
        if key not in _KEYS:
            problems.append(((key,), f"unknown key {show(key)}; {UnknownNameError('key', key, _KEYS).hint}"))
    enabled = table.get("enabled", True)
    if not isinstance(enabled, bool):
        problems.append((("enabled",), f"enabled = {show(enabled)}: expected true or false"))
    because = table.get("because")
    if because is not None and not isinstance(because, str):
        problems.append((("because",), f"because = {show(because)}: expected a string"))
        because = None
    phase = table.get("phase")
    if phase is not None and phase not in PHASES:
        text = f"phase = {show(phase)}: expected {' or '.join(PHASES)} (leave it out for both)"
        problems.append((("phase",), text))
    effects = [effect for effect in EFFECTS if effect in table]
    if len(effects) > 1 or (enabled and not effects):
        seen = " and ".join(effects) if effects else "none"
        problems.append((tuple(effects[1:2]), f"expected exactly one of {', '.join(EFFECTS)}; found {seen}"))
    only = table.get("only")
    if only is not None and (not isinstance(only, bool) or "priority" not in effects):
        accepted = "true or false" if "priority" in effects else "it beside priority alone"
        problems.append((("only",), f"only = {show(only)}: expected {accepted}"))
    backends: tuple[str, ...] = ()
    for effect in effects:
        try:
            backends = _backends(effect, table[effect])
        except ValueError as error:
            problems.append(((effect,), str(error)))
    when: tuple[Condition, ...] = ()
    warnings: list[str] = []
    try:
        when, warnings = compile_when(table.get("when", {}))
    except ConditionError as error:
        problems += [(("when", *key), text) for key, text in error.problems]
    return Rule(
        name=name,
        effect=effects[0] if effects else None,
        backends=backends,
        phase=phase,
        when=when,
        because=shorten(" ".join(because.split()), _LONGEST_REASON) if because else None,
        file=file,
        line=line,
        layer=layer,
        enabled=bool(enabled),
        warnings=tuple(warnings),
        only=only,
    )


def _backends(effect: str, value: object) -> tuple[str, ...]:
    """Return the names that an effect lists. Raises ValueError where it lists none or something else."""
    if effect == "evidence":
        if value is not False:
            raise ValueError(f"evidence = {show(value)}: expected false, which keeps times out of the choice")
        return ()
    if not isinstance(value, list) or not value or not all(map(_is_name, value)):
        raise ValueError(f'{effect} = {show(value)}: expected a list of backend names such as ["FLASH_ATTN"]')
    names = tuple(name.strip() for name in value)
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ValueError(f"{effect} lists {twice} twice")
    return names


def _is_name(value: object) -> bool:
    """Names are shown as they are, so nothing that moves a terminal's cursor may stand in one."""
    return isinstance(value, str) and value.isprintable() and len(value.strip()) > 0 and len(value) <= _LONGEST_NAME
