"""Regions of batches, each with its order of backends: few boxes that say what many times say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean

from attn_select.rules.conditions import OF_BATCH
from attn_select.times.batch_shape import BatchShape
from attn_select.times.timing import TIE
from attn_select_measure.tuning import Tuning

MOST_REGIONS = 6
"""Boxes beside the region that is everything."""
_LEAST_GAIN = 0.001
"""What a box has to win, as a mean over all cells: a rule that nobody would miss is not written."""
_LEAST_CHANGE = 0.002
"""What new regions have to win over the regions in force, as a mean over all cells."""
_PLAIN = 0.95
"""The share of its gain that a box keeps where a bound is left out for plainness."""
_AHEAD = math.log1p(TIE)
_WORST = 2.0
"""The most that a backend which leads without a workload may take in any batch, as a multiple of the best backend's
time."""

_PER_OCTAVE = 4
"""Batches of the grid from one power of two to the next, along every axis. A box ends at one of them: with two, a box
lost up to 6 % between the last one inside and the first one outside, whatever was known of the times."""
_NEVER = 10.0
"""The logarithm of a factor that no backend wins or loses by; what has no time loses this."""
FIELDS: Mapping[str, Callable[[BatchShape], float]] = {
    **{field: attrgetter(attribute) for field, attribute in OF_BATCH.items()},
    "effective_batch": lambda batch: round(batch.effective_requests, 1),
}
"""What bounds a region, by the names of the rules' conditions."""
Times = Mapping[str, float]
"""Microseconds by backend."""
Bounds = dict[str, tuple[float | None, float | None]]


@dataclass(slots=True)
class Region:
    """A box of batches and its order of backends. The last of several regions that hold a batch decides.

    Attributes:
        order: backends, the fastest first.
        bounds: the least and the greatest value by field (``FIELDS``), None for no bound.
        sample: the measured batch that shows best why the first backend leads; None where none does.
        times: microseconds by backend of that batch.
        against: the backend that the first one is compared with there.
        decided: measured batches in which this region decides.
        right: the batches in which its first backend is the fastest, or within a tie of it.
    """

    order: list[str]
    bounds: Bounds = field(default_factory=dict)
    sample: BatchShape | None = None
    times: Times = field(default_factory=dict)
    against: str | None = None
    decided: int = 0
    right: int = 0

    def holds(self, batch: BatchShape) -> bool:
        """Whether a batch lies in the box."""
        return _within(self.bounds, {name: FIELDS[name](batch) for name in self.bounds})

    def conditions(self) -> dict[str, float | str]:
        """Return the bounds as a rule's ``when`` has them."""
        found: dict[str, float | str] = {}
        for name, (low, high) in self.bounds.items():
            texts = [f">={low}"] * (low is not None) + [f"<={high}"] * (high is not None)
            found[name] = low if low is not None and low == high else ",".join(texts)
        return found


def order_in(regions: Sequence[Region], batch: BatchShape) -> list[str]:
    """Return the order of backends that the regions give a batch."""
    return next(region.order for region in reversed(regions) if region.holds(batch))


def find_regions(
    tuning: Tuning,
    weighted: Mapping[BatchShape, float] | None = None,
    present: Sequence[Region] = (),
    order: Sequence[str] = (),
) -> list[Region]:
    """Return the regions that a tuning's times ask for, first the one without bounds; none where nothing was measured.

    A box is added where its backend wins most over the regions before it, and where a measured batch shows that it
    does. The first region has the order of the mean times over the domain; where they are alike, the tuning's order of
    backends stays.

    Args:
        tuning: what was measured.
        weighted: batches with their shares that the first region's order is for, in place of the whole domain.
        order: of the first region, in place of the order of mean times.
        present: regions that are in force; where they lose hardly more than the new ones, they are returned instead, so
            that noise alone changes no rule.
    """
    regions, _ = _regions(tuning, weighted, _PER_OCTAVE, order)
    if present and order and present[0].order != [*order]:
        present = ()
    if regions and present and {name for each in present for name in each.order} == set(tuning.backends):
        batches = [weighted] if weighted else []
        batches.append(dict.fromkeys(tuning.cells(_PER_OCTAVE), 1.0))
        if all(_lost(present, tuning, each) <= _lost(regions, tuning, each) + _LEAST_CHANGE for each in batches):
            regions = [*present]
            for number, region in enumerate(regions):
                _show(region, tuning, regions[:number])
    _count(regions, tuning.fitted)
    return regions


def _count(regions: Sequence[Region], measured: Mapping[BatchShape, Times]) -> None:
    """Count for every region the measured batches in which it decides, and the batches in which it is right."""
    for batch, times in measured.items():
        region = next((each for each in reversed(regions) if each.holds(batch)), None)
        if region is not None and region.order[0] in times and len(times) > 1:
            region.decided += 1
            region.right += times[region.order[0]] <= (1 + TIE) * min(times.values())


