"""``FLASHINFER_GDN``, ``FLASHINFER_KDA`` and ``FLASHINFER_MAMBA``: layers that keep a state, by FlashInfer.

Gated delta nets run on Hopper and Blackwell, Kimi delta attention on Blackwell. Mamba-2 decodes anywhere from 8.0 on;
its prefills in chunks are for Blackwell.
"""

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
from attn_select.layer.features import MOST_SPECULATIVE_TOKENS
from attn_select.layer.layouts import STATE_VK
from attn_select.layer.state import StateConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import GDN_STATE_WRONG, LIBRARIES, release, wrong_release

_PREFILL_DRAFTS = Fact(
    MOST_SPECULATIVE_TOKENS, "prefills see no drafts; layers that have drafts take another backend's decodes"
)
"""Of every prefill of states."""
_COPIES = "copies the states that it reads out of the pool, and back"
_RAW_GATES = "activates the gates itself: give the layers raw gates"
"""A note of every plan whose kernel takes gates before their activation."""


@dataclass(frozen=True, slots=True)
class StateKernel:
    """What runs a phase; ``name``: FlashInfer's entry, behind a hyphen which of its kernels where it has several."""

    name: str


def _state_plan(
    config: StateConfig,
    phase: Phase,
    kernel: str,
    notes: tuple[str, ...],
    unverified: tuple[str, ...],
    chunked: str = "",
) -> BackendPlan:
    """Return the plan of a phase."""
    # chunked: what is said of prefills beside the usual
    prefill = phase == "prefill"
    because = f"chunks turn the recurrence into matrix products{chunked}"
    return BackendPlan(
        kernel=StateKernel(kernel),
        path="chunked" if prefill else "in the pool",
        because=because if prefill else "one launch reads and writes each state once, in the pool",
        query_dtype=config.dtype,
        returns_lse=False,
        kv_layouts=(STATE_VK,),
        kernel_block_sizes=(),
        cuda_graph="NEVER" if prefill else "UNIFORM_SINGLE_TOKEN_DECODE",
        notes=notes,
        unverified=unverified,
    )


_GDN = "flashinfer-ai/flashinfer flashinfer/gdn_prefill.py chunk_gated_delta_rule 0.6.14 and 0.7.2.post1"
_ENGINE = "vllm-project/vllm model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py 0.32.0"

_GDN_DECODE = (
    "flashinfer-ai/flashinfer flashinfer/gdn_decode.py gated_delta_rule_decode_pretranspose 0.6.14 and 0.7.2.post1"
)

GDN_PREFILL = StateCapabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((9, 0), (9, 0)), ((10, 0), (10, 3)))), f"{_GDN}: requires SM90 or SM100; {_ENGINE}"
    ),
    recurrences=Fact(("gated_delta_net",), f"{_GDN}: one decay per value head"),
    dtypes=Fact(("bfloat16", "float16"), f"{_GDN}: q, k and v of the tensor cores' dtypes"),
    state_dtypes=Fact(
        ("float32", "bfloat16", "float16"), f"{_GDN}: float32; the runtime converts what it gathers, as {_ENGINE}"
    ),
    head_sizes=Fact(HeadSizes((128,)), f"{_GDN}: asserts 128 on SM100; no other size was looked into on SM90"),
    v_head_sizes=Fact(HeadSizes((128,)), f"{_GDN}: state of (head_size, head_size)"),
    speculative_tokens=_PREFILL_DRAFTS,
)
GDN_DECODE = StateCapabilities(
    compute_capabilities=Fact(ComputeCapabilities((((9, 0), (12, 9)),)), f"{_GDN_DECODE}: requires SM90 and up"),
    recurrences=GDN_PREFILL.recurrences,
    dtypes=Fact(("bfloat16", "float16"), f"{_GDN_DECODE}: q must be float16/bfloat16"),
    state_dtypes=Fact(("float32", "bfloat16"), f"{_GDN_DECODE}: float32, or bfloat16 where heads have 128"),
    head_sizes=Fact(HeadSizes((128,)), f"{_GDN_DECODE}: at least 128, and 128 for states in bfloat16"),
    v_head_sizes=Fact(HeadSizes((128,)), f"{_GDN_DECODE}: likewise"),
    speculative_tokens=Fact(0, f"{_GDN_DECODE}: several tokens keep the state behind the last one alone"),
)


