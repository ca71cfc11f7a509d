"""What the tests of the gate share: layers, devices, and a short way to ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, HeadSizes, Reason
from attn_select.decide import gate
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment

MakeSpec = Callable[..., BackendSpec]
MakeCapabilities = Callable[..., Capabilities]
MakePlan = Callable[..., BackendPlan]
H100 = Device("h100", (9, 0))
T4 = Device("t4", (7, 5))
PLAIN = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
MLA = {"num_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SPARSE = {**MLA, "sparse_top_k": 2048}
ASSUMED = Environment(assume_installed=True)
WIDE_HEADS = {"head_sizes": HeadSizes((576,))}


def check(
    spec: BackendSpec,
    values: dict[str, Any],
    device: Device = H100,
    phase: Phase = "decode",
    environment: Environment = ASSUMED,
) -> BackendPlan | list[Reason]:
    return gate.check(spec, AttentionConfig(**values), device, environment, BackendOptions(), phase)


def reasons(spec: BackendSpec, values: dict[str, Any], device: Device = H100, phase: Phase = "decode") -> list[Reason]:
    outcome = check(spec, values, device, phase)
    return [] if isinstance(outcome, BackendPlan) else outcome


def marks(spec: BackendSpec, values: dict[str, Any], phase: Phase = "decode") -> tuple[str, ...]:
    outcome = check(spec, values, phase=phase)
    assert isinstance(outcome, BackendPlan), outcome
    return outcome.unverified
