"""``FLASHINFER_MLA_SPARSE`` at run time: every token attends to the slots that its indexer chose.

The kernels need nothing else of a batch. So every token is a row of one query, whichever request it belongs to, and
both phases are the same. trtllm-gen (10.x) reads the first ``seq_lens`` slots of a row, all of which must be valid, so
valid slots are moved to the front. So does fa3 (9.0), whose schedule is planned for the number of tokens. The kernel of
12.x skips slots of -1 wherever they stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attn_select.runtime import ops
from attn_select.runtime.backend import (
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.kv_cache import CacheView
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select_flashinfer.facts.mla_kernels import MLAKernel
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.mla_native import NativeLayer
from attn_select_flashinfer.runtime.mla_sparse_native import SparseCall, SparseSchedules
from attn_select_flashinfer.runtime.mla_trtllm import Heads, requests_at_once
from attn_select_flashinfer.runtime.scores import blank_rows

SLOTS = 128
"""What a row's width is a multiple of on 9.0 and 10.x; vLLM 0.33.0 pads its rows likewise."""


@dataclass(slots=True)
class SparseMetadata:
    """One batch: its tokens, and the zeroed workspace of all layers."""

    num_tokens: int
    workspace: Tensor


class FlashInferMLASparseMetadataBuilder(AttentionMetadataBuilder[SparseMetadata | SparseCall]):
    """Reads no lengths. Launches nothing, but on 9.0 copies a schedule to the device."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._schedules: SparseSchedules | None = None
        if context.kernel(MLAKernel).name == "fa3":
            self._schedules = SparseSchedules(context, padded_width(context.config.sparse_top_k or 0))
            self._workspace = torch.empty(0, dtype=torch.uint8, device=context.device)
            return
        library.flashinfer().check("trtllm_batch_decode_with_kv_cache_mla")
        size = max(plan.workspace_bytes for plan in context.plans.values())
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=context.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseMetadata | SparseCall:
        """As ``AttentionMetadataBuilder.build``."""
        tokens = common_attn_metadata.num_actual_tokens
        if self._schedules is not None and tokens:
            return self._schedules.of(tokens)
        return SparseMetadata(tokens, self._workspace)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> SparseMetadata | SparseCall:
        """As ``AttentionMetadataBuilder.build_for_cudagraph_capture``."""
        if self._schedules is not None:
            return self._schedules.capture(common_attn_metadata.num_actual_tokens)
        return self.build(0, common_attn_metadata)


class FlashInferMLASparseImpl(MLAAttentionImpl):
    """Runs one layer, both phases by one kernel."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        kernel = context.kernel(MLAKernel)  # of both phases
        self._native: NativeLayer | None = None
        if kernel.name == "fa3":
            self._native = NativeLayer(context, terms)
            self._pages = CacheView(lambda kv_cache: kv_cache.view(-1, 1, kv_cache.shape[2]))
            return
        self._entry = library.flashinfer().trtllm_batch_decode_with_kv_cache_mla
        self._on_12 = kernel.name == "sparse"
        self._heads = Heads(context.config, kernel, terms)
        self._fixed = self._heads.arguments
        if self._on_12:  # the cache's scales are powers of two (ops.concat_and_cache_mla)
            self._fixed["kv_scale_format"] = "pow2_fp32"

    def forward_mqa(
        self,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: SparseMetadata | SparseCall,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``; ``kv_cache (blocks, size, R + Pr)`` or ``(blocks, 64, 656)`` bytes."""
        assert topk_indices is not None
        tokens = attn_metadata.num_tokens
        if not tokens:
            return outputs.output
        if isinstance(attn_metadata, SparseCall):
            assert self._native is not None
            slots, counts = in_front(topk_indices[:tokens])
            attn_metadata.choose(slots, counts)
            own = outputs.first(tokens)
            self._native.run(query[:tokens], self._pages(kv_cache), attn_metadata, own)
            blank_rows(own, counts == 0)
            return outputs.output
        workspace = attn_metadata.workspace
        step = requests_at_once(workspace, self._heads.padded, 1, outputs.lse is not None)
        for first in range(0, tokens, step):
            rows = slice(first, min(first + step, tokens))
            self._run(query[rows], kv_cache, workspace, outputs.rows(rows), topk_indices[rows])
        return outputs.output

    def _run(self, query: Tensor, kv_cache: Tensor, workspace: Tensor, outputs: Outputs, indices: Tensor) -> None:
        work = self._heads.begin(query, outputs)
        if self._on_12:
            slots, lens = indices.clamp_min(-1), None  # any other negative number would be an address
            empty = (slots < 0).all(dim=1)
        else:
            slots, lens = in_front(indices)
            empty, lens = lens == 0, lens.clamp_min_(1)
        width = slots.shape[1]
        wanted: dict[str, Any] = {} if work.lse is None else {"lse": work.lse, "return_lse": True}
        self._entry(
            query=work.query.unsqueeze(1),
            kv_cache=kv_cache,
            workspace_buffer=workspace,
            block_tables=slots.unsqueeze(1),
            seq_lens=lens,
            max_seq_len=width,
            sparse_mla_top_k=width,
            out=work.out.unsqueeze(1),
            bmm1_scale=work.bmm1_scale,
            bmm2_scale=work.bmm2_scale,
            **self._fixed,
            **wanted,
        )
        self._heads.finish(work, outputs, empty)


def padded_width(slots: int) -> int:
    """Return a number of slots, rounded up to a multiple of ``SLOTS``."""
    return -(-slots // SLOTS) * SLOTS


def in_front(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 slots ``(T, k')`` with each row's valid ones in front, and how many there are, int32 ``(T,)``."""
    # Does not synchronise, and keeps their order. k' is k rounded up to a multiple of ``SLOTS``. Behind the valid slots
    # the first is repeated: the kernel may read what stands there and weigh it with 0, which does not hide the NaN of
    # another request. A row without valid slots has zeros.
    front, counts = ops.slots_in_front(indices)
    filler = front[:, :1].clamp_min(0)
    missing = padded_width(front.shape[1]) - front.shape[1]
    padded = functional.pad(front, (0, missing), value=-1) if missing else front
    return torch.where(padded < 0, filler, padded), counts


class FlashInferMLASparseBackend(library.FlashInferLibraryBackend):
    """``FLASHINFER_MLA_SPARSE``."""

    impl_cls = FlashInferMLASparseImpl
    builder_cls = FlashInferMLASparseMetadataBuilder
