"""One ``[[rules]]`` table, checked and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attn_select.config import PHASES, Phase
from attn_select.errors import UnknownNameError, shorten, show
from attn_select.rules.conditions import Condition, compile_when
from attn_select.rules.predicates import ConditionError

Effect = Literal["priority", "prefer", "avoid", "deny"]
EFFECTS: tuple[Effect, ...] = ("priority", "prefer", "avoid", "deny")
_KEYS = ("name", "phase", "when", *EFFECTS, "because", "enabled")
PACKAGED = 0
"""The layer of the packaged rules; plugins' fragments are below it, users' files above."""
_LONGEST_NAME = 100
_LONGEST_REASON = 1000


class RuleError(ValueError):
    """A rule that breaks the format; the message is for people."""


@dataclass(slots=True, eq=False)
class Rule:
    """One rule. Treat as immutable: rules are shared and cached.

    Attributes:
        name: unique within a file; a later layer's rule of the same name replaces this one.
        effect: ``priority``, ``prefer``, ``avoid`` or ``deny``; None for a rule that only switches another off.
        backends: the names that the effect lists, in order.
        phase: the one phase it speaks of, or None for both.
        when: all must match.
        because: the author's reason, shown by explain, as one line.
        file: path of the file as a user would write it; ``<packaged>`` rules carry their real path.
        line: line of the rule's header, from 1.
        layer: position of the file among the layers, later beats earlier: ``PACKAGED`` is that of the packaged rules,
            plugins' fragments are below it, users' files above.
        enabled: False removes the rule of this name from earlier layers.
        warnings: problems that do not stop the rule from working.
    """

    name: str
    effect: Effect | None
    backends: tuple[str, ...]
    phase: Phase | None
    when: tuple[Condition, ...]
    because: str | None
    file: str
    line: int
    layer: int
    enabled: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


def parse_rule(table: Mapping[str, Any], *, file: str, line: int, layer: int) -> Rule:
    """Check one table and compile it.

    Raises:
        RuleError: unknown keys, wrong types, no or several effects, a bad condition.
    """
    name = table.get("name")
    if name is None:
        raise RuleError("a rule needs a name, so that later files can replace or disable it")
    if not _is_name(name):
        raise RuleError(f"name = {show(name)}: expected a string of 1 to {_LONGEST_NAME} printable characters")
    try:
        return _parse(table, name.strip(), file, line, layer)
    except (RuleError, ConditionError) as error:
        raise RuleError(f"rule {name.strip()!r}: {error}") from None


def _parse(table: Mapping[str, Any], name: str, file: str, line: int, layer: int) -> Rule:
    for key in table:
        if key not in _KEYS:
            raise RuleError(f"unknown key {show(key)}; {UnknownNameError('key', key, _KEYS).hint}")
    enabled = table.get("enabled", True)
    if not isinstance(enabled, bool):
        raise RuleError(f"enabled = {show(enabled)}: expected true or false")
    because = table.get("because")
    if because is not None and not isinstance(because, str):
        raise RuleError(f"because = {show(because)}: expected a string")
    phase = table.get("phase")
    if phase is not None and phase not in PHASES:
        raise RuleError(f"phase = {show(phase)}: expected {' or '.join(PHASES)} (leave it out for both)")
    effects = [effect for effect in EFFECTS if effect in table]
    if len(effects) > 1 or (enabled and not effects):
        found = " and ".join(effects) if effects else "none"
        raise RuleError(f"expected exactly one of {', '.join(EFFECTS)}; found {found}")
    effect = effects[0] if effects else None
    backends = _backends(effect, table[effect]) if effect else ()
    when, warnings = compile_when(table.get("when", {}))
    return Rule(
        name=name,
        effect=effect,
        backends=backends,
        phase=phase,
        when=when,
        because=shorten(" ".join(because.split()), _LONGEST_REASON) if because else None,
        file=file,
        line=line,
        layer=layer,
        enabled=enabled,
        warnings=tuple(warnings),
    )


def _backends(effect: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(map(_is_name, value)):
        raise RuleError(f'{effect} = {show(value)}: expected a list of backend names such as ["FLASH_ATTN"]')
    names = tuple(name.strip() for name in value)
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise RuleError(f"{effect} lists {twice} twice")
    return names


def _is_name(value: object) -> bool:
    """Names are shown as they are, so nothing that moves a terminal's cursor may stand in one."""
    return isinstance(value, str) and value.isprintable() and len(value.strip()) > 0 and len(value) <= _LONGEST_NAME
