"""The decision about one layer, from top to bottom.

Candidates pass the gate, the rules order them, times order those that compare, and a backend or a pair is chosen. Each
step is a call that takes data and returns data; none changes what another one made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from typing import TYPE_CHECKING

from attn_select.backends import distributions
from attn_select.backends.spec import BackendPlan, BackendSpec, Reason
from attn_select.decide import gate
from attn_select.decide.explicit import NOTHING_ASKED, Choice
from attn_select.decide.outcome import Candidate, Verdict
from attn_select.decide.runner_up import runners_up
from attn_select.decide.selection import Selection
from attn_select.decide.shared_cache import Cache, shared_cache
from attn_select.decide.situation import Situation
from attn_select.layer.config import PHASES, Phase
from attn_select.layer.layer_config import ConfigT, LayerConfig
from attn_select.rules.ranking import Ranking
from attn_select.rules.rule import Rule

if TYPE_CHECKING:
    from attn_select.times.choice import ByTimes, PhaseOrder
    from attn_select.times.evidence import Evidence
    from attn_select.times.workload import Workload

Answers = Mapping[str, Mapping[Phase, BackendPlan | list[Reason]]]
"""By backend and phase: how it would run, or why it cannot."""
Plans = Mapping[Phase, Mapping[str, BackendPlan]]
"""By phase: how each backend that can run would run."""
Chosen = Mapping[Phase, str | None]
"""The backend of each phase of the layer."""


def decide(
    situation: Situation,
    config: ConfigT,
    choice: Choice = NOTHING_ASKED,
    kv_layout: str | None = None,
    workload: Workload | None = None,
    evidence: Evidence | None = None,
) -> Selection[ConfigT]:
    """Decide for one layer."""
    phases = config.phases
    explicit = choice.for_layer(phases, situation.specs)
    rankings = situation.ranker.rank(config, phases, situation.registered_for(config), _batches(config, workload))

    answers = through_gate(situation, config, explicit.values())
    answers = in_layout(answers, kv_layout)
    answers = not_denied(answers, rankings, explicit, situation.specs)
    plans = plans_in(answers, phases)

    rankings = {phase: proved_first(ranking, plans[phase]) for phase, ranking in rankings.items()}
    orders = {phase: in_order(rankings[phase], plans[phase], explicit.get(phase)) for phase in phases}
    chosen, cache = first_choice(config, rankings, orders, plans, explicit, kv_layout)
    by_times: ByTimes | None = None

    def fits(pair: Mapping[Phase, str]) -> bool:
        return _cache_of(config, pair, plans, kv_layout) is not None

    if evidence is not None:
        from attn_select.times.choice import order_by_times  # few devices were surveyed
        from attn_select.times.workload import default_mix

        given = {p: phase_order(rankings[p], orders[p], plans[p], chosen[p], explicit.get(p)) for p in phases}
        batches = default_mix(config) if workload is None else workload
        by_times = order_by_times(config, batches, evidence, given, fits, steps_alike=workload is None)
        if by_times.chosen != chosen:
            chosen = by_times.chosen
            cache = _cache_of(config, chosen, plans, kv_layout)
    layout, block_size = cache or (None, None)
    candidates = candidates_of(answers, rankings, chosen, by_times)
    used = None if by_times is None else by_times.used
    return Selection(
        config=config,
        device=situation.device,
        environment=situation.environment,
        backends={phase: None if name is None else situation.specs[name] for phase, name in chosen.items()},
        block_size=block_size,
        kv_layout=layout,
        candidates=candidates,
        rules=rules_of(rankings),
        explicit=explicit,
        warnings=(
            *situation.warnings,
            *choice_warnings(choice, explicit, rankings),
            *rank_warnings(rankings, explicit),
            *pair_warnings(chosen, orders),
        ),
        options=situation.options,
        workload=workload,
        evidence=used,
        runners_up=runners_up(candidates, rankings, explicit, used, fits),
    )


def _batches(config: LayerConfig, workload: Workload | None) -> dict[Phase, list[object]] | None:
    if workload is None:
        return None
    return {phase: [shape.batch for shape in workload.of_phase(phase, config)] for phase in config.phases}


# The gate.


def through_gate(situation: Situation, config: LayerConfig, named: Iterable[str]) -> Answers:
    """Put every known backend for attention, or for states, through the gate, and all that are asked for by name."""
    place = situation.device, situation.environment
    answers: dict[str, dict[Phase, BackendPlan | list[Reason]]] = {
        name: {phase: gate.check(spec, config, *place, situation.options[name], phase) for phase in config.phases}
        for name, spec in situation.candidates(config, named).items()
    }
    absent = {
        n: why for n, why in situation.absent.items() if distributions.is_of_states(n) is (config.sort == "state")
    }
    return answers | {name: {phase: [why] for phase in config.phases} for name, why in absent.items()}


def in_layout(answers: Answers, kv_layout: str | None) -> Answers:
    """Reject the plans that do not read the layout of a shared pool."""
    if kv_layout is None:
        return answers

    def judged(answer: BackendPlan | list[Reason]) -> BackendPlan | list[Reason]:
        if isinstance(answer, list) or not answer.kv_layouts or kv_layout in answer.kv_layouts:
            return answer
        text = f"the shared pool has KV layout {kv_layout} (supported: {', '.join(answer.kv_layouts)})"
        return [Reason("kv-layout", text, kv_layout, list(answer.kv_layouts))]

    return {name: {phase: judged(answer) for phase, answer in each.items()} for name, each in answers.items()}


def not_denied(
    answers: Answers,
    rankings: Mapping[Phase, Ranking],
    explicit: Mapping[Phase, str],
    specs: Mapping[str, BackendSpec],
) -> Answers:
    """Reject the backends that a rule denies, unless they are asked for by name."""

    def judged(name: str, phase: Phase, answer: BackendPlan | list[Reason]) -> BackendPlan | list[Reason]:
        rule = rankings[phase].denied.get(name)
        if rule is None or name not in specs or explicit.get(phase) == name:
            return answer
        because = f": {rule.because}" if rule.because else ""
        text = f"denied by rule {rule.name!r} ({rule.origin}){because}"
        denied = Reason(gate.DENIED, text, rule.name, None, f"--backend {name}")
        return [denied, *(answer if isinstance(answer, list) else ())]

    return {name: {p: judged(name, p, answer) for p, answer in each.items()} for name, each in answers.items()}


def plans_in(answers: Answers, phases: Sequence[Phase]) -> Plans:
    """Return the plans of the backends that can run each phase."""
    return {
        phase: {name: plan for name, each in answers.items() if isinstance(plan := each[phase], BackendPlan)}
        for phase in phases
    }


# The order by rules, and what the rules alone choose.


def proved_first(ranking: Ranking, plans: Mapping[str, BackendPlan]) -> Ranking:
    """Put backends whose plan nothing proves behind the others, where some are proved and some are not."""
    unverified = [name for name, plan in plans.items() if plan.unverified]
    return ranking.with_unverified_last(unverified) if 0 < len(unverified) < len(plans) else ranking


def in_order(ranking: Ranking, plans: Mapping[str, BackendPlan], explicit: str | None) -> list[str]:
    """Return the backends that may be chosen, best first: the one that is asked for by name, else all that can run."""
    return [name for name in ([explicit] if explicit is not None else ranking.order) if name in plans]


def first_choice(
    config: LayerConfig,
    rankings: Mapping[Phase, Ranking],
    orders: Mapping[Phase, Sequence[str]],
    plans: Plans,
    explicit: Mapping[Phase, str],
    kv_layout: str | None,
) -> tuple[Chosen, Cache | None]:
    """Return one backend per phase, with the KV layout and block size that they share.

    It is the first backend that serves all phases, else the compatible pair of lowest ranks, decode first. Where a rule
    ranks one phase alone or a backend is asked for by name, pairs alone count.
    """
    if len(orders) == 1 or not (orders["prefill"] and orders["decode"]):
        chosen = {phase: names[0] if names else None for phase, names in orders.items()}
        found = [plans[phase][name] for phase, name in chosen.items() if name is not None]
        return chosen, shared_cache(found, config.block_size, kv_layout) if config.has_cache else None
    rules = {rule for ranking in rankings.values() for rule in ranking.rules}
    by_phase = any(len(ranking.rules) < len(rules) for ranking in rankings.values())
    both = [] if by_phase or explicit else [name for name in orders["decode"] if name in plans["prefill"]]
    pairs: Iterable[tuple[str, str]] = product(orders["decode"], orders["prefill"])
    for decode, prefill in chain(zip(both, both, strict=True), pairs):
        pair: dict[Phase, str] = {"prefill": prefill, "decode": decode}
        cache = _cache_of(config, pair, plans, kv_layout)
        if cache is not None:
            return pair, cache
    return {"prefill": None, "decode": None}, (None, None)


def _cache_of(config: LayerConfig, chosen: Chosen, plans: Plans, kv_layout: str | None) -> Cache | None:
    """Return the KV layout and block size of the chosen backends; the preferences of decode come first."""
    found = [plans[phase][name] for phase in reversed(PHASES) if (name := chosen.get(phase)) is not None]
    return shared_cache(found, config.block_size, kv_layout)


def phase_order(
    ranking: Ranking, order: Sequence[str], plans: Mapping[str, BackendPlan], chosen: str | None, explicit: str | None
) -> PhaseOrder:
    """Return one phase as the rules order it, for times to change."""
    from attn_select.times.choice import PhaseOrder  # few devices were surveyed

    evidence, why_fixed = ranking.evidence, ""
    if explicit is not None:
        why_fixed = f"{explicit} is asked for by name"
    elif evidence is not None:
        why_fixed = f"rule {evidence.name!r} ({evidence.origin}) keeps times out"
    pinned = {name: f"rule {rule.name!r} ({rule.origin}) places {name}" for name, rule in ranking.pinned.items()}
    return PhaseOrder(order, plans, chosen, pinned, why_fixed)


# The outcome.


def candidates_of(
    answers: Answers, rankings: Mapping[Phase, Ranking], chosen: Chosen, by_times: ByTimes | None
) -> tuple[Candidate, ...]:
    """Return every known backend with its verdicts: by decode rank, then prefill rank, then as registered."""
    order = {p: _final_order(ranking.order, by_times.order[p] if by_times else []) for p, ranking in rankings.items()}
    ranks = {p: {name: r for r, name in enumerate([n for n in names if n in answers], 1)} for p, names in order.items()}
    shown = by_times.shown if by_times is not None else {}

    def verdict(name: str, phase: Phase) -> Verdict:
        answer, rank = answers[name][phase], ranks[phase].get(name)
        if isinstance(answer, list):
            return Verdict(rank, "rejected", answer, None)
        timing, relative_time = shown.get(phase, {}).get(name, (None, None))
        return Verdict(rank, "selected" if chosen[phase] == name else "valid", [], answer, timing, relative_time)

    ranked = [name for phase in reversed([*ranks]) for name in ranks[phase]]
    names = dict.fromkeys([*ranked, *answers])
    return tuple(Candidate(name, {phase: verdict(name, phase) for phase in rankings}) for name in names)


def _final_order(by_rules: Sequence[str], by_times: Sequence[str]) -> list[str]:
    """Return the order by rules with the candidates that times have ordered in their new order, on the same places."""
    moved = iter(by_times)
    return [next(moved) if name in by_times else name for name in by_rules]


def rules_of(rankings: Mapping[Phase, Ranking]) -> tuple[Rule, ...]:
    """Return the rules that took part, each once, in the order they were applied."""
    applied = [rule for ranking in rankings.values() for rule in ranking.rules]
    of_times = [ranking.evidence for ranking in rankings.values() if ranking.evidence is not None]
    return tuple(dict.fromkeys([*applied, *of_times]))


def choice_warnings(choice: Choice, explicit: Mapping[Phase, str], rankings: Mapping[Phase, Ranking]) -> list[str]:
    """Say where an explicit choice has no effect, and where a rule denies it."""
    warnings: list[str] = []
    for phase in PHASES:
        if phase not in rankings:
            if (name := choice.for_phase(phase)) is not None:
                warnings.append(f"backend {phase}={name} has no effect: this layer has no {phase}")
            continue
        rule = rankings[phase].denied.get(explicit.get(phase, ""))
        if rule is not None:
            what = f"{explicit[phase]} is chosen explicitly for {phase}"
            warnings.append(f"{what} although rule {rule.name!r} ({rule.origin}) denies it")
    return warnings


def rank_warnings(rankings: Mapping[Phase, Ranking], explicit: Mapping[Phase, str]) -> list[str]:
    """Say in which phases no rule gives an order."""
    return [
        f"no priority rule matches this layer in {phase}: backends stand by their rank"
        for phase, ranking in rankings.items()
        if phase not in explicit and not ranking.by_rule
    ]


def pair_warnings(chosen: Chosen, orders: Mapping[Phase, Sequence[str]]) -> list[str]:
    """Say where backends could run each phase, and no two of them share a cache."""
    if set(chosen.values()) != {None} or not all(orders.values()):
        return []
    could = ", ".join(orders["prefill"]), ", ".join(orders["decode"])
    return [f"no pair of backends shares a KV layout and block size: prefill could use {could[0]}, decode {could[1]}"]
