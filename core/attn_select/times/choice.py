"""What times say in a decision: the order of a phase's candidates, and the pair of backends that is fastest.

The rules decide first. Times then change what they decided, where they compare and no user's rule stands against it
(``docs/times.md`` has the order of authority).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.layer.config import Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.times.evidence import Evidence, digest_of
from attn_select.times.timing import Series, Timing, by_time, is_tie, strongest_first, yields
from attn_select.times.workload import Workload

if TYPE_CHECKING:
    from attn_select.times.model import TimeModel

Pair = dict[Phase, str]
"""The backend of each phase."""


def _with_host_time(timing: Timing, host_us: float) -> Timing:
    return replace(timing, time_us=timing.time_us + host_us, host_us=host_us) if timing.compares else timing


@dataclass(frozen=True, slots=True)
class PhaseEvidence:
    """What times did in one phase.

    Attributes:
        share: share of the workload's steps that are of the phase, from 0 to 1.
        by_times: whether times could order candidates: two or more that compare, and nothing above them that decides.
        why: why times could not, in words; empty where they could.
        behind: a time of each series that had to yield to a less trusted one with narrower margins.
    """

    share: float
    by_times: bool
    why: str = ""
    behind: tuple[Timing, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``docs/json.md`` documents it."""
        behind = [{"kind": t.kind, "source": t.source, "method": t.method, "files": [*t.files]} for t in self.behind]
        return {"share": self.share, "by_times": self.by_times, "why": self.why or None, "behind": behind}


@dataclass(frozen=True, slots=True)
class Rival:
    """A candidate whose time decides in a phase: it may take turns with the chosen one, step by step.

    Attributes:
        spec: the backend.
        plan: how it would run.
        series: where its times come from; all rivals of a phase have the same.
        model: predicts its steps in both phases; None where no model was fitted.
    """

    spec: BackendSpec
    plan: BackendPlan
    series: Series
    model: TimeModel | None


@dataclass(frozen=True, slots=True)
class EvidenceUsed:
    """What a decision took from evidence.

    Attributes:
        digest: of the measurements behind all times of the candidates; None where there are none.
        files: the files with these measurements.
        phases: what times did, per phase.
        time_us: mean time of one layer's step over the whole workload with the chosen backends, microseconds; None
            where not all of it is known from one series.
        rivals: per phase in which times could decide, the chosen candidate and all that compare with it, best first
            by rules.
        series: where ``time_us`` comes from.
    """

    digest: str | None
    files: tuple[str, ...]
    phases: Mapping[Phase, PhaseEvidence]
    time_us: float | None
    rivals: Mapping[Phase, tuple[Rival, ...]]
    series: Series | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``docs/json.md`` documents it."""
        return {
            "digest": self.digest,
            "files": list(self.files),
            "phases": {phase: used.to_dict() for phase, used in self.phases.items()},
            "time_us": self.time_us,
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
        ties_by_time: whether the shorter time wins where two times differ by less than their margins.
    """

    names: Sequence[str]
    plans: Mapping[str, BackendPlan]
    chosen: str | None
    placed: Mapping[str, str]
    held: str
    ties_by_time: bool


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
    specs: Mapping[str, BackendSpec],
    phases: Mapping[Phase, PhaseOrder],
    fits: Callable[[Pair], bool],
) -> ByTimes:
    """Order candidates by time where times compare, and choose the fastest that no user's rule forbids.

    Args:
        config: the layer.
        workload: the batches to be fast at.
        evidence: what is known about times on the device.
        specs: every registered backend.
        phases: the candidates of every phase, as the rules order them.
        fits: whether backends share a KV layout and block size.
    """
    kernels: dict[str, dict[Phase, str | None]] = {}
    for phase, by_rules in phases.items():
        for name, plan in by_rules.plans.items():
            kernels.setdefault(name, {})[phase] = plan.kernel_name
    order: dict[Phase, list[str]] = {}
    times: dict[Phase, PhaseTimes] = {}
    rivals: dict[Phase, dict[str, Timing]] = {}
    used: dict[Phase, PhaseEvidence] = {}
    for phase, by_rules in phases.items():
        times[phase] = known = _times_of(config, workload, evidence, by_rules, kernels, phase)
        order[phase] = [*by_rules.names]
        if not by_rules.held:
            order[phase] = known.arranged(by_rules.names, by_rules.placed, margins=not by_rules.ties_by_time)
        share = math.fsum([shape.weight for shape in workload.of_phase(phase, config)])
        why = _why_rules(phase, share, by_rules, known)
        if not why and by_rules.chosen is not None:
            rivals[phase] = known.rivals(by_rules.chosen, order[phase], by_rules.placed)
            if not rivals[phase]:
                why = f"no neighbour of {by_rules.chosen} in the order has a time that compares with its own"
        used[phase] = PhaseEvidence(share, not why, why, known.behind)
    chosen = {phase: by_rules.chosen for phase, by_rules in phases.items()}
    pair = {phase: name for phase, name in chosen.items() if name is not None}
    ties_by_time = {phase for phase, by_rules in phases.items() if by_rules.ties_by_time}
    final: dict[Phase, str | None] = {**chosen, **fastest(pair, rivals, fits, ties_by_time)}
    shown = {phase: known.shown(final[phase]) for phase, known in times.items()}
    every = [t for each in times.values() for timings in each.timings.values() for t in timings]
    winners = [shown[p][name][0] for p, name in final.items() if name in shown[p]]
    total = _total(winners)
    compared = {
        phase: tuple(
            Rival(specs[name], phases[phase].plans[name], t.series, evidence.model(config, name, kernels[name], t))
            for name, t in rivals[phase].items()
            if name == final[phase] or not t.host_us  # the others' steps are compared alone, as they are dispatched
        )
        for phase in phases
        if used[phase].by_times
    }
    evidence_used = EvidenceUsed(
        digest=digest_of(every),
        files=tuple(dict.fromkeys(file for t in every for file in t.files)),
        phases=used,
        time_us=total,
        rivals=compared,
        series=None if total is None else winners[0].series,
    )
    return ByTimes(order, final, evidence_used, shown)


