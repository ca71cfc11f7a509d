"""What times say in a decision: the order of a phase's candidates, and the pair of backends that is fastest.

The rules decide first. Predicted times then change what they decided, unless a user's rule stands against it
(``docs/times.md`` has the order of authority).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.times.batch_shape import BatchShape
from attn_select.times.evidence import Evidence
from attn_select.times.prediction import Near
from attn_select.times.roofline import is_decode
from attn_select.times.workload import WeightedShape, Workload

APART = 1.1
"""A mixed step of two backends counts so many times as long as its parts: no survey times such steps, and the least of
many predictions is one that was too short. Steps of MLA's pairs were timed: they take as long as their parts' predicted
times (0.997 times, the median of 77 on an H200)."""
FAVOURED = 1.1
"""Where nobody named a workload, a backend counts so many times as long, unless it is the fastest in most surveyed
workloads of such layers: predictions over a mix err by more than small gains. (On 320 workloads that the fit had not
seen, choices cost 1.037 times the best by it and 1.048 without; on 280 others, drawn afterwards, 1.040.)"""
Pair = dict[Phase, str]
"""The backend of each phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a candidate is predicted to take for the workload's steps of one phase, with what it rests on."""

    time_us: float  # mean time of one layer's step over the workload's shapes of the phase, microseconds
    share: float  # share of the workload's steps that are of the phase, from 0 to 1
    # its mean time as a multiple of the chosen backend's in the nearest measured workloads; None where it was not timed
    # there beside it
    near: float | None = None
    near_count: int = 0  # in how many measured workloads
    # most seconds of a first call in the nearest measured workloads; None where that is not known
    first_call_s: float | None = None
    # most device memory that a call takes beside its arguments in the nearest measured workloads
    workspace_bytes: float | None = None
    host_us: float = 0.0  # of ``time_us``, the host time that each new shape takes (``BackendPlan.host_us_per_shape``)
    stale: str | None = None  # which kernels it is of, where these are others than those that are here

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``docs/json.md`` documents it."""
        data = asdict(self)
        del data["share"]
        return data


@dataclass(frozen=True, slots=True)
class PhaseEvidence:
    """What times did in one phase."""

    share: float  # share of the workload's steps that are of the phase, from 0 to 1
    by_times: bool  # whether times could order candidates: two or more are predicted, and nothing above them decides
    why: str | None = None  # why times could not, in words; None where they could


@dataclass(frozen=True, slots=True)
class EvidenceUsed:
    """What a decision took from evidence."""

    digest: str  # of the survey's file
    gpu: str  # that was surveyed
    source: str  # ``packaged``, ``measured here``, a file's name, or ``of`` another GPU
    date: str  # of the survey's last time
    workloads: int  # how many the survey timed
    # 95 % of predicted ratios of two times lie within this factor of the measured ones, for kinds of layers that were
    # not surveyed
    margin: float
    phases: Mapping[Phase, PhaseEvidence]  # what times did, per phase
    # mean time of one layer's step over the whole workload with the chosen backends, microseconds; None where not all
    # of it is predicted
    time_us: float | None
    stale: Mapping[str, str]  # the backends whose kernels here are others than the surveyed ones, in words which

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``docs/json.md`` documents it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PhaseOrder:
    """The candidates of one phase that can run, in the order of the rules."""

    names: Sequence[str]  # the candidates, best first
    plans: Mapping[str, BackendPlan]  # how each of them, and each that no rule ranks, would run
    chosen: str | None  # what the rules alone choose, or None
    pinned: Mapping[str, str]  # the candidates that keep their place whatever times say, each with the reason in words
    why_fixed: str  # why times change nothing in this phase, in words; empty where they may


@dataclass(frozen=True, slots=True)
class ByTimes:
    """A decision after times were asked."""

    order: dict[Phase, list[str]]  # the candidates of every phase that can run, best first
    chosen: dict[Phase, str | None]
    used: EvidenceUsed
    # per phase and candidate, its time, and that time as a multiple of the chosen candidate's
    shown: dict[Phase, dict[str, tuple[Timing, float | None]]]


def order_by_times(
    config: LayerConfig,
    workload: Workload,
    evidence: Evidence,
    phases: Mapping[Phase, PhaseOrder],
    fits: Callable[[Pair], bool],
    steps_alike: bool = False,
) -> ByTimes:
    """Order candidates by predicted time, and choose the fastest that no user's rule forbids."""
    steps = _Steps(config, workload, evidence, phases, steps_alike)
    order: dict[Phase, list[str]] = {}
    used: dict[Phase, PhaseEvidence] = {}
    pools: dict[Phase, list[str]] = {}
    for phase, by_rules in phases.items():
        order[phase] = [*by_rules.names]
        costs = steps.costs[phase]
        if not by_rules.why_fixed:
            order[phase] = arranged(by_rules.names, steps.counted(costs), by_rules.pinned)
        share = math.fsum([shape.weight for shape in workload.of_phase(phase, config)])
        why = _why_rules(phase, share, by_rules, costs)
        if why is None and by_rules.chosen is not None:
            pools[phase] = [name for name in order[phase] if name in costs and name not in by_rules.pinned]
            if len(pools[phase]) < 2:
                del pools[phase]
                why = f"{by_rules.chosen} alone was surveyed on such layers"
        elif (
            not share
            and by_rules.chosen is not None
            and not by_rules.why_fixed
            and by_rules.chosen not in by_rules.pinned
        ):
            # No step of the workload is of this phase: it takes the first backend that shares the other one's cache.
            pools[phase] = [*by_rules.names]
        used[phase] = PhaseEvidence(share, why is None, why)
    chosen = {phase: by_rules.chosen for phase, by_rules in phases.items()}
    final: dict[Phase, str | None] = {**chosen}
    if any(each.by_times for each in used.values()):
        final |= fastest(chosen, pools, steps.cost, fits)
    survey = evidence.survey
    evidence_used = EvidenceUsed(
        digest=survey.digest,
        gpu=survey.gpu,
        source=survey.source,
        date=survey.date,
        workloads=survey.workloads,
        margin=survey.margin,
        phases=used,
        time_us=steps.time_us(final),
        stale=evidence.stale,
    )
    return ByTimes(order, final, evidence_used, {phase: steps.shown(phase, final[phase]) for phase in phases})


