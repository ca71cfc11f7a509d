"""``Survey``: what one GPU's survey says of every backend's time, for any layer and batch.

A survey times layers and batches drawn from the space of real models (``attn-select survey``). Its file holds the
features of each of them (``attn_select.times.features``), and for each backend weights that predict its time from the
measured ones, the more the nearer they lie: simple kriging with an exponential kernel, whose scales were fitted by
likelihood (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapters 2, 4 and 5). Kernels have
steps, where a wave of thread blocks ends or another tile is taken: smoother ones predict worse.
"""

from __future__ import annotations

import copy
import functools
import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import repeat
from operator import mul
from pathlib import Path
from typing import Any

from attn_select.errors import MeasurementError, printable
from attn_select.layer.config import AttentionConfig, Sort
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device, find_gpu
from attn_select.times.batch_shape import BatchShape
from attn_select.times.features import Rates, StepFeatures, step_features
from attn_select.times.state_features import state_features

VERSION = 1
"""Of the files' format."""
SUFFIX = ".json.gz"
PACKAGED_FOLDER = Path(__file__).parent / "surveys"
"""One file for each GPU; ``attn-select survey --fit`` writes them."""
NEAREST = 8
"""Measured workloads that a prediction is explained by, and one of which its backend must have been timed on."""


def family_of(config: LayerConfig) -> Sort | None:
    """Return which family a layer is of, whose backends are others; None of one that no survey times."""
    return None if isinstance(config, AttentionConfig) and config.attn_type != "decoder" else config.sort


def features_of(config: LayerConfig, batch: BatchShape, rates: Rates) -> StepFeatures:
    """Return the features of one layer's step over a batch."""
    if isinstance(config, AttentionConfig):
        return step_features(config, batch, rates)
    return state_features(config, batch, rates)


@dataclass(frozen=True, slots=True)
class Near:
    """A measured workload beside the one that is asked about."""

    times_us: Mapping[str, float]
    # seconds of the first call with a cold disk cache, by backend; without what is not known
    first_call_s: Mapping[str, float]
    workspace_bytes: Mapping[str, float]  # device memory that a call takes beside its arguments, by backend
    host_us: Mapping[str, float]  # host time of one layer's eager call, by backend


@dataclass(frozen=True)
class Surveyed:
    """What a survey has of one backend."""

    fingerprint: Mapping[str, str]  # of its kernels (``attn_select.times.fingerprint``)
    date: str  # of its last time, ISO 8601
    times: int  # how many workloads it was timed on


class _Family:
    """The measured workloads of a family, and the weights of its backends."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        features = data["features"]
        self.backends: Mapping[str, Any] = data["backends"]
        self.amplitude: float = data["amplitude"]
        self.levels = {name: each["level"] for name, each in self.backends.items()}
        self.weights = {name: each["weights"] for name, each in self.backends.items()}
        self.scales = {name: each["scale"] for name, each in features.items()}
        columns = [[each["scale"] * value for value in each["values"]] for each in features.values()]
        self.places = [*zip(*columns, strict=True)]

    @functools.cached_property
    def favourite(self) -> str:
        """The backend that was the fastest in the most of the workloads."""
        rows = zip(*[each["times_us"] for each in self.backends.values()], strict=True)
        fastest = [
            min((us, name) for name, us in zip(self.backends, row, strict=True) if us) for row in rows if any(row)
        ]
        return Counter(name for _, name in fastest).most_common(1)[0][0]

    def likeness(self, features: StepFeatures) -> list[float]:
        """Return how like each measured workload is to this one, from 0 to 1."""
        here = [features.values[name] * scale for name, scale in self.scales.items()]
        return [math.exp(-distance) for distance in map(math.dist, self.places, repeat(here))]

    def measured(self, index: int) -> Near:
        """Return a measured workload."""
        known = {
            key: {name: value for name, each in self.backends.items() if (value := each[key][index]) is not None}
            for key in ("times_us", "first_call_s", "workspace_bytes", "host_us")
        }
        return Near(**known)


class Survey:
    """One GPU's survey."""

    def __init__(self, data: Mapping[str, Any], source: str, digest: str = "") -> None:
        self.source, self.digest = source, digest
        self.data = data
        self.gpu: str = data["gpu"]  # its full name, as the driver has it
        self.date: str = data["date"]  # of its last time, ISO 8601
        self.workloads: int = data["workloads"]
        # 95 % of predicted ratios of two backends' times lie within it, for kinds of layers that were not surveyed.
        self.margin: float = data["margin"]
        self.backends = {name: Surveyed(**each) for name, each in data["backends"].items()}
        self.rates = Rates(**data["rates"])
        self._families = {name: _Family(each) for name, each in data["families"].items()}

    def scaled(self, measured: Device, other: Device) -> Survey:
        """Return this survey for a GPU that differs from the measured one in its memory alone."""
        assert measured.bandwidth_gbps
        assert other.bandwidth_gbps
        found = copy.copy(self)
        found.rates = replace(
            self.rates, bytes_per_us=self.rates.bytes_per_us * other.bandwidth_gbps / measured.bandwidth_gbps
        )
        return found

    def predict(self, config: LayerConfig, batch: BatchShape) -> dict[str, float]:
        """Return the time of one layer's step over a batch in us, for each backend that was timed on the like of it:
        on one of the ``NEAREST`` measured workloads at least.

        A backend that serves one phase alone is to be asked about batches of that phase.
        """
        family = self._families.get(family_of(config) or "")
        if family is None:
            return {}
        features, likeness, nearest = self._place(family, config, batch)
        found = {}
        for name, weights in family.weights.items():
            times = family.backends[name]["times_us"]
            if any(times[index] is not None for index in nearest):
                deviation = family.levels[name] + family.amplitude * sum(map(mul, likeness, weights))
                found[name] = features.floor_us * math.exp(deviation)
        return found

    def favourite(self, config: LayerConfig) -> str | None:
        """Return the backend that was the fastest in most workloads of a layer's family; None where none was timed."""
        family = self._families.get(family_of(config) or "")
        return None if family is None else family.favourite

    def nearest(self, config: LayerConfig, batch: BatchShape) -> list[Near]:
        """Return the measured workloads that are most like this one, the nearest first."""
        family = self._families.get(family_of(config) or "")
        if family is None:
            return []
        return [family.measured(index) for index in self._place(family, config, batch)[2]]

    @functools.lru_cache(maxsize=8)  # noqa: B019  # who asks for a step's times asks for the nearest workloads next
    def _place(self, family: _Family, config: Any, batch: BatchShape) -> tuple[StepFeatures, list[float], list[int]]:
        """Return a step's features, its likeness to each measured workload, and the nearest of them."""
        features = features_of(config, batch, self.rates)
        likeness = family.likeness(features)
        return features, likeness, nlargest(NEAREST, range(len(likeness)), likeness.__getitem__)