def _lost(regions: Sequence[Region], tuning: Tuning, weighted: Mapping[BatchShape, float]) -> float:
    """Return what the regions' choices lose to the best backends over batches, the mean of logarithms."""
    lost = total = 0.0
    for batch, times in zip(weighted, tuning.times([*weighted]), strict=True):
        chosen = next((times[name] for name in order_in(regions, batch) if name in times), None)
        if chosen is not None:
            lost += weighted[batch] * math.log(chosen / min(times.values()))
            total += weighted[batch]
    return lost / total if total else 0.0


def next_batch(tuning: Tuning) -> BatchShape | None:
    """Return the batch to measure next, or None where no batch left would change a rule.

    Batches that the models need come first, then batches whose measurement was disturbed. Then batches that show where
    a region ends take turns with batches whose times the models are unsure of.
    """
    if (batch := tuning.due() or tuning.doubtful()) is not None:
        return batch

    def showing() -> BatchShape | None:
        return next((batch for batch in _regions(tuning, None, 1)[1] if tuning.missing(batch)), None)

    if len(tuning.samples) % 2:
        return showing() or tuning.unsure()
    return tuning.unsure() or showing()


def _regions(
    tuning: Tuning, weighted: Mapping[BatchShape, float] | None, per_octave: int, first: Sequence[str] = ()
) -> tuple[list[Region], list[BatchShape]]:
    """Return the regions, and for each box that no measured batch shows the batch in which it should win most."""
    batches = tuning.cells(per_octave)
    cells = [_Cell(batch, times) for batch, times in zip(batches, tuning.times(batches), strict=True) if times]
    if not cells:
        return [], []
    order = _for_any_batch(tuning, cells)
    if weighted:
        times = tuning.times([*weighted])
        shares = [
            share * min(each.values()) if each else 0.0 for each, share in zip(times, weighted.values(), strict=True)
        ]
        order = _by_mean(tuning.backends, times, shares) or order
    regions = [Region([*first] or order)]
    wanted: list[BatchShape] = []
    _show(regions[0], tuning, [])
    for cell in cells:
        cell.now = cell.times.get(regions[0].order[0], math.inf)
    while len(regions) + len(wanted) <= MOST_REGIONS:
        box = max((_best_box(cells, name) for name in tuning.backends), key=lambda box: box.gain)
        if box.gain < _LEAST_GAIN * len(cells):
            break
        region = Region([box.backend], _bounds(cells, box))
        inside = [cell for cell in cells if _within(region.bounds, cell.values)]
        if _show(region, tuning, regions):
            region.order += [n for n in _by_mean(tuning.backends, [c.times for c in inside]) if n != box.backend]
            regions.append(region)
            for cell in inside:
                cell.now = cell.times.get(box.backend, cell.now)
        else:
            wanted.append(max(inside, key=lambda cell: cell.gain(box.backend)).batch)
            for cell in inside:
                cell.blocked.add(box.backend)
    return regions, wanted


def _for_any_batch(tuning: Tuning, cells: Sequence[_Cell]) -> list[str]:
    """Return the order of backends for users who name no workload.

    A backend's cost in a batch is its time over the best backend's time. Backends are ordered by their mean cost over
    the grid and the measured batches. A backend whose worst cost is above ``_WORST`` comes behind the others; where
    every backend's is, the one with the least worst cost leads. Of backends that tie with the first, the earliest
    leads. A backend that lacks a time somewhere, or was measured at too few uneven batches where such batches count,
    comes last.
    """
    known = [times for times in (*(cell.times for cell in cells), *tuning.fitted.values()) if times]
    costs = {
        name: [times[name] / min(times.values()) if name in times else math.inf for times in known]
        for name in _by_mean(tuning.backends, known)
    }
    costs |= {name: [math.inf] for name in tuning.unknown_uneven() if name in costs}
    bound = max(_WORST, min(max(each) for each in costs.values()))
    means = {name: (max(each) > bound, fmean(each)) for name, each in costs.items()}
    ordered = sorted(means, key=means.__getitem__)
    unbounded, least = means[ordered[0]]
    leader = next(
        (n for n in tuning.backends if n in means and means[n] <= (unbounded, least * (1 + TIE / 2))), ordered[0]
    )
    return [leader, *(name for name in ordered if name != leader)]


def _by_mean(backends: Sequence[str], times: Sequence[Times], weights: Sequence[float] = ()) -> list[str]:
    """Return backends by their mean loss to the best. Of backends that tie with the first, the earliest leads.

    A backend that lacks a time somewhere comes behind backends that have all.
    """
    means: dict[str, float] = {}
    known = [(each, weight) for each, weight in zip(times, weights or [1.0] * len(times), strict=True) if each]
    for backend in backends:
        lost = [
            (weight * math.log(each[backend] / min(each.values())), weight) for each, weight in known if backend in each
        ]
        if lost:
            mean = sum(loss for loss, _ in lost) / sum(weight for _, weight in lost)
            means[backend] = mean + 1e3 * (len(lost) < len(known))
    ordered = sorted(means, key=means.__getitem__)
    leaders = [name for name in backends if name in means and means[name] <= means[ordered[0]] + _AHEAD / 2]
    return [*leaders[:1], *(name for name in ordered if name not in leaders[:1])]


