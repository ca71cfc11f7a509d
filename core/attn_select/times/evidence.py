"""``Evidence``: everything that is known about times on one device, and what it says about a candidate.

A measurement counts for a candidate where GPU, backend, kernel names and the layer
(``attn_select.times.timed_layer``) are the same. Batches that were not measured are predicted from those that were
(``attn_select.times.model``). Times of a GPU with the same multiprocessors count less, scaled by its memory
(``attn_select.times.scaled``).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Protocol

from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine.device import Device, find_gpu
from attn_select.machine.environment import Environment
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.kept_fits import kept_or_fitted
from attn_select.times.measurement import Measurement
from attn_select.times.roofline import roofline_us, step_work
from attn_select.times.scaled import SCALED_MARGIN, can_scale, scaled_us
from attn_select.times.store import (
    MeasurementFile,
    Problem,
    Stored,
    StoredMeasurement,
    measurement_files,
    measurements_in,
)
from attn_select.times.timed_layer import TimedLayer, timed_layer
from attn_select.times.timing import WEAKER_MARGIN, Kind, Series, Timing, strongest_first
from attn_select.times.workload import Workload, phases_of

_UNKNOWN_MARGIN = 0.05
"""Margin of a measured batch whose line says nothing of its spread, where no model says more."""
_MOST_WARNINGS = 5
_KINDS: Mapping[str, Kind] = {"named": "named file", "user": "measured here", "packaged": "packaged"}
_CONFIG = re.compile(rb'"config"\s*:\s*(\{[^{}]*\})')
_GPU = re.compile(rb'"gpu"\s*:\s*("(?:[^"\\]|\\.)*")')


class Predicted(Protocol):
    """A predicted time in us, and half the width of its 95 % interval as a share of it."""

    @property
    def time_us(self) -> float: ...
    @property
    def margin(self) -> float: ...


class Model(Protocol):
    """Predicts the times of one kernel; None where it cannot."""

    def predict(self, batch: BatchShape) -> Predicted | None: ...


Points = tuple[tuple[BatchShape, float], ...]
Read = Callable[[TimedLayer], Stored]
Fit = Callable[[Sequence[tuple[BatchShape, float]], TimedLayer, Device], Model]


class Evidence:
    """What is known about times on one device, a snapshot: later measurements do not change it.

    Args:
        read: returns the measurements of a layer on this device, and on those that scale to it; others beside them
            are not looked at. It is called once per layer.
        device: the device.
        environment: the libraries that a decision rests on: measurements with others count as weaker.
        fit: makes the model of a kernel from its times.
    """

    def __init__(self, read: Read, device: Device, environment: Environment, fit: Fit = kept_or_fitted) -> None:
        self.problems: list[Problem] = []
        self._read, self._device, self._environment, self._fit = read, device, environment, fit
        self._rows: dict[TimedLayer, dict[str, list[tuple[BatchShape, StoredMeasurement]]]] = {}
        self._groups: dict[tuple[object, ...], dict[Series, list[_Group]]] = {}

    @property
    def warnings(self) -> list[str]:
        """What a selection warns of: the lines that could not be read, the first five of them."""
        told = [f"measurement skipped: {problem}" for problem in self.problems[:_MOST_WARNINGS]]
        more = len(self.problems) - len(told)
        return [*told, f"{more} more lines of measurements were skipped"] if more else told

    def timings(
        self,
        config: AttentionConfig,
        backend: str,
        kernels: Mapping[Phase, str | None],
        phase: Phase,
        workload: Workload,
    ) -> list[Timing]:
        """Return a candidate's times over the workload's shapes of a phase, one per series, the most trusted first.

        A series that does not cover every shape is left out. Where no series does, the least time that the device
        needs for the shapes is returned (``roofline estimate``). Nothing is returned where the workload has no shape
        of the phase.

        Args:
            kernels: name of the backend's kernel for each phase that it can run; a batch of prefills and decodes counts
                where both are the backend's.
        """
        shapes = workload.of_phase(phase, config)
        if not shapes:
            return []
        share = math.fsum([shape.weight for shape in shapes])
        weights = [(shape.batch, shape.weight / share) for shape in shapes]
        groups = self._groups_of(config, backend, kernels)
        found: list[Timing] = []
        for series in strongest_first(dict.fromkeys(groups, 0)):
            for group in groups[series]:
                if (timing := group.timing(weights, share)) is not None:
                    found.append(timing)
                    break
        return found or self._roofline(config, weights, share)

    def points(
        self, config: AttentionConfig, backend: str, kernels: Mapping[Phase, str | None], timing: Timing
    ) -> Points:
        """Return the measured batches that one of ``timings`` rests on, and their times in us."""
        groups = self._groups_of(config, backend, kernels)[timing.series]
        return next(group.points for group in groups if group.digest == timing.digest)

    def _roofline(
        self, config: AttentionConfig, weights: Sequence[tuple[BatchShape, float]], share: float
    ) -> list[Timing]:
        total = 0.0
        for batch, weight in weights:
            least = roofline_us(config, batch, self._device)
            if least is None:
                return []
            total += weight * least
        return [
            Timing(
                time_us=total,
                margin=0.0,
                share=share,
                kind="roofline estimate",
                source="peak rates of the device",
                method=None,
                measured_shapes=0,
                shapes=len(weights),
                kernel={},
                libraries={},
            )
        ]

    def _groups_of(
        self, config: AttentionConfig, backend: str, kernels: Mapping[Phase, str | None]
    ) -> dict[Series, list[_Group]]:
        """Return a candidate's measurements by series and versions; this environment's versions come first."""
        layer = timed_layer(config)
        key = backend, layer, *sorted(kernels.items())
        if key in self._groups:
            return self._groups[key]
        points: dict[tuple[Series, tuple[tuple[str, str], ...]], list[tuple[BatchShape, StoredMeasurement]]] = {}
        for batch, row in self._rows_for(config, backend):
            measured, series = row.measurement.kernel, _series(row, self._device)
            if series[0] == "scaled" and row.measurement.method == "table":
                continue  # of a warm L2, which is not the memory's rate
            if all(phase in measured and kernels.get(phase) == measured[phase] for phase in phases_of(batch, config)):
                versions = tuple(sorted(row.measurement.libraries.items()))
                points.setdefault((series, versions), []).append((batch, row))
        found: dict[Series, list[_Group]] = {}
        for (series, versions), rows in points.items():
            weaker = self._weaker(dict(versions))
            found.setdefault(series, []).append(_Group(series, rows, weaker, layer, self._device, self._fit))
        for groups in found.values():
            groups.sort(key=lambda group: group.date, reverse=True)
            groups.sort(key=lambda group: bool(group.weaker))
        self._groups[key] = found
        return found

    def _rows_for(self, config: AttentionConfig, backend: str) -> list[tuple[BatchShape, StoredMeasurement]]:
        """Return a backend's measurements of a layer; with drafts also the prefills of the layer without them."""
        rows = list(self._rows_of(timed_layer(config)).get(backend, ()))
        if config.num_speculative_tokens:
            plain = timed_layer(config.model_copy(update={"num_speculative_tokens": 0}))
            longest_decode = config.max_decode_query_len
            rows += [
                (batch, row)
                for batch, row in self._rows_of(plain).get(backend, ())
                if all(group.query_len > longest_decode for group in batch.groups)
            ]
        return rows

    def _rows_of(self, layer: TimedLayer) -> dict[str, list[tuple[BatchShape, StoredMeasurement]]]:
        """Return the measurements of a layer by backend."""
        if layer in self._rows:
            return self._rows[layer]
        found: dict[str, list[tuple[BatchShape, StoredMeasurement]]] = {}
        fields, stored = layer.to_dict(), self._read(layer)
        problems = [*stored.problems]
        for row in stored.measurements:
            if row.measurement.config != fields:
                continue
            try:
                batch = parse_batch_shape(row.measurement.batch)
            except ConfigError as error:
                problems.append(Problem(row.file.path, row.line, error.message))
            else:
                found.setdefault(row.measurement.backend, []).append((batch, row))
        self.problems += [problem for problem in problems if problem not in self.problems]
        self._rows[layer] = found
        return found

    def _weaker(self, libraries: Mapping[str, str]) -> str:
        """Say which libraries had another version than here; empty where none had, as far as versions are known."""
        others = []
        for name, version in libraries.items():
            here = self._environment.version(name)
            if here is None and not self._environment.assume_installed:
                others.append(f"{name} {version}, not installed here")
            elif here is not None and here != version:
                others.append(f"{name} {version}, here {here}")
        return f"measured with {'; '.join(others)}" if others else ""


