"""A survey whose predictions are written down, and decisions by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decider import Decider

from attn_select.decide.explicit import Choice
from attn_select.decide.selection import Selection
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device
from attn_select.times.batch_shape import BatchShape
from attn_select.times.evidence import Evidence
from attn_select.times.prediction import Near
from attn_select.times.workload import parse_workload

LAYER = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
HOPPER = Device("h100", (9, 0), full_name="NVIDIA H100 80GB HBM3", sm_count=132, bandwidth_gbps=3350)
Times = Mapping[str, Mapping[str, float]]
"""By batch, each backend's time in us; a batch that is not named takes what ``*`` has."""


class Written:
    """Stands in for ``Survey``."""

    gpu, source, date, digest = HOPPER.full_name, "written", "2026-11-28T00:00:00+00:00", "d1"
    workloads, margin = 1, 1.5

    def __init__(self, times: Times, favourite: str | None = None) -> None:
        self._times, self._favourite = times, favourite

    def favourite(self, config: LayerConfig) -> str | None:
        return self._favourite

    def predict(self, config: LayerConfig, batch: BatchShape) -> dict[str, float]:
        return dict(self._times.get(str(batch), self._times.get("*", {})))

    def nearest(self, config: LayerConfig, batch: BatchShape) -> list[Near]:
        times = self.predict(config, batch)
        return [Near(times, {"A": 2.5}, {"A": 4096.0}, dict.fromkeys(times, 90.0))]


def known(times: Times, host_time: bool = False, favourite: str | None = None, **stale: str) -> Evidence:
    """Return evidence of these times; ``stale`` says of which backends they are not the kernels that are here."""
    return Evidence(Written(times, favourite), stale, frozenset(), host_time)  # type: ignore[arg-type]


def decide(
    decider: Decider,
    times: Times,
    workload: str | None = "64q1s4k",
    backend: str | None = None,
    config: AttentionConfig = LAYER,
    **more: Any,
) -> Selection:
    choice = Choice() if backend is None else Choice(default=backend)
    given = None if workload is None else parse_workload(workload)
    return decider.decide(config, choice, workload=given, evidence=known(times, **more))


def ranks(selection: Selection, phase: Phase = "decode") -> list[str]:
    ranked = [(c.phases[phase].rank, c.backend) for c in selection.candidates if c.phases[phase].rank is not None]
    return [name for _, name in sorted(ranked)]  # type: ignore[type-var]


def why(selection: Selection, phase: Phase = "decode") -> str:
    assert selection.evidence is not None
    return selection.evidence.phases[phase].why
