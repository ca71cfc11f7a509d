"""What is doubtful about rules without being an error: unknown names, rules that can never take effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from attn_select.backends import distributions
from attn_select.errors import UnknownNameError, show
from attn_select.rules.document import MOST_PROBLEMS, Problem, problem_text
from attn_select.rules.layers import RuleSet
from attn_select.rules.libraries import library_doubts
from attn_select.rules.rule import Rule

if TYPE_CHECKING:
    from attn_select.backends.registry import Registry


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

    That is: a priority rule that an earlier one of its file always beats, since all conditions of that one stand in it
    too, and a rule that disables one which no earlier file has.
    """
    problems = list(rules.idle)
    for _, in_layer in groupby(rules.rules, key=lambda rule: rule.layer):
        seen: list[Rule] = []
        for rule in [each for each in in_layer if each.effect == "priority"]:
            if (first := next((each for each in seen if _beats(each, rule)), None)) is not None:
                text = f"rule {rule.name!r} is never reached: {first.name!r} (line {first.line}) matched first"
                problems.append((rule.file, rule.line, text))
            seen.append(rule)
    return problems


def _beats(earlier: Rule, later: Rule) -> bool:
    """Whether a rule surely matches wherever a later one does: it has no condition that is not in the other too."""
    narrow = {condition.field: {*condition.written} for condition in later.when}
    wide = {condition.field: {*condition.written} for condition in earlier.when}
    implied = all(field in narrow and narrow[field] <= values for field, values in wide.items())
    return implied and earlier.phase in (None, later.phase)


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
