"""``FLASHINFER``: FlashInfer's native and TRT-LLM kernels for multi-head, grouped-query and multi-query attention."""

from __future__ import annotations

from attn_select.backends.draft_trees import IN_TWO_PARTS, in_two_parts, reasons_against_two_parts
from attn_select.backends.reasons import device_reasons
from attn_select.backends.spec import (
    BackendPlan,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Reason,
)
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.layouts import FLASHINFER_HND, FLASHINFER_NHD
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import (
    DECODE,
    FINITE_MASK,
    INT_WORKSPACE,
    JIT_ATTENTION,
    LAUNCHER,
    LIBRARIES,
    MIB,
    ONE_CACHE_DTYPE,
    PREFILL,
    RAN,
    TURING,
    VLLM,
    pages,
    release,
)
from attn_select_flashinfer.facts.mha_kernels import (
    CUTE_DSL_PAGES,
    GEN_PAGES,
    NAN_TAIL_SAFE,
    NATIVE_PAGES,
    XQA_PAGES,
    Case,
    FlashInferOptions,
    NativeKernel,
    TrtllmKernel,
    against_turing,
    choose_native,
    decide,
    fp8_query,
    nan_tail_safe,
)

CAPABILITIES = Capabilities(
    compute_capabilities=Fact(
        ComputeCapabilities((((7, 5), (12, 1)),)),
        f"{VLLM} supports_compute_capability (8.0 and up, for want of the repair that 7.5 needs); {TURING.source}",
    ),
    dtypes=Fact(("bfloat16", "float16"), f"{JIT_ATTENTION}; {RAN}"),
    kv_cache_dtypes=Fact(
        ("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"),
        f"{RAN} (e4m3 and e5m2 through fa2, e4m3 through fa3 and XQA); {LAUNCHER} (e4m3)",
    ),
    head_sizes=Fact(
        HeadSizes((64, 128, 256, 512)),
        f"flashinfer include/flashinfer/utils.cuh v0.6.14 DISPATCH_HEAD_DIM; {RAN} (80, 96 and 192 raise)",
    ),
    block_sizes=Fact((16, 32, 64, 1), f"{RAN} (native: any page size)"),
    attn_types=Fact(("decoder",), f"{VLLM} FlashInferImpl.__init__"),
    mixed_kv_cache_dtype=ONE_CACHE_DTYPE,
    v_head_size_differs=Fact(False, f"{DECODE}: plan takes one head_dim for K and V"),
    sliding_window=Fact(True, f"{RAN} (fa2, XQA); {PREFILL}"),
    logits_soft_cap=Fact(True, f"{RAN} (fa2); native kernels only"),
    alibi=Fact(
        False, f"{DECODE}: pos_encoding_mode ALIBI computes its own slopes and takes none; {VLLM} stores them unread"
    ),
    sinks=Fact(True, f"{RAN} (XQA; fa2 and fa3 by the prefill wrapper, compiled with sinks)"),
    mm_prefix=Fact(False, f"{VLLM}: not declared; fa2 would need a custom mask packed for every step"),
    non_causal=Fact(True, f"{RAN} (fa3, the variant with sinks, XQA with a full mask); {VLLM} supports_non_causal"),
    batch_invariant=Fact(
        True,
        f"{RAN} (fa2 decode with disable_split_kv: bitwise equal); fa3 prefill splits no KV "
        "(flashinfer include/flashinfer/attention/hopper v0.6.14); fa2 prefill: flashinfer-ai/flashinfer #2424",
    ),
    per_head_quant_scales=Fact(True, f"{RAN} (fa3 with an FP8 query: prefill and decode)"),
    output_quantizations=Fact(("fp8", "fp4"), f"{DECODE} and {PREFILL} out_dtype; {RAN} (XQA to FP8)"),
    draft_tree=Fact(True, f"{RAN} (native kernels, causal=False over the context, return the LSE): {IN_TWO_PARTS}"),
    decode_context_parallel=Fact(True, f"{RAN} (native kernels return the LSE, base 2); {LAUNCHER} (trtllm-gen too)"),
    nan_tail_safe=Fact(
        False, "; ".join(f"{name}: {fact.value} ({fact.source})" for name, fact in NAN_TAIL_SAFE.items())
    ),
    speculative_tokens=Fact(1024, f"{RAN} (XQA with a draft mask); native: drafts go through the prefill wrapper"),
)

