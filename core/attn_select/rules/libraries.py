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


def library_doubts(rules: Iterable[Rule], specs: Mapping[str, BackendSpec]) -> list[Problem]:
    """Return a problem for every ``library.NAME`` that no registered backend names and that is not installed here, and
    for every other one in a rule of a user that is not installed."""
    distributions = dict.fromkeys(canonical_distribution(library.distribution) for library in _libraries(specs))
    modules = import_names(specs)
    known = {**distributions, **dict.fromkeys(modules)}
    problems: list[Problem] = []
    for rule, condition, name in _named_in(rules):
        spelled = canonical_distribution(name)
        if any(map(installed_version, (name, *modules.get(spelled, ())))):
            continue
        if spelled not in known:
            near = nearest(name, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; they use {', '.join(distributions)}"
            text = f"no registered backend uses a library {name!r}, and it is not installed here{hint}"
        elif rule.layer > PACKAGED:
            tries = f"(--with {name}==VERSION tries one)"
            text = f"{condition} holds nowhere on this machine: {name} is not installed {tries}"
        else:
            continue
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
