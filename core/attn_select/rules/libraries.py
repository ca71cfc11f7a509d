"""``library.NAME`` in a rule: distributions, and the import names by which people know them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from attn_select.backends.spec import BackendSpec, Library
from attn_select.errors import nearest
from attn_select.machine.environment import canonical_distribution, installed_version
from attn_select.rules.conditions import Condition
from attn_select.rules.document import MOST_PROBLEMS, Problem
from attn_select.rules.rule import PACKAGED, Rule

PREFIX = "library."


def import_names(specs: Mapping[str, BackendSpec]) -> dict[str, tuple[str, ...]]:
    """Return the distributions of registered backends by import name (``flashinfer``: ``flashinfer-python``)."""
    found: dict[str, dict[str, None]] = {}
    for library in _libraries(specs):
        found.setdefault(canonical_distribution(library.module), {})[library.distribution] = None
    return {module: tuple(distributions) for module, distributions in found.items()}


def unknown_libraries(rules: Iterable[Rule], specs: Mapping[str, BackendSpec]) -> list[Problem]:
    """Return a problem for every ``library.NAME`` that no registered backend names and that is not installed here."""
    distributions = dict.fromkeys(canonical_distribution(library.distribution) for library in _libraries(specs))
    known = {**distributions, **dict.fromkeys(import_names(specs))}
    problems: list[Problem] = []
    for rule, _, name in _named_in(rules):
        if canonical_distribution(name) not in known and installed_version(name) is None:
            near = nearest(name, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; they use {', '.join(distributions)}"
            text = f"no registered backend uses a library {name!r}, and it is not installed here{hint}"
            problems.append((rule.file, rule.line, f"rule {rule.name!r}: {text}"))
    return problems[:MOST_PROBLEMS]


def versions_not_here(rules: Iterable[Rule], specs: Mapping[str, BackendSpec]) -> list[Problem]:
    """Return a problem for every rule of a user about a version of a library that is not installed here."""
    modules = import_names(specs)
    problems: list[Problem] = []
    for rule, condition, name in _named_in(rule for rule in rules if rule.layer > PACKAGED):
        if not any(map(installed_version, (name, *modules.get(canonical_distribution(name), ())))):
            text = (
                f"{condition} holds nowhere on this machine: {name} is not installed (--with {name}==VERSION tries one)"
            )
            problems.append((rule.file, rule.line, f"rule {rule.name!r}: {text}"))
    return problems[:MOST_PROBLEMS]


def _named_in(rules: Iterable[Rule]) -> Iterator[tuple[Rule, Condition, str]]:
    """Yield each condition on a library's version, with its rule and the library's name."""
    for rule in rules:
        for condition in rule.when:
            if condition.field.startswith(PREFIX):
                yield rule, condition, condition.field.removeprefix(PREFIX)


def _libraries(specs: Mapping[str, BackendSpec]) -> Iterable[Library]:
    return chain.from_iterable(group for spec in specs.values() for group in spec.libraries)
