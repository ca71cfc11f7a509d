"""FlashInfer's native kernels, fa2 and fa3: which one runs a phase of ``FLASHINFER``, and what neither can.

Prefill goes through ``BatchPrefillWithPagedKVCacheWrapper``, decode through ``BatchDecodeWithPagedKVCacheWrapper`` with
tensor cores. On fa2 and fa3 both ignore their ``sinks`` argument; the prefill wrapper compiled with the variant that
counts them (``jit_args``) runs both phases.
"""

from __future__ import annotations

from typing import NamedTuple

from attn_select.spec import Reason
from attn_select_flashinfer.case import Case, PrefillKernel
from attn_select_flashinfer.common import (
    FP8_WINDOW_FA3,
    HEAD_512_BELOW_SM100,
    HEAD_512_FP8_BELOW_SM100,
    release,
    upgrade,
)

WITH_SINKS = " with sinks"
"""Ends the path of a plan whose kernel is the variant with attention sinks."""
NATIVE_PAGES = (16, 32, 64, 1)
"""Any page size runs (H100, flashinfer 0.6.14: 1, 5, 8, 16, 24, 32, 64)."""


class Native(NamedTuple):
    """The native kernel of one phase: ``fa2`` or ``fa3``, why, its query dtype, whether it counts sinks."""

    kernel: str
    because: str
    query_dtype: str
    sinks: bool


def choose(case: Case) -> Native | list[Reason]:
    """Return the native kernel that runs a phase, or every reason why none does."""
    config = case.config
    reasons = _objections(case)
    against_fa3 = _against_fa3(case)
    if case.phase == "decode":
        if config.per_head_quant_scales:
            # Only fa3 with an FP8 query takes a scale per head; the decode wrapper reaches it too.
            chosen = Native("fa3", "one FP8 scale per KV head", "fp8_e4m3", False)
        else:
            chosen = Native("fa2", "decode runs on fa2's tensor-core kernel", config.dtype, config.sinks)
    elif case.prefill_kernel == "fa3" and against_fa3 is not None:
        reasons.append(_forced(case.prefill_kernel, against_fa3))
        return reasons
    elif against_fa3 is None and case.prefill_kernel != "fa2":
        query = "fp8_e4m3" if config.kv_cache_dtype == "fp8_e4m3" else config.dtype
        why = 'prefill_kernel = "fa3"' if case.prefill_kernel == "fa3" else "fa3 is Hopper's own kernel"
        chosen = Native("fa3", why, query, config.sinks)
    else:
        chosen = Native("fa2", against_fa3 or 'prefill_kernel = "fa2"', config.dtype, config.sinks)
    if config.batch_invariant and case.phase == "prefill" and chosen.kernel == "fa2":
        reasons.append(
            Reason(
                "batch-invariant",
                "no batch invariance in native fa2 prefill: its query tile follows the batch's mean query length",
                True,
                "native fa3 prefill (compute capability 9.x), native fa2 decode",
            )
        )
    return reasons or chosen


def _against_fa3(case: Case) -> str | None:
    """Return the first thing that keeps prefill off fa3, or None.

    Sources: ``is_fa3_backend_supported`` in flashinfer/utils.py 0.6.14, include/flashinfer/attention/hopper/ v0.6.14.
    The FP8 kernels there take FP8 queries and have no soft cap (jit/attention/modules.py 0.6.14); a sink variant of
    them does not compile (H100, flashinfer 0.6.14, 2026-11-21).
    """
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
    elif cache in ("fp8_e5m2", "nvfp4"):
        return f"fa3 reads no {cache} cache"
    return None


