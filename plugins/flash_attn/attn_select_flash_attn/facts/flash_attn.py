"""``FLASH_ATTN``: FlashAttention 2, 3 and 4 for multi-head, grouped-query and multi-query attention."""

from __future__ import annotations

from pydantic import Field

from attn_select.backends.draft_trees import IN_TWO_PARTS, in_two_parts, reasons_against_two_parts
from attn_select.backends.kernel_builds import PROVIDER_OPTION, Objection, choose, describe_pins
from attn_select.backends.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Reason,
)
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flash_attn.facts.builds import (
    FA4,
    HOPPER,
    INVARIANCE_UNPROVEN,
    LIBRARIES,
    RAN,
    SGLANG_FA3,
    UPSTREAM_FA2,
    UPSTREAM_FA3,
    VLLM_FA3,
    VLLM_FA4,
    VLLM_PYTHON,
    FlashAttnBuild,
    ProviderName,
    Version,
    builds_for,
    fa4_accepts,
    kernel_of,
    notes_on_build,
    pins_of,
    proves_invariance,
    why_this_build,
)

_VLLM_BACKEND = "vllm-project/vllm v1/attention/backends/flash_attn.py 0.33.0"
_BOTH = f"{UPSTREAM_FA2}; {UPSTREAM_FA3}"

# A capability is what at least one build takes; `plan` compares the layer with each build.
CAPABILITIES = Capabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((8, 0), (99, 9)),)),
        f"{UPSTREAM_FA2} (Ampere GPUs or newer); vLLM 0.33.0 _vllm_fa2_C holds PTX, which ran on H100, 2026-11-21",
    ),
    dtypes=Fact(("bfloat16", "float16"), _BOTH),
    kv_cache_dtypes=Fact(("bfloat16", "float16", "fp8_e4m3"), f"{_BOTH}; {RAN} (e4m3; e5m2 rejected)"),
    quantized_kv_cache_on=Fact(
        ComputeCapabilities(((HOPPER, HOPPER), ((10, 0), (10, 9)))),
        f"{UPSTREAM_FA3} (FP8 on arch 90); {UPSTREAM_FA2}; {FA4} (FP8 on 10.x)",
    ),
    head_sizes=Fact(
        HeadSizes(multiple_of=8, minimum=8, maximum=512),
        f"{_BOTH} (up to 256); {RAN} (32 to 256); {VLLM_FA4} (up to 512 on 9.0)",
    ),
    block_sizes=Fact((1,), f"{RAN} (1, 4, 8, 16, 24, 48, 64, 256); FA2 wants multiples of 16 or 256"),
    attn_types=Fact(("decoder", "encoder", "encoder_only", "encoder_decoder"), f"{_BOTH} (causal; paged or not)"),
    v_head_size_differs=Fact(True, f"{UPSTREAM_FA3} (FA3 on 9.0); {FA4} _validate_head_dims"),
    sliding_window=Fact(True, _BOTH),
    logits_soft_cap=Fact(True, _BOTH),
    alibi=Fact(True, f"{UPSTREAM_FA2} (FA2 only)"),
    sinks=Fact(True, f"{RAN} (sinks in bfloat16); {VLLM_FA3}; {SGLANG_FA3}; {FA4} learnable_sink"),
    mm_prefix=Fact(False, f"{VLLM_PYTHON} (mask_mod raises for FA2 and FA3)"),
    non_causal=Fact(True, f"{_BOTH} (causal=False)"),
    batch_invariant=Fact(True, f"{_VLLM_BACKEND} (num_splits=1)"),
    per_head_quant_scales=Fact(True, f"{UPSTREAM_FA3} (descale is batch x KV heads)"),
    output_quantizations=Fact((), f"{VLLM_FA4} (output_scale: not with paged KV)"),
    decode_context_parallel=Fact(True, f"{RAN} (returns the LSE); {_VLLM_BACKEND}"),
    draft_tree=Fact(True, f"{_BOTH} (causal=False over the context, returns the LSE): {IN_TWO_PARTS}"),
    nan_tail_safe=Fact(
        True,
        f"{UPSTREAM_FA2} (flash_fwd_kernel.h fills V with zeros behind the last key); {UPSTREAM_FA3} (get_pagedkv_tma "
        "loads whole pages only where their size is a multiple of the tile, at least 64 keys; plans use smaller ones, "
        "and paged_kv.h load_V fills V with zeros); every configuration run on H200 with NaN there, 2026-11-22",
    ),
)


class FlashAttnOptions(BackendOptions):
    """``[backends.FLASH_ATTN]``."""

    version: Version = Field(
        "auto", description="FlashAttention's major version; auto is 3 on 9.0, 4 on 10.x and 2 elsewhere"
    )
    provider: ProviderName = Field("auto", description=PROVIDER_OPTION)


LAYOUTS = (FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND)
"""K and V may be strided views with a contiguous last dimension (ran on H100, FA3 of vLLM 0.26.0, 2026-11-21; vLLM
0.33.0 passes HND-ordered views to FA2 and FA3)."""