class _Group:
    """Measurements of one kernel and layer, of one series, with one set of versions.

    Args:
        series: of the measurements.
        rows: the measurements with their batches.
        weaker: why they count as weaker; empty where they do not.
        layer: the kind of layer.
        device: the device that is asked about.
        fit: makes the model of a kernel from its times.
    """

    def __init__(
        self,
        series: Series,
        rows: Sequence[tuple[BatchShape, StoredMeasurement]],
        weaker: str,
        layer: TimedLayer,
        device: Device,
        fit: Fit,
    ) -> None:
        self.weaker = weaker
        self.date = max(row.measurement.date for _, row in rows)
        self._series, self._rows, self._layer, self._device, self._fit = series, rows, layer, device, fit
        gpu = find_gpu(rows[0][1].measurement.gpu) if series[0] == "scaled" else None
        self._measured_on = device if gpu is None else gpu
        self._measured: dict[BatchShape, list[Measurement]] = {}
        for batch, row in rows:
            self._measured.setdefault(batch, []).append(row.measurement)
        self._model: Model | None = None
        self._digest = ""

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
        first = self._rows[0][1].measurement
        kernel = {phase: name for _, row in self._rows for phase, name in row.measurement.kernel.items()}
        kind, source, method = self._series
        return Timing(
            time_us=time_us,
            margin=half_width / time_us + (WEAKER_MARGIN if self.weaker else 0.0),
            share=share,
            kind=kind,
            source=source,
            method=method,
            measured_shapes=sum([batch in self._measured for batch, _ in weights]),
            shapes=len(weights),
            kernel=kernel,
            libraries=first.libraries,
            weaker=self.weaker,
            files=tuple(dict.fromkeys(str(row.file.path) for _, row in self._rows)),
            digest=self.digest,
        )

    @property
    def points(self) -> Points:
        """The batches and their times in us on the device that is asked about."""
        return tuple([(batch, self._here(batch, time_us)) for batch, time_us in self._measured_points])

    @property
    def _measured_points(self) -> Points:
        return tuple([(batch, row.measurement.time_us) for batch, row in self._rows])

    @property
    def digest(self) -> str:
        """Of all measurements of the group."""
        if not self._digest:
            lines = sorted(row.measurement.to_line() for _, row in self._rows)
            self._digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return self._digest

    def _of_batch(self, batch: BatchShape) -> tuple[float, float] | None:
        """Return time and margin of one batch."""
        measured = self._measured.get(batch)
        if measured is None:
            predicted = self._predicted(batch)
            return None if predicted is None else (predicted.time_us, predicted.margin)
        margins = [margin for each in measured if (margin := _margin(each)) is not None]
        if not margins:
            predicted = self._predicted(batch)
            margins = [_UNKNOWN_MARGIN if predicted is None else predicted.margin]
        return median([each.time_us for each in measured]), max(margins)

    @property
    def _is_scaled(self) -> bool:
        return self._measured_on is not self._device

    def _here(self, batch: BatchShape, time_us: float) -> float:
        """Return what a time where the batch was measured is on the device that is asked about."""
        if not self._is_scaled:
            return time_us
        return scaled_us(time_us, step_work(self._layer.config, batch).bytes, self._measured_on, self._device)

    def _predicted(self, batch: BatchShape) -> Predicted | None:
        if self._model is None:
            self._model = self._fit(self._measured_points, self._layer, self._measured_on)
        return self._model.predict(batch)


