"""Turns rules into a ranking per phase: which backends, in which order, and which are denied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment, canonical_distribution
from attn_select.rules.conditions import Condition
from attn_select.rules.libraries import PREFIX
from attn_select.rules.rule import PACKAGED, Rule

if TYPE_CHECKING:
    from attn_select.times.workload import Workload


@dataclass(slots=True)
class Ranking:
    """The effective order for one phase. Treat as immutable: layers that match the same rules share it.

    Attributes:
        order: backend names, best first.
        ranks: position from 1 of every candidate in that order.
        denied: backend name → the rule that denies it.
        rules: the rules that made the order, as they were applied.
        by_rule: False where no priority rule matched and the registered order was taken.
        evidence: the last rule that says how times count, or None.
    """

    order: list[str]
    denied: dict[str, Rule]
    rules: list[Rule]
    by_rule: bool
    evidence: Rule | None
    _default_order: list[str] | None
    """The order before the users' own rules; None where one of them gives the priority."""
    _later: list[Rule]
    """The users' rules that change that order, in the order they are applied."""
    _candidates: Collection[str] | None
    """The backends that count; None: all."""
    ranks: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        ranked = [name for name in self.order if self._candidates is None or name in self._candidates]
        self.ranks = {name: rank for rank, name in enumerate(ranked, 1)}

    @property
    def without_evidence(self) -> Rule | None:
        """The rule that keeps times out of the choice."""
        return self.evidence if self.evidence is not None and self.evidence.evidence is False else None

    @property
    def ties_by_time(self) -> bool:
        """Whether of times that tie within their margins the shortest decides, not the rules."""
        return self.evidence is not None and self.evidence.evidence == "fastest"

    def with_behind(self, unverified: Collection[str]) -> Ranking:
        """Return the ranking with backends that nothing proves behind all others, except where users' rules place them.

        The packaged rules, the plugins' fragments and the registered order are defaults, and defaults prefer what was
        proved. A user's priority stands as written, and a user's prefer and avoid apply after the move.
        """
        if self._default_order is None:
            return self
        order = [name for name in self._default_order if name not in unverified]
        return self._with_default([*order, *[name for name in self._default_order if name in unverified]])

    def arranged(self, arrange: Callable[[list[str]], list[str]]) -> Ranking:
        """Return the ranking with the default order arranged anew; what users' rules place stays where they place it.

        Users' rules that were made of times, before the first one that was not, are part of what is arranged. Unchanged
        where a user's priority gives the order, or a rule keeps evidence out.
        """
        if self._default_order is None or self.without_evidence is not None:
            return self
        default_order = self._default_order
        later = [*dropwhile(_is_measured, self._later)]
        for rule in self._later[: len(self._later) - len(later)]:
            default_order = _applied(rule, default_order)
        return replace(self, _later=later)._with_default(arrange(default_order))

    def _with_default(self, default_order: list[str]) -> Ranking:
        order = default_order
        for rule in self._later:
            order = _applied(rule, order)
        return replace(self, order=order, _default_order=default_order)

    def placed_by(self, name: str) -> Rule | None:
        """Return the user's rule that gives a backend its place, or None."""
        if self._default_order is None:
            return self.rules[0]
        return next((rule for rule in reversed(self._later) if name in rule.backends), None)


class Rankings(dict[Phase, Ranking]):
    """The ranking of every phase. Treat as immutable: layers that match the same rules share it.

    Attributes:
        rules: the rules that took part, in the order they were applied, each once.
        by_phase: whether one of them ranks one phase alone.
        denies: whether one of them denies a backend.
        ranks_of: backend name → its rank in every phase, None where the phase does not rank it; ranked ones alone.
        listed: every candidate, by decode rank, then prefill rank; those without a rank come last, as registered.
    """

    __slots__ = ("by_phase", "denies", "listed", "ranks_of", "rules")

    def __init__(self, rankings: Mapping[Phase, Ranking], candidates: Iterable[str]) -> None:
        super().__init__(rankings)
        rules = dict.fromkeys([rule for ranking in rankings.values() for rule in ranking.rules])
        self.by_phase = any(len(ranking.rules) < len(rules) for ranking in rankings.values())
        self.rules = (*rules, *dict.fromkeys([r.evidence for r in rankings.values() if r.evidence]))
        self.denies = any(ranking.denied for ranking in rankings.values())
        self.ranks_of: dict[str, dict[Phase, int | None]] = {}
        for phase in reversed([*rankings]):
            for name, rank in rankings[phase].ranks.items():
                self.ranks_of.setdefault(name, dict.fromkeys(rankings))[phase] = rank
        self.listed = tuple(dict.fromkeys([*self.ranks_of, *candidates]))

    def with_behind(self, phase: Phase, unverified: Collection[str]) -> Rankings:
        """Return the rankings with one phase's changed as ``Ranking.with_behind`` says."""
        return Rankings({**self, phase: self[phase].with_behind(unverified)}, self.listed)

    def arranged(self, phase: Phase, arrange: Callable[[list[str]], list[str]]) -> Rankings:
        """Return the rankings with one phase's changed as ``Ranking.arranged`` says."""
        return Rankings({**self, phase: self[phase].arranged(arrange)}, self.listed)


