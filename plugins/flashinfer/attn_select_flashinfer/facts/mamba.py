"""``FLASHINFER_MAMBA``: Mamba-2 by FlashInfer: decodes in the pool of states, on Blackwell prefills in chunks."""

from __future__ import annotations

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
from attn_select.layer.state import StateConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import LIBRARIES, wrong_release
from attn_select_flashinfer.facts.state_plans import COPIES, PREFILL_DRAFTS, RAW_GATES, state_plan

_MAMBA = "flashinfer-ai/flashinfer flashinfer/mamba/selective_state_update.py 0.6.14 and 0.7.2.post1"
_KERNEL = "flashinfer-ai/flashinfer include/flashinfer/mamba/kernel_selective_state_update_stp.cuh v0.6.14"
RATIOS: Fact[tuple[int, ...]] = Fact((1, 2, 4, 8, 16, 32, 64), f"{_KERNEL}: dispatchRatio")
"""Heads per group that the kernel for Hopper and Blackwell was compiled for."""

_SSD = "flashinfer-ai/flashinfer flashinfer/mamba/cake_ssd_combined.py CakeSSDCombined 0.7.2.post1"
SSD_RELEASES = Fact(">=0.7.2", f"{_SSD}: 0.6.14 has no ssd_combined_fwd")
CHUNK = 128
"""Tokens of a chunk of ``ssd_combined_fwd``."""

DECODE = StateCapabilities(
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
PREFILL = StateCapabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((10, 0), (10, 0)), ((10, 3), (10, 3)))), f"{_SSD}: requires SM100 or SM103"
    ),
    recurrences=DECODE.recurrences,
    dtypes=Fact(("bfloat16",), f"{_SSD}: x, B and C must be bfloat16"),
    state_dtypes=DECODE.state_dtypes,
    head_sizes=Fact(HeadSizes((128,)), f"{_SSD}: dstate=128"),
    v_head_sizes=Fact(HeadSizes((64,)), f"{_SSD}: headdim=64"),
    speculative_tokens=PREFILL_DRAFTS,
)

LEAST_LOG_DECAY = Fact(
    -400.0,
    f"{_SSD}: decays between tokens are differences of running sums over 128 tokens in float32, which lose what "
    "bfloat16 holds behind a larger one",
)
"""The least log-decay that prefills compute right."""


_KERNELS: dict[Phase, str] = {"prefill": "ssd_combined_fwd", "decode": "selective_state_update"}
_NOTES: dict[Phase, tuple[str, ...]] = {"prefill": (RAW_GATES, COPIES), "decode": (RAW_GATES,)}
_NEVER_RUN = "FlashInfer's Mamba-2 ran on compute capability 9.0 alone; its calls are held to signatures elsewhere"


def plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or that the release has no prefills, or that decodes are not compiled for such heads."""
    if phase == "prefill" and (reasons := wrong_release(environment, "prefills of Mamba-2", SSD_RELEASES)):
        return reasons
    ratio = config.num_v_heads // config.num_heads
    if phase == "decode" and ratio not in RATIOS.value:
        return [unsupported("head-ratio", "heads per group", ratio, list(RATIOS.value))]
    unverified = () if device.compute_capability == (9, 0) else (_NEVER_RUN,)
    return state_plan(config, phase, _KERNELS, _NOTES, unverified)


FLASHINFER_MAMBA = BackendSpec(
    name="FLASHINFER_MAMBA",
    summary="Mamba-2 layers by FlashInfer; prefills on Blackwell.",
    capabilities={"prefill": PREFILL, "decode": DECODE},
    plan=plan,
    libraries=LIBRARIES,
    compile_key=lambda config: (config.head_size, config.v_head_size, config.dtype, config.state_dtype),
    load="attn_select_flashinfer.runtime.mamba:FlashInferMambaBackend",
)