def load_evidence(device: Device, environment: Environment, named: Sequence[str | os.PathLike[str]] = ()) -> Evidence:
    """Read what is known about times on a device: packaged files, the user's, and named ones.

    Raises:
        MeasurementError: a named file does not exist.
    """
    contents: list[tuple[MeasurementFile, str, bytes]] = []
    unread: list[Problem] = []
    for file in measurement_files(named):
        try:
            content = file.path.read_bytes()
        except OSError as error:
            unread.append(Problem(file.path, None, f"cannot be read: {error.strerror or error}"))
            continue
        if file.kind == "named" and not _GPU.search(content):
            unread.append(Problem(file.path, None, "no line of it is a measurement"))
        contents += [(file, gpu, content) for gpu in _names_of(device, content)]

    def read(layer: TimedLayer) -> Stored:
        wanted = _mentions(layer)
        parts = [measurements_in(content, file, gpu, wanted) for file, gpu, content in contents]
        rows = tuple([row for part in parts for row in part.measurements])
        other = [
            Problem(file.path, None, why)
            for (file, _, content), part in zip(contents, parts, strict=True)
            if file.kind == "named" and not part.measurements and (why := _other_dtype(layer, content))
        ]
        return Stored(rows, (*unread, *[problem for part in parts for problem in part.problems], *other), ())

    return Evidence(read, device, environment)


