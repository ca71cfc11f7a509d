"""Fits models to files of measurements, and keeps them where decisions read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from attn_select.decide.selector import environment_for
from attn_select.errors import ConfigError
from attn_select.layer.config import Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device, find_gpu
from attn_select.times.evidence import Evidence
from attn_select.times.fitted import keep, kept_file, kept_model
from attn_select.times.known_times import KnownTimes, Points
from attn_select.times.measurement import Measurement
from attn_select.times.model import LEAST_POINTS, TimeModel
from attn_select.times.store import MeasurementFile, Stored, StoredMeasurement, measurement_files, read_measurements
from attn_select.times.timed_layer import TimedLayer, layer_from_dict
from attn_select_measure.fitting.fit import fit


def fit_and_keep(points: Points, layer: TimedLayer, device: Device) -> TimeModel | None:
    """Return the model of these points, read where it is kept, else fitted and kept; None where they are too few.

    A folder that cannot be written costs time, nothing else.
    """
    if len({batch for batch, _ in points}) < LEAST_POINTS:
        return None
    model = kept_model(points, layer, device)
    if model is None:
        model, path = fit(points, layer, device), kept_file(points, layer, device)
        if path is not None:
            with contextlib.suppress(OSError):
                keep(path, model.to_dict())
    return model


def known_times(rows: Sequence[StoredMeasurement]) -> list[KnownTimes]:
    """Return the groups of times that decisions make of measurements that are read together. Asking a group for its
    ``model`` fits the model and keeps it."""
    found: list[KnownTimes] = []
    by_device: dict[Device, list[StoredMeasurement]] = {}
    for row in rows:  # files may spell one GPU in several ways
        by_device.setdefault(device_named(row.measurement.gpu), []).append(row)
    for device, here in by_device.items():
        evidence = Evidence(partial(_stored, here), device, environment_for(device, {}), fit_and_keep)
        for layer, measured in _by_layer([row.measurement for row in here]):
            for backend in dict.fromkeys(one.backend for one in measured):
                own = [one for one in measured if one.backend == backend]
                for kernels in kernels_of(layer.config, own):
                    for known in evidence.known(layer.config, backend, kernels).values():
                        found += known
    return found


def _stored(rows: Sequence[StoredMeasurement], layer: TimedLayer) -> Stored:
    return Stored(tuple([row for row in rows if row.measurement.config == layer.to_dict()]), (), ())


def fit_file(path: Path) -> None:
    """Fit the measurements that decisions read together with a file: all files of the user's cache folder, if it is one
    of them, else this file alone."""
    own = [file for file in measurement_files() if file.kind == "user"]
    files = own if any(file.path == path for file in own) else [MeasurementFile("named", path)]
    for known in known_times(read_measurements(files).measurements):
        _ = known.model


def kernels_of(config: LayerConfig, measured: Sequence[Measurement]) -> Iterator[dict[Phase, str | None]]:
    """Yield every set of kernels, one for each phase, that a backend's measurements of a layer may be of."""
    names: dict[Phase, list[str]] = {
        phase: [*dict.fromkeys(one.kernel[phase] for one in measured if phase in one.kernel)] for phase in config.phases
    }
    wanted: list[list[str | None]] = [[*names[phase]] or [None] for phase in config.phases]
    for each in product(*wanted):
        yield dict(zip(config.phases, each, strict=True))


def device_named(gpu: str) -> Device:
    """Return the device that a file calls ``gpu``."""
    return find_gpu(gpu) or Device(gpu, None, full_name=gpu)


def _by_layer(measured: Iterable[Measurement]) -> list[tuple[TimedLayer, list[Measurement]]]:
    found: dict[TimedLayer, list[Measurement]] = {}
    for one in measured:
        with contextlib.suppress(ConfigError):  # `measurements check` names such lines
            found.setdefault(layer_from_dict(one.config), []).append(one)
    return [*found.items()]