_PAGES = {1: (16, 1), 16: (16,), 256: (256,)}
"""Block sizes in tokens by ``page_multiple``. FA3 loads whole blocks where their size is a multiple of its tile, and a
NaN in the unused part reaches the output in spite of its weight of 0 (Dao-AILab/flash-attention #1974 and
hopper/flash_api.cpp 0251105, get_pagedkv_tma): so its blocks are smaller than every tile of keys."""

_UNQUANTISED = "--kv-cache-dtype auto"
_FP8_NEEDS = "16-bit KV only, FP8 needs FA3 on compute capability 9.0 or FA4 on 10.x"
_WITH_ALIBI = "ALiBi slopes need FA2"
_WIDE_UNPROVEN = "FA4 with head sizes above 256 was never executed by this project"
# One NVIDIA H200, vLLM 0.26.0's build, 2026-11-27: 8 query heads on 8 KV heads of 192, a window of 2048, the batch
# q846s14413_q101s3145; the largest error was 7.8e-2.
_WRONG_ONCE = "FA3 with heads of 192 and a window was measured wrong once (largest error 7.8e-2), cause unknown"
_NARROW_V = "a V row takes head_size elements in the cache, of which the first v_head_size are used"
_CONVERTED = "with FP8 the kernel writes bfloat16, which is converted to float16"
_FA2_CROSS = "none in cross-attention"
"""In cross-attention a request may have more queries than keys, and a query's window may hold no key. FA2 ignores a
window's right bound from ``max_seqlen_k`` on, and writes the LSE of a tile that sees no key to a wrong place
(csrc/flash_attn/flash_api.cpp 0251105, mha_varlen_fwd, and src/flash_fwd_kernel.h, compute_attn_1rowblock_splitkv)."""
_BF16_SINKS = "sinks are passed in bfloat16"
_SPLIT_BYTES = (
    "inside CUDA graphs FA3's split-KV partial sums take num_splits x query heads x (V head size + 1) x 4 bytes "
    "per token (vLLM 0.33 caps num_splits at 32)"
)


def objections(build: FlashAttnBuild, config: AttentionConfig, capability: tuple[int, int] | None) -> list[Objection]:
    """Return the reasons against one build for a layer on a device of that compute capability; empty: it runs."""
    found: list[Objection] = []
    if build.version == 4:
        found += _of_fa4(build, config, capability)
    fa3_on_hopper = build.version == 3 and capability == HOPPER
    if config.alibi and build.version != 2:
        found.append(Objection("alibi", "none", "ALiBi slopes", True))
    window = config.sliding_window
    if build.version == 2 and config.attn_type == "encoder_decoder" and window is not None:
        found.append(Objection("sliding-window", _FA2_CROSS, f"sliding window {window}", window))
    size, page = config.block_size, build.page_multiple.value
    if size is not None and size % page and config.has_cache:
        found.append(Objection("block-size", page, f"block size {size}", size))
    dtype, heads = config.kv_cache_dtype, config.head_size
    fp8 = dtype == "fp8_e4m3"
    fa4_on_10 = build.version == 4 and capability is not None and capability[0] == 10
    if fp8 and not (fa3_on_hopper or fa4_on_10):
        found.append(Objection("kv-cache-dtype", _FP8_NEEDS, f"KV-cache dtype {dtype}", dtype, _UNQUANTISED))
    elif fp8 and heads % 16 and build.version == 3:
        found.append(Objection("head-size", "multiples of 16 with FP8", f"head size {heads}", heads, _UNQUANTISED))
    if heads > 256 and build.version != 4:
        found.append(Objection("head-size", "up to 256", f"head size {heads}", heads))
    if config.sinks and (accepts := _sinks_accepted(build, config, fa3_on_hopper)) is not None:
        found.append(Objection("sinks", accepts, f"attention sinks with {config.num_heads} query heads", True))
    width = config.v_head_size
    if width is not None and width != heads and build.version != 4:
        accepts = "the head size; other sizes need FA3 on compute capability 9.0 or FA4"
        if fa3_on_hopper:
            accepts = _v_head_sizes_accepted(heads, width, fp8, config.has_cache)
        if accepts is not None:
            found.append(Objection("v-head-size", accepts, f"V head size {width} with head size {heads}", width))
    return found


def _of_fa4(build: FlashAttnBuild, config: AttentionConfig, capability: tuple[int, int] | None) -> list[Objection]:
    """Return what FA4 alone objects to (flash-attn-4 4.0.0b36 flash_attn/cute/interface.py, _flash_attn_fwd)."""
    found: list[Objection] = []
    major = 9 if capability is None else capability[0]
    heads, width = config.head_size, config.value_head_size
    if major == 12 and config.has_cache:
        found.append(Objection("paged-kv", "none on compute capability 12.x", "a paged KV cache", True))
    accepts = fa4_accepts(build, heads, width, major, config.has_cache)
    if accepts is not None:
        found.append(Objection("head-size", accepts, f"head size {heads}", heads))
    if width > heads and config.has_cache:
        what = f"V head size {width} with head size {heads}"
        found.append(Objection("v-head-size", "V no wider than K in a paged cache", what, width))
    return found


