"""``PAGED_ATTENTION``: the classic paged attention of vLLM (arXiv 2309.06180), versions 1 and 2, written in Triton."""

from __future__ import annotations

from typing import NoReturn

from attn_select.config import AttentionConfig, Phase
from attn_select.device import Device
from attn_select.dtypes import BITS
from attn_select.environment import Environment
from attn_select.layouts import PAGED_ATTENTION as PAGED_ATTENTION_LAYOUT
from attn_select.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Fact, HeadSizes, Reason
from attn_select_triton.hardware import (
    DTYPES,
    KV_CACHE_DTYPES,
    LIBRARIES,
    OWN,
    TURING_AND_UP,
    device_reasons,
    no_runtime,
    notes,
)

_V1 = "vllm-project/vllm csrc/attention/paged_attention_v1.cu 03f8611"
_RULE = "vllm-project/vllm vllm/attention/ops/paged_attn.py 002a0ba"
_KERNELS = f"{OWN}, as {_V1}"
PARTITION_SIZE = 512
"""Tokens that one program of version 2 reads (``_RULE``)."""
V1_MOST_TOKENS = 8192
V1_LEAST_ROWS = 512
"""Version 1 above one partition needs more than this many sequences x query heads (``_RULE``)."""

CAPABILITIES = Capabilities(
    compute_capabilities=TURING_AND_UP,
    dtypes=DTYPES,
    kv_cache_dtypes=KV_CACHE_DTYPES,
    head_sizes=Fact(HeadSizes(values=(32, 64, 80, 96, 112, 120, 128, 192, 256)), _KERNELS),
    block_sizes=Fact((8, 16, 32), _KERNELS),
    mixed_kv_cache_dtype=Fact(True, f"{OWN}: casts K and V to the query's dtype as it loads"),
    sliding_window=Fact(False, _KERNELS),
    logits_soft_cap=Fact(False, _KERNELS),
    alibi=Fact(True, _KERNELS),
    sinks=Fact(False, _KERNELS),
    mm_prefix=Fact(False, _KERNELS),
    non_causal=Fact(False, _KERNELS),
    batch_invariant=Fact(False, f"{_RULE}: the batch chooses v1 or v2"),
    per_head_quant_scales=Fact(False, _KERNELS),
    output_quantizations=Fact((), _KERNELS),
    decode_context_parallel=Fact(False, f"{_KERNELS}: returns no log-sum-exp"),
    speculative_tokens=Fact(0, f"{_KERNELS}: the query is (num_seqs, num_heads, head_size), one token each"),
)

LAYOUTS = (PAGED_ATTENTION_LAYOUT,)
BLOCK_SIZES = (16, 32, 8)

_PREFILL = "TRITON_ATTN's prefill kernel, reading the classic layout"
_GRAPHS = "a captured graph keeps the version that its batch size and longest sequence chose"


def _rule(num_heads: int) -> str:
    most = V1_LEAST_ROWS // num_heads
    several = f"in batches of more than {most} sequences" if most else "in any batch"
    return (
        f"v1 where no sequence exceeds {PARTITION_SIZE} tokens, and up to {V1_MOST_TOKENS} tokens {several} "
        f"(sequences x {num_heads} heads > {V1_LEAST_ROWS}); else v2, in partitions of {PARTITION_SIZE} tokens"
    )


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: BackendOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or what the layout and Triton cannot do on this device."""
    reasons = device_reasons(config, device, environment)
    bits = BITS.get(config.cache_dtype, 8)
    x = 128 // bits
    if config.head_size % x:
        message = f"head size {config.head_size} with a {bits}-bit cache (supported: multiples of {x}, the layout's x)"
        remedy = "--kv-cache-dtype auto" if bits == 8 else None
        reasons.append(Reason("head-size", message, config.head_size, f"multiples of {x}", remedy))
    if reasons:
        return reasons
    said = notes(config, device)
    if phase == "prefill":
        return BackendPlan("prefill", _PREFILL, config.dtype, False, LAYOUTS, BLOCK_SIZES, "ALWAYS", 0, 1, None, said)
    row = config.head_size * BITS[config.dtype] // 8 + 8
    partial = f"v2 takes {row} bytes per sequence, head and partition for partial results, allocated at each call"
    said = (*said, partial, _GRAPHS)
    because = _rule(config.num_heads)
    return BackendPlan("v1/v2", because, config.dtype, False, LAYOUTS, BLOCK_SIZES, "ALWAYS", 0, 1, None, said)


def compile_key(config: AttentionConfig) -> object:
    """Group layers that share one compilation: what the kernels take as constants."""
    group = config.num_heads // config.num_kv_heads
    return (config.head_size, group, config.dtype, config.cache_dtype, config.block_size, config.alibi)


def load() -> NoReturn:
    """Raise ``RuntimeMissingError``: the runtime is not part of this release."""
    no_runtime("PAGED_ATTENTION")


PAGED_ATTENTION = BackendSpec(
    name="PAGED_ATTENTION",
    summary="classic paged attention, versions 1 and 2, in Triton, any NVIDIA GPU from Turing up",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load=load,
    libraries=LIBRARIES,
    compile_key=compile_key,
)
