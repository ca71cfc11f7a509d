"""``FLASHINFER_KDA``: Kimi delta attention by FlashInfer, on Blackwell: prefills in chunks, and decodes."""

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
from attn_select_flashinfer.facts.state_plans import PREFILL_DRAFTS, RAW_GATES, state_plan

_KDA = "flashinfer-ai/flashinfer flashinfer/kda_kernels/recurrent_kda.py run_recurrent_kda 0.7.2.post1"
KDA_RELEASES = Fact(
    ">=0.7.2", f"{_KDA}: 0.6.14 has no initial_state_source, so its kernel starts from the state that it overwrites"
)

_PREFILL = "flashinfer-ai/flashinfer flashinfer/kda_prefill.py _flash_kda_prefill_is_eligible 0.7.2.post1"
_SIZES = (64, 128)

DECODE = StateCapabilities(
    compute_capabilities=Fact(ComputeCapabilities((((10, 0), (10, 3)),)), f"{_KDA}: requires SM100"),
    recurrences=Fact(("kda",), f"{_KDA}: one decay per key channel"),
    dtypes=Fact(("bfloat16",), f"{_KDA}: q, k, v, g and beta must be bfloat16"),
    state_dtypes=Fact(("bfloat16",), f"{_KDA}: initial_state_source must be bfloat16"),
    head_sizes=Fact(HeadSizes(_SIZES), f"{_KDA}: HEAD_DIM must be 64 or 128"),
    v_head_sizes=Fact(HeadSizes(_SIZES), f"{_KDA}: K must equal V"),
    speculative_tokens=Fact(
        0, f"{_KDA}: drafts need all their slots and how many were accepted, which the runtime does not pass"
    ),
)
PREFILL = StateCapabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((10, 0), (10, 0)), ((10, 3), (10, 3)))), f"{_PREFILL}: 10.0 and 10.3, from raw gates"
    ),
    recurrences=DECODE.recurrences,
    dtypes=Fact(("bfloat16",), f"{_PREFILL}: q, k, v, g and beta must be bfloat16"),
    state_dtypes=Fact(
        ("bfloat16",),
        f"{_PREFILL}: a pool in bfloat16; in float32 only with a bound of the gate, which no layer has",
    ),
    head_sizes=Fact(HeadSizes((128,)), f"{_PREFILL}: _FLASH_KDA_HEAD_DIM"),
    v_head_sizes=Fact(HeadSizes((128,)), f"{_PREFILL}: v has the shape of q"),
    speculative_tokens=PREFILL_DRAFTS,
)

LEAST_LOG_DECAY = Fact(
    -3000.0,
    "flashinfer-ai/flashinfer csrc/kda/flashkda_bf16_fused_m128.cu 0.7.2.post1: decays between tokens are differences "
    "of running sums over 16 tokens in float32, which lose what bfloat16 holds behind a larger one",
)
"""The least log-decay that prefills compute right."""


_KERNELS: dict[Phase, str] = {"prefill": "recurrent_kda-prefill", "decode": "recurrent_kda"}
_NOTES: dict[Phase, tuple[str, ...]] = {
    "prefill": (RAW_GATES, "FlashInfer reads the bounds of the requests back from the device"),
    "decode": ("rounds log-decays and write strengths to bfloat16",),
}
_NEVER_RUN = "FlashInfer's KDA was never run here; its call is held to the signature of 0.7.2.post1"


def plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan; what plain capabilities do not say is the release, and that both widths are the same."""
    if reasons := wrong_release(environment, "its KDA", KDA_RELEASES):
        return reasons
    both = (config.head_size, config.v_head_size)
    if both[0] != both[1] and all(size in _SIZES for size in both):  # another size has its own reason
        return [unsupported("v-head-size", "V head size", config.v_head_size, [config.head_size])]
    return state_plan(config, phase, _KERNELS, _NOTES, (_NEVER_RUN,), "; states are updated in the pool")


FLASHINFER_KDA = BackendSpec(
    name="FLASHINFER_KDA",
    summary="Kimi delta attention by FlashInfer, on Blackwell.",
    capabilities={"prefill": PREFILL, "decode": DECODE},
    plan=plan,
    libraries=LIBRARIES,
    compile_key=lambda config: (config.num_heads, config.head_size),
    load="attn_select_flashinfer.runtime.kda:FlashInferKdaBackend",
)
