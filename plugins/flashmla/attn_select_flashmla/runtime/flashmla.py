"""``FLASHMLA`` at run time: dense decoding on the latent cache.

The kernel takes queries of one length, ``(B, q_len, H, 576)``. Where the decodes of a batch have different lengths, up
to ``1 + num_speculative_tokens``, shorter ones get rows in front, so that the last query still stands at the last key;
what comes out of these is dropped. The host knows which rows those are, so nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.batch import to_device
from attn_select.runtime.kv_cache import CacheView
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select_flashmla.facts.builds import FlashMLAKernel
from attn_select_flashmla.runtime.adapters import RANK, DecodeBatch, TensorSchedule, adapter_for, store_lse


@dataclass(slots=True)
class Padding:
    """Queries of different lengths as ``B * q_len`` rows."""

    sources: Tensor  # int64 ``(B * q_len,)``, the token that each row takes; rows in front repeat their request's first
    places: Tensor  # int64 ``(T,)``, the row of each token


@dataclass(slots=True)
class FlashMLAMetadata(DecodeBatch):
    """One batch of B decodes."""

    num_reqs: int  # B
    query_len: int  # the longest query
    padding: Padding | None  # None where all queries are ``query_len`` long


class FlashMLAMetadataBuilder(AttentionMetadataBuilder[FlashMLAMetadata]):
    """Launches nothing but a copy of FP8's table: the schedule is made by the first layer's call, in a CUDA graph at
    each replay."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        kernel = context.kernel(FlashMLAKernel)
        self._fp8 = kernel.function == "dense_fp8"
        self._new_schedule: Any = TensorSchedule if self._fp8 else adapter_for(kernel).new_schedule
        self._tables: dict[int, Tensor] = {}  # by their width, since graphs hold the address

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashMLAMetadata:
        """As ``AttentionMetadataBuilder.build``."""
        common = common_attn_metadata
        assert common.block_table_tensor is not None
        query_len, padding = common.max_query_len, None
        if common.num_reqs * query_len != common.num_actual_tokens:
            query_len, padding = padded(common)
        return FlashMLAMetadata(
            num_reqs=common.num_reqs,
            query_len=query_len,
            block_table=self._behind_a_page(common.block_table_tensor) if self._fp8 else common.block_table_tensor,
            seq_lens=common.seq_lens,
            causal=common.causal and not self.context.config.non_causal,
            schedule=self._new_schedule(),
            padding=padding,
        )

    def _behind_a_page(self, table: Tensor) -> Tensor:
        """Return a copy of a block table with page 0 before each row."""
        # Dense FP8 loads the page before the first one of a request without keys, as padding has none (vllm-project/
        # FlashMLA 46d64a8, flash_fwd_mla_kernel.h, line 415). Whatever stood there would be an address.
        requests, width = table.shape
        kept = self._tables.get(width)
        if kept is None:
            rows = self.context.max_num_seqs if self.context.cuda_graphs else requests
            kept = table.new_zeros(rows, width + 1)
            if self.context.cuda_graphs:
                self._tables[width] = kept
        return kept[:requests, 1:].copy_(table)


class FlashMLAImpl(MLAAttentionImpl):
    """Runs one layer. FP8 follows the cache: the query is quantised with ``terms.scales.q``."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        kernel = context.kernel(FlashMLAKernel)
        self._adapter, self._fp8 = adapter_for(kernel), kernel.function == "dense_fp8"
        self._dense = self._adapter.dense
        self._direct = self._adapter.writes_output and not self._fp8
        self.takes_query_parts = self._fp8
        self._heads, self._width = context.config.num_heads, context.config.head_size
        self._one_kv_head = CacheView(lambda kv_cache: kv_cache.unsqueeze(2))
        # By way of a scalar: the kernel wants a stride of 1, even of one number.
        self._descales = tuple(scale.reshape(()).reshape(1) for scale in (terms.scales.q, terms.scales.k))

    def forward_mqa(
        self,
        query: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        attn_metadata: FlashMLAMetadata,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``; ``kv_cache (blocks, 64, 576)`` is bfloat16, float16 or e4m3."""
        metadata, heads = attn_metadata, self._heads
        requests, query_len, padding = metadata.num_reqs, metadata.query_len, metadata.padding
        output, output_lse = outputs.output, outputs.lse
        if not query_len:
            return output
        cache, scale = self._one_kv_head(kv_cache), self.terms.scale
        if self._direct and padding is None and output.is_contiguous() and not isinstance(query, tuple):
            rows = query.view(requests, query_len, heads, self._width)
            into = output.view(requests, 1, query_len * heads, RANK)
            lse = self._dense(rows, cache, metadata, scale, into)[1]
        else:
            parts = [*query] if isinstance(query, tuple) else [query]
            if padding is not None:
                parts = [part.index_select(0, padding.sources) for part in parts]
            if self._fp8:
                quantize = ops.quantize_fp8 if len(parts) == 1 else ops.concat_and_quantize_mla_q
                rows = quantize(*parts, self.terms.scales.q, kv_cache.dtype)
                rows = rows.view(requests, query_len, heads, self._width)
                found, lse = self._adapter.dense_fp8(rows, cache, metadata, scale, self._descales)
            else:
                rows = parts[0].view(requests, query_len, heads, self._width)
                found, lse = self._dense(rows, cache, metadata, scale, None)
            found = found.reshape(requests * query_len, heads, RANK)
            if padding is None and found.dtype == output.dtype:
                output = found
            elif padding is None:
                output.copy_(found)
            else:
                output[: len(padding.places)] = found.index_select(0, padding.places)
        if output_lse is not None:
            lse = lse.transpose(1, 2).reshape(-1, heads)
            if padding is not None:
                lse = lse.index_select(0, padding.places)
            store_lse(output_lse[: len(lse)], lse)
        return output


def padded(common: CommonAttentionMetadata) -> tuple[int, Padding]:
    """Return the longest query's length, and how the others are padded to it. One copy to the device, not waiting."""
    lens, starts = common.query_lens_cpu, common.query_start_loc_cpu[:-1]
    requests, most = len(lens), int(lens.max())
    firsts = (most - lens).unsqueeze(1)  # the row of each request's first query, behind its padding
    offsets = torch.arange(most, dtype=torch.int32)
    # A request without a query repeats a neighbour's token. What comes out of it is dropped.
    sources = (starts.unsqueeze(1) + (offsets - firsts).clamp_min(0)).clamp_max(int(common.query_start_loc_cpu[-1]) - 1)
    places = (offsets >= firsts).flatten().nonzero().flatten()
    both = to_device(torch.cat([sources.flatten().long(), places]), common.seq_lens.device)
    return most, Padding(both[: requests * most], both[requests * most :])


class FlashMLABackend(AttentionBackend):
    """``FLASHMLA``."""

    impl_cls = FlashMLAImpl
    builder_cls = FlashMLAMetadataBuilder
