"""``Tuning``: which batches to measure of one layer and phase, so that its fastest backend is known for all of them."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

from attn_select.layer.config import Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.model import LEAST_POINTS, TimeModel
from attn_select.times.terms import coordinates
from attn_select.times.timed_layer import timed_layer
from attn_select.times.timing import TIE
from attn_select_measure.fitting.fit import fit
from attn_select_measure.fitting.points import farthest_first

FIRST = LEAST_POINTS + 4
"""Batches that lie far from each other, measured before the models say which ones are worth it."""
MOST_UNEVEN = 5
"""Of these, batches of few long requests among short ones, beside the others."""
LEAST_UNEVEN = 3
"""Uneven batches that have to be known before others are predicted."""
DOUBTFUL = math.log(1.3)
"""A time that is this much above what the others predict, as a logarithm, is measured again."""
_SUSPECT = 0.005
"""A model follows its own points. Whatever the other batches predict of a time, one that is above its own model by less
than this, as a logarithm, is not doubtful, so that no model is made without it."""
NEAR = 1.0
"""A batch within this distance of a known one, in doublings, is not far from all."""
MIXED = 4
"""Batches of a prefill beside decodes that say how a backend's two phases overlap."""
HELD_OUT = 8
"""Batches that judge the rules and that no model has seen."""
ENOUGH_KNOWN = 4 * HELD_OUT
"""Where this many batches are known before, some of them are held out, and no new ones are measured for that."""
_AHEAD = math.log1p(TIE)

Span = tuple[int, int]
"""The least and the greatest of some numbers."""
Points = list[tuple[BatchShape, float]]
"""Batches and their microseconds."""


