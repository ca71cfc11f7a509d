"""Fits a ``TimeModel`` to the measured times of one kernel, on one device and for one kind of layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import nnls
from scipy.spatial.distance import cdist

from attn_select.machine.device import Device
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.model import (
    LEAST_POINTS,
    NEAR,
    Curve,
    Deviations,
    TimeModel,
    Work,
    by_phase,
    longest_decode_of,
    on_curve,
    work_of,
)
from attn_select.times.terms import TERMS, Coordinates, Schedule
from attn_select.times.timed_layer import TimedLayer
from attn_select_measure.fitting.points import far_places

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
_LEAST_SPREAD, _FITTED = 6.0, 8
"""Over the square of the number of batches, the least spread; and how many numbers a fit chooses. Few batches are met
too well for their errors to say how others will be (docs/times-model.md)."""
_OVERLAPS = (1.0, 1.15, 1.3, 1.5, 2.0, 3.0, 5.0)
_LEAST_MIXED = 3
_LEAST_MIXED_PLACED = 8
"""With so many batches with both phases, or more, the errors left over of them are interpolated."""
_MIXED_NOISE = 1.0
"""As ``_NOISE``. It is larger, since a batch with both phases has the errors of both."""
_SHARED = 0.9
"""Share of the shortest time that one launch for both phases may save."""


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
    longest = longest_decode_of(config)
    times: dict[BatchShape, list[float]] = {}
    for batch, time_us in points:
        if not 0 < time_us < math.inf:
            raise ValueError(f"time_us = {time_us} of {batch}: expected a positive number")
        times.setdefault(batch, []).append(time_us)
    phases: dict[bool, list[tuple[Sequence[RequestGroup], float]]] = {False: [], True: []}
    mixed = []
    for batch, each in times.items():
        parts = by_phase(longest, batch)
        if len(parts) == 1:
            decode, groups = parts[0]
            phases[decode].append((groups, median(each)))
        else:
            mixed.append((batch, median(each)))
    least = min([_LEAST_START_US, *(_LEAST_START * median(each) for each in times.values())])
    curves = {decode: _fit_curve(work_of(config, decode, sm_count), known, least) for decode, known in phases.items()}
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


def _fit_curve(work: Work, known: Sequence[tuple[Sequence[RequestGroup], float]], least: float) -> Curve | None:
    if len(known) < LEAST_POINTS:
        return None
    times = [time_us for _, time_us in known]
    (_, power, rates, l2_bytes), schedule = _fit_rates(work, known, times, least)
    found = [work.features(groups, l2_bytes, schedule) for groups, _ in known]
    left = [math.log(t / on_curve(rates, power, each)) for t, each in zip(times, found, strict=True)]

    def places(whole: bool) -> list[Coordinates]:
        return [
            work.coordinates(groups, each[-1] / each[1], whole) for (groups, _), each in zip(known, found, strict=True)
        ]

    whole = False
    if work.hides_keys:
        noise = np.full(len(known), _NOISE)
        off = [sum(map(abs, _interpolated(places(each), left, noise).errors)) for each in (False, True)]
        whole = off[True] < _WHOLE_WORTH * off[False]
    deviations, nearest, errors = _thinned(places(whole), left)
    scaled = [abs(error) / math.sqrt(NEAR + distance) for error, distance in zip(errors, nearest, strict=True)]
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
        return _interpolated(places, left, np.full(len(places), _NOISE))
    kept = far_places(places, len(places), least=_APART)
    if len(kept) < _MANY:
        kept = far_places(places, _MANY)
    apart = cdist(places, [places[i] for i in kept])
    nearest, at = apart.min(axis=1), apart.argmin(axis=1)
    members = np.bincount(at, minlength=len(kept))
    means = np.bincount(at, weights=left, minlength=len(kept)) / members
    found = _interpolated([places[i] for i in kept], means.tolist(), _NOISE / members)
    # A batch that counts with n - 1 others has drawn their mean to itself.
    weights = np.array(found.deviations.weights)
    errors = np.array(left) - (apart @ weights + found.deviations.level)
    errors *= members[at] / np.maximum(1, members[at] - 1)
    nearest[kept], errors[kept] = found.nearest, found.errors
    return _Interpolated(found.deviations, nearest.tolist(), errors.tolist())


def _interpolated(
    places: Sequence[tuple[float, ...]], left: Sequence[float], noise: NDArray[np.float64]
) -> _Interpolated:
    """Return the deviations between batches; ``noise`` is the variance of each batch itself, as ``_NOISE``."""
    apart = cdist(places, places)
    most = 2 * apart.max() + 1  # the variance of the mean deviation: enough to let the points decide on it
    factor = cho_factor(most - apart + np.diag(noise))
    weights = cho_solve(factor, np.array(left))
    errors = weights / np.diag(cho_solve(factor, np.eye(len(places))))
    deviations = Deviations(tuple(places), float(most * weights.sum()), tuple((-weights).tolist()))
    others = apart + np.diag(np.full(len(places), np.inf))
    nearest = others.min(axis=1) if len(places) > 1 else np.zeros(1)
    return _Interpolated(deviations, nearest.tolist(), errors.tolist())


def _fit_rates(
    work: Work, known: Sequence[tuple[Sequence[RequestGroup], float]], times: Sequence[float], least: float
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
    features = np.array(found)
    greatest = features.max(axis=0)
    greatest[greatest == 0] = 1.0
    us = np.array(times)
    rows = (features / greatest * (times[0] / us)[:, None]) ** power
    shares, _ = nnls(rows, 1.0 - (least / us) ** power)
    shares[0] += (least / times[0]) ** power
    rates = (times[0] * shares ** (1 / power) / greatest).tolist()
    errors = [math.log(t / on_curve(rates, power, each)) for t, each in zip(times, found, strict=True)]
    middle = median(errors)
    error = sum(abs(each - middle) for each in errors) / len(errors) * (1.05 if l2_bytes else 1.0)
    return error, power, tuple([rate * math.exp(middle) for rate in rates]), l2_bytes


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
        [curve.placed(groups) for curve, (_, groups) in zip(curves, by_phase(model.longest_decode, batch), strict=True)]
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
        deviations, _, errors = _interpolated(places, errors, np.full(len(places), _MIXED_NOISE))
    return replace(found, mixed=deviations, mixed_errors=tuple(map(abs, errors)))