def _why_rules(phase: Phase, share: float, by_rules: PhaseOrder, costs: Mapping[str, float]) -> str | None:
    """Say why the rules alone decide a phase; None where times may."""
    if not share:
        return f"the workload has no {phase}"
    if by_rules.chosen is None:
        return f"no backend was found for {phase}"
    if by_rules.why_fixed:
        return by_rules.why_fixed
    if by_rules.chosen in by_rules.pinned:
        return by_rules.pinned[by_rules.chosen]
    if by_rules.chosen not in costs:
        return f"{by_rules.chosen} was not surveyed on such layers"
    return None


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a workload with its predicted times, in us, by backend."""

    weight: float
    phase: Phase  # that the step counts in; a mixed one is a prefill
    whole: Mapping[str, float]  # times of the whole step
    # times of the prefills and of the decodes of a mixed step, each alone; else empty
    parts: Mapping[Phase, Mapping[str, float]]
    # whether one backend runs both phases of a mixed step at once; those of MLA and of states run one behind the other
    together: bool
    unit: float  # that costs are in, us
    nearest: Sequence[Near]  # the measured workloads that are most like it

    def time_us(self, pair: Mapping[Phase, str | None]) -> float | None:
        """Return the time of the step by the backends of its phases; None where it is not predicted."""
        if not self.parts or pair.get("prefill") == pair.get("decode"):
            return self.whole.get(pair.get(self.phase) or "")
        times = [known.get(pair.get(phase) or "") for phase, known in self.parts.items()]
        apart = APART if self.together else 1.0
        return sum([each or 0.0 for each in times]) * apart if None not in times else None

    def alone_us(self, name: str) -> float | None:
        """Return the time by one backend, of the prefills of a mixed step where it runs these alone."""
        prefills = self.parts.get(self.phase, {}).get(name)
        return prefills if self.parts and not self.together else self.whole.get(name, prefills)


class _Steps:
    """The steps of a workload, and what is to be said of backends over them."""

    def __init__(
        self,
        config: LayerConfig,
        workload: Workload,
        evidence: Evidence,
        phases: Mapping[Phase, PhaseOrder],
        steps_alike: bool,
    ) -> None:
        self._config, self._evidence = config, evidence
        self._favourite = evidence.survey.favourite(config) if steps_alike else None
        self._plans = {phase: by_rules.plans for phase, by_rules in phases.items()}
        self._steps = [
            self._step(shape, phase, steps_alike) for phase in phases for shape in workload.of_phase(phase, config)
        ]
        self.costs = {phase: self._costs_of(phase) for phase in phases}

    def _step(self, shape: WeightedShape, phase: Phase, alike: bool) -> _Step:
        config, groups = self._config, shape.batch.groups
        decodes = [is_decode(config, group.query_len) for group in groups]
        parts: dict[Phase, Mapping[str, float]] = {}
        here: tuple[Phase, ...] = (phase,)
        if any(decodes) and not all(decodes):
            here = ("prefill", "decode")
            for part in here:
                mine = [group for group, decode in zip(groups, decodes, strict=True) if decode is (part == "decode")]
                parts[part] = self._predicted(BatchShape(tuple(mine)), (part,))
        whole = self._predicted(shape.batch, here)
        nearest = self._evidence.survey.nearest(config, shape.batch)
        together = isinstance(config, AttentionConfig) and not config.mla
        least = [whole] if whole else [*parts.values()]  # no backend may serve all of a mixed step
        unit = sum([min(times.values(), default=0.0) for times in least]) if alike else 1.0
        return _Step(shape.weight, phase, whole, parts, together, unit or 1.0, nearest)

    def _predicted(self, batch: BatchShape, phases: tuple[Phase, ...]) -> dict[str, float]:
        """Return the times of the backends that serve all of these phases."""
        found = {}
        for name, time_us in self._evidence.predict(self._config, batch).items():
            if all(name in self._plans.get(phase, {}) for phase in phases):
                first = phases[0]
                found[name] = time_us + (self._plans[first][name].host_us_per_shape if first == "prefill" else 0.0)
        return found

    def _costs_of(self, phase: Phase) -> dict[str, float]:
        """Return the mean cost of a phase's steps by backend, of those that are predicted in all of them."""
        found: dict[str, float] = {}
        steps = [step for step in self._steps if step.phase == phase]
        for name in self._plans[phase] if steps else ():
            times = [step.alone_us(name) for step in steps]
            if None not in times:
                costs = [s.weight * (time_us or 0.0) / s.unit for s, time_us in zip(steps, times, strict=True)]
                found[name] = math.fsum(costs)
        return found

    def cost(self, pair: Mapping[Phase, str]) -> tuple[int, float]:
        """Return how many steps of the whole workload are not predicted, and the mean cost of the others."""
        times = [(step, step.time_us(pair)) for step in self._steps]
        known = [step.weight * time_us / step.unit for step, time_us in times if time_us is not None]
        return len(times) - len(known), math.fsum(known) * self._favoured(*pair.values())

    def counted(self, costs: Mapping[str, float]) -> dict[str, float]:
        """Return the costs that candidates are ordered by."""
        return {name: cost * self._favoured(name) for name, cost in costs.items()}

    def _favoured(self, *names: str) -> float:
        """Return by how much the cost of backends counts."""
        return 1.0 if self._favourite is None or set(names) == {self._favourite} else FAVOURED

    def time_us(self, pair: Mapping[Phase, str | None]) -> float | None:
        """Return the mean time of a step of the whole workload; None where not all of it is predicted."""
        times = [(step.weight, step.time_us(pair)) for step in self._steps]
        known = [weight * time_us for weight, time_us in times if time_us is not None]
        return math.fsum(known) if known and len(known) == len(times) else None

    def shown(self, phase: Phase, winner: str | None) -> dict[str, tuple[Timing, float | None]]:
        """Return each candidate's time of a phase's steps, and that time as a multiple of the winner's."""
        steps = [step for step in self._steps if step.phase == phase]
        share = math.fsum([step.weight for step in steps])
        costs = self.costs[phase]
        found: dict[str, tuple[Timing, float | None]] = {}
        for name in costs:
            times = [step.weight * (step.alone_us(name) or 0.0) for step in steps]
            timing = Timing(
                time_us=math.fsum(times) / share,
                share=share,
                stale=self._evidence.stale.get(name),
                host_us=self._plans[phase][name].host_us_per_shape if phase == "prefill" else 0.0,
            )
            relative_time = costs[name] / costs[winner] if winner in costs else None
            found[name] = _beside(timing, name, winner, steps), relative_time
        return found


