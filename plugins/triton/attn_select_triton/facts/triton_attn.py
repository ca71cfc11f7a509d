"""``TRITON_ATTN``: prefill over the paged cache and split-KV decode, every kind of attention but MLA."""

from __future__ import annotations

from pydantic import Field

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities, Fact, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_triton.facts.planned_kernels import DecodeKernel, PrefillKernel
from attn_select_triton.facts.triton_support import (
    ANY_STRIDE,
    COMPILER_VARIABLES,
    DTYPES,
    E4M3_FROM,
    KV_CACHE_DTYPES,
    LIBRARIES,
    MASK,
    NAN_TAIL_SAFE,
    OWN,
    PREFILL_HEAD_SIZES,
    TURING_AND_UP,
    device_reasons,
    gluon_marks,
    marked,
    notes,
    split_workspace,
)
from attn_select_triton.limits import GLUON_CAPABILITY, TILE_ROWS, TMA_FROM, power_of_two, two_powers


class TritonAttnOptions(BackendOptions):
    """The ``[backends.TRITON_ATTN]`` table."""

    gather_workspace_mib: int = Field(
        128,
        ge=0,
        description="MiB reserved for keys and values that a prefill copies out of small pages; 0: it reads the pages",
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
    per_head_quant_scales=Fact(
        True, f"{OWN}: one scale per tensor, so the query is multiplied by K's scales and the output by V's"
    ),
    output_quantizations=Fact(("fp8",), f"{OWN}: results over their scale are rounded to e4m3 as they are written"),
    decode_context_parallel=Fact(True, f"{OWN}: returns the log-sum-exp; positions come from a tensor"),
    draft_tree=Fact(True, MASK),
    nan_tail_safe=NAN_TAIL_SAFE,
)

LAYOUTS = (FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND)
# Kernel block sizes that a plan offers where the config names none; every multiple of 16 runs.
PAGES = (16, 32, 64, 128, 256)
TMA_PAGE = 64  # Pages of a multiple of so many tokens hold whole tiles
# Half the programs per SM that the workspace of split-KV decode has room for. Two fill an SM. The rest is for batches
# of unequal lengths, where every request has room for as many splits as the longest.
PROGRAMS_PER_SM = 8

WARPS_HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
WARPS_PLAIN_SIZE = 64  # Of which windows took 1.3 times as long as by the plain prefill
_GATHERED = "TMA reads keys and values copied out of their pages, where the copy pays and fits its workspace"
_TMA = "TMA reads whole pages"
_WARPS = "one warp loads pages by TMA for two groups of warps that multiply (Gluon)"
_WHERE_CHEAPER = "prefills run by the plain kernel, or split their keys, where that is cheaper: short ones"
_POINTERS = "every row of keys by its own pointer through the block table"
_NO_CACHE = "reads the step's own K and V, no cache"
_DECODE = "splits the keys until every SM has its share of them, then merges by log-sum-exp"
_FIXED = "splits by the length of a request alone: batch invariance"
_FIXED_GROWS = "partial results of fixed splits grow with the longest sequence and are reserved for its maximum"
_PADDED_V = "K and V rows take as many elements in the cache as the wider of both"
_SCALES_PER_HEAD = "scales per head: the query is multiplied by K's before the kernel, the output by V's behind it"
_PER_HEAD_UNPROVEN = "Triton's kernels ran with scales per head in Triton's interpreter, never on a GPU"
_HALF = (
    "FP8 keys read in place are multiplied as float16, also with a bfloat16 query, whose largest number is then 65504"
)


def _v_reason(size: int) -> Reason:
    supported = str(PREFILL_HEAD_SIZES)
    return Reason("v-head-size", f"V head size {size} (supported: {supported})", size, supported)