def _objections(case: Case) -> list[Reason]:
    config = case.config
    reasons: list[Reason] = []
    major, cache = case.capability[0], config.kv_cache_dtype
    if config.sinks:
        if config.logits_soft_cap is not None:
            reasons.append(Reason("sinks", "attention sinks go with no logits soft cap in native kernels", True, False))
        if config.decode_context_parallel_size > 1:
            message = "attention sinks are not split over decode context parallel ranks"
            reasons.append(Reason("sinks", message, True, False, "--dcp 1"))
    if config.non_causal and config.sliding_window is not None and not _last_token_alone(case):
        message = "no non-causal attention with a sliding window: native kernels hide no keys behind a query"
        reasons.append(Reason("non-causal", message, True, False))
    if config.output_quantization != "none":
        message = f"native kernels write float16 and bfloat16, not {config.output_quantization}"
        reasons.append(
            Reason("output-quantization", message, config.output_quantization, ["none"], _output_remedy(case))
        )
    if config.per_head_quant_scales and (why := _against_per_head(case)) is not None:
        reasons.append(Reason("per-head-quant-scales", f"no per-head quantisation scales: {why}", True, False))
    if cache == "nvfp4":
        _nvfp4(case, reasons)
    if config.head_size > 256 and major < 10 and cache != "nvfp4":
        needed = HEAD_512_BELOW_SM100 if not cache.startswith("fp8") else HEAD_512_FP8_BELOW_SM100
        if release(case.environment) < needed.value:
            least = ".".join(map(str, needed.value))
            where = "with this cache below compute capability 10.0"
            message = f"head size {config.head_size} {where} needs flashinfer-python {least}"
            reasons.append(Reason("head-size", message, config.head_size, "64, 128, 256", upgrade(needed)))
    return reasons


def _last_token_alone(case: Case) -> bool:
    """Whether every query is its sequence's last token, which has no keys behind it."""
    return case.phase == "decode" and not case.config.num_speculative_tokens


def _against_per_head(case: Case) -> str | None:
    if case.capability[0] != 9:
        return "only native fa3 takes them, on compute capability 9.x"
    if (cache := case.config.kv_cache_dtype) != "fp8_e4m3":
        return f"native fa3 takes them with an fp8_e4m3 cache, not {cache}"
    if case.phase == "prefill" and case.prefill_kernel == "fa2":
        return 'prefill_kernel = "fa2", and only fa3 takes them'
    return _against_fa3(case)


def _output_remedy(case: Case) -> str:
    # Where TRT-LLM kernels could quantise the output, what they lack is usually the FP8 cache.
    if case.config.kv_cache_dtype != "fp8_e4m3" and case.capability[0] == 10:
        return "--kv-cache-dtype fp8_e4m3"
    return "--output-quantization none"


def _nvfp4(case: Case, reasons: list[Reason]) -> None:
    """Add what keeps fa2 from an NVFP4 cache: limits of vLLM 0.33.0 flashinfer.py (head size 128 ran on H100)."""
    config, major, remedy = case.config, case.capability[0], "--kv-cache-dtype auto"
    if major not in (8, 9, 12):
        message = "native kernels read an nvfp4 cache on compute capability 8.x, 9.x and 12.x"
        reasons.append(Reason("kv-cache-dtype", message, "nvfp4", ["8.x", "9.x", "12.x"], remedy))
        return
    if config.head_size == 64:
        message = "fa2 misreads an nvfp4 cache at head size 64"
        reasons.append(Reason("kv-cache-dtype", message, "nvfp4", "head sizes 128 and 256", remedy))
    if config.sinks:
        reasons.append(Reason("kv-cache-dtype", "the variant with sinks reads no nvfp4 cache", "nvfp4", False, remedy))
    if config.decode_context_parallel_size > 1:
        reasons.append(
            Reason(
                "decode-context-parallel", "no decode context parallelism with an nvfp4 cache", "nvfp4", 1, "--dcp 1"
            )
        )
    if config.non_causal:
        reasons.append(Reason("non-causal", "no non-causal attention with an nvfp4 cache", "nvfp4", False, remedy))
    if config.head_size > 256 and (
        release(case.environment) < HEAD_512_BELOW_SM100.value or (case.phase == "decode" and major < 10)
    ):
        message = "fa2 reads nvfp4 at head size 512 in prefill since flashinfer-python 0.6.15, in decode on 12.x only"
        reasons.append(Reason("kv-cache-dtype", message, "nvfp4", "head sizes 128 and 256", remedy))


def _forced(kernel: PrefillKernel, why: str) -> Reason:
    message = f'prefill_kernel = "{kernel}", but {why}'
    return Reason("forced-path", message, kernel, ["auto", "fa2"], 'backends.FLASHINFER.prefill_kernel = "auto"')
