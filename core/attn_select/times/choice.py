"""What times say in a decision: the order of a phase's candidates, and the pair of backends that is fastest.

The rules decide first. Predicted times then change what they decided, unless a user's rule stands against it
(``docs/times.md`` has the order of authority).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import PHASES, AttentionConfig, Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.times.batch_shape import BatchShape
from attn_select.times.evidence import Evidence
from attn_select.times.prediction import Near
from attn_select.times.roofline import is_decode
from attn_select.times.timing import Timing
from attn_select.times.workload import WeightedShape, Workload

APART = 1.1
"""A mixed step of two backends counts so many times as long as its parts: no survey times such steps, and the least of
many predictions is one that was too short. Steps of MLA's pairs were timed: they take 0.997 times their parts'
predicted times (the median of 77 on an H200)."""
Pair = dict[Phase, str]
"""The backend of each phase."""


@dataclass(frozen=True, slots=True)
class PhaseEvidence:
    """What times did in one phase.

    Attributes:
        share: share of the workload's steps that are of the phase, from 0 to 1.
        by_times: whether times could order candidates: two or more are predicted, and nothing above them decides.
        why: why times could not, in words; empty where they could.
    """

    share: float
    by_times: bool
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``docs/json.md`` documents it."""
        return {"share": self.share, "by_times": self.by_times, "why": self.why or None}