def _beside(timing: Timing, name: str, winner: str | None, steps: Sequence[_Step]) -> Timing:
    """Add what the workloads say that were measured nearest to any of the steps."""
    nearest = [near for step in steps for near in step.nearest]
    ratios = [
        math.log(near.times_us[name] / near.times_us[winner])
        for near in nearest
        if name in near.times_us and winner is not None and winner in near.times_us
    ]
    return replace(
        timing,
        near=math.exp(math.fsum(ratios) / len(ratios)) if ratios else None,
        near_count=len(ratios),
        first_call_s=max([near.first_call_s[name] for near in nearest if name in near.first_call_s], default=None),
        workspace_bytes=max([n.workspace_bytes[name] for n in nearest if name in n.workspace_bytes], default=None),
    )


def arranged(order: Sequence[str], costs: Mapping[str, float], pinned: Collection[str] = ()) -> list[str]:
    """Return candidates by cost; what a user's rule pins keeps its place, and what has no cost stands behind all that
    the rules put before it."""
    free = [name for name in order if name not in pinned]
    found = sorted([name for name in free if name in costs], key=costs.__getitem__)
    for place, name in enumerate(free):
        if name not in costs:
            found.insert(max([found.index(other) + 1 for other in free[:place]], default=0), name)
    rest = iter(found)
    return [name if name in pinned else next(rest) for name in order]


def fastest(
    chosen: Mapping[Phase, str | None],
    pools: Mapping[Phase, Sequence[str]],
    cost: Callable[[Mapping[Phase, str]], tuple[int, float]],
    fits: Callable[[Pair], bool],
) -> Pair:
    """Return the backends of all phases that together cost least; of equal ones those that stand first."""
    names = {phase: pools.get(phase) or [name] for phase, name in chosen.items() if name is not None}
    pairs = [dict(zip(names, each, strict=True)) for each in product(*names.values())]
    return min([pair for pair in pairs if fits(pair)], key=cost, default={})