def tile_rows(config: AttentionConfig) -> int:
    """Return the query rows of one decode program: all heads of a group and all draft tokens, in steps of 16."""
    rows = config.num_heads // config.num_kv_heads * config.max_decode_query_len
    return min(TILE_ROWS, -(-rows // 16) * 16)


def kernel_block_sizes(size: int | None) -> tuple[int, ...]:
    """Return the allocator's own block size, since larger pages are read faster, then what it can be split to."""
    if size is None or size % PAGES[0]:
        return PAGES
    return tuple(dict.fromkeys((size, *(page for page in reversed(PAGES) if size % page == 0))))


def warp_specialised(config: AttentionConfig, device: Device) -> bool:
    """Whether the Gluon kernel computes this layer's prefill on this device."""
    return (
        device.compute_capability == GLUON_CAPABILITY
        and config.dtype in ("bfloat16", "float16")
        and (config.cache_dtype == config.dtype or config.cache_dtype.startswith("fp8"))
        and config.head_size == config.value_head_size
        and config.head_size in WARPS_HEAD_SIZES
        and not (config.head_size == WARPS_PLAIN_SIZE and config.sliding_window is not None)
        and (config.block_size or PAGES[0]) % PAGES[0] == 0
        and (config.sliding_window is None or (config.attn_type == "decoder" and not config.non_causal))
        and not (config.alibi or config.mm_prefix)
        and not config.batch_invariant  # captured steps and short ones run the plain kernel, and bits would differ
    )


def whole_pages(config: AttentionConfig) -> bool:
    """Whether TMA reads whole tiles out of this layer's pages."""
    return (config.block_size or PAGES[0]) % TMA_PAGE == 0 and config.cache_dtype == config.dtype


def in_boxes(head_size: int, width: int) -> bool:
    """Whether TMA reads rows of K and of V in boxes whose widths are powers of two."""
    return two_powers(head_size) != (0, 0) and power_of_two(width) == width


def prefill_way(
    config: AttentionConfig, device: Device, environment: Environment, options: TritonAttnOptions
) -> tuple[bool, bool, int, bool]:
    """Return how a prefill reads the paged cache: the attributes of its ``PrefillKernel``."""
    capability = device.compute_capability
    if capability is None or capability < TMA_FROM or config.dtype == "float32":
        return False, False, 0, False
    warps = warp_specialised(config, device)
    in_place = config.cache_dtype == config.dtype  # FP8 is copied out of the pages, as 16 bits
    boxes = in_boxes(config.head_size, config.value_head_size)
    by_tma = boxes and whole_pages(config)
    copies = not by_tma and (boxes or (warps and not in_place)) and not config.batch_invariant
    gathered = options.gather_workspace_mib << 20 if copies else 0
    return warps and in_place, by_tma, gathered, warps and not in_place and gathered > 0


def prefill_words(kernel: PrefillKernel) -> tuple[str, str]:
    """Return a prefill's path, and why it is taken."""
    if kernel.warp_specialised:
        return "warp-specialised prefill", _WARPS
    if kernel.gather_bytes:
        return "prefill, pages gathered", _GATHERED
    return ("prefill by TMA", _TMA) if kernel.pages_by_tma else ("prefill", _POINTERS)


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: TritonAttnOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the plan, or what Triton cannot compile for this device."""
    cached = config.has_cache
    reasons = device_reasons(config, device, environment, cached)
    width = config.v_head_size
    if width is not None and not PREFILL_HEAD_SIZES.accepts(width):
        reasons.append(_v_reason(width))
    capability = device.compute_capability
    if config.output_quantization == "fp8" and capability is not None and capability < E4M3_FROM:
        text = f"FP8 output on compute capability {device.capability_text} (supported: none; e4m3 from 8.9 on)"
        reasons.append(Reason("output-quantization", text, "fp8", ["none"], "--output-quantization none"))
    if config.per_head_quant_scales and config.output_quantization != "none":
        text = "quantisation scales per head with a quantised output: V's scales multiply the output in 16 bits"
        reasons.append(Reason("per-head-quant-scales", text, True, False, "--output-quantization none"))
    if reasons:
        return reasons
    fixed = config.batch_invariant
    kernel: PrefillKernel | DecodeKernel = PrefillKernel()
    path, because, workspace = "prefill", _NO_CACHE, 0
    if cached and not fixed:  # a prefill of few tokens over a long context splits its keys too
        workspace = split_workspace(device, PROGRAMS_PER_SM, tile_rows(config), config.value_head_size)
    if cached and phase == "prefill":
        kernel = PrefillKernel(*prefill_way(config, device, environment, options))
        path, because = prefill_words(kernel)
    elif cached:
        kernel = DecodeKernel(fixed)
        path, because = ("fixed-split decode", _FIXED) if fixed else ("split-KV decode", _DECODE)
    prefill = kernel if isinstance(kernel, PrefillKernel) else PrefillKernel()
    copied = f"{prefill.gather_bytes >> 20} MiB of the workspace hold keys and values out of small pages"
    own = {
        _PADDED_V: cached and config.value_head_size != config.head_size,
        _HALF: cached and config.dtype == "bfloat16" and config.cache_dtype.startswith("fp8"),
        _SCALES_PER_HEAD: cached and config.per_head_quant_scales,
        _WHERE_CHEAPER: prefill.warp_specialised,
        copied: prefill.gather_bytes > 0,
        _FIXED_GROWS: cached and fixed and phase == "decode",
    }
    marks = gluon_marks(environment) if prefill.warp_specialised or prefill.gathered_warps else ()
    made = BackendPlan(
        kernel=kernel,
        path=path,
        because=because,
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=LAYOUTS if cached else (),
        kernel_block_sizes=kernel_block_sizes(config.block_size) if cached else (),
        # a captured mixed step runs decodes by the prefill's kernel, which knows no trees
        cuda_graph="UNIFORM_BATCH" if config.draft_tree else "ALWAYS",
        workspace_bytes=workspace + prefill.gather_bytes,
        notes=(*notes(config, device), *(note for note, holds in own.items() if holds)),
        unverified=(*marks, _PER_HEAD_UNPROVEN) if cached and config.per_head_quant_scales else marks,
    )
    return marked(made, config, device.compute_capability)


def compile_key(config: AttentionConfig) -> object:
    """Group layers that share one compilation: what the kernels take as constants."""
    return (
        config.head_size,
        config.value_head_size,
        config.num_heads,
        config.num_kv_heads,
        config.num_speculative_tokens,
        config.draft_tree,
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
        config.output_quantization,
    )


TRITON_ATTN = BackendSpec(
    name="TRITON_ATTN",
    summary="own Triton kernels, every kind of layer but MLA, any NVIDIA GPU from Turing up",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_triton.runtime.triton_attn:TritonAttnBackend",
    libraries=LIBRARIES,
    variables=COMPILER_VARIABLES,
    options=TritonAttnOptions,
    compile_key=compile_key,
)
