"""``FLASHINFER_MLA``: dense multi-head latent attention, decode on the latent cache, prefill on full K and V."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from attn_select.backends.reasons import device_reasons
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
from attn_select.layer.layouts import MLA
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import (
    CONVERTED,
    LIBRARIES,
    MIB,
    MLA_CORE,
    PREFILL,
    RAN,
    pages,
)
from attn_select_flashinfer.facts.mla_kernels import (
    FA2,
    FA3,
    KERNELS,
    PREFILL_KERNELS,
    TILE,
    TRTLLM_GEN,
    DecodeFacts,
    MLAKernel,
    PrefillFacts,
    RaggedKernel,
    choose_kernel,
)

_VLLM_MLA = "vllm-project/vllm v1/attention/backends/mla/flashinfer_mla.py 0.33.0"
_CAPABILITIES = Fact(
    ComputeCapabilities((((8, 0), (12, 1)),)),
    f"{RAN} (fa2 and fa3); {MLA_CORE} (trtllm-gen on 10.x, XQA on 12.x); vLLM 0.33.0 offers it on 10.x only",
)

# What is not named is not served: the entries have no such argument.
DECODE = Capabilities(
    mla=True,
    compute_capabilities=_CAPABILITIES,
    dtypes=Fact(("bfloat16", "float16"), f"{MLA_CORE}; {RAN} (bfloat16)"),
    kv_cache_dtypes=Fact(
        ("bfloat16", "float16", "fp8_e4m3"), f"{MLA_CORE}; {RAN} (FP8 through fa3: relative error 3.6e-3)"
    ),
    head_sizes=Fact(HeadSizes((576, 320)), f"{MLA_CORE} supported_mla_head_dimensions"),
    block_sizes=Fact((64, 32, 16, 1), f"{RAN} (wrapper: any page size); {MLA_CORE}"),
    sinks=Fact(True, f"{MLA_CORE} (trtllm-gen)"),
    non_causal=Fact(True, f"{MLA_CORE} (wrapper: causal=False); {_VLLM_MLA} (one row per query token)"),
    batch_invariant=Fact(False, "flashinfer-ai/flashinfer #2107; vllm-project/vllm #28967"),
    per_head_quant_scales=Fact(True, "the latent is one KV head, so a scale per head is the scale of the tensor"),
    decode_context_parallel=Fact(True, f"{RAN} (wrapper returns the LSE); {MLA_CORE} (trtllm-gen too, XQA not)"),
    nan_tail_safe=Fact(
        False,
        "; ".join(
            f"{name}: {kernel.nan_tail_safe.value} ({kernel.nan_tail_safe.source})" for name, kernel in KERNELS.items()
        ),
    ),
    speculative_tokens=Fact(1024, f"{RAN} (wrapper, query length 3); {MLA_CORE} (trtllm-gen: any, XQA: 1)"),
)
PREFILL_CAPABILITIES = Capabilities(
    mla=True,
    reads_cache=False,
    compute_capabilities=Fact(
        _CAPABILITIES.value, f"{RAN} (fa2 and fa3 with 192 / 128); {PREFILL} (cutlass on 10.x and 11.0)"
    ),
    dtypes=Fact(("bfloat16", "float16"), f"{PREFILL}; {RAN} (bfloat16)"),
    kv_cache_dtypes=Fact(("bfloat16", "float16", "fp8_e4m3"), "prefill runs on decompressed K and V"),
    head_sizes=Fact(HeadSizes(), "prefill does not see the latent width"),
    block_sizes=Fact((1,), "prefill reads no cache"),
    sinks=Fact(True, f"{PREFILL} trtllm_ragged_attention_deepseek attention_sinks"),
    non_causal=Fact(True, f"{PREFILL} (causal=False)"),
    batch_invariant=Fact(False, "flashinfer-ai/flashinfer #2424; vllm-project/vllm #28967"),
    per_head_quant_scales=Fact(True, "prefill reads no quantised cache"),
    decode_context_parallel=Fact(True, f"{RAN} (returns the LSE)"),
)


class FlashInferMLAOptions(BackendOptions):
    """``[backends.FLASHINFER_MLA]``."""

    decode_kernel: Literal["auto", "trtllm-gen", "xqa", "fa3", "fa2"] = Field(
        "auto", description="the decode kernel; auto is the device's own where it runs the layer, else fa2"
    )
    prefill_kernel: Literal["auto", "trtllm-gen", "cutlass", "fa3", "fa2"] = Field(
        "auto", description="the kernel of ragged prefill; auto is the device's own where it runs the layer, else fa2"
    )
    workspace_bytes: Annotated[int, Field(ge=40 * MIB, le=1 << 40, strict=True)] | None = Field(
        None, description="decode scratch; left out: 128 MiB, 256 MiB where trtllm-gen returns the log-sum-exp"
    )
    device_scales: bool = Field(
        False,
        description="trtllm-gen reads FP8 scales from the device at each call, so that they may change between replays "
        "of a CUDA graph; else they are numbers",
    )
    skip_softmax_threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="approximate: trtllm-gen leaves out tiles of keys whose weights lie below this over the number of "
        "keys (arXiv 2512.12087); left out: none",
    )


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashInferMLAOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Plan one phase: which kernel, and why; or every reason why none runs."""
    capability = device.compute_capability
    if capability is None or capability < (8, 0):
        return device_reasons(DECODE.compute_capabilities.value, device)
    if phase == "prefill":
        ragged = choose_kernel(phase, options.prefill_kernel, PREFILL_KERNELS, config, device, environment)
        return ragged if isinstance(ragged, list) else _prefill_plan(config, *ragged)
    chosen = choose_kernel(phase, options.decode_kernel, KERNELS, config, device, environment)
    if isinstance(chosen, list):
        return chosen
    if options.skip_softmax_threshold is not None and chosen[0] is not TRTLLM_GEN:
        message = f"skip_softmax_threshold is trtllm-gen's, and {chosen[0].path} runs these layers"
        remedy = "leave backends.FLASHINFER_MLA.skip_softmax_threshold out"
        return [Reason("forced-path", message, options.skip_softmax_threshold, None, remedy)]
    return _decode_plan(config, *chosen, options, capability[0] >= 10)