_MOST_RANKINGS = 1024
_Test = tuple[Callable[[Any], Any], Callable[[Any], bool]]
"""Gets a value out of a config or a batch shape, and says whether it matches."""
_Compiled = tuple[Rule, list[_Test]]
_OF_BATCH = {
    "batch": "num_requests",
    "seq_len": "max_seq_len",
    "query_len": "max_query_len",
    "kv_tokens": "num_kv_tokens",
    "pairs": "num_pairs",
    "effective_batch": "effective_requests",
}


def _kv_cache_names(config: AttentionConfig) -> tuple[str, ...]:
    """``auto`` and the dtype that it stands for are the same cache, so a rule may name either."""
    return ("auto", config.dtype) if config.kv_cache_dtype in ("auto", config.dtype) else (config.kv_cache_dtype,)


def _as_names(field: str) -> Callable[[AttentionConfig], tuple[str, ...]]:
    get = attrgetter(field)
    return lambda config: (get(config),)


_GETTERS: dict[str, Callable[[AttentionConfig], Any]] = {
    "kv_cache_dtype": _kv_cache_names,
    **{field: _as_names(field) for field in ("dtype", "attn_type", "output_quantization", "cuda_graph")},
}


class Ranker:
    """Rules compiled for one device and environment: what depends on neither config nor phase is decided once.

    ``registered`` is the order that counts where no priority rule matches. ``modules`` are the distributions that an
    import name in ``library.NAME`` stands for (``libraries.import_names``). ``candidates`` are the backends that get a
    rank; None: every name that a rule gives.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        device: Device,
        environment: Environment,
        registered: Sequence[str],
        modules: Mapping[str, Sequence[str]] = MappingProxyType({}),
        candidates: Collection[str] | None = None,
    ) -> None:
        self._candidates = candidates
        self._rankings: dict[tuple[object, ...], Rankings] = {}
        self._by_values: dict[tuple[object, ...], Rankings] = {}
        self._registered = list(registered)
        compiled: list[_Compiled] = []
        self._of_batch: dict[Rule, list[_Test]] = {}
        for rule in rules:
            tests: list[_Test] = []
            for condition in rule.when:
                if condition.scope == "config":
                    tests.append(_test(condition))
                elif condition.scope == "workload":
                    test = attrgetter(_OF_BATCH[condition.field]), condition.matches
                    self._of_batch.setdefault(rule, []).append(test)
                elif not _holds(condition, device, environment, modules):
                    break
            else:
                compiled.append((rule, tests))
        # Priorities: last layer to first, top-down within one. sorted() is stable.
        priorities = sorted(
            [item for item in compiled if item[0].effect == "priority"], key=lambda item: -item[0].layer
        )
        effects = [item for item in compiled if item[0].effect != "priority"]
        self._with_workload = priorities, effects
        self._priorities = self._without_workload(priorities)
        self._effects = self._without_workload(effects)
        asked = [rule.when for rule, _ in (*self._priorities, *self._effects)]
        fields = {condition.field for when in asked for condition in when if condition.scope == "config"}
        self._values = attrgetter("mla", "dtype", *fields)  # the dtype is what a kv_cache_dtype of "auto" stands for

    def _without_workload(self, compiled: Sequence[_Compiled]) -> list[_Compiled]:
        """Return the rules that may match where no workload is given: without one no time is known."""
        return [item for item in compiled if item[0] not in self._of_batch and item[0].effect != "evidence"]

    def rank(self, config: AttentionConfig, phases: Sequence[Phase]) -> Rankings:
        """Return the ranking of every phase."""
        values = (self._values(config), tuple(phases))  # all that the rules ask of a layer: few layers differ in it
        known = self._by_values.get(values)
        if known is not None:
            return known
        priorities = tuple([rule for rule, tests in self._priorities if _matches(tests, config)])
        effects = tuple([rule for rule, tests in self._effects if _matches(tests, config)])
        key = (priorities, effects, *phases)
        found = self._rankings.get(key)
        if found is None:
            if len(self._rankings) >= _MOST_RANKINGS:
                self._rankings.clear()
            ranked = {phase: self._rank(phase, priorities, effects) for phase in phases}
            found = Rankings(ranked, self._candidates or ())
            self._rankings[key] = found
        if len(self._by_values) >= _MOST_RANKINGS:
            self._by_values.clear()
        self._by_values[values] = found
        return found

    def rank_for(self, config: AttentionConfig, phases: Sequence[Phase], workload: Workload) -> Rankings:
        """Return the ranking of every phase for a workload.

        Conditions on batches hold in a phase where they hold for every shape that the workload has of it.
        """
        priorities, effects = [
            [rule for rule, tests in compiled if _matches(tests, config)] for compiled in self._with_workload
        ]
        rankings: dict[Phase, Ranking] = {}
        for phase in phases:
            shapes = workload.of_phase(phase, config)

            def holds(rule: Rule, batches: Sequence[object] = [shape.batch for shape in shapes]) -> bool:
                tests = self._of_batch.get(rule)
                return tests is None or (bool(batches) and all(_matches(tests, batch) for batch in batches))

            rankings[phase] = self._rank(phase, [*filter(holds, priorities)], [*filter(holds, effects)])
        return Rankings(rankings, self._candidates or ())

    def _rank(self, phase: Phase, priorities: Sequence[Rule], effects: Sequence[Rule]) -> Ranking:
        applied: list[Rule] = []
        order = self._registered
        for rule in priorities:
            if rule.phase is None or rule.phase == phase:
                order = list(rule.backends)
                applied.append(rule)
                break
        by_rule = bool(applied)
        users = by_rule and applied[0].layer > PACKAGED
        default_order = None if users else order
        later: list[Rule] = []
        denied: dict[str, Rule] = {}
        evidence: Rule | None = None
        for rule in effects:
            if rule.phase is not None and rule.phase != phase:
                continue
            if rule.effect == "deny":
                denied.update(dict.fromkeys(rule.backends, rule))
            elif rule.effect == "evidence":
                evidence = rule
                continue
            elif users and rule.layer < PACKAGED:
                continue  # a plugin's fragment does not change the order that a user wrote
            else:
                order = _applied(rule, order)
                if rule.layer > PACKAGED:
                    later.append(rule)
                elif not users:
                    default_order = order
            applied.append(rule)
        return Ranking(order, denied, applied, by_rule, evidence, default_order, later, self._candidates)


def _test(condition: Condition) -> _Test:
    get = _GETTERS.get(condition.field) or attrgetter(condition.field)
    if not condition.unset:
        return get, condition.matches
    return lambda config: (get(config),), lambda value: value[0] is None or condition.matches(value[0])


def _is_measured(rule: Rule) -> bool:
    return rule.measured is not None


def _applied(rule: Rule, order: list[str]) -> list[str]:
    """Return ``order`` after a prefer (its list in front) or an avoid (its list at the end)."""
    others = [name for name in order if name not in rule.backends]
    if rule.effect == "prefer":
        return [*rule.backends, *others]
    listed = [name for name in order if name in rule.backends]
    return [*others, *listed, *(name for name in rule.backends if name not in listed)]


def holds_for(condition: Condition, config: AttentionConfig, device: Device) -> bool:
    """Whether a condition on the config or the device holds; an unset field never does."""
    if condition.scope == "device":
        value = device.name if condition.field == "gpu" else getattr(device, condition.field)
    else:
        value = (_GETTERS.get(condition.field) or attrgetter(condition.field))(config)
    return value is not None and condition.matches(value)


def _matches(tests: list[_Test], asked: object) -> bool:
    """Whether a config, or a batch shape, passes all tests; an unset field passes none."""
    for get, matches in tests:
        value = get(asked)
        if value is None or not matches(value):
            return False
    return True


def _holds(
    condition: Condition, device: Device, environment: Environment, modules: Mapping[str, Sequence[str]]
) -> bool:
    value: Any
    if condition.field == "gpu":
        value = device.name
    elif condition.field == "cuda":
        value = environment.cuda
    elif condition.field.startswith(PREFIX):
        value = _library_version(condition.field.removeprefix(PREFIX), environment, modules)
    else:
        value = getattr(device, condition.field)
    return value is not None and condition.matches(value)


def unknown_versions(
    rules: Sequence[Rule], device: Device, environment: Environment, modules: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a warning for every rule of a user that waits for a version of a library that nobody knows here.

    Its conditions on the device hold; the packaged rules are left out.
    """
    found = []
    for rule in rules if environment.assume_installed else ():
        places = [c for c in rule.when if c.scope in ("device", "environment") and not c.field.startswith(PREFIX)]
        if rule.layer <= PACKAGED or not all(_holds(c, device, environment, modules) for c in places):
            continue
        for condition in rule.when:
            name = condition.field.removeprefix(PREFIX)
            if name != condition.field and _library_version(name, environment, modules) is None:
                found.append(
                    f"{rule.origin}: rule {rule.name!r} is not applied: it asks for {condition}, and the version of "
                    f"{name} is not known here (--with {name}==VERSION says it)"
                )
    return found


def _library_version(name: str, environment: Environment, modules: Mapping[str, Sequence[str]]) -> str | None:
    """Return the known version of a distribution, or of the first known one that brings a module of this name."""
    names = (name, *modules.get(canonical_distribution(name), ()))
    return next((version for each in names if (version := environment.version(each)) is not None), None)
