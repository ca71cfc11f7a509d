"""``TimeModel``: the time of one kernel for any batch, from times of some.

Each phase has a curve, ``t = (sum of (rate * feature)^p)^(1/p)`` over the batch's ``features``: a roofline with a start
and terms for tiles, waves and the longest request, whose rates are fitted and never negative. What is left over, in
logarithms, is interpolated between the measured batches (kriging with a linear variogram): near a measured batch the
prediction is that measurement, far from all it is the curve with a mean deviation. A batch with prefills and decodes
takes both times, overlapped as far as measured batches of that kind say, and with what is left over of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import product, repeat
from operator import mul, truediv
from statistics import fmean, median
from typing import Any, NamedTuple

from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.least_squares import cholesky, inverse_diagonal, non_negative_least_squares, solve
from attn_select.times.points import far_places
from attn_select.times.terms import (
    TERMS,
    Coordinates,
    PhaseWork,
    Schedule,
    phase_work,
)
from attn_select.times.timed_layer import TimedLayer, layer_from_dict

LEAST_POINTS = 6
"""Batches of a phase that a curve needs."""
_POWERS = (1.0, 1.5, 2.0, 3.0, 5.0)
_SCHEDULED_POWERS = (1.5, 3.0)
"""Tried with each schedule, beside the power that is best without one."""
_L2_BYTES = tuple([16e6 * 2 ** (step / 2) for step in range(9)])
_SCHEDULE_WORTH = 0.97
"""A schedule has to bring the mean error to this share."""
_WHOLE_WORTH = 0.8
"""Keys that a window hides, which some kernels read or visit, have to bring the error of left-out batches to this
share before batches lie by them too."""
Fitted = tuple[float, float, tuple[float, ...], float]
"""Mean error in logarithms, power, rates, bytes that stay in the L2."""
_LEAST_START, _LEAST_START_US = 0.7, 7.0
"""A start takes at least this share of the shortest time, as far as that is no more than so many us: few measured
batches of long requests say nothing of it."""
_NOISE = 0.1
"""Variance of a measurement's own error, as the distance (in doublings) over which deviations differ as much."""
_APART, _MANY = 0.95, 64
"""Batches that are nearer to each other, in doublings, count as one where deviations are interpolated, as long as so
many are left: more places make a prediction slower, and no better. On a grid of doublings none are."""
_NEAR = 0.1
"""Distance to a measured batch within which the margin does not shrink any more."""
_LEAST_SPREAD, _FITTED = 6.0, 8
"""Over the square of the number of batches, the least spread; and how many numbers a fit chooses. Few batches are met
too well for their errors to say how others will be (docs/times-model.md)."""
_OVERLAPS = (1.0, 1.15, 1.3, 1.5, 2.0, 3.0, 5.0)
_LEAST_MIXED = 3
_LEAST_MIXED_PLACED = 8
"""With so many batches with both phases, or more, the errors left over of them are interpolated."""
_MIXED_NOISE = 1.0
"""As ``_NOISE``. It is larger, since a batch with both phases has the errors of both."""
_MIXED_NEAR = 8
"""How many batches with both phases lend their errors to a batch near them."""
_SHARED = 0.9
"""Share of the shortest time that one launch for both phases may save."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted time.

    Attributes:
        time_us: of one layer's step, microseconds.
        margin: half the width of the 95 % interval, as a share of ``time_us``.
    """

    time_us: float
    margin: float


@dataclass(frozen=True, slots=True)
class Deviations:
    """What is left over of measured times, in logarithms, interpolated between their batches.

    Attributes:
        points: where the measured batches lie.
        level: to which each point's weight times its distance is added.
        weights: one for each point.
    """

    points: tuple[tuple[float, ...], ...]
    level: float
    weights: tuple[float, ...]

    def at(self, distances: Iterable[float]) -> float:
        """Return the deviation at these distances from the points."""
        return sum(map(mul, self.weights, distances), self.level)

    def distances(self, place: Sequence[float]) -> list[float]:
        """Return how far a place is from the points."""
        return list(map(math.dist, repeat(place), self.points))


