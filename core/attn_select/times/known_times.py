"""``KnownTimes``: what is known of one kernel and layer from one source, and what it says of any batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

from attn_select.machine.device import Device
from attn_select.times.batch_shape import BatchShape
from attn_select.times.fitted import PackagedFit
from attn_select.times.measurement import Measurement
from attn_select.times.roofline import step_work
from attn_select.times.scaled import SCALED_MARGIN, scaled_us
from attn_select.times.store import StoredMeasurement
from attn_select.times.timed_layer import TimedLayer
from attn_select.times.timing import WEAKER_MARGIN, Series, Timing
from attn_select.times.workload import phases_of

if TYPE_CHECKING:
    from attn_select.times.model import Prediction, TimeModel

Points = Sequence[tuple[BatchShape, float]]
"""Batches and their times in us."""
Fitted = Callable[[Points, TimedLayer, Device], "TimeModel | None"]
"""Returns the model that was fitted to points; None where none was."""
_UNKNOWN_MARGIN = 0.05
"""Margin of a measured batch whose line says nothing of its spread, where no model says more."""


@dataclass
class KnownTimes:
    """What is known of one kernel and layer, of one series, with one set of versions.

    Attributes:
        series: of the times.
        kernel: name of the kernel by phase.
        libraries: version by distribution that the times were measured with.
        weaker: why they count as weaker; empty where they do not.
        date: of the last one.
        files: that they come from.
        digest: of all of them.
        measured: the batches that were measured themselves.
        find_model: returns what predicts other batches; None where no model was fitted.
        layer: the kind of layer.
        measured_on: the device of the times.
        device: the device that is asked about.
        lacks_model: whether another batch was asked for, and no model was fitted where one could be.
    """

    series: Series
    kernel: Mapping[str, str]
    libraries: Mapping[str, str]
    weaker: str
    date: str
    files: tuple[str, ...]
    digest: str
    measured: Mapping[BatchShape, list[Measurement]]
    find_model: Callable[[], TimeModel | None]
    layer: TimedLayer
    measured_on: Device
    device: Device
    lacks_model: bool = False

    @classmethod
    def of_rows(
        cls,
        series: Series,
        rows: Sequence[tuple[BatchShape, StoredMeasurement]],
        weaker: str,
        layer: TimedLayer,
        measured_on: Device,
        device: Device,
        fitted: Fitted,
    ) -> KnownTimes:
        """Return the known times that measurements are."""
        measured: dict[BatchShape, list[Measurement]] = {}
        for batch, row in rows:
            measured.setdefault(batch, []).append(row.measurement)
        points = [(batch, row.measurement.time_us) for batch, row in rows]
        lines = sorted(row.measurement.to_line() for _, row in rows)
        return cls(
            series,
            kernel={phase: name for _, row in rows for phase, name in row.measurement.kernel.items()},
            libraries=rows[0][1].measurement.libraries,
            weaker=weaker,
            date=max(row.measurement.date for _, row in rows),
            files=tuple(dict.fromkeys(str(row.file.path) for _, row in rows)),
            digest=hashlib.sha256("\n".join(lines).encode()).hexdigest(),
            measured=measured,
            find_model=lambda: fitted(points, layer, measured_on),
            layer=layer,
            measured_on=measured_on,
            device=device,
        )

    @classmethod
    def of_fit(
        cls,
        series: Series,
        fit: PackagedFit,
        kernel: Mapping[str, str],
        weaker: str,
        layer: TimedLayer,
        measured_on: Device,
        device: Device,
    ) -> KnownTimes:
        """Return the known times that a packaged model predicts, for the phases of ``kernel``."""
        return cls(
            series,
            kernel=kernel,
            libraries=fit.libraries,
            weaker=weaker,
            date=fit.date,
            files=(str(fit.path),),
            digest=fit.digest,
            measured={},
            find_model=lambda: fit.model,
            layer=layer,
            measured_on=measured_on,
            device=device,
        )

    def timing(self, weights: Sequence[tuple[BatchShape, float]], share: float) -> Timing | None:
        """Return the mean time over batches of these weights; None where one is neither measured nor predictable."""
        time_us = half_width = 0.0
        for batch, weight in weights:
            known = self._of_batch(batch)
            if known is None:
                return None
            here_us = self._here(batch, known[0])
            margin = math.hypot(known[1], SCALED_MARGIN) if self._is_scaled else known[1]
            time_us += weight * here_us
            half_width += weight * here_us * margin  # errors of one model go one way, so they add up
        kind, source, method = self.series
        return Timing(
            time_us=time_us,
            margin=half_width / time_us + (WEAKER_MARGIN if self.weaker else 0.0),
            share=share,
            kind=kind,
            source=source,
            method=method,
            measured_shapes=sum([batch in self.measured for batch, _ in weights]),
            shapes=len(weights),
            kernel=self.kernel,
            libraries=self.libraries,
            weaker=self.weaker,
            files=self.files,
            digest=self.digest,
        )

    @cached_property
    def model(self) -> TimeModel | None:
        """What predicts other batches than the measured ones; None where no model was fitted."""
        return self.find_model()

    def _of_batch(self, batch: BatchShape) -> tuple[float, float] | None:
        """Return time and margin of one batch."""
        measured = self.measured.get(batch)
        if measured is None:
            predicted = self._predicted(batch)
            return None if predicted is None else (predicted.time_us, predicted.margin)
        margins = [margin for each in measured if (margin := _margin(each)) is not None]
        if not margins:
            predicted = self._predicted(batch)
            margins = [_UNKNOWN_MARGIN if predicted is None else predicted.margin]
        return median([each.time_us for each in measured]), max(margins)

    def _predicted(self, batch: BatchShape) -> Prediction | None:
        if not {*phases_of(batch, self.layer.config)} <= {*self.kernel}:
            return None
        if self.model is None:
            from attn_select.times.model import LEAST_POINTS  # with a packaged model nobody asks

            self.lacks_model = len(self.measured) >= LEAST_POINTS
            return None
        return self.model.predict(batch)

    @property
    def _is_scaled(self) -> bool:
        return self.measured_on is not self.device

    def _here(self, batch: BatchShape, time_us: float) -> float:
        """Return what a time where the batch was measured is on the device that is asked about."""
        if not self._is_scaled:
            return time_us
        return scaled_us(time_us, step_work(self.layer.config, batch).bytes, self.measured_on, self.device)


def _margin(measurement: Measurement) -> float | None:
    """Return half the width of a median's 95 % interval, by the quartiles and the number of rounds.

    A normal distribution's quartiles lie 1.349 standard deviations apart; its median's standard error is 1.2533 of
    the mean's.
    """
    if measurement.spread_us is None or measurement.rounds < 2:
        return None
    low, high = measurement.spread_us
    deviation = (high - low) / 1.349
    return 1.96 * 1.2533 * deviation / math.sqrt(measurement.rounds) / measurement.time_us
