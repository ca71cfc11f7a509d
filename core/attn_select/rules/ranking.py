"""Turns rules into an order for each phase: which backends stand where, which are denied, and by which rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Literal

from attn_select.layer.config import Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment, canonical_distribution
from attn_select.rules.conditions import NAMES, OF_BATCH, Condition
from attn_select.rules.libraries import PREFIX
from attn_select.rules.rule import PACKAGED, Rule


@dataclass(frozen=True, slots=True)
class Ranking:
    """The order that the rules give one phase."""

    default: list[str]  # backend names, best first, before the users' own rules for it
    users: list[Rule]  # the users' rules that change this order, in the order they are applied
    priority: Rule | None  # the rule that gives the order, None where no priority rule matched
    denied: dict[str, Rule]  # backend name → the rule that denies it
    rules: list[Rule]  # the rules that made the order, as they were applied
    evidence: Rule | None  # the last rule that keeps times out, or None
    unverified: tuple[str, ...] = ()  # the unproved backends that stand behind all others in ``default``

    @property
    def order(self) -> list[str]:
        """Backend names, best first."""
        order = self.default
        for rule in self.users:
            order = _applied(rule, order)
        return order

    @property
    def by_rule(self) -> bool:
        """Whether a priority rule matched. Without one backends stand by their rank."""
        return self.priority is not None

    @property
    def by_user(self) -> bool:
        """Whether a user's priority rule gives the order."""
        return self.priority is not None and self.priority.layer > PACKAGED

    @property
    def pinned(self) -> dict[str, Rule]:
        """The backends that a user's rule placed, each with the last such rule."""
        if self.priority is not None and self.by_user:
            return dict.fromkeys(self.order, self.priority)
        return {name: rule for rule in self.users for name in rule.backends}

    def with_unverified_last(self, unverified: Collection[str]) -> Ranking:
        """Return the ranking with unproved backends behind all others, except where users' rules place them.

        The packaged rules and the backends' ranks are defaults, and defaults prefer what was
        proved. A user's priority stands as written. A user's prefer and avoid apply after the move.
        """
        if self.by_user:
            return self
        proved = [name for name in self.default if name not in unverified]
        last = tuple([name for name in self.default if name in unverified])
        return replace(self, default=[*proved, *last], unverified=last)

    def put_before(self, first: str, second: str) -> tuple[Literal["rule", "unverified", "rank"], Rule | None]:
        """Say what put one backend before another: the last step of the order that names either of the two."""
        packaged = [rule for rule in self.rules if rule not in self.users and rule.effect in ("prefer", "avoid")]

        def last(rules: Sequence[Rule]) -> Rule | None:
            return next((rule for rule in reversed(rules) if {first, second} & {*rule.backends}), None)

        rule = last(self.users)
        if rule is None and second in self.unverified and first not in self.unverified:
            return "unverified", None
        rule = rule or last(packaged) or last([] if self.priority is None else [self.priority])
        return ("rank", None) if rule is None else ("rule", rule)


