"""What is doubtful about rules without being an error: unknown names, rules that can never take effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from attn_select import catalog
from attn_select.config import MLA_DIMS, PHASES
from attn_select.errors import UnknownNameError, show
from attn_select.rules.conditions import Condition, compile_when
from attn_select.rules.document import MOST_PROBLEMS, Problem
from attn_select.rules.layers import RuleSet
from attn_select.rules.rule import Rule

if TYPE_CHECKING:
    from attn_select.registry import Registry

(_MLA,), _ = compile_when({"mla": True})
(_NOT_MLA,), _ = compile_when({"mla": False})


def known_names(registry: Registry) -> list[str]:
    """Return every backend name that rules may use: registered (also twice), or in the catalogue."""
    return list(dict.fromkeys((*registry.specs, *registry.conflicts, *catalog.DISTRIBUTIONS)))


def unknown_names(rules: RuleSet, known: Sequence[str]) -> list[Problem]:
    """Return a problem for every backend name that is neither registered nor in the catalogue (the first hundred)."""
    problems: list[Problem] = []
    valid = set(known)
    for file, line, what, name in _names(rules):
        if name not in valid and len(problems) < MOST_PROBLEMS:
            hint = UnknownNameError("backend", name, known).hint
            problems.append((file, line, f"{what} unknown backend {show(name)}; {hint}"))
    return problems


def _names(rules: RuleSet) -> Iterator[tuple[str, int | None, str, str]]:
    for rule in rules.rules:
        for name in rule.backends:
            yield rule.file, rule.line, f"rule {rule.name!r}:", name
    for name, table in rules.options.items():
        yield *table.origin, "options for", name


def unreachable(rules: RuleSet) -> list[Problem]:
    """Return a problem for every rule without any effect.

    That is: a priority rule that earlier ones of its file always beat, a rule whose conditions nothing meets, and one
    that disables a rule which no earlier file has.
    """
    problems = list(rules.idle)
    for _, in_layer in groupby(rules.rules, key=lambda rule: rule.layer):
        seen: list[Rule] = []
        for rule in in_layer:
            text = None
            if not all(map(_can_match, rule.when)):
                text = "nothing meets its conditions"
            elif rule.effect == "priority":
                if beaten_by := _beaten_by(rule, seen):
                    text = f"{' and '.join(f'{r.name!r} (line {r.line})' for r in beaten_by)} matched first"
                seen.append(rule)
            if text is not None:
                problems.append((rule.file, rule.line, f"rule {rule.name!r} is never reached: {text}"))
    return problems


def _can_match(condition: Condition) -> bool:
    return not condition.points or any(map(condition.matches, condition.points))


def _beaten_by(rule: Rule, earlier: Sequence[Rule]) -> list[Rule]:
    """Return the earlier rules that together take every case of ``rule``, or nothing."""
    found: dict[str, Rule] = {}
    for phase in PHASES if rule.phase is None else (rule.phase,):
        for when in _halves(rule.when):
            for other in earlier:
                if other.phase in (None, phase) and implies(when, other.when):
                    found[other.name] = other
                    break
            else:
                return []
    return list(found.values())


def _halves(when: tuple[Condition, ...]) -> list[tuple[Condition, ...]]:
    """Split ``when`` into its MLA and its other cases: most rules files have these two halves."""
    fields = {condition.field for condition in when}
    if "mla" in fields:
        return [when]
    sparse = any(condition.field == "sparse" and not condition.matches(False) for condition in when)
    if sparse or not fields.isdisjoint((*MLA_DIMS, "sparse_top_k")):
        return [(*when, _MLA)]
    return [(*when, _MLA), (*when, _NOT_MLA)]


def implies(narrow: Iterable[Condition], wide: Iterable[Condition]) -> bool:
    """Whether everything that matches ``narrow`` surely matches ``wide`` too."""
    by_field = {condition.field: condition for condition in narrow}
    return all(_implies(by_field.get(condition.field), condition) for condition in wide)


def _implies(narrow: Condition | None, wide: Condition) -> bool:
    if narrow is None:
        return False
    if narrow.points:
        return all(wide.matches(point) for point in narrow.points | wide.points if narrow.matches(point))
    return set(narrow.written) <= set(wide.written)


def rule_warnings(rules: RuleSet, known: Sequence[str]) -> list[str]:
    """Return the warnings that a selection carries, one line each: unknown names, idle rules, doubtful conditions."""
    problems = [*unknown_names(rules, known), *rules.idle]
    for rule in rules.rules:
        problems += ((rule.file, rule.line, f"rule {rule.name!r}: {text}") for text in rule.warnings)
    return [f"{file}:{line}: {text}" if line else f"{file}: {text}" for file, line, text in problems]