@dataclass(frozen=True, slots=True)
class Domain:
    """The batches of one phase that a tuning speaks of: requests of one length, in decode also of unequal ones.

    Attributes:
        batch: requests.
        query_len: new tokens of each.
        seq_len: tokens of the longest, the new ones included; None: the new ones alone (a layer without a cache).
        fits: whether a batch is to be measured.
        uneven: whether requests of unequal lengths count too.
    """

    batch: Span
    query_len: Span
    seq_len: Span | None
    fits: Callable[[BatchShape], bool] = lambda batch: True
    uneven: bool = False

    @property
    def axes(self) -> dict[str, Span]:
        """What moves, by the names of the rules' conditions."""
        spans = {"batch": self.batch, "query_len": self.query_len, "seq_len": self.seq_len}
        return {name: span for name, span in spans.items() if span is not None}

    def cells(self, per_octave: int) -> list[BatchShape]:
        """Return the batches of a grid: along every axis its ends, powers of two, and as many numbers from one to the
        next as are asked for. Those that no request has or that do not fit are left out. Behind them come uneven ones
        of the same ends, where they count."""
        axes = {name: _between(*span, per_octave) for name, span in self.axes.items()}
        places = [dict(zip(axes, place, strict=True)) for place in product(*axes.values())]
        found = [self.batch_at(**place) for place in places]
        if self.uneven:
            found += [
                self.uneven_at(**place, long=place["batch"] // 8, short=place["seq_len"] // 16) for place in places
            ]
        return list(dict.fromkeys(batch for batch in found if batch is not None))

    def batch_at(self, batch: int, query_len: int, seq_len: int | None = None) -> BatchShape | None:
        """Return the batch of these numbers, None where there is none or it does not fit."""
        if seq_len is not None and seq_len < query_len:
            return None
        shape = BatchShape((RequestGroup(batch, query_len, query_len if seq_len is None else seq_len),))
        return shape if self.fits(shape) else None

    def uneven_at(self, batch: int, query_len: int, seq_len: int, long: int, short: int) -> BatchShape | None:
        """Return a batch of at least four requests, ``long`` of them (at least one) of ``seq_len`` tokens, the others
        of ``short``; None where there is none or it does not fit."""
        short = max(query_len, short)
        if batch < 4 or short >= seq_len:
            return None
        long = max(1, long)
        shape = BatchShape((RequestGroup(long, query_len, seq_len), RequestGroup(batch - long, query_len, short)))
        return shape if self.fits(shape) else None

    def mixed(self, decodes: Span, new_tokens: int) -> list[BatchShape]:
        """Return ``MIXED`` batches of one prefill, every other one without cached tokens, and decodes beside it, drawn
        log-uniformly by a fixed seed; fewer where few fit.

        Args:
            decodes: how many requests decode.
            new_tokens: of each of them; prefills have more.
        """
        draw, found = random.Random(17), dict[BatchShape, None]()
        spans = self.axes
        for _ in range(50 * MIXED if "seq_len" in spans else 0):
            query = log_uniform(draw, *spans["query_len"])
            cached = len(found) % 2 and max(0, log_uniform(draw, *spans["seq_len"]) - query)
            count, length = log_uniform(draw, *decodes), log_uniform(draw, *spans["seq_len"])
            prefill, decode = RequestGroup(1, query, query + cached), RequestGroup(count, new_tokens, length)
            if (
                query > new_tokens <= length
                and len(found) < MIXED
                and self.fits(batch := BatchShape((prefill, decode)))
            ):
                found[batch] = None
        return [*found]

    def holds(self, batch: BatchShape) -> bool:
        """Whether a batch is one of these."""
        lengths = {group.query_len for group in batch.groups}
        if len(lengths) > 1 or (len(batch.groups) > 1 and not self.uneven):
            return False
        values = {"batch": batch.num_requests, "query_len": batch.max_query_len, "seq_len": batch.max_seq_len}
        return all(low <= values[name] <= high for name, (low, high) in self.axes.items())


def log_uniform(draw: random.Random, low: int, high: int) -> int:
    """Draw a number whose logarithm is uniform."""
    return min(high, round(math.exp(draw.uniform(math.log(low), math.log(high + 1)))))


def _between(low: int, high: int, per_octave: int) -> list[int]:
    powers = [1 << i for i in range(high.bit_length())]
    steps = {power * part // per_octave for power in powers for part in range(per_octave, 2 * per_octave)}
    return sorted({low, high, *(step for step in steps if low < step < high)})


@dataclass(slots=True)
class Tuning:
    """One layer and phase: what was measured, and what to measure next.

    Attributes:
        config: the layer.
        phase: the phase.
        device: for the models.
        domain: the batches.
        backends: the candidates, in the order that decides between equal times.
        samples: microseconds by backend for every batch that was measured; a backend that failed, or was not tried, has
            none.
        held_out: batches that judge the rules. They are drawn by a fixed seed, so that each run has the same, or taken
            of what was known before (``hold_out_known``).
    """

    config: LayerConfig
    phase: Phase
    device: Device
    domain: Domain
    backends: Sequence[str]
    samples: dict[BatchShape, dict[str, float]] = field(default_factory=dict)
    _tried: dict[BatchShape, set[str]] = field(default_factory=dict)
    held_out: tuple[BatchShape, ...] = field(init=False)
    _pool: list[BatchShape] = field(init=False)
    _first: list[BatchShape] = field(init=False)
    _checked: set[BatchShape] = field(default_factory=set)
    _models: dict[str, tuple[Points, TimeModel]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        grid = self.domain.cells(1)
        even = [batch for batch in grid if len(batch.groups) == 1]
        uneven = [batch for batch in grid if len(batch.groups) > 1]
        between = self._between(even)
        self._first = farthest_first(even, FIRST // 2) if even else []
        self._first += farthest_first(between, FIRST - FIRST // 2, self._first) if between else []
        self._first += farthest_first(uneven, MOST_UNEVEN) if uneven else []
        self.held_out = self._drawn()
        self._pool = [*grid, *between]

    def _between(self, grid: Sequence[BatchShape]) -> list[BatchShape]:
        """Return batches between a grid's: kernels favour powers of two, and requests know nothing of them."""
        draw = random.Random(11)
        found: dict[BatchShape, None] = {}
        for batch in grid:
            (group,) = batch.groups
            values = {"batch": group.count, "query_len": group.query_len, "seq_len": group.seq_len}
            at = {
                name: min(high, round(values[name] * 2 ** draw.random()))
                for name, (_, high) in self.domain.axes.items()
            }
            other = self.domain.batch_at(**at)
            if other is not None and other not in grid:
                found[other] = None
        return [*found]

    def _drawn(self) -> tuple[BatchShape, ...]:
        """Return batches drawn log-uniformly, none of them among the first; every other one uneven, if those count."""
        draw = random.Random(7)
        between = partial(log_uniform, draw)
        found: dict[BatchShape, None] = {}
        for _ in range(HELD_OUT * 50):
            at = {name: between(*span) for name, span in self.domain.axes.items()}
            batch = self.domain.batch_at(**at)
            if self.domain.uneven and len(found) % 2 and at["batch"] >= 4:
                long, short = between(1, at["batch"] // 2), between(1, at["seq_len"])
                batch = self.domain.uneven_at(**at, long=long, short=short)
            if batch is not None and batch not in self._first and len(found) < HELD_OUT:
                found[batch] = None
        return tuple(found)

    def hold_out_known(self) -> None:
        """Where many batches are known of all backends, hold out some of them in place of those that nobody has
        measured. Which ones is said by a digest of their names, so that a batch more changes little."""
        known = [batch for batch in self.samples if self.domain.holds(batch) and not self.missing(batch)]
        drawn = [batch for batch in self.held_out if batch in known]
        if len(drawn) < len(self.held_out) and len(known) >= ENOUGH_KNOWN:
            others = sorted((batch for batch in known if batch not in drawn), key=_digest)
            wanted = max(HELD_OUT, len(known) // 8) - len(drawn)
            uneven = [batch for batch in others if len(batch.groups) > 1][: wanted // 2]  # half of them, as when drawn
            even = [batch for batch in others if batch not in uneven][: wanted - len(uneven)]
            self.held_out = (*drawn, *even, *uneven)

    def due(self) -> BatchShape | None:
        """Return a batch that is measured in any case: one that lies far from the others, or is held out.

        One near a batch that all backends were tried on before is not. Where some were, that one is returned.
        """
        first = [batch for batch in self._first if self.missing(batch)]
        near = [(coordinates(batch.groups, 0.0), batch) for batch in self.fitted if batch not in self._first]
        for batch in first:
            place = coordinates(batch.groups, 0.0)
            known = {other: apart for at, other in near if (apart := math.dist(place, at)) <= NEAR}
            if all(map(self.missing, known)):
                return batch if batch in self.samples else min(known, key=known.__getitem__, default=batch)
        return next((batch for batch in self.held_out if self.missing(batch)), None)

    def missing(self, batch: BatchShape) -> list[str]:
        """Return the backends that were not tried on a batch."""
        tried = self._tried.get(batch, ())
        return [name for name in self.backends if name not in tried]

    def add(self, batch: BatchShape, times: Mapping[str, float], tried: Iterable[str] | None = None) -> None:
        """Add what was measured of a batch. Of two times of one backend the shorter one counts: what disturbs a
        measurement makes it longer.

        Args:
            batch: the batch.
            times: microseconds by backend.
            tried: the backends that were measured, or failed; None: all.
        """
        known = self.samples.setdefault(batch, {})
        for name, time_us in times.items():
            known[name] = min(time_us, known.get(name, math.inf))
        self._tried.setdefault(batch, set()).update(self.backends if tried is None else tried)

    def forget(self, batch: BatchShape) -> None:
        """Take a batch for one that was not measured."""
        del self.samples[batch], self._tried[batch]

    def leave_out(self, backend: str) -> None:
        """Forget the times of a backend, and that it was not tried."""
        for batch, times in self.samples.items():
            times.pop(backend, None)
            self._tried[batch].add(backend)

    def doubtful(self) -> BatchShape | None:
        """Return a batch with a time far above what the other batches predict, to be measured again; each one once."""
        fitted = self.fitted
        if len(fitted) <= FIRST and self.due() is not None:
            return None
        models = self.models()
        for batch in [each for each in fitted if each not in self._checked and not self.missing(each)]:
            self._checked.add(batch)
            for name, time_us in fitted[batch].items():
                if self._above(models.get(name), batch, time_us) <= _SUSPECT:
                    continue
                without = [point for point in self._points(name) if point[0] != batch]
                other = fit(without, timed_layer(self.config), self.device)
                if self._above(other, batch, time_us) > DOUBTFUL:
                    return batch
        return None

    @staticmethod
    def _above(model: TimeModel | None, batch: BatchShape, time_us: float) -> float:
        """Return by how much a time is above a model's, as a logarithm; 0 where the model says nothing."""
        prediction = None if model is None else model.predict(batch)
        return 0.0 if prediction is None else math.log(time_us / prediction.time_us)

    def unsure(self) -> BatchShape | None:
        """Return the batch whose best backend is least sure; None where all are sure, or measured."""
        models = self.models()
        held = set(self.held_out)
        doubts = [
            (self._doubt(models, batch), batch) for batch in self._pool if self.missing(batch) and batch not in held
        ]
        worst = max(doubts, key=lambda pair: pair[0], default=(0.0, None))
        return worst[1] if worst[0] > _AHEAD else None

    def _doubt(self, models: Mapping[str, TimeModel], batch: BatchShape) -> float:
        """Return what the best backend may be slower than another one, as a logarithm, within 95 % intervals."""
        found = [prediction for model in models.values() if (prediction := model.predict(batch)) is not None]
        if len(found) < 2:
            return 0.0
        best, *others = sorted(found, key=lambda prediction: prediction.time_us)
        return max(
            math.hypot(math.log1p(best.margin), math.log1p(other.margin)) - math.log(other.time_us / best.time_us)
            for other in others
        )

    def cells(self, per_octave: int) -> list[BatchShape]:
        """Return the domain's grid, without uneven batches where too few of them were measured to predict others."""
        known = sum(len(batch.groups) > 1 for batch in self.fitted) >= LEAST_UNEVEN
        return [batch for batch in self.domain.cells(per_octave) if known or len(batch.groups) == 1]

    def unknown_uneven(self) -> list[str]:
        """Return the backends that were measured at too few uneven batches; none where only even batches count."""
        uneven = [times for batch, times in self.fitted.items() if len(batch.groups) > 1]
        known = {name: sum(name in times for times in uneven) for name in self.backends}
        return [name for name, count in known.items() if count < LEAST_UNEVEN] if self.domain.uneven else []

    @property
    def fitted(self) -> dict[BatchShape, dict[str, float]]:
        """What was measured of this domain and not held out."""
        held = set(self.held_out)
        return {b: times for b, times in self.samples.items() if b not in held and self.domain.holds(b)}

    def models(self) -> dict[str, TimeModel]:
        """Return the model of every backend that was measured often enough for one."""
        found = {}
        for backend in self.backends:
            points = self._points(backend)
            if len(points) < LEAST_POINTS:
                continue
            if backend not in self._models or self._models[backend][0] != points:
                self._models[backend] = points, fit(points, timed_layer(self.config), self.device)
            found[backend] = self._models[backend][1]
        return found

    def _points(self, backend: str) -> Points:
        return [(batch, times[backend]) for batch, times in self.fitted.items() if backend in times]

    def times(self, batches: Sequence[BatchShape]) -> list[dict[str, float]]:
        """Return the microseconds by backend for batches: predicted, or measured where there is no model.

        A backend without either is left out.
        """
        models, fitted = self.models(), self.fitted
        found = []
        for batch in batches:
            measured = fitted.get(batch, {})
            times = {}
            for backend in self.backends:
                prediction = models[backend].predict(batch) if backend in models else None
                if prediction is not None:
                    times[backend] = prediction.time_us
                elif backend in measured:
                    times[backend] = measured[backend]
            found.append(times)
        return found


def _digest(batch: BatchShape) -> bytes:
    return hashlib.sha256(str(batch).encode()).digest()