def load_survey(device: Device) -> Survey | None:
    """Return the survey of a device: the user's own, else the packaged one, else that of a GPU that differs from it in
    its memory alone; None where there is none.
    """
    own = user_path(device)
    return survey_for(device, own, "measured here") if own is not None and own.exists() else packaged_survey(device)


def packaged_survey(device: Device) -> Survey | None:
    """Return the packaged survey of a device, as ``load_survey`` does where the user has none."""
    path = PACKAGED_FOLDER / _file_name(device)
    if path.exists():
        return survey_for(device, path, "packaged")
    for path in sorted(PACKAGED_FOLDER.glob(f"*{SUFFIX}")):
        measured = find_gpu(path.name.removesuffix(SUFFIX))
        if measured is not None and _differs_in_memory_alone(measured, device):
            return survey_for(device, path, f"of {measured.name}")
    return None


def survey_for(device: Device, path: Path, source: str) -> Survey:
    """Return the survey of a file for a device: of that device, or of one that differs from it in its memory alone."""
    survey = read_survey_file(path, source)
    measured = find_gpu(survey.gpu)
    if survey.gpu == device.full_name or (measured is not None and measured.name == device.name):
        return survey
    if measured is not None and _differs_in_memory_alone(measured, device):
        return survey.scaled(measured, device)
    of, here = printable(str(survey.gpu)), device.full_name or device.name
    text = f"{printable(str(path))}: a survey of {of} says nothing of {here}"
    raise MeasurementError(text, hint="a GPU has the same multiprocessors where its survey serves another one")


def _differs_in_memory_alone(measured: Device, other: Device) -> bool:
    figures = [
        (gpu.compute_capability, gpu.sm_count, gpu.bf16_tflops, gpu.fp8_tflops)
        for gpu in (measured, other)
        if gpu.sm_count and gpu.bf16_tflops and gpu.bandwidth_gbps
    ]
    return len(figures) == 2 and figures[0] == figures[1]


@functools.lru_cache(maxsize=16)
def read_survey_file(path: Path, source: str) -> Survey:
    """Return the survey that a file holds. Cached."""
    import hashlib

    try:
        content = path.read_bytes()
        data = json.loads(gzip.decompress(content))
        version = data["v"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise MeasurementError(f"{printable(str(path))}: no survey that can be read: {why}") from None
    if version != VERSION:
        raise MeasurementError(f"{printable(str(path))}: v = {version!r}: accepted is {VERSION}, the format's version")
    try:
        return Survey(data, source, hashlib.sha256(content).hexdigest()[:16])
    except (KeyError, TypeError) as error:
        raise MeasurementError(f"{printable(str(path))}: no survey that can be read: {error}") from None


def user_path(device: Device) -> Path | None:
    """Return where ``attn-select tune`` writes a device's survey; None where there is no home directory."""
    import platformdirs

    try:
        return platformdirs.user_cache_path("attn-select", appauthor=False) / "surveys" / _file_name(device)
    except (OSError, RuntimeError):  # no home directory
        return None


def _file_name(device: Device) -> str:
    return f"{device.name}{SUFFIX}"
