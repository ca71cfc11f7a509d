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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from attn_select.errors import ConfigError
from attn_select.layer.config import Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device, find_gpu
from attn_select.machine.environment import Environment
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.fitted import PackagedFit, kept_model, packaged_fits
from attn_select.times.known_times import Fitted, KnownTimes
from attn_select.times.measurement import Method
from attn_select.times.roofline import roofline_us
from attn_select.times.scaled import can_scale
from attn_select.times.store import (
    MeasurementFile,
    Problem,
    Stored,
    StoredMeasurement,
    measurement_files,
    measurements_in,
)
from attn_select.times.timed_layer import CONFIG, TimedLayer, mentions, timed_layer
from attn_select.times.timing import Kind, Series, Timing, strongest_first
from attn_select.times.workload import Workload, phases_of

if TYPE_CHECKING:
    from attn_select.times.model import TimeModel

_MOST_WARNINGS = 5
_KINDS: Mapping[str, Kind] = {"named": "named file", "user": "measured here", "packaged": "packaged"}
_GPU = re.compile(rb'"gpu"\s*:\s*("(?:[^"\\]|\\.)*")')


Read = Callable[[TimedLayer], Stored]


class Evidence:
    """What is known about times on one device, a snapshot: later measurements do not change it.

    Args:
        read: returns the measurements of a layer on this device, and on those that scale to it; others beside them
            are not looked at. It is called once per layer.
        device: the device.
        environment: the libraries that a decision rests on: measurements with others count as weaker.
        fitted: returns the model of measured times.
        packaged: returns the models of a layer that come with this project; it is called once per layer.
    """

    def __init__(
        self,
        read: Read,
        device: Device,
        environment: Environment,
        fitted: Fitted = kept_model,
        packaged: Callable[[TimedLayer], Sequence[PackagedFit]] = lambda layer: (),
    ) -> None:
        self.problems: list[Problem] = []
        self._read, self._device, self._environment, self._fitted = read, device, environment, fitted
        self._packaged = cache(packaged)
        self._rows: dict[TimedLayer, dict[str, list[tuple[BatchShape, StoredMeasurement]]]] = {}
        self._groups: dict[tuple[object, ...], dict[Series, list[KnownTimes]]] = {}
        self._measured: list[KnownTimes] = []

    @property
    def warnings(self) -> list[str]:
        """What a selection warns of: the first five lines that could not be read, and files without a model."""
        told = [f"measurement skipped: {problem}" for problem in self.problems[:_MOST_WARNINGS]]
        if more := len(self.problems) - len(told):
            told.append(f"{more} more lines of measurements were skipped")
        for file in sorted({file for known in self._measured if known.lacks_model for file in known.files}):
            told.append(
                f"{file}: no model is fitted to these times, so other batches are not predicted from them "
                f"(`attn-select measurements fit {file}`)"
            )
        return told

    def timings(
        self,
        config: LayerConfig,
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
        groups = self.known(config, backend, kernels)
        found: list[Timing] = []
        for series in strongest_first(dict.fromkeys(groups, 0)):
            for group in groups[series]:
                if (timing := group.timing(weights, share)) is not None:
                    found.append(timing)
                    break
        return found or self._roofline(config, weights, share)

    def model(
        self, config: LayerConfig, backend: str, kernels: Mapping[Phase, str | None], timing: Timing
    ) -> TimeModel | None:
        """Return the model that predicts further batches of one of ``timings``; None where none was fitted.

        Of scaled times it is the model of the GPU that was measured.
        """
        groups = self.known(config, backend, kernels)[timing.series]
        return next(group.model for group in groups if group.digest == timing.digest)

    def _roofline(self, config: LayerConfig, weights: Sequence[tuple[BatchShape, float]], share: float) -> list[Timing]:
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

    def known(
        self, config: LayerConfig, backend: str, kernels: Mapping[Phase, str | None]
    ) -> dict[Series, list[KnownTimes]]:
        """Return all known times of a candidate by series; times with this environment's versions come first."""
        layer = timed_layer(config)
        key = backend, layer, *sorted(kernels.items())
        if key in self._groups:
            return self._groups[key]
        points: dict[tuple[Series, tuple[tuple[str, str], ...]], list[tuple[BatchShape, StoredMeasurement]]] = {}
        for batch, row in self._rows_for(config, backend):
            one = row.measurement
            measured = one.kernel
            series = _series_of(one.gpu, one.source, one.method, _KINDS[row.file.kind], self._device)
            if series[0] == "scaled" and one.method == "table":
                continue  # of a warm L2, which is not the memory's rate
            if all(phase in measured and kernels.get(phase) == measured[phase] for phase in phases_of(batch, config)):
                versions = tuple(sorted(one.libraries.items()))
                points.setdefault((series, versions), []).append((batch, row))
        found: dict[Series, list[KnownTimes]] = {}
        for (series, versions), rows in points.items():
            weaker = self._weaker(dict(versions))
            measured_on = self._measured_on(rows[0][1].measurement.gpu)
            group = KnownTimes.of_rows(series, rows, weaker, layer, measured_on, self._device, self._fitted)
            self._measured.append(group)
            found.setdefault(series, []).append(group)
        for fit, kernel in self._fits_for(config, backend, kernels):
            series = _series_of(fit.gpu, fit.source, fit.method, "packaged", self._device)
            weaker, measured_on = self._weaker(fit.libraries), self._measured_on(fit.gpu)
            group = KnownTimes.of_fit(series, fit, kernel, weaker, layer, measured_on, self._device)
            found.setdefault(series, []).append(group)
        for groups in found.values():
            groups.sort(key=lambda group: group.date, reverse=True)
            groups.sort(key=lambda group: bool(group.weaker))
        self._groups[key] = found
        return found

    def _measured_on(self, gpu: str) -> Device:
        """Return the device that a GPU's name means."""
        return self._device if _is_of(self._device, gpu) else (find_gpu(gpu) or self._device)

    def _fits_for(
        self, config: LayerConfig, backend: str, kernels: Mapping[Phase, str | None]
    ) -> Iterator[tuple[PackagedFit, dict[str, str]]]:
        """Yield the packaged models of a candidate, each with the kernels that are the candidate's; with drafts also
        those of the layer without them, for prefills."""
        layers: list[tuple[TimedLayer, tuple[Phase, ...]]] = [(timed_layer(config), config.phases)]
        if config.num_speculative_tokens:
            plain = timed_layer(config.model_copy(update={"num_speculative_tokens": 0}))
            layers.append((plain, ("prefill",)))
        for layer, phases in layers:
            for fit in self._packaged(layer):
                own: dict[str, str] = {}
                own |= {p: name for p, name in fit.kernel.items() if p in phases and kernels.get(p) == name}
                if own and fit.backend == backend and _counts_on(self._device, fit.gpu):
                    yield fit, own

    def _rows_for(self, config: LayerConfig, backend: str) -> list[tuple[BatchShape, StoredMeasurement]]:
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


def load_evidence(
    device: Device,
    environment: Environment,
    named: Sequence[str | os.PathLike[str]] = (),
    fitted: Fitted = kept_model,
) -> Evidence:
    """Read what is known about times on a device: packaged models, the user's files, and named ones.

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
        wanted = mentions(layer)
        parts = [measurements_in(content, file, gpu, wanted) for file, gpu, content in contents]
        rows = tuple([row for part in parts for row in part.measurements])
        other = [
            Problem(file.path, None, why)
            for (file, _, content), part in zip(contents, parts, strict=True)
            if file.kind == "named" and not part.measurements and (why := _other_dtype(layer, content))
        ]
        return Stored(rows, (*unread, *[problem for part in parts for problem in part.problems], *other), ())

    return Evidence(read, device, environment, fitted, packaged_fits)


def digest_of(timings: Iterable[Timing]) -> str | None:
    """Return one digest of the measurements that timings rest on; None where they rest on none."""
    digests = sorted({timing.digest for timing in timings if timing.digest})
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16] if digests else None


def _other_dtype(layer: TimedLayer, content: bytes) -> str:
    """Return what a file says that has times of this layer in another dtype alone; empty where it has none."""
    fields, default = layer.to_dict(), layer.config.model_fields
    for written in dict.fromkeys(CONFIG.findall(content)):
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


def _series_of(gpu: str, source: str, method: Method, kind: Kind, device: Device) -> Series:
    if not _is_of(device, gpu):
        return "scaled", f"scaled from {gpu}", method
    return "table" if method == "table" else kind, source, method


def _is_of(device: Device, gpu: str) -> bool:
    """Whether a file means the device by the name of a GPU."""
    found = find_gpu(gpu)
    return gpu == device.full_name or (found is not None and found.name == device.name)


def _counts_on(device: Device, gpu: str) -> bool:
    """Whether times of a GPU say something about the device: it is the same one, or they scale to it."""
    found = find_gpu(gpu)
    return _is_of(device, gpu) or (found is not None and can_scale(found, device))


def _names_of(device: Device, content: bytes) -> list[str]:
    """Return the names by which a file calls the device, and the GPUs whose times scale to it."""
    names: list[str] = []
    for written in set(_GPU.findall(content)):
        try:
            name = json.loads(written)
        except ValueError:  # reading the line says what is wrong
            continue
        if _counts_on(device, name):
            names.append(name)
    return sorted(names)
