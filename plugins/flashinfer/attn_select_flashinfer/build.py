"""``FLASHINFER`` at build time: a step's batch becomes parts, each planned on the host.

Decodes come first. Their path is the decode plan's for good, since steps are captured; prefills follow the prefill
plan, but where that is trtllm-gen, a step that is not causal runs natively. Nothing here waits for the device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_select.runtime.backend import AttentionMetadataBuilder, BackendContext
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, prefix_sums, split_decodes_and_prefills
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select_flashinfer.common import INT_WORKSPACE, MIB
from attn_select_flashinfer.draft_mask import DraftMasks
from attn_select_flashinfer.metadata import FlashInferMetadata, Part, TRTLLMDecode, TRTLLMPrefill
from attn_select_flashinfer.mha import FlashInferOptions, native_scratch
from attn_select_flashinfer.native_build import NativeBuilder
from attn_select_flashinfer.trtllm import GEN_PATH, XQA_PATH
from attn_select_flashinfer.wrappers import NativeKernel, hnd_or_nhd

LEAST_SAVED = 256 * MIB
"""Bytes of keys and values that a cascade must spare from being read again. On an H100 (bfloat16, 32 and 8 heads of
128) it lost 2 % with 8 decodes at 112 MiB, 20 % with 32 at 124 MiB and 26 % with 128 at 127 MiB, and won 33, 60 and
24 % at 448, 496 and 508 MiB (``bench/bench_flashinfer.py --parts cascade``)."""
COUNTERS = 8 * MIB
"""What decode keeps zeroed at the start of the TRT-LLM buffer. Prefill writes softmax statistics from where its buffer
begins (csrc/trtllm_fmha_kernel_launcher.cu, csrc/xqa v0.6.14), so it gets what lies behind."""
NOT_CAUSAL = "step not causal"
_TRTLLM = (XQA_PATH, GEN_PATH)


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Builds the metadata of one kind of layers, for the step that is run next: its plans replace the last one's.

    Attributes:
        ran: how many steps each path took part in, by ``phase: path``; replayed steps count.
        native: what plans the native wrappers; None while no phase runs natively.
        workspace: the TRT-LLM kernels' zeroed buffer; None where no phase runs by them.
    """

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config, plans = context.config, context.plans
        self.ran: Counter[str] = Counter()
        native = {phase: plan for phase, plan in plans.items() if plan.path not in _TRTLLM}
        self._kernels = {
            phase: NativeKernel.of(plan, context, decode=phase == "decode") for phase, plan in native.items()
        }
        self._instead: NativeKernel | None = None
        self.native: NativeBuilder | None = None
        if native:
            scratch = max(plan.workspace_bytes for plan in native.values()) - INT_WORKSPACE
            self.native = NativeBuilder(context, scratch)
        trtllm = [plan.workspace_bytes for plan in plans.values() if plan.path in _TRTLLM]
        self.workspace: Tensor | None = None
        if trtllm:
            self.workspace = torch.zeros(max(trtllm), dtype=torch.uint8, device=context.device)
        self._xqa = "decode" in plans and plans["decode"].path == XQA_PATH
        self._causal_drafts = "decode" in plans and plans["decode"].path == GEN_PATH
        self._masks = DraftMasks(context.max_num_seqs, context.device)
        self._window_left = -1 if config.sliding_window is None else config.sliding_window - 1
        if "decode" in plans:
            # Batch-invariant drafts are prefills: the tile of fa2 would follow their number.
            self.reorder_batch_threshold = 1 + (0 if config.batch_invariant else config.num_speculative_tokens)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferMetadata:
        """As ``AttentionMetadataBuilder.build``; natively the last build's metadata alone can be run.

        Raises:
            BatchError: the step is not causal and its kernels have no such mask, or its schedule exceeds the scratch.
        """
        common = common_attn_metadata
        if common_prefix_len:
            cascade = self._native().cascade(common, self._kernels["decode"], common_prefix_len)
            return self._metadata(common, [cascade])
        return self._metadata(common, self._parts(common, capture=False))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashInferMetadata:
        """Return the metadata to capture with, and keep a wrapper for this batch size."""
        return self._metadata(common_attn_metadata, self._parts(common_attn_metadata, capture=True))

    def use_cascade_attention(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether to attend to a common prefix apart: the shared rule, natively, where ``LEAST_SAVED`` is spared."""
        kernel = self._kernels.get("decode")
        if kernel is None or len(self._kernels) < len(self.context.plans):
            return False
        token = 2 * kernel.num_kv_heads * kernel.head_size * kernel.cache_dtype.itemsize
        saved = (common_attn_metadata.num_reqs - 1) * common_prefix_len * token
        return saved >= LEAST_SAVED and super().use_cascade_attention(common_prefix_len, common_attn_metadata)

    def _metadata(self, common: CommonAttentionMetadata, parts: list[Part]) -> FlashInferMetadata:
        for part in parts:
            self.ran[f"{part.phase}: {part.path}"] += 1
        return FlashInferMetadata(self.context, common.num_actual_tokens, parts)

    def _native(self) -> NativeBuilder:
        if self.native is None:  # of prefill, which is not captured
            options = self.context.options
            assert isinstance(options, FlashInferOptions)
            self.native = NativeBuilder(self.context, native_scratch(self.context.config, options))
        return self.native

    def _parts(self, common: CommonAttentionMetadata, *, capture: bool) -> list[Part]:
        requests, tokens = common.num_reqs, common.num_actual_tokens
        decodes, decode_tokens = self._split(common) if tokens else (0, 0)
        parts: list[Part] = []
        kernel = self._kernels.get("decode")
        if decode_tokens and kernel is None:
            parts += self._trtllm_decodes(common, decodes)
        elif decode_tokens and kernel is not None:
            native = self._native()
            single = decodes == decode_tokens and (
                common.max_query_len == 1 or bool((common.query_lens_cpu[:decodes] == 1).all())
            )
            if single and decodes == requests and (capture or native.pool.is_captured(requests)):
                return [native.captured(common, kernel)]
            if single and kernel.single_token:
                parts.append(native.decode(common, kernel, decodes))
            else:
                parts.append(native.prefill(common, kernel.any_length, 0, decodes, phase="decode"))
        if decode_tokens < tokens:
            prefill = self._prefill_kernel(common)
            if prefill is None:
                parts.append(self._trtllm_prefill(common, decodes))
            else:
                path = None if "prefill" in self._kernels else f"{prefill.label} ({NOT_CAUSAL})"
                parts.append(self._native().prefill(common, prefill, decodes, requests, path=path))
        return parts

    def _split(self, common: CommonAttentionMetadata) -> tuple[int, int]:
        """Return the decodes of a batch and their tokens."""
        threshold = self.reorder_batch_threshold
        if threshold is None:
            return 0, 0
        if "prefill" not in self.context.plans:
            return common.num_reqs, common.num_actual_tokens
        if self._causal_drafts and not common.causal and common.max_query_len > 1:
            return 0, 0
        # Nothing but prefills: known without the ten tensors that the function below makes.
        if common.max_query_len > threshold and np.diff(common.query_start_loc_cpu.numpy()).min() > threshold:
            return 0, 0
        split = split_decodes_and_prefills(common, threshold)
        return split.num_decodes, split.num_decode_tokens

    def _prefill_kernel(self, common: CommonAttentionMetadata) -> NativeKernel | None:
        """Return the native kernel of a step's prefills; None: trtllm-gen runs them."""
        kernel, config = self._kernels.get("prefill"), self.context.config
        if kernel is not None or common.causal:
            return kernel
        if config.output_quantization != "none":
            text = f"{NOT_CAUSAL}: native kernels run it, which write no {config.output_quantization} output"
            raise BatchError(text)
        if self._instead is None:
            planned = NativeKernel.of(self.context.plans["prefill"], self.context, decode=False)
            self._instead = replace(planned, sinks=config.sinks, query_dtype=PLAIN_DTYPES[config.dtype])
        return self._instead

    def _shared(self, common: CommonAttentionMetadata, phase: Any, first: int, last: int) -> dict[str, Any]:
        """Return what both TRT-LLM calls take for requests ``first .. last - 1``."""
        plan, table, workspace = self.context.plans[phase], common.block_table_tensor, self.workspace
        assert table is not None
        assert workspace is not None
        bounds = common.query_start_loc_cpu
        return {
            "phase": phase,
            "path": plan.path,
            "start": int(bounds[first]),
            "end": int(bounds[last]),
            "workspace": workspace if phase == "decode" else workspace[COUNTERS:],
            "block_tables": table[first:last].contiguous(),
            "seq_lens": common.seq_lens[first:last],
            "max_seq_len": common.max_seq_len,
            "window_left": self._window_left,
            "kv_layout": hnd_or_nhd(self.context),
            "fp8_query": plan.query_dtype == "fp8_e4m3",
        }

    def _trtllm_prefill(self, common: CommonAttentionMetadata, first: int) -> TRTLLMPrefill:
        shared = self._shared(common, "prefill", first, common.num_reqs)
        bounds = common.query_start_loc[first:]
        return TRTLLMPrefill(
            **shared,
            cum_seq_lens_q=bounds - shared["start"] if first else bounds,
            cum_seq_lens_kv=prefix_sums(shared["seq_lens"]),
            max_q_len=common.max_query_len,
        )

    def _trtllm_decodes(self, common: CommonAttentionMetadata, decodes: int) -> list[TRTLLMDecode]:
        """Return one call per run of requests whose queries are equally long: usually one.

        XQA takes no others. trtllm-gen does, but before flashinfer-python 0.6.18 it counts the parts of a shorter
        query's keys by the longest query and can lose the last one (csrc/fmhaReduction.cu v0.6.14).
        """
        lens = common.query_lens_cpu[:decodes].tolist()
        parts, first = [], 0
        for length, run in groupby(lens):
            last = first + len(list(run))
            if length:
                parts.append(self._trtllm_decode(common, first, last, length))
            first = last
        return parts

    def _trtllm_decode(self, common: CommonAttentionMetadata, first: int, last: int, length: int) -> TRTLLMDecode:
        causal, mask = common.causal and not self.context.config.non_causal, None
        fp8 = self.context.config.kv_cache_dtype == "fp8_e4m3"
        if length > 1 and not common.causal and (not self._xqa or fp8):
            path = self.context.plans["decode"].path
            raise BatchError(f"{NOT_CAUSAL}, with queries of {length} tokens: {path} decodes them causally")
        if self._xqa:
            mask = self._masks.mask(last - first, length, causal)
        return TRTLLMDecode(
            **self._shared(common, "decode", first, last),
            backend="xqa" if self._xqa else "trtllm-gen",
            q_len_per_req=length,
            mask=mask,
            keyless=self._keyless(common, first, last, length),
        )

    def _keyless(self, common: CommonAttentionMetadata, first: int, last: int, length: int) -> Tensor | None:
        """Return which rows belong to requests without keys; None without any, as far as the host knows."""
        if not bool((common.seq_lens_cpu[first:last] == 0).any()):
            return None
        empty = common.seq_lens[first:last] == 0
        return empty if length == 1 else empty.repeat_interleave(length)