@dataclass(frozen=True, slots=True)
class Curve:
    """One phase of a kernel.

    Attributes:
        work: makes the features.
        power: ``p`` of the sum: 1 adds the terms, a large one takes the longest.
        rates: us per unit of each of ``TERMS``.
        l2_bytes: bytes that stay in the L2 between runs; 0: none.
        schedule: how the work is cut, as far as that explains the times.
        whole: whether batches lie by all keys of their requests, those included that a window hides.
        deviations: from the curve.
        spread: 95 % of errors, in logarithms, are below this times the root of the distance.
    """

    work: PhaseWork
    power: float
    rates: tuple[float, ...]
    l2_bytes: float
    schedule: Schedule | None
    whole: bool
    deviations: Deviations
    spread: float

    def predict(self, groups: Sequence[RequestGroup]) -> Prediction:
        """Return the time of ``groups``, all of this curve's phase."""
        return self.placed(groups)[0]

    def placed(self, groups: Sequence[RequestGroup]) -> tuple[Prediction, Coordinates]:
        """Return the time of ``groups``, all of this curve's phase, and where they lie."""
        found = self.work.features(groups, self.l2_bytes, self.schedule)
        place = self.work.coordinates(groups, found[-1] / found[1], self.whole)
        distances = self.deviations.distances(place)
        time_us = _on_curve(self.rates, self.power, found) * math.exp(self.deviations.at(distances))
        return Prediction(time_us, math.expm1(self.spread * math.sqrt(_NEAR + min(distances)))), place


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Predicts the time of one kernel on one device for one kind of layer. Made by ``fit``.

    Attributes:
        layer: the kind of layer.
        sm_count: multiprocessors of the device.
        longest_decode: new tokens up to which a request is a decode; 0 for encoders, which have none.
        decode: the curve of decodes, those of speculative decoding included; None: too few were measured.
        prefill: the curve of prefills; None: too few were measured.
        overlap: ``m`` of ``(prefill^m + decode^m)^(1/m)`` in batches with both: 1 adds the times.
        shared_us: of both times, what a batch with both takes once: the start, where one launch runs it. It is added
            to the times without it.
        mixed: deviations of batches with both, by where their prefills and their decodes lie; None: too few are known.
        mixed_errors: what leaving each of these batches out would have missed it by, in logarithms, without a sign:
            the largest one nearby is the least margin of a batch with both.
        knows_mixed: whether enough batches with both were measured to say how they overlap.
    """

    layer: TimedLayer
    sm_count: int
    longest_decode: int
    decode: Curve | None
    prefill: Curve | None
    overlap: float = 1.0
    shared_us: float = 0.0
    mixed: Deviations | None = None
    mixed_errors: tuple[float, ...] = ()
    knows_mixed: bool = False

    def predict(self, batch: BatchShape) -> Prediction | None:
        """Return the time of one step over ``batch``; None where it has a phase without a curve."""
        parts = []
        for decode, groups in _by_phase(self.longest_decode, batch):
            curve = self.decode if decode else self.prefill
            if curve is None:
                return None
            parts.append(curve.placed(groups))
        if len(parts) == 1:
            return parts[0][0]
        (prefill, place), (decodes, other) = parts
        total = prefill.time_us + decodes.time_us
        margin = (prefill.time_us * prefill.margin + decodes.time_us * decodes.margin) / total
        time_us = self.together(prefill.time_us, decodes.time_us)
        near: Sequence[float] = self.mixed_errors
        if self.mixed is not None:
            distances = self.mixed.distances((*place, *other))
            time_us *= math.exp(self.mixed.at(distances))
            near = [error for _, error in nsmallest(_MIXED_NEAR, zip(distances, near, strict=True))]
        return Prediction(time_us, max(margin, math.expm1(max(near, default=0.0))))

    def together(self, prefill_us: float, decode_us: float) -> float:
        """Return the time of a batch whose prefills and decodes alone take these times, microseconds."""
        shared = min(self.shared_us, prefill_us, decode_us)
        apart = math.pow(prefill_us - shared, self.overlap) + math.pow(decode_us - shared, self.overlap)
        return shared + math.pow(apart, 1 / self.overlap)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a file; ``from_dict`` makes an equal model of it."""
        return {
            "layer": self.layer.to_dict(),
            "sm_count": self.sm_count,
            "decode": _curve_to_dict(self.decode),
            "prefill": _curve_to_dict(self.prefill),
            "overlap": self.overlap,
            "shared_us": self.shared_us,
            "mixed": None if self.mixed is None else _deviations_to_dict(self.mixed),
            "mixed_errors": list(self.mixed_errors),
            "knows_mixed": self.knows_mixed,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TimeModel:
        """Return the model that ``to_dict`` wrote."""
        layer, sm_count = layer_from_dict(data["layer"]), data["sm_count"]
        config = layer.config
        return cls(
            layer,
            sm_count,
            _longest_decode(config),
            decode=_curve_from_dict(data["decode"], phase_work(config, True, sm_count)),
            prefill=_curve_from_dict(data["prefill"], phase_work(config, False, sm_count)),
            overlap=data["overlap"],
            shared_us=data["shared_us"],
            mixed=None if data["mixed"] is None else _deviations_from_dict(data["mixed"]),
            mixed_errors=tuple(data["mixed_errors"]),
            knows_mixed=data["knows_mixed"],
        )


def fit(points: Iterable[tuple[BatchShape, float]], layer: TimedLayer, device: Device) -> TimeModel:
    """Return the model of one kernel from measured times.

    A batch that was measured several times counts once, at its median.

    Args:
        points: batches and their times in us, all by one method from one source.
        layer: the kind of layer.
        device: for its multiprocessors; 100 are assumed where their number is unknown.

    Raises:
        ValueError: a time that is not a positive number.
    """
    config, sm_count = layer.config, device.sm_count or 100
    longest = _longest_decode(config)
    times: dict[BatchShape, list[float]] = {}
    for batch, time_us in points:
        if not 0 < time_us < math.inf:
            raise ValueError(f"time_us = {time_us} of {batch}: expected a positive number")
        times.setdefault(batch, []).append(time_us)
    phases: dict[bool, list[tuple[Sequence[RequestGroup], float]]] = {False: [], True: []}
    mixed = []
    for batch, each in times.items():
        parts = _by_phase(longest, batch)
        if len(parts) == 1:
            decode, groups = parts[0]
            phases[decode].append((groups, median(each)))
        else:
            mixed.append((batch, median(each)))
    least = min([_LEAST_START_US, *(_LEAST_START * median(each) for each in times.values())])
    curves = {
        decode: _fit_curve(phase_work(config, decode, sm_count), known, least) for decode, known in phases.items()
    }
    model = TimeModel(layer, sm_count, longest, decode=curves[True], prefill=curves[False])
    return _with_overlap(model, mixed, _SHARED * min(map(median, times.values()), default=0.0))


def left_out_errors(
    points: Iterable[tuple[BatchShape, float]], layer: TimedLayer, device: Device, batches: Iterable[BatchShape]
) -> dict[BatchShape, float]:
    """Return by how much a fit without it misses each of ``batches``, as a share of its time.

    Left out are batches that the rest cannot predict.
    """
    known = list(points)
    found: dict[BatchShape, float] = {}
    for batch in batches:
        predicted = fit([each for each in known if each[0] != batch], layer, device).predict(batch)
        if predicted is not None:
            measured = median(time_us for each, time_us in known if each == batch)
            found[batch] = abs(predicted.time_us / measured - 1)
    return found


def _longest_decode(config: AttentionConfig) -> int:
    return config.max_decode_query_len if config.has_cache else 0


def _by_phase(longest_decode: int, batch: BatchShape) -> list[tuple[bool, Sequence[RequestGroup]]]:
    """Return the prefills and the decodes of a batch, each with whether they are decodes; without empty ones."""
    groups = batch.groups  # the longest queries come first
    if groups[0].query_len <= longest_decode:
        return [(True, groups)]
    if groups[-1].query_len > longest_decode:
        return [(False, groups)]
    prefills = [group for group in groups if group.query_len > longest_decode]
    return [(False, prefills), (True, groups[len(prefills) :])]


def _fit_curve(work: PhaseWork, known: Sequence[tuple[Sequence[RequestGroup], float]], least: float) -> Curve | None:
    if len(known) < LEAST_POINTS:
        return None
    times = [time_us for _, time_us in known]
    (_, power, rates, l2_bytes), schedule = _fit_rates(work, known, times, least)
    found = [work.features(groups, l2_bytes, schedule) for groups, _ in known]
    left = [math.log(t / _on_curve(rates, power, each)) for t, each in zip(times, found, strict=True)]

    def places(whole: bool) -> list[Coordinates]:
        return [
            work.coordinates(groups, each[-1] / each[1], whole) for (groups, _), each in zip(known, found, strict=True)
        ]

    whole = False
    if work.hides_keys:
        noise = [_NOISE] * len(known)
        off = [sum(map(abs, _interpolated(places(each), left, noise).errors)) for each in (False, True)]
        whole = off[True] < _WHOLE_WORTH * off[False]
    deviations, nearest, errors = _thinned(places(whole), left)
    scaled = [abs(error) / math.sqrt(_NEAR + distance) for error, distance in zip(errors, nearest, strict=True)]
    count = len(known)
    spread = max(_LEAST_SPREAD / count**2, _at_95_percent(scaled)) * count / max(1, count - _FITTED)
    return Curve(
        work,
        power,
        rates,
        l2_bytes,
        schedule,
        whole=whole,
        deviations=deviations,
        spread=spread,
    )


class _Interpolated(NamedTuple):
    """Deviations as they are interpolated between the measured batches.

    Attributes:
        deviations: between these.
        nearest: how far each batch is from the nearest other one that they lie between.
        errors: what leaving a batch out would have missed its deviation by.
    """

    deviations: Deviations
    nearest: list[float]
    errors: list[float]


def _thinned(places: Sequence[tuple[float, ...]], left: Sequence[float]) -> _Interpolated:
    """Return the deviations between batches that are ``_APART`` from each other, if those are many; what is left over
    of the others is averaged with that of the nearest one."""
    if len(places) <= _MANY:
        return _interpolated(places, left, [_NOISE] * len(places))
    kept = far_places(places, len(places), least=_APART)
    if len(kept) < _MANY:
        kept = far_places(places, _MANY)
    apart = [list(map(math.dist, repeat(place), [places[i] for i in kept])) for place in places]
    nearest = [min(row) for row in apart]
    together: list[list[float]] = [[] for _ in kept]
    members = [together[row.index(least)] for row, least in zip(apart, nearest, strict=True)]
    for each, deviation in zip(members, left, strict=True):
        each.append(deviation)
    noise = [_NOISE / len(each) for each in together]
    found = _interpolated([places[i] for i in kept], list(map(fmean, together)), noise)
    errors = [  # a batch that counts with n - 1 others has drawn their mean to itself
        (deviation - found.deviations.at(row)) * len(each) / max(1, len(each) - 1)
        for each, deviation, row in zip(members, left, apart, strict=True)
    ]
    for place, i in enumerate(kept):
        nearest[i], errors[i] = found.nearest[place], found.errors[place]
    return _Interpolated(found.deviations, nearest, errors)


def _interpolated(places: Sequence[tuple[float, ...]], left: Sequence[float], noise: Sequence[float]) -> _Interpolated:
    """Return the deviations between batches; ``noise`` is the variance of each one's own, as ``_NOISE``."""
    apart = [list(map(math.dist, repeat(place), places)) for place in places]
    most = 2 * max(map(max, apart)) + 1  # the variance of the mean deviation: enough to let the points decide on it
    covariance = [[most - distance for distance in row] for row in apart]
    for i, row in enumerate(covariance):
        row[i] += noise[i]
    factor = cholesky(covariance)
    weights = solve(factor, left)
    errors = list(map(truediv, weights, inverse_diagonal(factor)))
    deviations = Deviations(tuple(places), most * sum(weights), tuple([-each for each in weights]))
    nearest = [min((each for j, each in enumerate(row) if j != i), default=0.0) for i, row in enumerate(apart)]
    return _Interpolated(deviations, nearest, errors)


def _fit_rates(
    work: PhaseWork, known: Sequence[tuple[Sequence[RequestGroup], float]], times: Sequence[float], least: float
) -> tuple[Fitted, Schedule | None]:
    """Return the rates with the least error: first the power for cold caches, then the schedule, then the size of the
    L2. ``least`` is that of the start, us."""

    def made(l2_bytes: float, schedule: Schedule | None) -> list[tuple[float, ...]]:
        return [work.features(groups, l2_bytes, schedule) for groups, _ in known]

    cold = made(0.0, None)
    best, chosen = min(_fit_power(cold, times, power, 0.0, least) for power in _POWERS), None
    if len(known) <= len(TERMS):
        return best, chosen
    for schedule in work.schedules:
        cut = made(0.0, schedule)
        found = min(_fit_power(cut, times, power, 0.0, least) for power in {best[1], *_SCHEDULED_POWERS})
        if found[0] < best[0] * _SCHEDULE_WORTH:
            best, chosen = found, schedule
    warm = (_fit_power(made(l2_bytes, chosen), times, best[1], l2_bytes, least) for l2_bytes in _L2_BYTES)
    return min(best, *warm), chosen


def _fit_power(
    found: Sequence[tuple[float, ...]], times: Sequence[float], power: float, l2_bytes: float, least: float
) -> Fitted:
    """Return the best rates for a power and a size of the L2, which has to explain more than chance would."""
    greatest = [max(column) or 1.0 for column in zip(*found, strict=True)]
    rows = [
        [(value / most / (time_us / times[0])) ** power for value, most in zip(each, greatest, strict=True)]
        for each, time_us in zip(found, times, strict=True)
    ]
    shares = non_negative_least_squares(rows, [1.0 - (least / time_us) ** power for time_us in times])
    shares[0] += (least / times[0]) ** power
    rates = [times[0] * share ** (1 / power) / most for share, most in zip(shares, greatest, strict=True)]
    errors = [math.log(t / _on_curve(rates, power, each)) for t, each in zip(times, found, strict=True)]
    middle = median(errors)
    error = sum(abs(each - middle) for each in errors) / len(errors) * (1.05 if l2_bytes else 1.0)
    return error, power, tuple([rate * math.exp(middle) for rate in rates]), l2_bytes


def _on_curve(rates: Sequence[float], power: float, found: Sequence[float]) -> float:
    if power == 1:
        return sum(map(mul, rates, found), 0.0)
    return math.pow(sum([term**power for term in map(mul, rates, found)]), 1 / power)


def _at_95_percent(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)))]