_HND = (FLASHINFER_HND,)
_NHD_HND = (FLASHINFER_NHD, FLASHINFER_HND)

_SHARED = "the zeroed TRT-LLM buffer is shared by both phases and apart from native scratch"
_GEN_NOTES: dict[Phase, tuple[str, ...]] = {
    "prefill": ("chosen for each step: a step that is not causal runs natively", _SHARED),
    "decode": (_SHARED,),
}
_XQA_BUFFER = "XQA's zeroed buffer is apart from native scratch and holds its semaphores"
_XQA_SLOWER = "with 16-bit KV on an H100, native fa2 is 2 to 5 % faster (use_trtllm = false)"
_NATIVE_SCRATCH = "native scratch includes 8 MiB for the schedule; both phases share the rest"
_DRAFTS = "queries of more than one token go through the prefill wrapper"
_SINKS_UNPROVEN = "the kernel with attention sinks was executed on compute capability 9.0, never on 8.x"
_TURING_UNPROVEN = "FlashInfer was never executed on compute capability 7.5 by this project"
_CUTE_DSL_UNPROVEN = "FlashInfer's decode in CuTe DSL was never executed by this project"
# vllm-project/vllm #50331, open on 2026-11-28: "invalid resource handle" with 0.6.14 and 0.6.15.post1.
_GB10_UNPROVEN = "with heads of 256 and an FP8 cache a GB10 was seen to fail at the first request, cause unknown"
_FINITE_MASK = "a row whose products of query and key are all below -5e4 gives zeros before flashinfer-python 0.7.0"
_NO_SPLIT = "splits no KV (disable_split_kv)"


def plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashInferOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Plan one phase: native or TRT-LLM, which kernel, and why; or every reason why neither runs."""
    if config.draft_tree:
        return _tree_plan(config, device, environment, options, phase)
    capability = device.compute_capability
    if capability is None or capability < (7, 5):
        return device_reasons(CAPABILITIES.compute_capabilities.value, device)
    if capability < (8, 0) and (reasons := against_turing(config, environment)):
        return reasons
    case = Case(config, phase, capability, options, environment)
    decided = decide(case)
    if isinstance(decided, list):
        return decided
    use_trtllm, because = decided
    if use_trtllm:
        return _trtllm_plan(case, because)
    chosen = choose_native(case)
    return chosen if isinstance(chosen, list) else _native_plan(case, *chosen, because)


def _tree_plan(
    config: AttentionConfig, device: Device, environment: Environment, options: FlashInferOptions, phase: Phase
) -> BackendPlan | list[Reason]:
    """Plan a layer whose drafts form trees: native kernels attend to the context, by steps that are not causal."""
    reasons = reasons_against_two_parts(config)
    if options.decode_kernel != "auto":
        text = "trees of drafts run on fa2 and fa3, and decode_kernel is set to cute-dsl (supported: auto)"
        reasons.append(Reason("pinned-kernel", text, options.decode_kernel, ["auto"]))
    if options.use_trtllm is True:
        text = "trees of drafts run on native kernels, and use_trtllm is set to true (supported: auto, false)"
        reasons.append(Reason("pinned-kernel", text, True, ["auto", False]))
    context = config.model_copy(update={"draft_tree": False, "non_causal": True})
    native = options.model_copy(update={"use_trtllm": False, "decode_kernel": "auto"})
    found = plan(context, device, environment, native, phase)
    if isinstance(found, list):
        return [*found, *reasons]
    return reasons or in_two_parts(found, config)


def _trtllm_plan(case: Case, because: str) -> BackendPlan:
    config, phase = case.config, case.phase
    assert case.kernel is not None
    kernel = TrtllmKernel(case.kernel, fp8_query(config, case.kernel))
    xqa, fp8 = kernel.name == "xqa", config.kv_cache_dtype == "fp8_e4m3"
    notes = _GEN_NOTES[phase]
    if xqa:
        notes = (_XQA_BUFFER, _XQA_SLOWER) if case.capability[0] == 9 and not fp8 else (_XQA_BUFFER,)
    single = config.decode_context_parallel_size > 1 and phase == "decode"
    return BackendPlan(
        kernel=kernel,
        path=str(kernel),
        because=because,
        query_dtype="fp8_e4m3" if kernel.fp8_query else config.dtype,
        returns_lse=not xqa,
        kv_layouts=_NHD_HND if xqa else _HND,
        kernel_block_sizes=pages(XQA_PAGES if xqa else GEN_PAGES, config.block_size),
        cuda_graph="UNIFORM_SINGLE_TOKEN_DECODE" if single else "UNIFORM_BATCH",
        workspace_bytes=case.options.trtllm_workspace_bytes,
        notes=notes,
        nan_tail_safe=nan_tail_safe(case),
        rounds_to="fp8_e4m3" if xqa and config.cache_dtype == "fp8_e4m3" else None,
    )


def native_scratch(config: AttentionConfig, options: FlashInferOptions) -> int:
    """Return the bytes that native wrappers get for partial results."""
    return options.native_workspace_bytes or (2048 * MIB if config.batch_invariant else 394 * MIB)


def _native_plan(case: Case, kernel: NativeKernel, why: str, because: str) -> BackendPlan:
    """Return the plan of one phase with FlashInfer's own wrappers."""
    config, size, decode = case.config, case.config.block_size, case.phase == "decode"
    sizes = NATIVE_PAGES if size is None else tuple(dict.fromkeys((size, *NATIVE_PAGES)))
    if kernel.backend == "cute-dsl":
        sizes = CUTE_DSL_PAGES.value
    notes = [_NATIVE_SCRATCH]
    if decode and config.num_speculative_tokens:
        notes.append(_DRAFTS)
    if decode and config.batch_invariant:
        notes.append(_NO_SPLIT)
    if kernel.backend == "fa2" and release(case.environment) < FINITE_MASK.value:
        notes.append(_FINITE_MASK)
    return BackendPlan(
        kernel=kernel,
        path=str(kernel),
        because=f"{because}; {why}",
        query_dtype="fp8_e4m3" if kernel.fp8_query else config.dtype,
        returns_lse=True,
        kv_layouts=_HND if case.capability[0] == 10 else _NHD_HND,
        kernel_block_sizes=pages(sizes, size),
        cuda_graph="UNIFORM_SINGLE_TOKEN_DECODE" if decode else "UNIFORM_BATCH",
        workspace_bytes=native_scratch(config, case.options) + INT_WORKSPACE,
        notes=tuple(notes),
        nan_tail_safe=NAN_TAIL_SAFE[kernel.backend].value,
        unverified=_unproven(case, kernel),
    )


def _unproven(case: Case, kernel: NativeKernel) -> tuple[str, ...]:
    config, capability = case.config, case.capability
    if capability < (8, 0):
        return (_TURING_UNPROVEN,)
    if capability == (12, 1) and config.head_size == 256 and config.kv_cache_dtype.startswith("fp8"):
        return (_GB10_UNPROVEN,)
    if kernel.backend == "cute-dsl":
        return (_CUTE_DSL_UNPROVEN,)
    return (_SINKS_UNPROVEN,) if config.sinks and capability[0] == 8 else ()


def compile_key(config: AttentionConfig) -> object:
    """Return what FlashInfer compiles one module for: dtypes, head size and variants; for XQA group and page too."""
    return (
        config.dtype,
        config.kv_cache_dtype,
        config.head_size,
        config.sliding_window is not None,
        config.logits_soft_cap is not None,
        config.sinks,
        config.num_heads // config.num_kv_heads,
        config.block_size,
        config.num_speculative_tokens,
        config.output_quantization,
    )


FLASHINFER = BackendSpec(
    name="FLASHINFER",
    summary="FlashInfer: native fa2 and fa3, and TRT-LLM kernels (trtllm-gen on 10.x, XQA on 9.x and 12.x)",
    capabilities={"prefill": CAPABILITIES, "decode": CAPABILITIES},
    plan=plan,
    load="attn_select_flashinfer.runtime.mha:FlashInferBackend",
    libraries=LIBRARIES,
    options=FlashInferOptions,
    compile_key=compile_key,
)
