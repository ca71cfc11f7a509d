"""What is doubtful about rules without being an error: unknown names, rules that can never take effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from attn_select.backends import distributions
from attn_select.errors import UnknownNameError, show
from attn_select.layer.config import MLA_DIMS, PHASES
from attn_select.rules.conditions import (
    Condition,
    compile_when,
    is_number,
    limits,
)
from attn_select.rules.document import MOST_PROBLEMS, Problem, problem_text
from attn_select.rules.layers import RuleSet
from attn_select.rules.libraries import library_doubts
from attn_select.rules.rule import Rule

if TYPE_CHECKING:
    from attn_select.backends.registry import Registry

(_MLA,), _ = compile_when({"mla": True})
(_NOT_MLA,), _ = compile_when({"mla": False})


def known_names(registry: Registry) -> list[str]:
    """Return every backend name that rules may use: registered (also twice), or known."""
    return list(dict.fromkeys((*registry.specs, *registry.conflicts, *distributions.known_backends())))


def unknown_names(rules: RuleSet, known: Sequence[str]) -> list[Problem]:
    """Return a problem for every backend name that is neither registered nor known (the first hundred)."""
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
    yield from rules.named
    for name, table in rules.options.items():
        yield *table.origin, "options for", name


def unreachable(rules: RuleSet) -> list[Problem]:
    """Return a problem for every rule without any effect.

    That is: a priority rule that earlier ones of its file always beat, a rule with a condition that nothing meets, and
    one that disables a rule which no earlier file has.
    """
    problems = list(rules.idle)
    for _, in_layer in groupby(rules.rules, key=lambda rule: rule.layer):
        seen: list[Rule] = []
        for rule in in_layer:
            unmet = next((each for each in rule.when if not _may_hold(each)), None)
            text = None if unmet is None else f"nothing matches {unmet}{_accepted(unmet.field)}"
            if text is None and rule.effect == "priority":
                if beaten_by := _beaten_by(rule, seen):
                    text = f"{' and '.join(f'{r.name!r} (line {r.line})' for r in beaten_by)} matched first"
                seen.append(rule)
            if text is not None:
                problems.append((rule.file, rule.line, f"rule {rule.name!r} is never reached: {text}"))
    return problems


def _may_hold(condition: Condition) -> bool:
    """Whether a value may match a condition."""
    return condition.unset or not condition.points or any(map(condition.matches, condition.points))


def _accepted(field: str) -> str:
    """Return the values that a field of numbers can have, in words; nothing for other fields."""
    if not is_number(field):
        return ""
    least, most = limits(field)
    if 0 < least < 1:
        return " (it is greater than 0)"
    return f" (it is at least {least})" if most >= 2**31 - 1 else f" (it lies between {least} and {most})"


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
    if narrow is None or (narrow.unset and not wide.unset):
        return False
    if narrow.points:
        return all(wide.matches(point) for point in narrow.points | wide.points if narrow.matches(point))
    return set(narrow.written) <= set(wide.written)


def rule_warnings(rules: RuleSet, known: Sequence[str]) -> list[str]:
    """Return the warnings that a selection carries, one line each."""
    return [*map(problem_text, [*rules.foreign, *unknown_names(rules, known), *rules.idle, *_of_rules(rules)])]


def _of_rules(rules: RuleSet) -> list[Problem]:
    """Return the warnings that rules came with when they were compiled."""
    return [(each.file, each.line, f"rule {each.name!r}: {text}") for each in rules.rules for text in each.warnings]


def doubts(rules: RuleSet, registry: Registry) -> list[Problem]:
    """Return what ``rules check`` warns of."""
    libraries = library_doubts(rules.rules, registry.specs)
    problems = [*rules.foreign, *_of_rules(rules), *libraries, *unreachable(rules)]
    return sorted(problems, key=lambda problem: (problem[0], problem[1] or 0))