def _times_of(
    config: LayerConfig,
    workload: Workload,
    evidence: Evidence,
    by_rules: PhaseOrder,
    kernels: Mapping[str, Mapping[Phase, str | None]],
    phase: Phase,
) -> PhaseTimes:
    found: dict[str, list[Timing]] = {}
    for name, plan in by_rules.plans.items():
        found[name] = evidence.timings(config, name, kernels[name], phase, workload)
        if phase == "prefill" and plan.host_us_per_shape:
            found[name] = [_with_host_time(timing, plan.host_us_per_shape) for timing in found[name]]
    return PhaseTimes(found)


def _why_rules(phase: Phase, share: float, by_rules: PhaseOrder, times: PhaseTimes) -> str:
    """Say why the rules alone decide a phase; empty where times may."""
    if not share:
        return f"the workload has no {phase}"
    if by_rules.chosen is None:
        return f"no backend was found for {phase}"
    if by_rules.held:
        return by_rules.held
    if by_rules.chosen in by_rules.placed:
        return by_rules.placed[by_rules.chosen]
    return "" if times.known else "no times are known for this layer on this device"


def _total(winners: Sequence[Timing]) -> float | None:
    """Return the mean time of a step of the whole workload; None where it is not known from one series."""
    shares = math.fsum([timing.share for timing in winners])
    if len({timing.series for timing in winners}) != 1 or not winners[0].compares or not math.isclose(shares, 1):
        return None
    return math.fsum([timing.time_us * timing.share for timing in winners])