@dataclass(frozen=True, slots=True)
class EvidenceUsed:
    """What a decision took from evidence.

    Attributes:
        digest: of the survey's file.
        gpu: that was surveyed.
        source: ``packaged``, ``measured here``, a file's name, or ``of`` another GPU.
        date: of the survey's last time.
        workloads: how many the survey timed.
        margin: 95 % of predicted ratios of two times lie within this factor of the measured ones, for kinds of layers
            that were not surveyed.
        phases: what times did, per phase.
        time_us: mean time of one layer's step over the whole workload with the chosen backends, microseconds; None
            where not all of it is predicted.
        stale: the backends whose kernels here are others than the surveyed ones, in words which.
    """

    digest: str
    gpu: str
    source: str
    date: str
    workloads: int
    margin: float
    phases: Mapping[Phase, PhaseEvidence]
    time_us: float | None
    stale: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``docs/json.md`` documents it."""
        return {
            "digest": self.digest,
            "gpu": self.gpu,
            "source": self.source,
            "date": self.date,
            "workloads": self.workloads,
            "margin": self.margin,
            "phases": {phase: used.to_dict() for phase, used in self.phases.items()},
            "time_us": self.time_us,
            "stale": dict(self.stale),
        }


@dataclass(frozen=True, slots=True)
class PhaseOrder:
    """The candidates of one phase that can run, in the order of the rules.

    Attributes:
        names: the candidates, best first.
        plans: how each of them, and each that no rule ranks, would run.
        chosen: what the rules alone choose, or None.
        placed: the candidates that keep their place whatever times say, each with the reason in words.
        held: why times change nothing in this phase, in words; empty where they may.
    """

    names: Sequence[str]
    plans: Mapping[str, BackendPlan]
    chosen: str | None
    placed: Mapping[str, str]
    held: str


@dataclass(frozen=True, slots=True)
class ByTimes:
    """A decision after times were asked.

    Attributes:
        order: the candidates of every phase that can run, best first.
        chosen: the backend per phase.
        used: what was taken from evidence.
        shown: per phase and candidate, its time, and that time as a multiple of the chosen candidate's.
    """

    order: dict[Phase, list[str]]
    chosen: dict[Phase, str | None]
    used: EvidenceUsed
    shown: dict[Phase, dict[str, tuple[Timing, float | None]]]


def order_by_times(
    config: LayerConfig,
    workload: Workload,
    evidence: Evidence,
    phases: Mapping[Phase, PhaseOrder],
    fits: Callable[[Pair], bool],
    steps_alike: bool = False,
) -> ByTimes:
    """Order candidates by predicted time, and choose the fastest that no user's rule forbids.

    Args:
        config: the layer.
        workload: the batches to be fast at.
        evidence: what is known about times on the device.
        phases: the candidates of every phase, as the rules order them.
        fits: whether backends share a KV layout and block size.
        steps_alike: whether each step counts by how far it is from the fastest candidate's, and not by its time: so
            that long steps do not rule a mix that nobody measured.
    """
    steps = _Steps(config, workload, evidence, phases, steps_alike)
    order: dict[Phase, list[str]] = {}
    used: dict[Phase, PhaseEvidence] = {}
    pools: dict[Phase, list[str]] = {}
    for phase, by_rules in phases.items():
        order[phase] = [*by_rules.names]
        costs = steps.costs(phase)
        if not by_rules.held:
            order[phase] = arranged(by_rules.names, costs, by_rules.placed)
        share = math.fsum([shape.weight for shape in workload.of_phase(phase, config)])
        why = _why_rules(phase, share, by_rules, costs)
        if not why and by_rules.chosen is not None:
            pools[phase] = rivals(by_rules.chosen, order[phase], costs, by_rules.placed)
            if len(pools[phase]) < 2:
                del pools[phase]
                why = f"no neighbour of {by_rules.chosen} in the order has times"
        elif not share and by_rules.chosen is not None and not by_rules.held and by_rules.chosen not in by_rules.placed:
            # No step of the workload is of this phase: it takes the first backend that shares the other one's cache.
            pools[phase] = [*by_rules.names]
        used[phase] = PhaseEvidence(share, not why, why)
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


def _why_rules(phase: Phase, share: float, by_rules: PhaseOrder, costs: Mapping[str, float]) -> str:
    """Say why the rules alone decide a phase; empty where times may."""
    if not share:
        return f"the workload has no {phase}"
    if by_rules.chosen is None:
        return f"no backend was found for {phase}"
    if by_rules.held:
        return by_rules.held
    if by_rules.chosen in by_rules.placed:
        return by_rules.placed[by_rules.chosen]
    if by_rules.chosen not in costs:
        return f"{by_rules.chosen} was not surveyed on such layers"
    return ""


class _Steps:
    """The predicted times of a workload's steps, by backend."""

    def __init__(
        self,
        config: LayerConfig,
        workload: Workload,
        evidence: Evidence,
        phases: Mapping[Phase, PhaseOrder],
        steps_alike: bool,
    ) -> None:
        self._config, self._evidence, self._phases = config, evidence, phases
        self._shapes = {phase: workload.of_phase(phase, config) for phase in phases}
        # The phases of MLA run one behind the other in any case.
        self._apart = 1.0 if isinstance(config, AttentionConfig) and config.mla else APART
        self._known: dict[tuple[BatchShape, Phase], dict[str, float]] = {}
        self._cut: dict[BatchShape, dict[Phase, BatchShape]] = {}
        self._nearest: dict[BatchShape, list[Near]] = {}
        self._units: dict[BatchShape, float] = {}
        for phase, shapes in self._shapes.items():
            for shape in shapes:
                times = self._alone(phase, shape.batch).values()
                self._units[shape.batch] = min(times, default=1.0) if steps_alike else 1.0

    def _of_part(self, phase: Phase, batch: BatchShape) -> dict[str, float]:
        """Return the times of requests that are all of one phase, or of a whole mixed step, in us."""
        key = batch, phase
        if key not in self._known:
            plans = self._phases[phase].plans
            times = self._evidence.predict(self._config, batch)
            self._known[key] = {
                name: time_us + (plans[name].host_us_per_shape if phase == "prefill" else 0.0)
                for name, time_us in times.items()
                if name in plans
            }
        return self._known[key]

    def _parts(self, batch: BatchShape) -> dict[Phase, BatchShape]:
        """Return the requests of each phase."""
        if batch in self._cut:
            return self._cut[batch]
        decodes = [is_decode(self._config, group.query_len) for group in batch.groups]
        found: dict[Phase, BatchShape] = {}
        for phase in PHASES:
            groups = tuple(
                [g for g, decode in zip(batch.groups, decodes, strict=True) if decode is (phase == "decode")]
            )
            if groups:
                found[phase] = BatchShape(groups)
        self._cut[batch] = found
        return found

    def _time(self, pair: Mapping[Phase, str | None], phase: Phase, batch: BatchShape) -> float | None:
        """Return the time of a step in us; None where it is not predicted."""
        parts = self._parts(batch)
        if len(parts) == 1 or len({pair.get(each) for each in parts}) == 1:
            return self._of_part(phase, batch).get(pair.get(phase) or "")
        times = [self._of_part(each, part).get(pair.get(each) or "") for each, part in parts.items()]
        known = [time_us for time_us in times if time_us is not None]
        return sum(known) * self._apart if len(known) == len(times) else None

    def _alone(self, phase: Phase, batch: BatchShape) -> dict[str, float]:
        """Return the time of a step by each backend that runs all of it, or its prefills where it runs them alone."""
        found: dict[str, float] = {}
        for name in self._phases[phase].plans:
            time_us = self._time(dict.fromkeys(self._phases, name), phase, batch)
            if time_us is None:
                time_us = self._of_part(phase, self._parts(batch)[phase]).get(name)
            if time_us is not None:
                found[name] = time_us
        return found

    def costs(self, phase: Phase) -> dict[str, float]:
        """Return the mean cost of a phase's steps by backend, of those that are predicted in all of them."""
        found: dict[str, float] = {}
        for name in self._phases[phase].plans:
            costs = [self._cost_alone(name, phase, shape) for shape in self._shapes[phase]]
            if costs and None not in costs:
                found[name] = math.fsum([each for each in costs if each is not None])
        return found

    def _cost_alone(self, name: str, phase: Phase, shape: WeightedShape) -> float | None:
        time_us = self._alone(phase, shape.batch).get(name)
        return None if time_us is None else shape.weight * time_us / self._units[shape.batch]

    def cost(self, pair: Mapping[Phase, str]) -> tuple[int, float]:
        """Return how many steps of the whole workload are not predicted, and the mean cost of the others."""
        unknown, total = 0, 0.0
        for phase, shapes in self._shapes.items():
            for shape in shapes:
                time_us = self._time(pair, phase, shape.batch)
                unknown += time_us is None
                total += shape.weight * time_us / self._units[shape.batch] if time_us is not None else 0.0
        return unknown, total

    def time_us(self, pair: Mapping[Phase, str | None]) -> float | None:
        """Return the mean time of a step of the whole workload; None where not all of it is predicted."""
        times = [
            (shape.weight, self._time(pair, phase, shape.batch))
            for phase, shapes in self._shapes.items()
            for shape in shapes
        ]
        known = [weight * time_us for weight, time_us in times if time_us is not None]
        return math.fsum(known) if known and len(known) == len(times) else None

    def shown(self, phase: Phase, winner: str | None) -> dict[str, tuple[Timing, float | None]]:
        """Return each candidate's time of a phase's steps, and that time as a multiple of the winner's."""
        shapes = self._shapes[phase]
        share = math.fsum([shape.weight for shape in shapes])
        costs = self.costs(phase)
        found: dict[str, tuple[Timing, float | None]] = {}
        for name in costs:
            times = [shape.weight * self._alone(phase, shape.batch)[name] for shape in shapes]
            timing = Timing(
                time_us=math.fsum(times) / share,
                share=share,
                stale=self._evidence.stale.get(name, ""),
                host_us=self._phases[phase].plans[name].host_us_per_shape if phase == "prefill" else 0.0,
            )
            behind = costs[name] / costs[winner] if winner in costs else None
            found[name] = self._beside(timing, name, winner, shapes), behind
        return found

    def _beside(self, timing: Timing, name: str, winner: str | None, shapes: Sequence[WeightedShape]) -> Timing:
        """Add what the nearest measured workloads say: of the step that counts most."""
        batch = max(shapes, key=lambda shape: shape.weight).batch
        if batch not in self._nearest:
            self._nearest[batch] = self._evidence.survey.nearest(self._config, batch)
        nearest = self._nearest[batch]
        ratios = [
            math.log(near.times_us[name] / near.times_us[winner])
            for near in nearest
            if name in near.times_us and winner is not None and winner in near.times_us
        ]
        first = [near.first_call_s[name] for near in nearest if name in near.first_call_s]
        return replace(
            timing,
            near=math.exp(math.fsum(ratios) / len(ratios)) if ratios else None,
            near_count=len(ratios),
            first_call_s=first[0] if first else None,
            workspace_bytes=max([n.workspace_bytes[name] for n in nearest if name in n.workspace_bytes], default=None),
        )


