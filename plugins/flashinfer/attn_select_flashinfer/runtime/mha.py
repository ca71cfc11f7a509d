"""``FLASHINFER`` at run time: the builder of a step's metadata, and the layers.

A step's batch is cut into parts, each planned on the host. Decodes come first. They always run by the decode plan's
kernel, because their steps may be captured. Prefills run by the prefill plan's kernel. Where that is trtllm-gen, a step
that is not causal runs natively instead. Nothing here waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    BackendContext,
)
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, prefix_sums, split_decodes_and_prefills
from attn_select.runtime.terms import Outputs, Terms
from attn_select_flashinfer.facts.libraries import INT_WORKSPACE, MIB
from attn_select_flashinfer.facts.mha import FlashInferOptions, native_scratch
from attn_select_flashinfer.facts.mha_kernels import NativeKernel, TrtllmKernel
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.mha_calls import LayerArguments, Part, TRTLLMDecode, TRTLLMPrefill
from attn_select_flashinfer.runtime.mha_native import NativeBuilder
from attn_select_flashinfer.runtime.native_wrappers import PhaseKernel, hnd_or_nhd

LEAST_SAVED = 256 * MIB
"""Bytes of keys and values that a cascade must spare from being read again. On an H100 (bfloat16, 32 and 8 heads of
128) it lost 2 % with 8 decodes at 112 MiB, 20 % with 32 at 124 MiB and 26 % with 128 at 127 MiB, and won 33, 60 and
24 % at 448, 496 and 508 MiB."""
COUNTERS = 8 * MIB
"""What decode keeps zeroed at the start of the TRT-LLM buffer. Prefill writes softmax statistics from where its buffer
begins (csrc/trtllm_fmha_kernel_launcher.cu, csrc/xqa v0.6.14), so it gets what lies behind."""
NOT_CAUSAL = "step not causal"
_WORD = 32


@dataclass(slots=True)
class FlashInferMetadata:
    """One step for all layers of a kind."""

    num_actual_tokens: int  # T
    parts: list[Part] = field(default_factory=list)  # decodes first


def packed_rows(drafts: int, causal: bool) -> list[list[int]]:
    """Return one row of signed 16-bit words per draft, the first draft in the lowest bit, padded to 32 bits."""
    # The layout as ``mask`` has it in flashinfer/xqa.py 0.6.14.
    words = -(-drafts // _WORD) * 2
    seen = [(1 << (row + 1 if causal else drafts)) - 1 for row in range(drafts)]
    cut = [[(bits >> 16 * word) & 0xFFFF for word in range(words)] for bits in seen]
    # Signed words of the same bits: ``DraftMasks`` views them as uint16.
    return [[word - 0x10000 if word >= 0x8000 else word for word in row] for row in cut]


# A mask says which of a request's last tokens each of them sees. All keys before them are seen.
class DraftMasks:
    """XQA's masks of draft tokens, made once; they stay where they are."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._max_num_seqs, self._device = max_num_seqs, device
        self._made: dict[tuple[int, bool], Tensor] = {}

    def mask(self, num_reqs: int, drafts: int, causal: bool) -> Tensor | None:
        """Return uint16 ``(num_reqs, drafts, words)``, or None for a single token."""
        if drafts == 1:
            return None
        key = drafts, causal
        if key not in self._made:
            rows = torch.tensor(packed_rows(drafts, causal), dtype=torch.int16)
            every = rows.expand(self._max_num_seqs, *rows.shape).contiguous()
            self._made[key] = every.to(self._device).view(torch.uint16)
        return self._made[key][:num_reqs]


def entries_of(native: Mapping[str, PhaseKernel], trtllm: Mapping[str, TrtllmKernel]) -> list[str]:
    """Return the names of FlashInfer's entries that these kernels are called by, per phase."""
    names = [f"trtllm_batch_{'decode' if phase == 'decode' else 'context'}_with_kv_cache" for phase in trtllm]
    if native:
        names += ["BatchPrefillWithPagedKVCacheWrapper", "merge_state_in_place"]
    if any(kernel.single_token for kernel in native.values()):
        names.append("BatchDecodeWithPagedKVCacheWrapper")
    return names


