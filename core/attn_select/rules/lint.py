"""What is doubtful about rules without being an error: unknown names, rules that can never be reached."""

from __future__ import annotations

from collections.abc import Sequence

from attn_select import catalog
from attn_select.errors import UnknownNameError, shorten
from attn_select.registry import Registry
from attn_select.rules.conditions import implies
from attn_select.rules.layers import RuleSet
from attn_select.rules.rule import Rule


def known_names(registry: Registry) -> list[str]:
    """Return every backend name that rules may use: registered (also twice), or in the catalogue."""
    return list(dict.fromkeys((*registry.specs, *registry.conflicts, *catalog.DISTRIBUTIONS)))


def unknown_names(rules: RuleSet, known: Sequence[str]) -> list[tuple[str, int | None, str]]:
    """Return ``(file, line, message)`` for every backend name that is neither registered nor in the catalogue."""
    problems: list[tuple[str, int | None, str]] = []
    for rule in rules.rules:
        for name in rule.backends:
            if name not in known:
                text = f"rule {shorten(rule.name)!r}: unknown backend {shorten(repr(name))}; {UnknownNameError('', name, known).hint}"
                problems.append((rule.file, rule.line, text))
    for name, table in rules.options.items():
        if name not in known:
            file, line = next(iter(table.origins.values()), ("", None))
            text = f"options for unknown backend {shorten(repr(name))}; {UnknownNameError('', name, known).hint}"
            problems.append((file, line, text))
    return problems


def unreachable(rules: RuleSet) -> list[tuple[str, int | None, str]]:
    """Return ``(file, line, message)`` for every priority rule that an earlier one of its file always beats."""
    found: list[tuple[str, int | None, str]] = []
    seen: list[Rule] = []
    for rule in rules.rules:
        if rule.effect != "priority":
            continue
        for earlier in seen:
            if earlier.layer == rule.layer and earlier.phase in (None, rule.phase) and implies(rule.when, earlier.when):
                text = f"rule {shorten(rule.name)!r} is never reached: {shorten(earlier.name)!r} (line {earlier.line}) matches first"
                found.append((rule.file, rule.line, text))
                break
        seen.append(rule)
    return found


def rule_warnings(rules: RuleSet, known: Sequence[str]) -> list[str]:
    """Return the warnings that a selection carries: unknown names and doubtful conditions, one line each."""
    warnings = [f"{file}:{line}: {text}" if line else text for file, line, text in unknown_names(rules, known)]
    return warnings + [f"{rule.origin}: rule {rule.name!r}: {text}" for rule in rules.rules for text in rule.warnings]