class Ranker:
    """The rules that hold on one device with one set of libraries."""

    def __init__(
        self,
        rules: Sequence[Rule],
        device: Device,
        environment: Environment,
        modules: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        here = [
            rule
            for rule in rules
            if all(
                _holds_here(condition, device, environment, modules)
                for condition in rule.when
                if condition.scope in ("device", "environment")
            )
        ]
        # Priorities: last layer to first, top-down within one. sorted() is stable.
        self._priorities = sorted([rule for rule in here if rule.effect == "priority"], key=lambda rule: -rule.layer)
        self._effects = [rule for rule in here if rule.effect != "priority"]

    def rank(
        self,
        config: LayerConfig,
        phases: Sequence[Phase],
        registered: Sequence[str],
        batches: Mapping[Phase, Sequence[object]] | None = None,
    ) -> dict[Phase, Ranking]:
        """Return the ranking of every phase; ``registered`` are the backends for such layers, best first."""
        return {phase: self._rank(config, phase, registered, (batches or {}).get(phase)) for phase in phases}

    def _rank(
        self, config: LayerConfig, phase: Phase, base: Sequence[str], batches: Sequence[object] | None
    ) -> Ranking:
        def holds(rule: Rule) -> bool:
            return rule.phase in (None, phase) and _holds_for_layer(rule, config, batches)

        priority = next(filter(holds, self._priorities), None)
        order = list(base)
        if priority is not None:
            listed = [*priority.backends]
            order = listed if priority.only else [*listed, *[name for name in base if name not in listed]]
        ranking = Ranking(order, [], priority, {}, [] if priority is None else [priority], None)
        for rule in filter(holds, self._effects):
            if rule.effect == "evidence":
                ranking = replace(ranking, evidence=rule)
                continue
            if rule.effect == "deny":
                ranking.denied.update(dict.fromkeys(rule.backends, rule))
            elif rule.layer > PACKAGED:
                ranking.users.append(rule)
            else:
                ranking = replace(ranking, default=_applied(rule, ranking.default))
            ranking.rules.append(rule)
        return ranking


def _holds_for_layer(rule: Rule, config: LayerConfig, batches: Sequence[object] | None) -> bool:
    for condition in rule.when:
        if condition.scope == "config":
            if not holds_for_config(condition, config):
                return False
        elif condition.scope == "workload":
            values = map(attrgetter(OF_BATCH[condition.field]), batches or ())
            if not batches or not all(condition.matches(value) for value in values):
                return False
    return True


_ABSENT = object()


def holds_for_config(condition: Condition, config: LayerConfig) -> bool:
    """Whether a condition on the config holds; an unset field matches ``none`` alone.

    No condition on what the other sort of layers has holds: ``mla = false`` speaks of attention.
    """
    value = getattr(config, condition.field, _ABSENT)
    if value is _ABSENT:
        return False
    if condition.field == "kv_cache_dtype":
        # ``auto`` and the dtype that it stands for are the same cache, so a rule may name either.
        value = ("auto", config.dtype) if value in ("auto", config.dtype) else (value,)
    elif condition.field in NAMES:
        value = (value,)
    return condition.unset if value is None else condition.matches(value)


def holds_for(condition: Condition, config: LayerConfig, device: Device) -> bool:
    """Whether a condition on the config or the device holds; an unset field matches ``none`` alone."""
    return holds_on(condition, device) if condition.scope == "device" else holds_for_config(condition, config)


def holds_on(condition: Condition, device: Device) -> bool:
    """Whether a condition on the device holds."""
    value = device.name if condition.field == "gpu" else getattr(device, condition.field)
    return value is not None and condition.matches(value)


def _applied(rule: Rule, order: list[str]) -> list[str]:
    """Return ``order`` after a prefer (its list in front) or an avoid (its list at the end)."""
    others = [name for name in order if name not in rule.backends]
    if rule.effect == "prefer":
        return [*rule.backends, *others]
    listed = [name for name in order if name in rule.backends]
    return [*others, *listed, *(name for name in rule.backends if name not in listed)]


def _holds_here(
    condition: Condition, device: Device, environment: Environment, modules: Mapping[str, Sequence[str]]
) -> bool:
    if condition.scope == "device":
        return holds_on(condition, device)
    if condition.field == "cuda":
        value = environment.cuda
    else:
        value = _library_version(condition.field.removeprefix(PREFIX), environment, modules)
    return value is not None and condition.matches(value)


def unknown_versions(
    rules: Sequence[Rule], device: Device, environment: Environment, modules: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return a warning for every rule of a user that waits for a version of a library that nobody knows here."""
    found = []
    for rule in rules if environment.assume_installed else ():
        places = [c for c in rule.when if c.scope in ("device", "environment") and not c.field.startswith(PREFIX)]
        if rule.layer <= PACKAGED or not all(_holds_here(c, device, environment, modules) for c in places):
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