_READS_BFLOAT16 = Fact(
    "bfloat16",
    "flashinfer-ai/flashinfer flashinfer/gdn_kernels/gdn_decode_bf16_state.py 0.7.2.post1: with states in bfloat16 the "
    "kernel reads queries, keys and values as bfloat16, and the entry lets float16 pass: wrong numbers on an H200",
)
_GDN_NEVER_RUN = (
    "FlashInfer's gated delta net ran on compute capability 9.0 alone; elsewhere calls are held to signatures"
)


def _gdn_plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or what is wrong in one release or for one pair of dtypes."""
    wrong = phase == "prefill" and (device.compute_capability or (0,))[0] == 10
    if wrong and release(environment)[:3] == GDN_STATE_WRONG.value:
        seen = environment.version("flashinfer-python")
        text = f"flashinfer-python {seen} leaves wrong states behind prefills on 10.x (needed: another release)"
        return [Reason("library-version", text, seen, "!=0.6.17", "pip install 'flashinfer-python>=0.6.18'")]
    read_as = _READS_BFLOAT16.value
    if phase == "decode" and config.state_dtype == read_as != config.dtype:
        return [unsupported("dtype", f"dtype with states in {read_as}", config.dtype, [read_as])]
    unverified = () if device.compute_capability == (9, 0) else (_GDN_NEVER_RUN,)
    if phase == "decode":
        return _state_plan(config, phase, "gated_delta_rule_decode_pretranspose", (_RAW_GATES,), unverified)
    vllm = "; vLLM 0.32 takes it on Hopper"
    return _state_plan(config, phase, "chunk_gated_delta_rule", (_COPIES,), unverified, vllm)


FLASHINFER_GDN = BackendSpec(
    name="FLASHINFER_GDN",
    summary="Gated delta net layers by FlashInfer, on Hopper and Blackwell.",
    capabilities={"prefill": GDN_PREFILL, "decode": GDN_DECODE},
    plan=_gdn_plan,
    libraries=LIBRARIES,
    compile_key=lambda config: (config.num_heads, config.num_v_heads, config.dtype),
    load="attn_select_flashinfer.runtime.states:FlashInferGdnBackend",
)


_KDA = "flashinfer-ai/flashinfer flashinfer/kda_kernels/recurrent_kda.py run_recurrent_kda 0.7.2.post1"
KDA_RELEASES = Fact(
    ">=0.7.2", f"{_KDA}: 0.6.14 has no initial_state_source, so its kernel starts from the state that it overwrites"
)

_KDA_PREFILL = "flashinfer-ai/flashinfer flashinfer/kda_prefill.py _flash_kda_prefill_is_eligible 0.7.2.post1"
_SIZES = (64, 128)

KDA_DECODE = StateCapabilities(
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
KDA_PREFILL = StateCapabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((10, 0), (10, 0)), ((10, 3), (10, 3)))), f"{_KDA_PREFILL}: 10.0 and 10.3, from raw gates"
    ),
    recurrences=KDA_DECODE.recurrences,
    dtypes=Fact(("bfloat16",), f"{_KDA_PREFILL}: q, k, v, g and beta must be bfloat16"),
    state_dtypes=Fact(
        ("bfloat16",),
        f"{_KDA_PREFILL}: a pool in bfloat16; in float32 only with a bound of the gate, which no layer has",
    ),
    head_sizes=Fact(HeadSizes((128,)), f"{_KDA_PREFILL}: _FLASH_KDA_HEAD_DIM"),
    v_head_sizes=Fact(HeadSizes((128,)), f"{_KDA_PREFILL}: v has the shape of q"),
    speculative_tokens=_PREFILL_DRAFTS,
)

KDA_LEAST_LOG_DECAY = Fact(
    -3000.0,
    "flashinfer-ai/flashinfer csrc/kda/flashkda_bf16_fused_m128.cu 0.7.2.post1: decays between tokens are differences "
    "of running sums over 16 tokens in float32, which lose what bfloat16 holds behind a larger one",
)
"""The least log-decay that prefills compute right."""


_KDA_NEVER_RUN = "FlashInfer's KDA was never run here; its call is held to the signature of 0.7.2.post1"


def _kda_plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan; what plain capabilities do not say is the release, and that both widths are the same."""
    if reasons := wrong_release(environment, "its KDA", KDA_RELEASES):
        return reasons
    both = (config.head_size, config.v_head_size)
    if both[0] != both[1] and all(size in _SIZES for size in both):  # another size has its own reason
        return [unsupported("v-head-size", "V head size", config.v_head_size, [config.head_size])]
    if phase == "decode":
        rounded = "rounds log-decays and write strengths to bfloat16"
        return _state_plan(config, phase, "recurrent_kda", (rounded,), (_KDA_NEVER_RUN,))
    notes = (_RAW_GATES, "FlashInfer reads the bounds of the requests back from the device")
    in_pool = "; states are updated in the pool"
    return _state_plan(config, phase, "recurrent_kda-prefill", notes, (_KDA_NEVER_RUN,), in_pool)


