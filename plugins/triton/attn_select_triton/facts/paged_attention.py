"""``PAGED_ATTENTION``: the classic paged attention of vLLM (arXiv 2309.06180), versions 1 and 2, written in Triton."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Fact, HeadSizes, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.dtypes import BITS
from attn_select.layer.layouts import PAGED_ATTENTION as PAGED_ATTENTION_LAYOUT
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_triton.facts.planned_kernels import ClassicDecodeKernel, PrefillKernel
from attn_select_triton.facts.triton_attn import TritonAttnOptions
from attn_select_triton.facts.triton_support import (
    COMPILER_VARIABLES,
    DTYPES,
    KV_CACHE_DTYPES,
    LIBRARIES,
    NAN_TAIL_SAFE,
    OWN,
    TURING_AND_UP,
    device_reasons,
    marked,
    notes,
)
from attn_select_triton.limits import TMA_FROM, power_of_two


class PagedAttentionOptions(TritonAttnOptions):
    """The ``[backends.PAGED_ATTENTION]`` table."""

    gather_workspace_mib: int = Field(
        0,
        ge=0,
        description="MiB reserved for keys and values that a prefill copies out of the cache; 0: it reads the blocks",
    )


_V1 = "vllm-project/vllm csrc/attention/paged_attention_v1.cu 03f8611"
_RULE = "vllm-project/vllm vllm/attention/ops/paged_attn.py 002a0ba"
_KERNELS = f"{OWN}, as {_V1}"
# ``_RULE`` has the first three. A batch whose partial results take more than the last is run in several launches.
DECODE = ClassicDecodeKernel(partition_size=512, v1_most_tokens=8192, v1_least_rows=512, partials_bytes=128 << 20)

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
    nan_tail_safe=NAN_TAIL_SAFE,
    speculative_tokens=Fact(0, f"{_KERNELS}: the query is (num_seqs, num_heads, head_size), one token each"),
)

LAYOUTS = (PAGED_ATTENTION_LAYOUT,)
# V is read in pieces of one block: a decode on an H100 took 372, 388 and 440 us in blocks of 32, 16 and 8.
BLOCK_SIZES = (32, 16, 8)

_GATHERED = (
    "TRITON_ATTN's prefill kernel; TMA reads the step's own keys, or keys and values copied out of the cache where the "
    "copy pays and fits its workspace"
)
_PREFILL = "TRITON_ATTN's prefill kernel, reading the step's own keys, or the classic layout by pointers"
_GRAPHS = "a captured graph keeps the version that its batch size and the longest possible sequence chose"


def partial_bytes(config: AttentionConfig) -> int:
    """Return the bytes of one partial result: an output row in the query's dtype, maximum and sum in float32."""
    return config.head_size * BITS[config.dtype] // 8 + 8


def _rule(num_heads: int) -> str:
    tokens, rows = DECODE.partition_size, DECODE.v1_least_rows
    most = rows // num_heads
    several = f"in batches of more than {most} sequences" if most else "in any batch"
    return (
        f"v1 where no sequence exceeds {tokens} tokens, and up to {DECODE.v1_most_tokens} tokens {several} "
        f"(sequences x {num_heads} heads > {rows}); else v2, whose partitions of {tokens} tokens let "
        "few or long sequences fill the GPU"
    )


def _in_boxes(config: AttentionConfig, device: Device) -> bool:
    """Whether the prefill kernel reads contiguous keys and values through TMA."""
    capability, size = device.compute_capability, config.head_size
    newer = capability is not None and capability >= TMA_FROM
    return newer and config.dtype != "float32" and power_of_two(size) == size


def _partials(size: int) -> str:
    return (
        f"v2 reserves {size} bytes per sequence, head and partition for partial results, "
        f"{DECODE.partials_bytes >> 20} MiB or one sequence's at most; batches that need more take several launches"
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
    made = BackendPlan(
        kernel=DECODE,
        path="v1/v2",
        because=_rule(config.num_heads),
        query_dtype=config.dtype,
        returns_lse=False,
        kv_layouts=LAYOUTS,
        kernel_block_sizes=BLOCK_SIZES,
        cuda_graph="ALWAYS",
        workspace_bytes=DECODE.partials_bytes,
        notes=(*said, _partials(partial_bytes(config)), _GRAPHS),
    )
    if phase == "prefill":
        assert isinstance(options, PagedAttentionOptions)
        copied = options.gather_workspace_mib << 20 if _in_boxes(config, device) else 0
        made = replace(
            made,
            kernel=PrefillKernel(gather_bytes=copied),
            path="prefill, pages gathered" if copied else "prefill",
            because=_GATHERED if copied else _PREFILL,
            workspace_bytes=copied,
            notes=said,
        )
    return marked(made, config, device.compute_capability)


def compile_key(config: AttentionConfig) -> object:
    """Group layers that share one compilation: what the kernels take as constants."""
    heads = (config.num_heads, config.num_kv_heads)
    return (config.head_size, heads, config.dtype, config.cache_dtype, config.block_size, config.alibi)


PAGED_ATTENTION = BackendSpec(
    name="PAGED_ATTENTION",
    summary="classic paged attention, versions 1 and 2, in Triton, any NVIDIA GPU from Turing up",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_triton.runtime.paged_attention:PagedAttentionBackend",
    libraries=LIBRARIES,
    variables=COMPILER_VARIABLES,
    options=PagedAttentionOptions,
    compile_key=compile_key,
)