class PhaseTimes:
    """The times of one phase's candidates.

    Args:
        timings: by candidate that can run the phase, one timing per series.

    Attributes:
        timings: the same, the most trusted first.
        behind: a time of each series that had to yield to a less trusted one.
    """

    def __init__(self, timings: Mapping[str, Sequence[Timing]]) -> None:
        counts = Counter(t.series for each in timings.values() for t in each if t.compares)
        self._of_series: dict[Series, dict[str, Timing]] = {
            series: {name: t for name, each in timings.items() for t in each if t.series == series} for series in counts
        }
        self._series: list[Series] = []
        behind: dict[Series, Timing] = {}
        for series in strongest_first(counts):
            place = len(self._series)
            while place and yields(self._of_series[self._series[place - 1]], self._of_series[series]):
                place -= 1
                passed = self._series[place]
                behind[passed] = next(iter(self._of_series[passed].values()))
            self._series.insert(place, series)
        self.behind = tuple(behind.values())
        places = {series: place for place, series in enumerate(self._series)}
        self.timings = {
            name: sorted(each, key=lambda t: places.get(t.series, len(places))) for name, each in timings.items()
        }

    @property
    def known(self) -> bool:
        """Whether any candidate has a time. The bound of a roofline is no time."""
        return bool(self._series)

    def arranged(self, order: Sequence[str], placed: Collection[str] = (), margins: bool = True) -> list[str]:
        """Return the candidates by time where times compare; the most trusted series sorts last, so its order holds.

        Args:
            order: the candidates that can run, best first.
            placed: candidates that keep their place, and that no other candidate passes.
            margins: whether times within their margins are a tie.
        """
        rules = {name: position for position, name in enumerate(order)}
        found = [*order]
        for series in reversed(self._series):
            times = {name: timing for name, timing in self._of_series[series].items() if name not in placed}
            found = by_time(found, times, rules, margins)
        return found

    def rivals(self, name: str, order: Sequence[str], fixed: Collection[str]) -> dict[str, Timing]:
        """Return the candidate and its neighbours in the order whose times compare with its own, in their order.

        Args:
            order: the candidates that can run, best first.
            fixed: candidates that a user's rule places; nothing replaces them, and they replace nothing.
        """
        found: dict[str, Timing] = {}
        if name in fixed:
            return found
        for series in self._series:
            times = self._of_series[series]
            if name not in times:
                continue
            run = [name]
            here = order.index(name)
            for step, others in ((-1, reversed(order[:here])), (1, iter(order[here + 1 :]))):
                for other in others:
                    if other not in times or other in fixed:
                        break
                    run = [*run, other] if step > 0 else [other, *run]
            if len(run) > 1:
                return {each: times[each] for each in run}
        return found

    def shown(self, winner: str | None) -> dict[str, tuple[Timing, float | None]]:
        """Return each candidate's time, and that time as a multiple of the winner's; None where the two do not compare.

        A time that compares with the winner's is shown before a more trusted one that does not.
        """
        best = self._best(winner)
        found: dict[str, tuple[Timing, float | None]] = {}
        for name, timings in self.timings.items():
            same = [t for t in timings if best is not None and t.compares and t.series == best.series]
            if same and best is not None:
                found[name] = same[0], same[0].time_us / best.time_us
            elif timings:
                found[name] = timings[0], None
        return found

    def _best(self, winner: str | None) -> Timing | None:
        """Return the winner's time from the most trusted series that times others too, else from the most trusted."""
        own = [t for t in self.timings.get(winner or "", ()) if t.compares]
        shared = [t for t in own if len(self._of_series[t.series]) > 1]
        return next(iter((*shared, *own)), None)


def fastest(
    chosen: Pair,
    rivals: Mapping[Phase, Mapping[str, Timing]],
    fits: Callable[[Pair], bool],
    ties_by_time: Collection[Phase] = (),
) -> Pair:
    """Return the fastest backends for all phases together.

    A tie with the fastest goes to what the rules chose, then to one backend for both phases, then to the candidates
    that stand first.

    Args:
        chosen: what the rules chose.
        rivals: per phase in which times decide, the candidates and their times, best first. The other phases keep what
            the rules chose.
        fits: whether backends share a KV layout and block size.
        ties_by_time: phases in which times within their margins are no tie.
    """
    pools = {phase: list(rivals.get(phase) or [name]) for phase, name in chosen.items()}
    pairs = [
        pair
        for names in product(*reversed(pools.values()))
        if fits(pair := dict(zip(reversed(pools), names, strict=True)))
    ]
    timed = [phase for phase in chosen if rivals.get(phase)]
    if not timed or not pairs:
        return chosen

    def total(pair: Pair) -> float:
        return sum([(t := rivals[phase][pair[phase]]).time_us * t.share for phase in timed])

    best = min(pairs, key=total)

    def ties(pair: Pair) -> bool:
        parts = {p: (rivals[p][pair[p]], rivals[p][best[p]]) for p in timed if pair[p] != best[p]}
        return not parts or is_tie(
            [part for p, part in parts.items() if p not in ties_by_time], (total(pair), total(best))
        )

    near = [pair for pair in pairs if ties(pair)]
    one = [pair for pair in near if len(timed) > 1 and len(set(pair.values())) == 1]
    found = chosen if chosen in near else (one or near)[0]
    return {phase: found[phase] for phase in chosen}
