"""``FLASHINFER`` at run time: the builder of a step's metadata, and the layers.

A step's batch is cut into parts, each planned on the host. Decodes come first. They always run by the decode plan's
kernel, because their steps may be captured. Prefills run by the prefill plan's kernel. Where that is trtllm-gen, a step
that is not causal runs natively instead. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.runtime.backend import (
    AttentionImpl,
    AttentionMetadataBuilder,
    BackendContext,
)
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, prefix_sums, split_decodes_and_prefills
from attn_select.runtime.terms import Outputs, Terms
from attn_select_flashinfer.facts.libraries import INT_WORKSPACE, MIB
from attn_select_flashinfer.facts.mha import native_scratch
from attn_select_flashinfer.facts.mha_kernels import FlashInferOptions, NativeKernel, TrtllmKernel
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.mha_calls import LayerArguments, Part, TrtllmPart
from attn_select_flashinfer.runtime.mha_native import NativeBuilder
from attn_select_flashinfer.runtime.native_wrappers import PhaseKernel, hnd_or_nhd
from attn_select_flashinfer.runtime.scores import copy_back, packed

LEAST_SAVED = 256 * MIB
"""Bytes of keys and values that a cascade must spare from being read again. On an H100 (bfloat16, 32 and 8 heads of
128) it lost 2 % with 8 decodes at 112 MiB, 20 % with 32 at 124 MiB and 26 % with 128 at 127 MiB, and won 33, 60 and
24 % at 448, 496 and 508 MiB."""
COUNTERS = 8 * MIB
"""What decode keeps zeroed at the start of the TRT-LLM buffer. Prefill writes softmax statistics from where its buffer
begins (csrc/trtllm_fmha_kernel_launcher.cu, csrc/xqa v0.6.14), so it gets what lies behind."""


def draft_mask(drafts: int, causal: bool) -> Tensor:
    """Return which of a request's last tokens each of them sees, uint16 ``(drafts, words)``; it sees all keys before.

    The first token is the lowest bit, and rows are padded to 32 bits (``mask`` in flashinfer/xqa.py 0.6.14).
    """
    seen = np.zeros((drafts, -(-drafts // 32) * 32), dtype=bool)
    seen[:, :drafts] = np.tri(drafts) if causal else 1
    words = np.packbits(seen, axis=1, bitorder="little").view(np.int16)
    return torch.from_numpy(words).view(torch.uint16)


def entry_of(phase: str) -> str:
    """Return the name of the TRT-LLM function of a phase."""
    return f"trtllm_batch_{'decode' if phase == 'decode' else 'context'}_with_kv_cache"


# Several steps may be built before the first one runs. Each runs by its own plan, which is made again where a later
# one has taken its place. With CUDA graphs only the last one can be run, and ``BatchError`` says so.
class FlashInferMetadataBuilder(AttentionMetadataBuilder[list[Part]]):
    """Builds the metadata of one kind of layers."""

    least_cascade_bytes = LEAST_SAVED

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config, plans = context.config, context.plans
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
        names = [entry_of(phase) for phase in self._trtllm]
        if self._kernels:
            names += ["BatchPrefillWithPagedKVCacheWrapper", "merge_state_in_place"]
        if any(kernel.single_token for kernel in self._kernels.values()):
            names.append("BatchDecodeWithPagedKVCacheWrapper")
        library.flashinfer().check(*names)
        self._instead: PhaseKernel | None = None
        # what plans the native wrappers; None while no phase runs natively
        self.native = NativeBuilder(context, native - INT_WORKSPACE) if native else None
        self.workspace: Tensor | None = None  # the TRT-LLM kernels' zeroed buffer; None where no phase runs by them
        if zeroed:
            self.workspace = torch.zeros(zeroed, dtype=torch.uint8, device=context.device)
        self._masks: dict[tuple[int, bool], Tensor] = {}  # of drafts, for XQA: ``draft_mask`` for each request
        self._window_left = -1 if config.sliding_window is None else config.sliding_window - 1
        if "decode" in plans:
            # Batch-invariant drafts run as prefills, because the tile of fa2 decode would follow their number.
            self.reorder_batch_threshold = 1 + (0 if config.batch_invariant else config.num_speculative_tokens)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> list[Part]:
        """As ``AttentionMetadataBuilder.build``; decodes come first."""
        common = common_attn_metadata
        if common_prefix_len:
            return [self._native().cascade(common, self._kernels["decode"], common_prefix_len)]
        return self._parts(common, capture=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> list[Part]:
        """Return the metadata to capture with, and keep a wrapper for this batch size."""
        return self._parts(common_attn_metadata, capture=True)

    def use_cascade_attention(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Whether to attend to a common prefix apart: the shared rule, where decodes and prefills run natively."""
        native = "decode" in self._kernels and len(self._kernels) == len(self.context.plans)
        return native and super().use_cascade_attention(common_prefix_len, common_attn_metadata)

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
                parts.append(native.prefill(common, kernel.any_length, 0, decodes, role="decode", alone=alone))
        if decode_tokens < tokens:
            prefill = self._prefill_kernel(common)
            if prefill is None:
                parts.append(self._trtllm_prefill(common, decodes))
            else:
                parts.append(self._native().prefill(common, prefill, decodes, requests))
        return parts

    def _split(self, common: CommonAttentionMetadata) -> tuple[int, int]:
        """Return the decodes of a batch and their tokens."""
        threshold = self.reorder_batch_threshold
        if threshold is None:
            return 0, 0
        if "prefill" not in self.context.plans:
            return common.num_reqs, common.num_actual_tokens
        trtllm = self._trtllm.get("decode")
        if trtllm and trtllm.name == "trtllm-gen" and not common.causal and common.max_query_len > 1:
            return 0, 0
        # Nothing but prefills: known without the ten tensors that the function below makes.
        if common.max_query_len > threshold and np.diff(common.query_start_loc_cpu.numpy()).min() > threshold:
            return 0, 0
        split = split_decodes_and_prefills(common, threshold)
        return split.num_decodes, split.num_decode_tokens

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

    def _trtllm_part(
        self, common: CommonAttentionMetadata, phase: Phase, first: int, last: int, keyless: Tensor | None = None
    ) -> TrtllmPart:
        """Return the call of requests ``first .. last - 1``, without the arguments that its phase alone has."""
        kernel, table, workspace = self._trtllm[phase], common.block_table_tensor, self.workspace
        assert table is not None
        assert workspace is not None
        decode, bounds, entries = phase == "decode", common.query_start_loc_cpu.numpy(), library.flashinfer()
        return TrtllmPart(
            start=int(bounds[first]),
            end=int(bounds[last]),
            function=getattr(entries, entry_of(phase)),
            kernel=kernel,
            keyless=keyless,
            step={
                "workspace_buffer": workspace if decode else workspace[COUNTERS:],
                "block_tables": table[first:last].contiguous(),
                "seq_lens": common.seq_lens[first:last],
                "window_left": self._window_left,
                "kv_layout": hnd_or_nhd(self.context),
            },
        )

    def _trtllm_prefill(self, common: CommonAttentionMetadata, first: int) -> TrtllmPart:
        part = self._trtllm_part(common, "prefill", first, common.num_reqs)
        bounds, seq_lens = common.query_start_loc[first:], part.step["seq_lens"]
        part.step |= {
            "max_q_len": common.max_query_len,
            "max_kv_len": common.max_seq_len,
            "batch_size": len(seq_lens),
            "cum_seq_lens_q": bounds - part.start if first else bounds,
            "cum_seq_lens_kv": prefix_sums(seq_lens),
        }
        return part

    def _trtllm_decodes(self, common: CommonAttentionMetadata, decodes: int) -> Iterator[TrtllmPart]:
        """Yield one call per run of requests whose queries are equally long: usually one."""
        # XQA takes no others. trtllm-gen does, but before flashinfer-python 0.6.18 it counts the parts of a shorter
        # query's keys by the longest query and can lose the last one (csrc/fmhaReduction.cu v0.6.14).
        if common.num_actual_tokens == common.num_reqs == decodes and common.max_query_len == 1:
            yield self._trtllm_decode(common, 0, decodes, 1)  # one token each: no length is 0
            return
        first = 0
        for length, run in groupby(common.query_lens_cpu[:decodes].tolist()):
            last = first + len(list(run))
            if length:
                yield self._trtllm_decode(common, first, last, length)
            first = last

    def _trtllm_decode(self, common: CommonAttentionMetadata, first: int, last: int, length: int) -> TrtllmPart:
        kernel, mask, config = self._trtllm["decode"], None, self.context.config
        xqa, keyless = kernel.name == "xqa", None
        if length > 1 and not common.causal and (not xqa or config.kv_cache_dtype == "fp8_e4m3"):
            text = f"the step is not causal and has queries of {length} tokens, which {kernel} decodes causally"
            raise BatchError(text, hint="set use_trtllm = false under [backends.FLASHINFER]")
        if xqa and length > 1:
            key = length, common.causal and not config.non_causal
            if key not in self._masks:  # made once for all batches, so that it stays where it is
                every = draft_mask(*key).expand(self.context.max_num_seqs, -1, -1).contiguous()
                self._masks[key] = every.to(self.context.device)
            mask = self._masks[key][: last - first]
        if not common.seq_lens_cpu.numpy()[first:last].all():  # as far as the host knows
            keyless = common.seq_lens[first:last] == 0
            keyless = keyless if length == 1 else keyless.repeat_interleave(length)
        part = self._trtllm_part(common, "decode", first, last, keyless)
        more = {"max_seq_len": common.max_seq_len, "q_len_per_req": length, "mask": mask, "backend": kernel.name}
        part.step |= more
        return part


class FlashInferImpl(AttentionImpl[list[Part]]):
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
        attn_metadata: list[Part],
        outputs: Outputs,
    ) -> Tensor:
        """As ``AttentionImpl.forward``."""
        assert kv_cache is not None
        arguments = self._arguments
        for part in attn_metadata:
            start, end = part.start, part.end
            rows = outputs.rows(slice(start, end)) if start else outputs.first(end)
            whole = start == 0 and end == query.shape[0]
            into = packed(rows)
            part.attend(arguments, query if whole else query[start:end], kv_cache, into)
            copy_back(into, rows)
        return outputs.output


class FlashInferBackend(library.FlashInferLibraryBackend):
    """``FLASHINFER``."""

    impl_cls = FlashInferImpl
    builder_cls = FlashInferMetadataBuilder