def arranged(order: Sequence[str], costs: Mapping[str, float], placed: Collection[str] = ()) -> list[str]:
    """Return candidates by cost where they have one.

    A candidate moves only past neighbours that have a cost too. One without stays where it is and nothing passes it,
    and so does one that a rule places.

    Args:
        order: the candidates that can run, best first.
        costs: by candidate.
        placed: candidates that keep their place.
    """
    found: list[str] = []
    run: list[str] = []
    for name in order:
        if name in costs and name not in placed:
            run.append(name)
        else:
            found += [*sorted(run, key=costs.__getitem__), name]
            run = []
    return found + sorted(run, key=costs.__getitem__)


def rivals(name: str, order: Sequence[str], costs: Mapping[str, float], placed: Collection[str]) -> list[str]:
    """Return the candidate and its neighbours in the order that times may choose in its place, in their order."""
    found = [name]
    here = order.index(name)
    for step, others in ((-1, reversed(order[:here])), (1, iter(order[here + 1 :]))):
        for other in others:
            if other not in costs or other in placed:
                break
            found = [*found, other] if step > 0 else [other, *found]
    return found


def fastest(
    chosen: Mapping[Phase, str | None],
    pools: Mapping[Phase, Sequence[str]],
    cost: Callable[[Mapping[Phase, str]], tuple[int, float]],
    fits: Callable[[Pair], bool],
) -> Pair:
    """Return the backends of all phases that together cost least; of equal ones those that stand first.

    Args:
        chosen: what the rules chose.
        pools: per phase in which times decide, or that the workload lacks, the candidates, best first. The other phases
            keep what the rules chose.
        cost: of the whole workload by a pair.
        fits: whether backends share a KV layout and block size.
    """
    names = {phase: pools.get(phase) or [name] for phase, name in chosen.items() if name is not None}
    pairs = [dict(zip(names, each, strict=True)) for each in product(*names.values())]
    return min([pair for pair in pairs if fits(pair)], key=cost, default={})