def digest_of(timings: Iterable[Timing]) -> str | None:
    """Return one digest of the measurements that timings rest on; None where they rest on none."""
    digests = sorted({timing.digest for timing in timings if timing.digest})
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16] if digests else None


def _mentions(layer: TimedLayer) -> Callable[[bytes], bool]:
    """Return whether a line may be of a layer. One without a layer that can be read is looked at too."""
    fields = layer.to_dict()
    found: dict[bytes, bool] = {}  # many lines are of few layers

    def of_layer(text: bytes) -> bool:
        try:
            return bool(json.loads(text) == fields)
        except ValueError:
            return True

    def wanted(line: bytes) -> bool:
        written = _CONFIG.search(line)
        if written is None:
            return True
        text = written[1]
        if text not in found:
            found[text] = of_layer(text)
        return found[text]

    return wanted


def _other_dtype(layer: TimedLayer, content: bytes) -> str:
    """Return what a file says that has times of this layer in another dtype alone; empty where it has none."""
    fields, default = layer.to_dict(), AttentionConfig.model_fields
    for written in dict.fromkeys(_CONFIG.findall(content)):
        try:
            found = json.loads(written)
        except ValueError:
            continue
        differ = [name for name in {**fields, **found} if fields.get(name) != found.get(name)]
        if differ and set(differ) <= {"dtype", "kv_cache_dtype"}:
            seen, asked = (
                " and ".join(f"{name} {each.get(name, default[name].default)}" for name in differ)
                for each in (found, fields)
            )
            return f"this file has times of such layers with {seen}, and none with {asked}"
    return ""


def _series(row: StoredMeasurement, device: Device) -> Series:
    measurement = row.measurement
    if not _is_of(device, measurement.gpu):
        return "scaled", f"scaled from {measurement.gpu}", measurement.method
    kind: Kind = "table" if measurement.method == "table" else _KINDS[row.file.kind]
    return kind, measurement.source, measurement.method


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


def _is_of(device: Device, gpu: str) -> bool:
    """Whether a file means the device by the name of a GPU."""
    found = find_gpu(gpu)
    return gpu == device.full_name or (found is not None and found.name == device.name)


def _names_of(device: Device, content: bytes) -> list[str]:
    """Return the names by which a file calls the device, and the GPUs whose times scale to it."""
    names: list[str] = []
    for written in set(_GPU.findall(content)):
        try:
            name = json.loads(written)
        except ValueError:  # reading the line says what is wrong
            continue
        gpu = find_gpu(name)
        if _is_of(device, name) or (gpu is not None and can_scale(gpu, device)):
            names.append(name)
    return sorted(names)