# Several steps may be built before the first one runs. Each runs by its own plan, which is made again where a later
# one has taken its place. With CUDA graphs only the last one can be run, and ``BatchError`` says so.
class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Builds the metadata of one kind of layers."""

    least_cascade_bytes = LEAST_SAVED

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config, plans = context.config, context.plans
        # how many steps each kernel took part in, by ``phase: kernel`` in words. Replayed steps count.
        self.ran: Counter[str] = Counter()
        self._kernels: dict[str, PhaseKernel] = {}
        self._trtllm: dict[str, TrtllmKernel] = {}
        native, zeroed = 0, 0
        for phase, plan in plans.items():
            if isinstance(plan.kernel, TrtllmKernel):
                self._trtllm[phase] = plan.kernel
                zeroed = max(zeroed, plan.workspace_bytes)
            else:
                assert isinstance(plan.kernel, NativeKernel)
                self._kernels[phase] = PhaseKernel.of(plan.kernel, context, decode=phase == "decode")
                native = max(native, plan.workspace_bytes)
        library.flashinfer().check(*entries_of(self._kernels, self._trtllm))
        self._instead: PhaseKernel | None = None
        # what plans the native wrappers; None while no phase runs natively
        self.native = NativeBuilder(context, native - INT_WORKSPACE) if native else None
        self.workspace: Tensor | None = None  # the TRT-LLM kernels' zeroed buffer; None where no phase runs by them
        if zeroed:
            self.workspace = torch.zeros(zeroed, dtype=torch.uint8, device=context.device)
        self._masks = DraftMasks(context.max_num_seqs, context.device)
        self._window_left = -1 if config.sliding_window is None else config.sliding_window - 1
        if "decode" in plans:
            # Batch-invariant drafts run as prefills, because the tile of fa2 decode would follow their number.
            self.reorder_batch_threshold = 1 + (0 if config.batch_invariant else config.num_speculative_tokens)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashInferMetadata:
        """As ``AttentionMetadataBuilder.build``."""
        common = common_attn_metadata
        if common_prefix_len:
            cascade = self._native().cascade(common, self._kernels["decode"], common_prefix_len)
            return self._metadata(common, [cascade])
        return self._metadata(common, self._parts(common, capture=False))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashInferMetadata:
        """Return the metadata to capture with, and keep a wrapper for this batch size."""
        return self._metadata(common_attn_metadata, self._parts(common_attn_metadata, capture=True))

    def use_cascade_attention(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether to attend to a common prefix apart: the shared rule, where decodes and prefills run natively."""
        native = "decode" in self._kernels and len(self._kernels) == len(self.context.plans)
        return native and super().use_cascade_attention(common_prefix_len, common_attn_metadata)

    def _metadata(self, common: CommonAttentionMetadata, parts: list[Part]) -> FlashInferMetadata:
        for part in parts:
            self.ran[f"{part.phase}: {part.label}"] += 1
        return FlashInferMetadata(common.num_actual_tokens, parts)

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
            alone = common.max_query_len == 1 or bool((common.query_lens_cpu[:decodes] <= 1).all())
            single = alone and decodes == decode_tokens  # no request without a token
            if single and decodes == requests and (capture or native.pool.is_captured(requests)):
                return [native.captured(common, kernel)]
            if single and kernel.single_token:
                parts.append(native.decode(common, kernel, decodes))
            else:
                parts.append(native.prefill(common, kernel.any_length, 0, decodes, phase="decode", alone=alone))
        if decode_tokens < tokens:
            prefill = self._prefill_kernel(common)
            if prefill is None:
                parts.append(self._trtllm_prefill(common, decodes))
            else:
                label = None if "prefill" in self._kernels else f"{prefill.label} ({NOT_CAUSAL})"
                parts.append(self._native().prefill(common, prefill, decodes, requests, label=label))
        return parts

    def _split(self, common: CommonAttentionMetadata) -> tuple[int, int]:
        """Return the decodes of a batch and their tokens."""
        threshold = self.reorder_batch_threshold
        if threshold is None:
            return 0, 0
        if "prefill" not in self.context.plans:
            return common.num_reqs, common.num_actual_tokens
        if self._decode_is("trtllm-gen") and not common.causal and common.max_query_len > 1:
            return 0, 0
        # Nothing but prefills: known without the ten tensors that the function below makes.
        if common.max_query_len > threshold and np.diff(common.query_start_loc_cpu.numpy()).min() > threshold:
            return 0, 0
        split = split_decodes_and_prefills(common, threshold)
        return split.num_decodes, split.num_decode_tokens

    def _decode_is(self, name: str) -> bool:
        """Whether decodes run by the TRT-LLM kernel of this name."""
        kernel = self._trtllm.get("decode")
        return kernel is not None and kernel.name == name

    def _prefill_kernel(self, common: CommonAttentionMetadata) -> PhaseKernel | None:
        """Return the native kernel of a step's prefills; None: trtllm-gen runs them."""
        kernel, config = self._kernels.get("prefill"), self.context.config
        if kernel is not None or common.causal:
            return kernel
        if config.output_quantization != "none":
            text = (
                f"the step is not causal; the native kernels that run it write no {config.output_quantization} output"
            )
            raise BatchError(text, hint="run such steps in a group of layers without output_quantization")
        if self._instead is None:
            self._instead = PhaseKernel.of(NativeKernel("fa2", config.sinks), self.context, decode=False)
        return self._instead

    def _shared(self, common: CommonAttentionMetadata, phase: Any, first: int, last: int) -> dict[str, Any]:
        """Return what both TRT-LLM calls take for requests ``first .. last - 1``."""
        kernel, table, workspace = self._trtllm[phase], common.block_table_tensor, self.workspace
        assert table is not None
        assert workspace is not None
        bounds = common.query_start_loc_cpu.numpy()
        return {
            "phase": phase,
            "label": str(kernel),
            "start": int(bounds[first]),
            "end": int(bounds[last]),
            "workspace": workspace if phase == "decode" else workspace[COUNTERS:],
            "block_tables": table[first:last].contiguous(),
            "seq_lens": common.seq_lens[first:last],
            "max_seq_len": common.max_seq_len,
            "window_left": self._window_left,
            "kv_layout": hnd_or_nhd(self.context),
            "fp8_query": kernel.fp8_query,
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
        """Return one call per run of requests whose queries are equally long: usually one."""
        # XQA takes no others. trtllm-gen does, but before flashinfer-python 0.6.18 it counts the parts of a shorter
        # query's keys by the longest query and can lose the last one (csrc/fmhaReduction.cu v0.6.14).
        if common.num_actual_tokens == common.num_reqs == decodes and common.max_query_len == 1:
            return [self._trtllm_decode(common, 0, decodes, 1)]  # one token each: no length is 0
        lens = common.query_lens_cpu[:decodes].tolist()
        parts, first = [], 0
        for length, run in groupby(lens):
            last = first + len(list(run))
            if length:
                parts.append(self._trtllm_decode(common, first, last, length))
            first = last
        return parts

    def _trtllm_decode(self, common: CommonAttentionMetadata, first: int, last: int, length: int) -> TRTLLMDecode:
        kernel, mask = self._trtllm["decode"], None
        causal = common.causal and not self.context.config.non_causal
        xqa, fp8 = kernel.name == "xqa", self.context.config.kv_cache_dtype == "fp8_e4m3"
        if length > 1 and not common.causal and (not xqa or fp8):
            text = f"the step is not causal and has queries of {length} tokens, which {kernel} decodes causally"
            raise BatchError(text, hint="set use_trtllm = false under [backends.FLASHINFER]")
        if xqa:
            mask = self._masks.mask(last - first, length, causal)
        return TRTLLMDecode(
            **self._shared(common, "decode", first, last),
            backend=kernel.name,
            q_len_per_req=length,
            mask=mask,
            keyless=self._keyless(common, first, last, length),
        )

    def _keyless(self, common: CommonAttentionMetadata, first: int, last: int, length: int) -> Tensor | None:
        """Return which rows belong to requests without keys; None without any, as far as the host knows."""
        if common.seq_lens_cpu.numpy()[first:last].all():
            return None
        empty = common.seq_lens[first:last] == 0
        return empty if length == 1 else empty.repeat_interleave(length)


class FlashInferImpl(AttentionImpl[FlashInferMetadata]):
    """Runs one layer. Layers of a kind may have scales of their own: no plan holds one."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        self._arguments = LayerArguments(terms, quantized=context.config.cache_dtype.startswith("fp8"))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        attn_metadata: FlashInferMetadata,
        outputs: Outputs,
    ) -> Tensor:
        """As ``AttentionImpl.forward``."""
        assert kv_cache is not None
        arguments = self._arguments
        for part in attn_metadata.parts:
            start, end = part.start, part.end
            rows = outputs.rows(slice(start, end)) if start else outputs.first(end)
            whole = start == 0 and end == query.shape[0]
            # The kernels read no strides of what they write.
            into = _packed(rows)
            part.attend(arguments, query if whole else query[start:end], kv_cache, into)
            if into is not rows:
                _copy(into, rows)
        return outputs.output


class FlashInferBackend(AttentionBackend):
    """``FLASHINFER``."""

    impl_cls = FlashInferImpl
    builder_cls = FlashInferMetadataBuilder

    @classmethod
    def prepare(cls) -> None:
        """Make sure that FlashInfer is there, in a release that this plugin was written for."""
        library.flashinfer()


def _packed(outputs: Outputs) -> Outputs:
    """Return the outputs themselves, or contiguous memory where theirs is not."""
    output, lse = outputs.output, outputs.lse
    if output.is_contiguous() and (lse is None or lse.is_contiguous()):
        return outputs
    return replace(outputs, output=_memory(output), lse=None if lse is None else _memory(lse))


def _memory(written: Tensor) -> Tensor:
    if written.is_contiguous():
        return written
    return torch.empty_like(written, memory_format=torch.contiguous_format)


def _copy(made: Outputs, outputs: Outputs) -> None:
    """Bring what was written into other memory to where it belongs."""
    if made.output is not outputs.output:
        outputs.output.copy_(made.output)
    if outputs.lse is not None and made.lse is not None and made.lse is not outputs.lse:
        outputs.lse.copy_(made.lse)
