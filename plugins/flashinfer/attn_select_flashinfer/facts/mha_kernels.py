"""Which of FlashInfer's kernels runs a phase of ``FLASHINFER``, and what each cannot.

*TRT-LLM.* Two kernels stand behind FlashInfer's TRT-LLM entries: trtllm-gen (prebuilt, compute capability 10.0 and
10.3, both phases) and XQA (compiled at first use, 9.x and 12.x, decode only). ``_obstacles`` says what they cannot run,
``_why_trtllm`` why they run what native kernels could run too. Both follow
``use_trtllm_attention`` and the metadata builder in vLLM 0.33.0 (utils/flashinfer.py, v1/attention/backends/
flashinfer.py). One condition there, that KV heads divide query heads, is left out: every ``AttentionConfig`` fulfils
it.

*Native.* fa2 and fa3. Prefill goes through ``BatchPrefillWithPagedKVCacheWrapper``, decode through
``BatchDecodeWithPagedKVCacheWrapper`` with tensor cores. On fa2 and fa3 both ignore their ``sinks`` argument. The
prefill wrapper compiled with the variant that counts sinks (``jit_args``) runs both phases then. Where an option asks
for it, the decode wrapper runs CuTe DSL's kernel on 10.0 and 10.3, which takes sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from attn_select.backends.reasons import unsupported
from attn_select.backends.spec import BackendOptions, Fact, Reason
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import (
    FP8_WINDOW_FA3,
    GEN_DRAFTS,
    GEN_DRAFTS_RIGHT,
    HEAD_512_BELOW_SM100,
    HEAD_512_FP8_BELOW_SM100,
    MIB,
    RAN,
    TRTLLM_GEN_CAPABILITIES,
    TURING,
    XQA_DRAFT_MASK_FP8,
    XQA_DRAFT_WINDOW,
    page_reasons,
    release,
    text_of,
    upgrade,
    wrong_release,
)

TrtllmName = Literal["trtllm-gen", "xqa"]

GEN_PAGES = (16, 32, 64)
"""trtllm-gen pages. Larger ones exist, but above 128 they read wrong blocks (flashinfer-ai/flashinfer #4347).

With head size 256, pages of 16 gave wrong values in 0.4.1 (flashinfer-ai/flashinfer #1993). #2137 repaired them,
FlashInfer tests both together (tests/attention/test_trtllm_gen_attention.py), and vllm-project/vllm #36987 ran them on
a B200.
"""
XQA_PAGES = (16, 32, 64, 128)
CUTE_DSL = "flashinfer-ai/flashinfer flashinfer/cute_dsl/attention/wrappers/batch_decode.py 0.7.2.post1"
CUTE_DSL_RELEASES = Fact(">=0.7.2", f"{CUTE_DSL}; 0.6.14 has no such back end of the decode wrapper")
CUTE_DSL_PAGES = Fact((64, 32, 16, 8), f"{CUTE_DSL} BatchDecodePagedCuteDSLWrapper.plan")
NATIVE_PAGES = (16, 32, 64, 1)
"""Any page size runs (H100, flashinfer 0.6.14: 1, 5, 8, 16, 24, 32, 64)."""


NAN_TAIL_SAFE = {
    "fa2": Fact(
        True, "flashinfer include/flashinfer/attention/prefill.cuh v0.6.14 page_produce_kv: zeros behind the end of V"
    ),
    "fa3": Fact(
        True,
        "flashinfer include/flashinfer/attention/hopper v0.6.14 sparse_mainloop.cuh and "
        "quantization/mainloop_sparse_load.cuh: cp_async_zfill in the last tile",
    ),
    "xqa": Fact(True, "flashinfer csrc/xqa/mhaUtils.cuh v0.6.14 copyPartialHeadsAsync: zeros behind the end of V"),
    "xqa, FP8 on 9.x": Fact(
        False, f"flashinfer csrc/xqa/mha_sm90.cu v0.6.14: whole pages by TMA, scores alone are masked; {RAN}: NaN"
    ),
    "cute-dsl": Fact(
        False,
        "flashinfer/cute_dsl/attention/gqa_decode_paged.py 0.7.2.post1: whole pages by TMA, scores alone are masked",
    ),
    "trtllm-gen": Fact(
        False, "whole pages by TMA: vllm-project/vllm #43990 (decode, FP8), NVIDIA/TensorRT-LLM #18925 (prefill)"
    ),
}
"""Whether NaN behind a sequence's end in its last page leaves the result alone, by kernel."""


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """fa2, fa3 or CuTe DSL's decode as a plan names it."""

    backend: Literal["fa2", "fa3", "cute-dsl"]  # FlashInfer's name of the kernel
    sinks: bool = False  # whether it counts attention sinks: of fa2 and fa3 a variant does
    fp8_query: bool = False  # whether it takes an FP8 query

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return f"native-{self.backend}"

    def __str__(self) -> str:
        return f"native {self.backend}{' with sinks' if self.sinks else ''}"


@dataclass(frozen=True, slots=True)
class TrtllmKernel:
    """A TRT-LLM kernel as a plan names it; ``fp8_query``: whether it takes an FP8 query."""

    name: TrtllmName
    fp8_query: bool = False

    def __str__(self) -> str:
        return "TRT-LLM (XQA)" if self.name == "xqa" else f"TRT-LLM ({self.name})"


Bytes = Annotated[int, Field(ge=16 * MIB, le=1 << 40, strict=True)]


class FlashInferOptions(BackendOptions):
    """``[backends.FLASHINFER]``."""

    use_trtllm: Literal["auto", True, False] = Field(
        "auto", description="TRT-LLM kernels (trtllm-gen, XQA) in every phase, in none, or where they are preferred"
    )
    prefill_kernel: Literal["auto", "fa2", "fa3"] = Field(
        "auto", description="the kernel of native prefill; auto is fa3 on Hopper where it runs the layer, else fa2"
    )
    decode_kernel: Literal["auto", "cute-dsl"] = Field(
        "auto", description="cute-dsl: decodes on compute capability 10.0 and 10.3 by CuTe DSL's kernel"
    )
    native_workspace_bytes: Bytes | None = Field(
        None, description="scratch of the native wrappers; left out: 394 MiB, 2 GiB for batch-invariant layers"
    )
    trtllm_workspace_bytes: Bytes = Field(
        394 * MIB,
        description="the zeroed buffer of the TRT-LLM kernels; prefill by trtllm-gen with log-sum-exp needs 9 MiB and "
        "8 bytes per query head, request and token of the longest query, counted in 256s",
    )


class Case(NamedTuple):
    """One phase of one layer on one device."""

    config: AttentionConfig
    phase: Phase
    capability: tuple[int, int]
    options: FlashInferOptions
    environment: Environment

    @property
    def kernel(self) -> TrtllmName | None:
        """The TRT-LLM kernel that the device has for the phase."""
        if self.capability in TRTLLM_GEN_CAPABILITIES:
            return "trtllm-gen"
        return "xqa" if self.phase == "decode" and self.capability[0] in (9, 12) else None


def fp8_query(config: AttentionConfig, kernel: TrtllmName | None) -> bool:
    """Whether the kernel wants an FP8 query: trtllm-gen does with an FP8 cache, XQA never."""
    return kernel == "trtllm-gen" and config.kv_cache_dtype == "fp8_e4m3"


def nan_tail_safe(case: Case) -> bool:
    """Whether the TRT-LLM kernel of a phase is safe from NaN behind a sequence's end."""
    if case.kernel == "xqa" and case.capability[0] == 9 and case.config.kv_cache_dtype == "fp8_e4m3":
        return NAN_TAIL_SAFE["xqa, FP8 on 9.x"].value
    return NAN_TAIL_SAFE[case.kernel or ""].value


def decide(case: Case) -> tuple[bool, str] | list[Reason]:
    """Return whether TRT-LLM kernels run a phase, and why; or, where an option asks for them, every reason why not."""
    if case.phase == "decode" and case.options.decode_kernel == "cute-dsl":
        return False, 'decode_kernel = "cute-dsl"'
    if case.options.use_trtllm is False:
        return False, "use_trtllm = false"
    against = _obstacles(case)
    if not against:
        return True, _why_trtllm(case)
    if case.options.use_trtllm != "auto":
        remedy = 'backends.FLASHINFER.use_trtllm = "auto"'
        return [Reason("forced-path", f"use_trtllm = true, but {why}", True, why, remedy) for why in against]
    return False, against[0]


def _obstacles(case: Case) -> list[str]:
    """Return what TRT-LLM kernels cannot run of a layer, most general first."""
    # Sources: files of flashinfer-ai/flashinfer 0.6.14, and of vLLM 0.33.0 utils/flashinfer.py.
    config, before, hopper = case.config, release(case.environment), case.capability[0] == 9
    xqa, gen, decode = case.kernel == "xqa", case.kernel == "trtllm-gen", case.phase == "decode"
    drafts, window, size = config.num_speculative_tokens, config.sliding_window is not None, config.block_size
    e4m3, ranks = config.kv_cache_dtype == "fp8_e4m3", config.decode_context_parallel_size
    output = config.output_quantization
    against = {
        # vLLM supports_trtllm_attention; include/flashinfer/trtllm/fmha v0.6.14; flashinfer/xqa.py 0.6.14
        "TRT-LLM kernels are for compute capability 10.0 and 10.3, and for decode on 9.x and 12.x": case.kernel is None,
        # vLLM supports_trtllm_attention
        "the TRT-LLM kernels split the KV by the load, so results depend on the batch": config.batch_invariant,
        # decode.py and prefill.py: no such argument
        "TRT-LLM kernels take no logits soft cap": config.logits_soft_cap is not None,
        # vLLM use_trtllm_attention; decode.py: xqa raises for return_lse
        "decode context parallelism: XQA returns no log-sum-exp, and TRT-LLM prefill is not combined across ranks": (
            ranks > 1 and (xqa or not decode)
        ),
        # vLLM build: causal and use_trtllm_attention(...); csrc/trtllm_fmha_kernel_launcher.cu: a causal mask in decode
        "trtllm-gen is used for causal attention only": gen and config.non_causal,
        # flashinfer csrc/xqa/mha_sm90.cu v0.6.14: a mask that is not causal goes with no sliding window
        "XQA's window cannot hide keys behind a draft token": xqa and drafts > 0 and config.non_causal and window,
        # include/flashinfer/trtllm/fmha/fmhaRunner.cuh v0.6.14; jit/xqa.py takes e5m2 for bfloat16 (ran on H100: wrong)
        "TRT-LLM kernels read no fp8_e5m2 cache": config.kv_cache_dtype == "fp8_e5m2",
        # jit/xqa.py; ran on H100 (XQA: 64, 128, 256); flashinfer tests/attention v0.6.14 (trtllm-gen: 512)
        "XQA takes head sizes up to 256": xqa and config.head_size > 256,
        # jit/xqa.py; ran on H100 (XQA: 16, 32, 64, 128; 8 raises); flashinfer tests/attention v0.6.14 (trtllm-gen)
        "TRT-LLM kernels take pages of 16, 32 and 64 tokens": size is not None and size % 16 != 0,
        # Ran on H100: 16 and 32 run, 48 and 71 do not compile; 64 with 16 bits
        "XQA takes at most 32 query heads per KV head": xqa and config.num_heads > 32 * config.num_kv_heads,
        "XQA before flashinfer-python 0.6.16 gives all draft tokens the last one's window": (
            xqa and drafts > 0 and window and before < XQA_DRAFT_WINDOW.value
        ),
        "XQA before flashinfer-python 0.6.16 masks drafts causally with an FP8 cache on compute capability 9.x": (
            xqa and drafts > 0 and config.non_causal and e4m3 and hopper and before < XQA_DRAFT_MASK_FP8.value
        ),
        "trtllm-gen before flashinfer-python 0.6.18 mixes up the requests of a batch in decodes of 5 and more tokens": (
            gen and decode and drafts + 1 > GEN_DRAFTS_RIGHT and before < GEN_DRAFTS.value
        ),
        # decode.py and prefill.py (query must be FP8); ran on H100 (XQA to FP8: relative error 4.3e-2)
        "TRT-LLM kernels quantise the output only with an fp8_e4m3 cache, and XQA only to FP8": (
            output != "none" and (not e4m3 or (xqa and output != "fp8"))
        ),
        # decode.py and prefill.py: bmm1_scale and bmm2_scale are scalars
        "TRT-LLM kernels take one scale per tensor": config.per_head_quant_scales,
    }
    return [why for why, holds in against.items() if holds]


def _why_trtllm(case: Case) -> str:
    """Return why TRT-LLM kernels run what native ones could run too: ``use_trtllm_attention`` in vLLM."""
    config = case.config
    if config.num_speculative_tokens and case.phase == "decode":
        return "draft tokens are decoded by TRT-LLM kernels, in CUDA graphs too"
    if fp8_query(config, case.kernel):
        return "the cache is quantised and trtllm-gen reads it with an FP8 query"
    if config.sinks:
        return "TRT-LLM kernels take attention sinks"
    if case.options.use_trtllm is True:
        return "use_trtllm = true"
    if case.phase == "prefill":
        return "auto: prefill takes trtllm-gen with an unquantised cache"
    if config.kv_cache_dtype == "fp8_e4m3":
        return "auto: XQA decodes an FP8 cache"
    # vLLM FlashInferMetadataBuilder.__init__
    return "auto: decode takes TRT-LLM kernels where they run, because one path serves all batches of a builder"


def choose_native(case: Case) -> tuple[NativeKernel, str] | list[Reason]:
    """Return the native kernel that runs a phase and why, or every reason why none does."""
    config = case.config
    reasons = _objections(case)
    if case.phase == "decode":
        if case.options.decode_kernel == "cute-dsl":
            reasons += _against_cute_dsl(case)
            return reasons or (NativeKernel("cute-dsl", config.sinks), "CuTe DSL's decode for Blackwell")
        if config.per_head_quant_scales:
            # Only fa3 with an FP8 query takes a scale per head; the decode wrapper reaches it too.
            return reasons or (NativeKernel("fa3", False, True), "one FP8 scale per KV head")
        return reasons or (NativeKernel("fa2", config.sinks), "decode runs on fa2's tensor-core kernel")
    against_fa3 = _against_fa3(case)
    if case.options.prefill_kernel == "fa3" and against_fa3 is not None:
        text, remedy = f'prefill_kernel = "fa3", but {against_fa3}', 'backends.FLASHINFER.prefill_kernel = "auto"'
        return [*reasons, Reason("forced-path", text, "fa3", ["auto", "fa2"], remedy)]
    if against_fa3 is None and case.options.prefill_kernel != "fa2":
        why = 'prefill_kernel = "fa3"' if case.options.prefill_kernel == "fa3" else "fa3 is Hopper's own kernel"
        return reasons or (NativeKernel("fa3", config.sinks, config.kv_cache_dtype == "fp8_e4m3"), why)
    if config.batch_invariant:
        text = "native fa2 prefill is not batch-invariant: its query tile follows the mean query length of the batch"
        supported = "native fa3 prefill (compute capability 9.x), native fa2 decode"
        reasons.append(Reason("batch-invariant", text, True, supported))
    return reasons or (NativeKernel("fa2", config.sinks), against_fa3 or 'prefill_kernel = "fa2"')


def _against_cute_dsl(case: Case) -> list[Reason]:
    """Return everything that CuTe DSL's decode kernel cannot run; ``CUTE_DSL`` is the source."""
    config = case.config
    reasons = wrong_release(case.environment, "CuTe DSL's decode", CUTE_DSL_RELEASES)
    reasons += page_reasons(CUTE_DSL_PAGES.value, config.block_size)
    against = {
        "it is for compute capability 10.0 and 10.3": case.capability not in TRTLLM_GEN_CAPABILITIES,
        "use_trtllm = true asks for TRT-LLM kernels": case.options.use_trtllm is True,
        "it takes queries of one token, and the layer has drafts": config.num_speculative_tokens > 0,
        "it reads no quantised cache here": config.cache_dtype != config.dtype,
        "it has no logits soft cap": config.logits_soft_cap is not None,
        "it splits keys by the load, so results depend on the batch": config.batch_invariant,
    }
    remedy = 'backends.FLASHINFER.decode_kernel = "auto"'
    reasons += [
        Reason("forced-path", f'decode_kernel = "cute-dsl", but {why}', "cute-dsl", ["auto"], remedy)
        for why, holds in against.items()
        if holds
    ]
    return reasons


def _against_fa3(case: Case) -> str | None:
    """Return the first thing that keeps prefill off fa3, or None."""
    # Sources: ``is_fa3_backend_supported`` in flashinfer/utils.py 0.6.14, include/flashinfer/attention/hopper/ v0.6.14.
    # The FP8 kernels there take FP8 queries and have no soft cap (jit/attention/modules.py 0.6.14); a sink variant of
    # them does not compile (H100, flashinfer 0.6.14, 2026-11-21).
    config = case.config
    if case.capability[0] != 9:
        return "fa3 is for compute capability 9.x only"
    if config.head_size > 256:
        return "fa3 takes head sizes up to 256"
    cache = config.kv_cache_dtype
    if cache == "fp8_e4m3":
        if config.logits_soft_cap is not None:
            return "fa3 has no soft cap with FP8"
        if config.sinks:
            return "fa3 has no attention sinks with FP8"
        if config.sliding_window is not None and release(case.environment) < FP8_WINDOW_FA3.value:
            return "fa3 hangs on FP8 with a sliding window before flashinfer-python 0.6.15"
    elif cache == "fp8_e5m2":
        return "fa3 reads no fp8_e5m2 cache"
    return None


def against_turing(config: AttentionConfig, environment: Environment) -> list[Reason]:
    """Return what keeps a layer off compute capability 7.5, where fa2 is all there is."""
    # Sources: bfloat16 MMA needs 8.0 (flashinfer include/flashinfer/mma.cuh v0.7.2.post1); head sizes above 256 do not
    # fit the shared memory (vllm-project/vllm #55380).
    reasons: list[Reason] = []
    where = "on compute capability 7.5"
    if config.dtype != "float16":
        reasons.append(unsupported("dtype", f"{where} dtype", config.dtype, ["float16"], "--dtype float16"))
    if config.head_size > 256:
        reasons.append(unsupported("head-size", f"{where} head size", config.head_size, "64, 128, 256"))
    if release(environment) < TURING.value:
        version, least = environment.version("flashinfer-python"), text_of(TURING)
        text = f"flashinfer-python {version} {where} (needed: {least})"
        reasons.append(Reason("library-version", text, version, least, upgrade(TURING)))
    return reasons


def _objections(case: Case) -> list[Reason]:
    """Return what no native kernel runs."""
    config, reasons = case.config, list[Reason]()
    cache, output = config.kv_cache_dtype, config.output_quantization
    if config.sinks and config.logits_soft_cap is not None:
        text = "native kernels take no attention sinks together with a logits soft cap"
        reasons.append(Reason("sinks", text, True, False))
    if config.sinks and config.decode_context_parallel_size > 1:
        text = "native kernels take no attention sinks with decode context parallelism: each rank would count them"
        reasons.append(Reason("sinks", text, True, False, "--dcp 1"))
    # A single query is its sequence's last token, which has no keys behind it.
    alone = case.phase == "decode" and not config.num_speculative_tokens
    if config.non_causal and config.sliding_window is not None and not alone:
        text = "native kernels run no non-causal attention with a sliding window: they cannot hide keys behind a query"
        reasons.append(Reason("non-causal", text, True, False))
    if output != "none":
        # Where TRT-LLM kernels could quantise the output, what they lack is usually the FP8 cache.
        lacks_fp8 = cache != "fp8_e4m3" and case.capability[0] == 10
        remedy = "--kv-cache-dtype fp8_e4m3" if lacks_fp8 else "--output-quantization none"
        reasons.append(unsupported("output-quantization", "native kernels' output dtype", output, ["none"], remedy))
    if config.per_head_quant_scales and (why := _against_per_head(case)) is not None:
        text = f"quantisation scales per head cannot be used: {why}"
        reasons.append(Reason("per-head-quant-scales", text, True, False))
    if config.head_size > 256 and case.capability[0] < 10:
        needed = HEAD_512_FP8_BELOW_SM100 if cache.startswith("fp8") else HEAD_512_BELOW_SM100
        if release(case.environment) < needed.value:
            where = f"with this cache below compute capability 10.0 (needs flashinfer-python {text_of(needed)})"
            text = f"head size {config.head_size} {where}"
            reasons.append(Reason("head-size", text, config.head_size, "64, 128, 256", upgrade(needed)))
    return reasons


def _against_per_head(case: Case) -> str | None:
    if case.capability[0] != 9:
        return "only native fa3 takes them, on compute capability 9.x"
    if (cache := case.config.kv_cache_dtype) != "fp8_e4m3":
        return f"native fa3 takes them with an fp8_e4m3 cache, not {cache}"
    if case.phase == "prefill" and case.options.prefill_kernel == "fa2":
        return 'prefill_kernel = "fa2", and only fa3 takes them'
    return _against_fa3(case)
