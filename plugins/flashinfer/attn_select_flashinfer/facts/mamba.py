"""``FLASHINFER_MAMBA``: decodes of Mamba-2 by FlashInfer."""

from __future__ import annotations

from dataclasses import dataclass

from attn_select.backends.reasons import unsupported
from attn_select.backends.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Reason,
    StateCapabilities,
)
from attn_select.layer.config import Phase
from attn_select.layer.layouts import STATE_VK
from attn_select.layer.state import StateConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.gdn import RAW_GATES
from attn_select_flashinfer.facts.libraries import LIBRARIES

_MAMBA = "flashinfer-ai/flashinfer flashinfer/mamba/selective_state_update.py 0.6.14 and 0.7.2.post1"
_KERNEL = "flashinfer-ai/flashinfer include/flashinfer/mamba/kernel_selective_state_update_stp.cuh v0.6.14"
RATIOS: Fact[tuple[int, ...]] = Fact((1, 2, 4, 8, 16, 32, 64), f"{_KERNEL}: dispatchRatio")
"""Heads per group that the kernel for Hopper and Blackwell was compiled for."""

CAPABILITIES = StateCapabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((8, 0), (12, 9)),)), f"{_MAMBA}: kernels of 9.0, of 10.0 and up, and of what is older"
    ),
    recurrences=Fact(("mamba2",), f"{_MAMBA}: A, dt and D are one number per head"),
    dtypes=Fact(("bfloat16", "float16"), f"{_MAMBA}: compiled for the dtype of x"),
    state_dtypes=Fact(("float32", "bfloat16", "float16"), f"{_MAMBA}: compiled for the dtype of the state"),
    head_sizes=Fact(HeadSizes((64, 128, 256)), f"{_MAMBA}: dstate of the models that it was written for"),
    v_head_sizes=Fact(HeadSizes((64, 128)), f"{_MAMBA}: dim of the models that it was written for"),
    speculative_tokens=Fact(
        0, f"{_MAMBA}: drafts need all their slots and how many were accepted, which the runtime does not pass"
    ),
)


@dataclass(frozen=True, slots=True)
class MambaKernel:
    """The one kernel of this backend."""

    name: str = "selective_state_update"


def plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or that the kernel is not compiled for as many heads per group."""
    ratio = config.num_v_heads // config.num_heads
    if ratio not in RATIOS.value:
        return [unsupported("head-ratio", "heads per group", ratio, list(RATIOS.value))]
    return BackendPlan(
        kernel=MambaKernel(),
        path="in the pool",
        because="one launch reads and writes each state once, in the pool",
        query_dtype=config.dtype,
        returns_lse=False,
        kv_layouts=(STATE_VK,),
        kernel_block_sizes=(),
        cuda_graph="UNIFORM_SINGLE_TOKEN_DECODE",
        notes=(RAW_GATES,),
        unverified=("FlashInfer's Mamba-2 was never run here; its call is held to the signatures of two releases",),
    )


FLASHINFER_MAMBA = BackendSpec(
    name="FLASHINFER_MAMBA",
    summary="Decodes of Mamba-2 layers by FlashInfer.",
    capabilities={"decode": CAPABILITIES},
    plan=plan,
    libraries=LIBRARIES,
    compile_key=lambda config: (config.head_size, config.v_head_size, config.dtype, config.state_dtype),
    load="attn_select_flashinfer.runtime.mamba:FlashInferMambaBackend",
)
