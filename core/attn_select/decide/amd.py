"""Which backends of plugins may run on AMD's GPUs: the rows of ``amd.toml``."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

from attn_select.backends.reasons import unsupported
from attn_select.backends.spec import Reason
from attn_select.decide.condition_reasons import reasons_against
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import Device
from attn_select.rules.conditions import Condition, compile_when

NVIDIA = "GPUs of NVIDIA"
"""What a backend without a row supports, as its reason says it."""


@functools.cache
def rows() -> dict[str, list[tuple[tuple[Condition, ...], str]]]:
    """Return by backend where it may run, and what is not proved of it there."""
    found: dict[str, list[tuple[tuple[Condition, ...], str]]] = {}
    for row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["backends"]:
        for name in row["names"]:
            found.setdefault(name, []).append((compile_when(row["when"])[0], row["unverified"]))
    return found


def on_amd(backend: str, config: LayerConfig, device: Device) -> tuple[list[Reason], str]:
    """Return what speaks against a backend on one of AMD's GPUs; where nothing does, what is not proved of it."""
    judged = [(reasons_against(when, config, device), unproved) for when, unproved in rows().get(backend, ())]
    nowhere = [unsupported("compute-capability", "arch", device.capability_text, NVIDIA)]
    return min(judged, key=lambda each: len(each[0]), default=(nowhere, ""))