def _sinks_accepted(build: FlashAttnBuild, config: AttentionConfig, fa3_on_hopper: bool) -> str | None:
    """Return what this build takes instead of the layer's sinks, or None where it takes them."""
    most = build.sink_heads.value
    if not most:
        return "none"
    if build.version == 3 and not fa3_on_hopper:
        return "on compute capability 9.0 only"
    if config.num_heads > most:
        return f"at most {most}"
    if config.value_head_size != config.head_size and not build.sinks_with_other_v_size.value:
        return f"none with V head size {config.value_head_size} beside head size {config.head_size}"
    return None


def _v_head_sizes_accepted(head_size: int, v_head_size: int, fp8: bool, cached: bool) -> str | None:
    """Return what FA3 takes on Hopper instead, or None where the pair fits (hopper/flash_api.cpp 0251105, mha_fwd)."""
    if v_head_size % (16 if fp8 else 8):
        return f"multiples of {16 if fp8 else 8}"
    if head_size <= 64:
        # With FP8 the dispatch takes the 64 x 64 kernel whatever V is.
        if v_head_size > (64 if fp8 else 512):
            return f"V head sizes up to {64 if fp8 else 512} with head sizes up to 64"
        if cached and v_head_size > head_size:
            return "V no wider than K in a paged cache"
        return None
    if 128 < head_size <= 192 and 96 < v_head_size <= 128:
        return None
    return "V 104 to 128 with head sizes 136 to 192, V up to 512 with head sizes up to 64"


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashAttnOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Return the first installed build that runs the layer, or what each one lacks."""
    capability = device.compute_capability
    pins = pins_of("FLASH_ATTN", "version", options.version, options.provider)
    chosen = choose(
        builds_for(capability, config.batch_invariant),
        environment,
        lambda build: objections(build, config, capability),
        pins=pins,
        capability=capability,
    )
    apart = reasons_against_two_parts(config)
    if not isinstance(chosen, FlashAttnBuild):
        return [*chosen, *apart]
    if apart:
        return apart
    why = why_this_build(chosen, capability)
    if pins:
        why = describe_pins(pins)
    elif config.alibi:
        why = _WITH_ALIBI
    cached, fp8 = config.has_cache, config.kv_cache_dtype == "fp8_e4m3"
    notes = {
        _NARROW_V: cached and config.value_head_size < config.head_size,
        _CONVERTED: fp8 and config.dtype == "float16",
        _BF16_SINKS: config.sinks and chosen.version == 3,
        _SPLIT_BYTES: chosen.version == 3 and config.cuda_graph != "NEVER",
    }
    marks = {
        _WIDE_UNPROVEN: config.head_size > 256,
        _WRONG_ONCE: chosen.version == 3 and config.head_size == 192 and config.sliding_window is not None,
        INVARIANCE_UNPROVEN: config.batch_invariant and not proves_invariance(chosen, capability),
    }
    made = BackendPlan(
        kernel=kernel_of(chosen, cached, splits_keys=chosen.version != 4 or capability != HOPPER),
        path=chosen.kernel,
        because=why,
        query_dtype="fp8_e4m3" if fp8 else config.dtype,
        returns_lse=True,
        kv_layouts=LAYOUTS if cached else (),
        kernel_block_sizes=_PAGES[chosen.page_multiple.value] if cached else (),
        cuda_graph="UNIFORM_BATCH" if chosen.version == 2 else "ALWAYS",
        provider=chosen.provider,
        notes=(*notes_on_build(chosen, capability), *(note for note, holds in notes.items() if holds)),
        unverified=tuple(mark for mark, holds in marks.items() if holds),
    )
    return in_two_parts(made, config)


def compile_key(config: AttentionConfig) -> object:
    """Return what layers that share one compilation have in common; None: nothing is compiled."""
    # Only vLLM's FA2 compiles at its first call, from PTX above compute capability 8.x: once per head-size bucket,
    # dtype, causality and paging. On Hopper only layers with ALiBi run it, so the others have no key.
    if not config.alibi:
        return None
    bucket = next((size for size in (32, 64, 96, 128, 192, 256) if config.head_size <= size), 512)
    # A window makes the kernel's mask "local", which is among the non-causal ones.
    causal = config.attn_type == "decoder" and not config.non_causal and config.sliding_window is None
    return ("FA2", bucket, config.dtype, causal, config.has_cache)


FLASH_ATTN = BackendSpec(
    name="FLASH_ATTN",
    summary="FlashAttention 3 on Hopper, 4 on compute capability 10.x, 2 on 8.0 and up",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_flash_attn.runtime.flash_attn:FlashAttnBackend",
    libraries=LIBRARIES,
    options=FlashAttnOptions,
    compile_key=compile_key,
)