def _prefill_plan(config: AttentionConfig, kernel: PrefillFacts, because: str) -> BackendPlan:
    return BackendPlan(
        kernel=RaggedKernel(kernel.name),
        path=kernel.path,
        because=because,
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=(),
        kernel_block_sizes=(),
        cuda_graph="UNIFORM_BATCH",
        workspace_bytes=kernel.workspace_bytes,
        notes=(kernel.workspace_note,),
    )


_NOT_BLACKWELLS = "fa2 was not made for Blackwell and is slow there with MLA layers"
_FA2_UNPROVEN = "fa2 decode of MLA layers was never executed on compute capability 10.x or newer"
_SLOW_FP8 = (
    "with an FP8 cache fa3 takes 2.3 times as long as with bfloat16 (H100, 64 requests of 4096 tokens, 128 heads)"
)
_BY_TOKEN = f"draft tokens run as requests of their own where their heads do not fill tiles of {TILE.value} rows"
_APPROXIMATE = "results are approximate: skip_softmax_threshold leaves out tiles of keys with small weights"
_LSE_256 = "the workspace is 256 MiB because trtllm-gen keeps softmax statistics in it for the log-sum-exp"


def _decode_plan(
    config: AttentionConfig, kernel: DecodeFacts, because: str, options: FlashInferMLAOptions, blackwell: bool
) -> BackendPlan:
    fp8 = config.kv_cache_dtype == "fp8_e4m3"
    fp8_query = fp8 and kernel.fp8_query
    sizes = pages(kernel.pages.value, config.block_size)
    workspace, level, notes = kernel.workspace_bytes, kernel.cuda_graph, [kernel.workspace_note]
    if kernel is TRTLLM_GEN and config.decode_context_parallel_size > 1:
        workspace, level = 2 * workspace, "UNIFORM_SINGLE_TOKEN_DECODE"
        if not options.workspace_bytes:
            notes.append(_LSE_256)
    heads, native = kernel.heads(config.num_heads), kernel in (FA2, FA3)
    others = {
        _APPROXIMATE: options.skip_softmax_threshold is not None,
        _NOT_BLACKWELLS: blackwell and kernel is FA2,
        CONVERTED: config.dtype == "float16" and fp8_query,
        _SLOW_FP8: kernel is FA3 and fp8,
        _BY_TOKEN: native and config.num_speculative_tokens > 0 and TILE.value % config.num_heads != 0,
        f"query heads are padded from {config.num_heads} to {heads}": heads != config.num_heads,
    }
    notes += [note for note, holds in others.items() if holds]
    return BackendPlan(
        kernel=MLAKernel(kernel.name, heads, fp8_query),
        path=kernel.path,
        because=because,
        query_dtype="fp8_e4m3" if fp8_query else config.dtype,
        returns_lse=kernel.returns_lse,
        kv_layouts=(MLA,),
        kernel_block_sizes=sizes,
        cuda_graph=level,
        workspace_bytes=options.workspace_bytes or workspace,
        nan_tail_safe=kernel.nan_tail_safe.value,
        block_table_width_multiple=128 // min(sizes) if kernel.aligned_tables.value else 1,
        notes=tuple(notes),
        unverified=(_FA2_UNPROVEN,) if blackwell and kernel is FA2 else (),
    )


def compile_key(config: AttentionConfig) -> object:
    """Return what FlashInfer compiles one module for: dtypes and MLA dimensions; for XQA the page too."""
    return (
        config.dtype,
        config.kv_cache_dtype,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.v_head_dim,
        config.block_size,
    )


FLASHINFER_MLA = BackendSpec(
    name="FLASHINFER_MLA",
    summary="FlashInfer MLA: trtllm-gen on 10.x, fa3 on 9.x, XQA on 12.x, fa2 elsewhere",
    capabilities={"prefill": PREFILL_CAPABILITIES, "decode": DECODE},
    plan=plan,
    load="attn_select_flashinfer.runtime.mla:FlashInferMLABackend",
    libraries=LIBRARIES,
    options=FlashInferMLAOptions,
    compile_key=compile_key,
)
