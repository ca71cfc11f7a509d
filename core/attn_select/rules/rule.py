"""One ``[[rules]]`` table, checked and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attn_select.config import PHASES, Phase
from attn_select.errors import UnknownNameError, shorten
from attn_select.rules.conditions import Condition, ConditionError, compile_when

Effect = Literal["priority", "prefer", "avoid", "deny"]
EFFECTS: tuple[Effect, ...] = ("priority", "prefer", "avoid", "deny")
_KEYS = ("name", "phase", "when", *EFFECTS, "because", "enabled")


class RuleError(ValueError):
    """A rule that breaks the format; the message is for people."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: unique within a file; a later layer's rule of the same name replaces this one.
        effect: ``priority``, ``prefer``, ``avoid`` or ``deny``; None for a rule that only switches another off.
        backends: the names that the effect lists, in order.
        phase: the one phase it speaks of, or None for both.
        when: all must match.
        because: the author's reason, shown by explain.
        file: path of the file as a user would write it; ``<packaged>`` rules carry their real path.
        line: line of the rule's header, from 1.
        layer: position of the file among the layers, later beats earlier.
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
    if not isinstance(name, str) or not name.strip():
        raise RuleError("a rule needs a name (a non-empty string), so that later files can replace or disable it")
    for key in table:
        if key not in _KEYS:
            hint = UnknownNameError("key", key, _KEYS).hint
            raise RuleError(f"rule {shorten(name)!r}: unknown key {shorten(repr(key))}; {hint}")
    enabled = table.get("enabled", True)
    if not isinstance(enabled, bool):
        raise RuleError(f"rule {shorten(name)!r}: enabled = {shorten(repr(enabled))}: expected true or false")
    because = table.get("because")
    if because is not None and not isinstance(because, str):
        raise RuleError(f"rule {shorten(name)!r}: because = {shorten(repr(because))}: expected a string")
    phase = table.get("phase")
    if phase is not None and phase not in PHASES:
        raise RuleError(f"rule {shorten(name)!r}: phase = {shorten(repr(phase))}: expected {' or '.join(PHASES)} (leave it out for both)")
    effects = [effect for effect in EFFECTS if effect in table]
    if len(effects) > 1 or (enabled and not effects):
        found = " and ".join(effects) if effects else "none"
        raise RuleError(f"rule {shorten(name)!r}: expected exactly one of {', '.join(EFFECTS)}; found {found}")
    effect = effects[0] if effects else None
    backends = _names(name, effect, table[effect]) if effect else ()
    try:
        when, warnings = compile_when(table.get("when", {}))
    except ConditionError as error:
        raise RuleError(f"rule {shorten(name)!r}: {error}") from None
    return Rule(name, effect, backends, phase, when, because, file, line, layer, enabled, tuple(warnings))


def _names(rule: str, effect: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v.strip() for v in value):
        raise RuleError(f'rule {shorten(rule)!r}: {effect} = {shorten(repr(value))}: expected a list of backend names such as ["FLASH_ATTN"]')
    names = tuple(v.strip() for v in value)
    for index, backend in enumerate(names):
        if backend in names[:index]:
            raise RuleError(f"rule {shorten(rule)!r}: {effect} lists {shorten(backend)} twice")
    return names