def _with_overlap(model: TimeModel, mixed: Sequence[tuple[BatchShape, float]], start_us: float) -> TimeModel:
    """Return the model with the overlap that measured batches of both phases show, where there are enough, with
    ``start_us`` shared where that brings them nearer, and with the deviations of those that are left over."""
    if len(mixed) < _LEAST_MIXED or model.decode is None or model.prefill is None:
        return model
    curves = model.prefill, model.decode
    parts = [
        [
            curve.placed(groups)
            for curve, (_, groups) in zip(curves, _by_phase(model.longest_decode, batch), strict=True)
        ]
        for batch, _ in mixed
    ]
    tried = []
    for overlap, shared_us in product(_OVERLAPS, (0.0, start_us)):
        other = replace(model, overlap=overlap, shared_us=shared_us, knows_mixed=True)
        errors = [
            math.log(time_us / other.together(prefill.time_us, decodes.time_us))
            for (_, time_us), ((prefill, _), (decodes, _)) in zip(mixed, parts, strict=True)
        ]
        tried.append((sum(map(abs, errors)), errors, other))
    _, errors, found = min(tried, key=lambda each: each[0])
    deviations = None
    if len(mixed) >= _LEAST_MIXED_PLACED:
        places = [(*place, *other) for (_, place), (_, other) in parts]
        deviations, _, errors = _interpolated(places, errors, [_MIXED_NOISE] * len(places))
    return replace(found, mixed=deviations, mixed_errors=tuple(map(abs, errors)))


def _deviations_to_dict(deviations: Deviations) -> dict[str, Any]:
    points = [list(point) for point in deviations.points]
    return {"points": points, "level": deviations.level, "weights": list(deviations.weights)}


def _deviations_from_dict(data: Mapping[str, Any]) -> Deviations:
    return Deviations(tuple(map(tuple, data["points"])), data["level"], tuple(data["weights"]))


def _curve_to_dict(curve: Curve | None) -> dict[str, Any] | None:
    if curve is None:
        return None
    return {
        "power": curve.power,
        "rates": dict(zip(TERMS, curve.rates, strict=True)),
        "l2_bytes": curve.l2_bytes,
        "schedule": curve.schedule,
        "whole": curve.whole,
        "deviations": _deviations_to_dict(curve.deviations),
        "spread": curve.spread,
    }


def _curve_from_dict(data: Mapping[str, Any] | None, work: PhaseWork) -> Curve | None:
    if data is None:
        return None
    return Curve(
        work,
        data["power"],
        tuple(data["rates"][name] for name in TERMS),
        data["l2_bytes"],
        None if data["schedule"] is None else (data["schedule"][0], data["schedule"][1]),
        data["whole"],
        _deviations_from_dict(data["deviations"]),
        data["spread"],
    )
