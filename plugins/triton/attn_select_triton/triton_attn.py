"""``TRITON_ATTN``: prefill over the paged cache and split-KV decode, every kind of attention but MLA."""

from __future__ import annotations

from typing import NoReturn

from attn_select.config import AttentionConfig, Phase
from attn_select.device import Device
from attn_select.environment import Environment
from attn_select.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Fact, Reason
from attn_select_triton.hardware import (
    ANY_STRIDE,
    DTYPES,
    KV_CACHE_DTYPES,
    LIBRARIES,
    MASK,
    OWN,
    PREFILL_HEAD_SIZES,
    TURING_AND_UP,
    device_reasons,
    no_runtime,
    notes,
    split_workspace,
)

CAPABILITIES = Capabilities(
    compute_capabilities=TURING_AND_UP,
    dtypes=DTYPES,
    kv_cache_dtypes=KV_CACHE_DTYPES,
    head_sizes=Fact(PREFILL_HEAD_SIZES, f"{OWN}: rows padded to a power of two under a mask"),
    block_sizes=Fact((16,), ANY_STRIDE),
    attn_types=Fact(("decoder", "encoder", "encoder_only", "encoder_decoder"), f"{OWN}: with a block table or without"),
    mixed_kv_cache_dtype=Fact(True, f"{OWN}: casts K and V to the query's dtype as it loads"),
    v_head_size_differs=Fact(True, f"{OWN}: V has its own tile width"),
    sliding_window=Fact(True, f"{OWN}: tiles outside the window are not visited"),
    logits_soft_cap=Fact(True, MASK),
    alibi=Fact(True, MASK),
    sinks=Fact(True, f"{OWN}: the running maximum and sum start from the sink"),
    # The kernel masks image ranges: inside one, keys behind the query are kept. vLLM 0.33 sends Gemma 3 here for this.
    mm_prefix=Fact(True, MASK),
    non_causal=Fact(True, MASK),
    batch_invariant=Fact(True, f"{OWN}: splits of a fixed number of tokens"),
    per_head_quant_scales=Fact(False, f"{OWN}: one scale per tensor"),
    output_quantizations=Fact((), f"{OWN}: no output scale"),
    decode_context_parallel=Fact(True, f"{OWN}: returns the log-sum-exp; positions come from a tensor"),
)

LAYOUTS = (FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND)
BLOCK_SIZES = (16,)
TILE_ROWS = 128
"""The most query rows (queries x heads of a group) that one program holds."""
PROGRAMS_PER_SM = 4
"""Programs that split-KV decode aims at per SM: it splits only while the unsplit grid is smaller than that."""

_PREFILL = "tiles of queries over the paged cache"
_NO_CACHE = "tiles of queries over K and V as they come, no cache"
_DECODE = "splits the keys until every SM has work, then merges by log-sum-exp"
_FIXED = "splits of a fixed number of tokens: batch invariance"
_FIXED_GROWS = "partial results of fixed splits grow with the longest sequence and are reserved for its maximum"
_PADDED_V = "K and V rows take as many elements in the cache as the wider of both"


def _v_reason(size: int) -> Reason:
    supported = str(PREFILL_HEAD_SIZES)
    return Reason("v-head-size", f"V head size {size} (supported: {supported})", size, supported)


def tile_rows(config: AttentionConfig) -> int:
    """Return the query rows of one decode program: all heads of a group and all draft tokens, in steps of 16."""
    rows = config.num_heads // config.num_kv_heads * (1 + config.num_speculative_tokens)
    return min(TILE_ROWS, -(-rows // 16) * 16)


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or what Triton cannot compile for this device."""
    cached = config.has_cache
    reasons = device_reasons(config, device, environment, cached)
    width = config.v_head_size
    if width is not None and not PREFILL_HEAD_SIZES.accepts(width):
        reasons.append(_v_reason(width))
    if reasons:
        return reasons
    said = notes(config, device)
    if not cached:
        return BackendPlan("prefill", _NO_CACHE, config.dtype, True, (), (), "ALWAYS", 0, 1, None, said)
    if width is not None and width != config.head_size:
        said = (*said, _PADDED_V)
    if phase == "prefill":
        return BackendPlan("prefill", _PREFILL, config.dtype, True, LAYOUTS, BLOCK_SIZES, "ALWAYS", 0, 1, None, said)
    if config.batch_invariant:
        said = (*said, _FIXED_GROWS)
        path, because, workspace = "fixed-split decode", _FIXED, 0
    else:
        workspace = split_workspace(device, PROGRAMS_PER_SM, tile_rows(config), config.value_head_size)
        path, because = "split-KV decode", _DECODE
    return BackendPlan(path, because, config.dtype, True, LAYOUTS, BLOCK_SIZES, "ALWAYS", workspace, 1, None, said)


def compile_key(config: AttentionConfig) -> object:
    """Group layers that share one compilation: what the kernels take as constants."""
    return (
        config.head_size,
        config.value_head_size,
        config.num_heads // config.num_kv_heads,
        config.num_speculative_tokens,
        config.dtype,
        config.cache_dtype,
        config.block_size,
        config.has_cache,
        config.attn_type == "decoder" and not config.non_causal,
        config.sliding_window is not None,
        config.logits_soft_cap is not None,
        config.alibi,
        config.sinks,
        config.mm_prefix,
    )


def load() -> NoReturn:
    """Raise ``RuntimeMissingError``: the runtime is not part of this release."""
    no_runtime("TRITON_ATTN")


TRITON_ATTN = BackendSpec(
    name="TRITON_ATTN",
    summary="own Triton kernels, every kind of layer but MLA, any NVIDIA GPU from Turing up",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load=load,
    libraries=LIBRARIES,
    compile_key=compile_key,
)
