"""Made-up kernels with known times, what is measured of them, and decisions by these times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decider import Decider

from attn_select.decide.explicit import Choice
from attn_select.decide.selection import Selection
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.times.evidence import Evidence
from attn_select.times.measurement import Measurement
from attn_select.times.store import MeasurementFile, Stored, StoredMeasurement
from attn_select.times.timed_layer import timed_layer
from attn_select.times.workload import parse_workload
from attn_select_measure.fitting.fit import fit

LAYER = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
HOPPER = Device("h100", (9, 0), full_name="NVIDIA H100 80GB HBM3", sm_count=132, bandwidth_gbps=3350)
FILES: dict[str, MeasurementFile] = {
    kind: MeasurementFile(kind, Path(f"{kind}.jsonl"))  # type: ignore[arg-type]
    for kind in ("packaged", "user", "named")
}


def measured(
    backend: str,
    batch: str,
    time_us: float,
    phase: Phase = "decode",
    file: str = "packaged",
    config: AttentionConfig = LAYER,
    **changes: Any,
) -> StoredMeasurement:
    fields: dict[str, Any] = {
        "gpu": HOPPER.full_name,
        "compute_capability": "9.0",
        "backend": backend,
        "kernel": {phase: backend.lower()},
        "config": timed_layer(config).to_dict(),
        "batch": batch,
        "time_us": time_us,
        "spread_us": (time_us * 0.999, time_us * 1.001),
        "rounds": 20,
        "method": "graph",
        "date": "2026-11-22",
    }
    return StoredMeasurement(Measurement(**{**fields, **changes}), FILES[file], 1)


def decode(times: Mapping[str, float], batch: str = "64q1s4k", **changes: Any) -> list[StoredMeasurement]:
    return [measured(name, batch, time_us, "decode", **changes) for name, time_us in times.items()]


def prefill(times: Mapping[str, float], batch: str = "q2k", **changes: Any) -> list[StoredMeasurement]:
    return [measured(name, batch, time_us, "prefill", **changes) for name, time_us in times.items()]


def known(rows: Sequence[StoredMeasurement], environment: Environment) -> Evidence:
    return Evidence(lambda layer: Stored(tuple(rows), (), ()), HOPPER, environment, fit)


def decide(
    decider: Decider,
    rows: Sequence[StoredMeasurement],
    workload: str = "64q1s4k",
    backend: str | None = None,
    config: AttentionConfig = LAYER,
) -> Selection:
    choice = Choice() if backend is None else Choice(default=backend)
    evidence = known(rows, decider.environment)
    return decider.decide(config, choice, workload=parse_workload(workload), evidence=evidence)


def ranks(selection: Selection, phase: Phase = "decode") -> list[str]:
    ranked = [(c.phases[phase].rank, c.backend) for c in selection.candidates if c.phases[phase].rank is not None]
    return [name for _, name in sorted(ranked)]  # type: ignore[type-var]


def why(selection: Selection, phase: Phase = "decode") -> str:
    assert selection.evidence is not None
    return selection.evidence.phases[phase].why