class _Cell:
    """One batch of the grid.

    Attributes:
        values: by field.
        times: microseconds by backend.
        now: time of the backend that the regions so far choose.
        blocked: backends that are not counted as faster here, because nothing shows it.
    """

    __slots__ = ("batch", "blocked", "now", "times", "values")

    def __init__(self, batch: BatchShape, times: Times) -> None:
        self.batch, self.times = batch, times
        self.values = {name: get(batch) for name, get in FIELDS.items()}
        self.now = math.inf
        self.blocked: set[str] = set()

    def gain(self, backend: str) -> float:
        """Return what a backend wins over the time of now, as a logarithm."""
        if backend not in self.times:
            return -_NEVER
        gain = max(-_NEVER, min(math.log(self.now / self.times[backend]), _NEVER))
        return min(gain, 0.0) if backend in self.blocked else gain


@dataclass(frozen=True, slots=True)
class _Box:
    """The cells between bounds, both included, by field, and what a backend wins there: the sum of logarithms."""

    gain: float
    backend: str
    spans: Mapping[str, tuple[float, float]]


def _best_box(cells: Sequence[_Cell], backend: str) -> _Box:
    """Return the box in which a backend wins most: from every order of the fields, each bounded in turn as is best."""
    columns = {name: tuple(cell.values[name] for cell in cells) for name in FIELDS}
    names = [
        *{column: name for name, column in reversed(columns.items()) if len({*column}) > 1}.values()
    ]  # no two alike
    rows = [
        (gain, *values)
        for gain, *values in zip([cell.gain(backend) for cell in cells], *map(columns.__getitem__, names), strict=True)
    ]
    best = _Box(0.0, backend, {})
    for first in range(len(names)):
        spans: dict[int, tuple[float, float]] = {}
        gain, last = 0.0, -math.inf
        while gain > last:
            last = gain
            for at in [*range(first + 1, len(names) + 1), *range(1, first + 1)]:
                inside = rows
                for other, (low, high) in spans.items():
                    if other != at:
                        inside = [row for row in inside if low <= row[other] <= high]
                sums: dict[float, float] = {}
                for row in inside:
                    sums[row[at]] = sums.get(row[at], 0.0) + row[0]
                gain, spans[at] = _best_run(sorted(sums.items()))
        if gain > best.gain:
            best = _Box(gain, backend, {names[at - 1]: span for at, span in spans.items()})
    return best


def _best_run(sums: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, float]]:
    """Return the greatest sum of neighbours and the values of the first and the last of them, zeros beside included."""
    best, span = 0.0, (sums[0][0], sums[0][0])
    total, start = 0.0, sums[0][0]
    for value, gain in sums:
        if total < 0:
            total, start = 0.0, value
        total += gain
        if total >= best:
            best, span = total, (start, value)
    return best, span


def _bounds(cells: Sequence[_Cell], box: _Box) -> Bounds:
    """Return a box's bounds without those that its gain hardly rests on, and those that leave no cell out, as where the
    domain ends."""
    sides = [(name, side, span[side]) for name, span in box.spans.items() for side in (0, 1)]
    gains = []
    for cell in cells:
        beyond = {
            at
            for at, (name, side, limit) in enumerate(sides)
            if (cell.values[name] > limit if side else cell.values[name] < limit)
        }
        gains.append((cell.gain(box.backend), beyond))
    kept, gain = {*range(len(sides))}, box.gain
    while kept:
        more = dict.fromkeys(kept, 0.0)  # what the cells that one bound alone keeps out would add
        for won, beyond in gains:
            if len(left := beyond & kept) == 1:
                more[left.pop()] += won
        at = max(more, key=more.__getitem__)
        if gain + more[at] < _PLAIN * box.gain:
            break
        gain += more[at]
        kept.remove(at)
    found: Bounds = {}
    for name, side, limit in map(sides.__getitem__, sorted(kept)):
        low, high = found.get(name, (None, None))
        found[name] = (low, limit) if side else (limit, high)
    return found


def _within(bounds: Bounds, values: Mapping[str, float]) -> bool:
    return all(
        (low is None or low <= values[name]) and (high is None or values[name] <= high)
        for name, (low, high) in bounds.items()
    )


def _show(region: Region, tuning: Tuning, before: Sequence[Region]) -> bool:
    """Set the measured batch in which the region's first backend is farthest ahead of the one that ran before.

    Return whether it is ahead by more than a tie, and no slower in the mean over the measured batches of the region.
    """
    name = region.order[0]
    most, total = -math.inf, 0.0
    for batch, times in tuning.fitted.items():
        rivals = order_in(before, batch)[:1] if before else [other for other in times if other != name]
        rivals = [other for other in rivals if other in times and other != name]
        if name not in times or not region.holds(batch) or (not rivals and (before or region.sample)):
            continue
        rival = min(rivals, key=times.__getitem__, default=None)
        ahead = 0.0 if rival is None else math.log(times[rival] / times[name])
        total += ahead
        if ahead > most:
            most, region.sample, region.times, region.against = ahead, batch, times, rival
    return most > _AHEAD and total > 0
