"""``Evidence``: a device's survey, and which of its times are of other kernels than those that are here."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attn_select.backends.spec import BackendSpec
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.times.batch_shape import BatchShape
from attn_select.times.fingerprint import SOURCES, present, stale_parts
from attn_select.times.prediction import PACKAGED_FOLDER, Near, Survey, load_survey, survey_for

STALE = 1.05
"""A time of another release counts as so many times as long: kernels become faster, and a survey of them is due."""
KNOWN_STALE = PACKAGED_FOLDER / "known_stale.toml"
"""Backends whose packaged times are known to be of older kernels, with the reason and the date."""


@dataclass(frozen=True)
class Evidence:
    """What is known about times on one device."""

    survey: Survey  # of the device, or of one that differs from it in its memory alone
    stale: Mapping[str, str]  # by backend whose kernels here are others than the surveyed ones, in words which
    without: frozenset[str]  # of these, the backends whose own code has changed: their times say nothing
    host_time: bool = False  # whether a step takes at least the host time of an eager call

    def predict(self, config: LayerConfig, batch: BatchShape) -> dict[str, float]:
        """Return the time of one layer's step in us, by backend; a stale one counts ``STALE`` times as long."""
        found = self.survey.predict(config, batch)
        host = _host_us(self.survey.nearest(config, batch)) if self.host_time else {}
        return {
            name: max(time_us, host.get(name, 0.0)) * (STALE if name in self.stale else 1.0)
            for name, time_us in found.items()
            if name not in self.without
        }


def _host_us(nearest: list[Near]) -> dict[str, float]:
    """Return the mean host time of one layer's eager call in the nearest measured workloads, by backend."""
    found: dict[str, list[float]] = {}
    for near in nearest:
        for name, host_us in near.host_us.items():
            found.setdefault(name, []).append(host_us)
    return {name: sum(each) / len(each) for name, each in found.items()}


def load_evidence(
    device: Device,
    environment: Environment,
    specs: Mapping[str, BackendSpec],
    path: Path | None = None,
    host_time: bool = False,
) -> Evidence | None:
    """Return what is known about times on a device; None where nothing is."""
    survey = load_survey(device) if path is None else survey_for(device, path, path.name)
    if survey is None:
        return None
    stale: dict[str, str] = {}
    without = set()
    for name, surveyed in survey.backends.items():
        if name not in specs:
            continue
        now = present(surveyed.fingerprint, specs[name], environment)
        if parts := stale_parts(name, surveyed.fingerprint, now):
            stale[name] = ", ".join(parts)
            own = {part: was for part, was in surveyed.fingerprint.items() if part == SOURCES}
            if name in known_stale() or stale_parts(name, own, now):
                without.add(name)
    return Evidence(survey, stale, frozenset(without), host_time)


@cache
def known_stale() -> dict[str, dict[str, str]]:
    """Return the backends that ``known_stale.toml`` names, each with ``reason`` and ``date``."""
    found: dict[str, dict[str, str]] = tomllib.loads(KNOWN_STALE.read_text(encoding="utf-8"))
    return found