FLASHINFER_KDA = BackendSpec(
    name="FLASHINFER_KDA",
    summary="Kimi delta attention by FlashInfer, on Blackwell.",
    capabilities={"prefill": KDA_PREFILL, "decode": KDA_DECODE},
    plan=_kda_plan,
    libraries=LIBRARIES,
    compile_key=lambda config: (config.num_heads, config.head_size),
    load="attn_select_flashinfer.runtime.states:FlashInferKdaBackend",
)


_MAMBA = "flashinfer-ai/flashinfer flashinfer/mamba/selective_state_update.py 0.6.14 and 0.7.2.post1"
_KERNEL = "flashinfer-ai/flashinfer include/flashinfer/mamba/kernel_selective_state_update_stp.cuh v0.6.14"
RATIOS: Fact[tuple[int, ...]] = Fact((1, 2, 4, 8, 16, 32, 64), f"{_KERNEL}: dispatchRatio")
"""Heads per group that the kernel for Hopper and Blackwell was compiled for."""

_SSD = "flashinfer-ai/flashinfer flashinfer/mamba/cake_ssd_combined.py CakeSSDCombined 0.7.2.post1"
SSD_RELEASES = Fact(">=0.7.2", f"{_SSD}: 0.6.14 has no ssd_combined_fwd")
CHUNK = 128
"""Tokens of a chunk of ``ssd_combined_fwd``."""

MAMBA_DECODE = StateCapabilities(
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
MAMBA_PREFILL = StateCapabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((10, 0), (10, 0)), ((10, 3), (10, 3)))), f"{_SSD}: requires SM100 or SM103"
    ),
    recurrences=MAMBA_DECODE.recurrences,
    dtypes=Fact(("bfloat16",), f"{_SSD}: x, B and C must be bfloat16"),
    state_dtypes=MAMBA_DECODE.state_dtypes,
    head_sizes=Fact(HeadSizes((128,)), f"{_SSD}: dstate=128"),
    v_head_sizes=Fact(HeadSizes((64,)), f"{_SSD}: headdim=64"),
    speculative_tokens=_PREFILL_DRAFTS,
)

MAMBA_LEAST_LOG_DECAY = Fact(
    -400.0,
    f"{_SSD}: decays between tokens are differences of running sums over 128 tokens in float32, which lose what "
    "bfloat16 holds behind a larger one",
)
"""The least log-decay that prefills compute right."""


_MAMBA_NEVER_RUN = (
    "FlashInfer's Mamba-2 ran on compute capability 9.0 alone; its calls are held to signatures elsewhere"
)


def _mamba_plan(
    config: StateConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or that the release has no prefills, or that decodes are not compiled for such heads."""
    if phase == "prefill" and (reasons := wrong_release(environment, "prefills of Mamba-2", SSD_RELEASES)):
        return reasons
    ratio = config.num_v_heads // config.num_heads
    if phase == "decode" and ratio not in RATIOS.value:
        return [unsupported("head-ratio", "heads per group", ratio, list(RATIOS.value))]
    unverified = () if device.compute_capability == (9, 0) else (_MAMBA_NEVER_RUN,)
    if phase == "decode":
        return _state_plan(config, phase, "selective_state_update", (_RAW_GATES,), unverified)
    return _state_plan(config, phase, "ssd_combined_fwd", (_RAW_GATES, _COPIES), unverified)


FLASHINFER_MAMBA = BackendSpec(
    name="FLASHINFER_MAMBA",
    summary="Mamba-2 layers by FlashInfer; prefills on Blackwell.",
    capabilities={"prefill": MAMBA_PREFILL, "decode": MAMBA_DECODE},
    plan=_mamba_plan,
    libraries=LIBRARIES,
    compile_key=lambda config: (config.head_size, config.v_head_size, config.dtype, config.state_dtype),
    load="attn_select_flashinfer.runtime.states:FlashInferMambaBackend",
)
