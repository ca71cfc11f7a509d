"""``TRITON_MLA``: dense multi-head latent attention (arXiv 2405.04434): prefill decompressed, decode on the latent."""

from __future__ import annotations

from typing import NoReturn

from attn_select.config import AttentionConfig, Phase
from attn_select.device import Device
from attn_select.environment import Environment
from attn_select.layouts import MLA
from attn_select.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Fact, HeadSizes, Reason
from attn_select_triton.hardware import (
    ANY_STRIDE,
    COMPILED,
    KV_CACHE_DTYPES,
    LIBRARIES,
    OWN,
    PREFILL_HEAD_SIZES,
    TURING_AND_UP,
    device_reasons,
    no_runtime,
    notes,
    split_workspace,
)

LORA_RANKS = HeadSizes(multiple_of=16, minimum=16, maximum=512)
"""Accepted ``kv_lora_rank``: the contraction of ``tl.dot`` goes in steps of 16; DeepSeek-V2 and V3 have 512."""
ROPE_SIZES = HeadSizes(multiple_of=16, minimum=16, maximum=128)
"""Accepted ``qk_rope_head_dim``; DeepSeek-V2 and V3 have 64."""
MOST_HEADS = 128
HEAD_TILE = 64
"""The most query rows (heads x draft tokens) that one decode program holds."""
PROGRAMS_PER_SM = 1
"""A tile of 64 rows and 576 columns leaves an SM's registers and shared memory no room for a second."""


def _capabilities(reads_cache: bool) -> Capabilities:
    return Capabilities(
        compute_capabilities=TURING_AND_UP,
        dtypes=Fact(("bfloat16", "float16"), f"{COMPILED}: tl.dot of each, from 7.5 on; {OWN}: no float32 latent"),
        kv_cache_dtypes=Fact(("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"), KV_CACHE_DTYPES.source),
        head_sizes=Fact(HeadSizes(multiple_of=16, minimum=32, maximum=640), f"{OWN}: rank and rope part by themselves"),
        block_sizes=Fact((16,), ANY_STRIDE),
        mla=True,
        reads_cache=reads_cache,
        mixed_kv_cache_dtype=Fact(True, f"{OWN}: casts the latent to the query's dtype as it loads"),
        non_causal=Fact(True, f"{OWN}: each query row has its own number of keys"),
        batch_invariant=Fact(True, f"{OWN}: splits of a fixed number of tokens"),
        per_head_quant_scales=Fact(True, "the latent is one KV head, so a scale per head is the scale of the tensor"),
        output_quantizations=Fact((), f"{OWN}: no output scale"),
        decode_context_parallel=Fact(True, f"{OWN}: returns the log-sum-exp; positions come from a tensor"),
    )


PREFILL = _capabilities(reads_cache=False)
DECODE = _capabilities(reads_cache=True)
BLOCK_SIZES = (16,)

_PREFILL = "TRITON_ATTN's prefill kernel on decompressed keys and values"
_DECODE = "splits the keys until every SM has work, then merges by log-sum-exp"
_FIXED = "splits of a fixed number of tokens: batch invariance"
_FIXED_GROWS = "partial results of fixed splits grow with the longest sequence and are reserved for its maximum"


def _dim(name: str, value: int, supported: HeadSizes) -> Reason:
    return Reason("mla-dims", f"{name} {value} (supported: {supported})", {name: value}, str(supported))


def _dim_reasons(config: AttentionConfig, phase: Phase) -> list[Reason]:
    rank, rope = config.kv_lora_rank or 0, config.qk_rope_head_dim or 0
    nope, v_dim = config.qk_nope_head_dim or 0, config.v_head_dim or 0
    found = []
    if config.num_heads > MOST_HEADS:
        message = f"{config.num_heads} query heads (supported: at most {MOST_HEADS})"
        found.append(Reason("num-heads", message, config.num_heads, f"at most {MOST_HEADS}"))
    if phase == "prefill":
        if not PREFILL_HEAD_SIZES.accepts(nope + rope):
            found.append(_dim("qk_nope_head_dim + qk_rope_head_dim", nope + rope, PREFILL_HEAD_SIZES))
        if not PREFILL_HEAD_SIZES.accepts(v_dim):
            found.append(_dim("v_head_dim", v_dim, PREFILL_HEAD_SIZES))
        return found
    if not LORA_RANKS.accepts(rank):
        found.append(_dim("kv_lora_rank", rank, LORA_RANKS))
    if not ROPE_SIZES.accepts(rope):
        found.append(_dim("qk_rope_head_dim", rope, ROPE_SIZES))
    return found


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or what the kernels and Triton cannot do for these dimensions on this device."""
    decode = phase == "decode"
    reasons = device_reasons(config, device, environment, decode) + _dim_reasons(config, phase)
    if reasons:
        return reasons
    said = notes(config, device)
    # Chunked prefill loops on host lengths, so mixed batches are not captured.
    if not decode:
        return BackendPlan("prefill", _PREFILL, config.dtype, True, (), (), "UNIFORM_BATCH", 0, 1, None, said)
    if config.batch_invariant:
        said = (*said, _FIXED_GROWS)
        path, because, workspace = "fixed-split decode", _FIXED, 0
    else:
        rows = config.num_heads * (1 + config.num_speculative_tokens)
        rows = min(HEAD_TILE, -(-rows // 16) * 16)
        workspace = split_workspace(device, PROGRAMS_PER_SM, rows, config.kv_lora_rank or 0)
        path, because = "split-KV decode", _DECODE
    return BackendPlan(
        path, because, config.dtype, True, (MLA,), BLOCK_SIZES, "UNIFORM_BATCH", workspace, 1, None, said
    )


def compile_key(config: AttentionConfig) -> object:
    """Group layers that share one compilation: what the kernels take as constants."""
    return (
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.num_heads,
        config.num_speculative_tokens,
        config.dtype,
        config.cache_dtype,
        config.block_size,
        config.non_causal,
    )


def load() -> NoReturn:
    """Raise ``RuntimeMissingError``: the runtime is not part of this release."""
    no_runtime("TRITON_MLA")


TRITON_MLA = BackendSpec(
    name="TRITON_MLA",
    summary="own Triton kernels for dense MLA, any NVIDIA GPU from Turing up",
    capabilities={"prefill": PREFILL, "decode": DECODE},
    plan=plan,
    load=load,
    libraries=LIBRARIES,
    compile_key=compile_key,
)
