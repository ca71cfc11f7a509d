"""``TimeModel``: the time of one kernel for any batch, from times of some.

Each phase has a curve, ``t = (sum of (rate * feature)^p)^(1/p)`` over the batch's ``features``: a roofline with a start
and terms for tiles, waves and the longest request, whose rates are fitted and never negative. What is left over, in
logarithms, is interpolated between the measured batches (kriging with a linear variogram): near a measured batch the
prediction is that measurement, far from all it is the curve with a mean deviation. A batch with prefills and decodes
takes both times, overlapped as far as measured batches of that kind say, and with what is left over of those.

Models are fitted by ``attn-select-measure``. This module predicts, and reads and writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import repeat
from operator import mul
from typing import Any

from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.state import StateConfig
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.state_terms import StatePhaseWork
from attn_select.times.terms import TERMS, Coordinates, PhaseWork, Schedule, phase_work
from attn_select.times.timed_layer import TimedLayer, layer_from_dict

Work = PhaseWork | StatePhaseWork
LEAST_POINTS = 6
"""Batches of a phase that a curve needs."""
NEAR = 0.1
"""Distance to a measured batch within which the margin does not shrink any more."""
_MIXED_NEAR = 8
"""How many batches with both phases lend their errors to a batch near them."""


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

    work: Work
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
        time_us = on_curve(self.rates, self.power, found) * math.exp(self.deviations.at(distances))
        return Prediction(time_us, math.expm1(self.spread * math.sqrt(NEAR + min(distances)))), place


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Predicts the time of one kernel on one device for one kind of layer.

    Attributes:
        layer: the kind of layer.
        sm_count: multiprocessors of the device.
        longest_decode: new tokens up to which a request is a decode; 0 for encoders, which have none.
        decode: the curve of decodes, speculative ones included; None: too few were measured.
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
        for decode, groups in by_phase(self.longest_decode, batch):
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
            longest_decode_of(config),
            decode=_curve_from_dict(data["decode"], work_of(config, True, sm_count)),
            prefill=_curve_from_dict(data["prefill"], work_of(config, False, sm_count)),
            overlap=data["overlap"],
            shared_us=data["shared_us"],
            mixed=None if data["mixed"] is None else _deviations_from_dict(data["mixed"]),
            mixed_errors=tuple(data["mixed_errors"]),
            knows_mixed=data["knows_mixed"],
        )


def work_of(config: LayerConfig, decode: bool, sm_count: int) -> Work:
    """Return what makes the features of one phase's batches."""
    if isinstance(config, StateConfig):
        return StatePhaseWork(config, decode, sm_count)
    return phase_work(config, decode, sm_count)


def longest_decode_of(config: LayerConfig) -> int:
    """Return the new tokens up to which a request is a decode; 0 where a layer has none."""
    return config.max_decode_query_len if config.has_cache else 0


def by_phase(longest_decode: int, batch: BatchShape) -> list[tuple[bool, Sequence[RequestGroup]]]:
    """Return the prefills and the decodes of a batch, each with whether they are decodes; without empty ones."""
    groups = batch.groups  # the longest queries come first
    if groups[0].query_len <= longest_decode:
        return [(True, groups)]
    if groups[-1].query_len > longest_decode:
        return [(False, groups)]
    prefills = [group for group in groups if group.query_len > longest_decode]
    return [(False, prefills), (True, groups[len(prefills) :])]


def on_curve(rates: Sequence[float], power: float, found: Sequence[float]) -> float:
    """Return ``(sum of (rate * feature)^power)^(1 / power)``."""
    if power == 1:
        return sum(map(mul, rates, found), 0.0)
    return math.pow(sum([term**power for term in map(mul, rates, found)]), 1 / power)


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


def _curve_from_dict(data: Mapping[str, Any] | None, work: Work) -> Curve | None:
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
