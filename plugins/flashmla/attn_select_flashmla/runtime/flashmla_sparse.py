"""``FLASHMLA_SPARSE`` at run time: every token attends to the slots that its indexer chose.

Nothing else of a batch matters to the kernels, so tokens are rows, whichever request they belong to. Three paths:

- a bfloat16 cache is one flat run of tokens, which the prefill kernel reads in both phases;
- the decode kernel reads the 656-byte tokens of ``FP8_DS_MLA``: decodes, and prefills of few heads;
- prefills of many heads read a bfloat16 copy of their requests' contexts, made per layer and part of the batch; slots
  become positions in the copy. A part is as many requests as have ``max_model_len`` tokens together, which bounds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.batch import to_device
from attn_select.runtime.kv_cache import CacheView
from attn_select.runtime.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from attn_select.runtime.terms import Outputs, Terms
from attn_select_flashmla.facts.builds import FlashMLAKernel
from attn_select_flashmla.facts.flashmla_sparse import MOST_HEADS
from attn_select_flashmla.runtime.adapters import RANK, adapter_for, store_lse

BLOCK = 64
"""Tokens per block of the FP8 cache."""
TILE = 128
"""Latent values that share a scale."""
COPIED_BLOCKS = 256
"""Blocks that are dequantised at a time: what lies between takes 28 MB."""
MAX_DECODE_ROWS = 1024
"""Tokens per call of the decode kernel. Its float32 partial sums take about (tokens + 132) x heads x 2 KiB: at 64 heads
145 MiB, where a prefill of 8192 tokens in one call would take 1 GiB."""


@dataclass(slots=True, eq=False)
class Span:
    """Tokens that one call of a kernel computes."""

    rows: slice  # the tokens
    schedule: Any = None  # of the decode kernel, shared by all layers; None: the prefill kernel
    blocks: Tensor | None = None  # int64 ``(n,)``, the blocks to copy first; None: the cache itself is read
    # int32 ``(num_blocks,)``, where each block of the cache lies in the copy, negative if nowhere. Made by the first
    # layer, which knows how many blocks there are.
    positions: Tensor | None = None

    def position_of(self, indices: Tensor, num_blocks: int) -> Tensor:
        """Return int32 positions in the copy for slots of the cache, -1 for void ones."""
        blocks = self.blocks
        assert blocks is not None
        if self.positions is None or len(self.positions) != num_blocks:
            self.positions = torch.full((num_blocks,), -1, dtype=torch.int32, device=blocks.device)
            self.positions[blocks] = torch.arange(len(blocks), dtype=torch.int32, device=blocks.device)
        slots = indices.clamp_min(0)
        # 64 tokens a block. A slot of a block that was not copied gives -64 to -1: void for the prefill kernel too.
        block = self.positions.index_select(0, (slots >> 6).flatten()).view_as(slots)
        return torch.where(indices < 0, -1, (block << 6) + (slots & (BLOCK - 1)))


@dataclass(slots=True)
class FlashMLASparseMetadata:
    """One batch as the calls that compute it."""

    spans: tuple[Span, ...]


def _kernels(context: BackendContext) -> list[FlashMLAKernel]:
    """Return the kernels of the phases that are served here; all are of one build."""
    return [context.kernel(FlashMLAKernel, phase) for phase in context.plans]


class FlashMLASparseMetadataBuilder(AttentionMetadataBuilder[FlashMLASparseMetadata]):
    """Builds without a kernel launch, except for the list of blocks to copy."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        kernels = _kernels(context)
        self._adapter = adapter_for(kernels[0])
        self._reads_fp8 = any(kernel.function == "sparse_decode" for kernel in kernels)
        self._copies = any(kernel.copies_cache for kernel in kernels)
        if self._copies and "decode" in context.plans:
            # Only here do the phases differ; elsewhere any order will do.
            self.reorder_batch_threshold = context.config.max_decode_query_len

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashMLASparseMetadata:
        """As ``AttentionMetadataBuilder.build``."""
        common = common_attn_metadata
        if not self._copies:
            return self._direct(common.num_actual_tokens)
        decodes = 0
        if self.reorder_batch_threshold is not None:
            decodes = split_decodes_and_prefills(common, self.reorder_batch_threshold).num_decodes
        tokens = int(common.query_start_loc_cpu[decodes])
        direct = self._direct(tokens).spans if tokens else ()
        return FlashMLASparseMetadata((*direct, *self._copied(common, decodes)))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashMLASparseMetadata:
        """As ``AttentionMetadataBuilder.build_for_cudagraph_capture``; all requests are decodes."""
        return self._direct(common_attn_metadata.num_actual_tokens)

    def _direct(self, tokens: int) -> FlashMLASparseMetadata:
        """Return the spans of the first tokens, which read the cache itself."""
        if not self._reads_fp8:
            return FlashMLASparseMetadata((Span(slice(0, tokens)),))
        edges = [*range(0, tokens, MAX_DECODE_ROWS), tokens]
        # A schedule depends on how many tokens there are alone, so full spans share one.
        schedules = {end - start: self._adapter.new_schedule() for start, end in pairwise(edges)}
        spans = [Span(slice(start, end), schedules[end - start]) for start, end in pairwise(edges)]
        return FlashMLASparseMetadata(tuple(spans))

    def _copied(self, common: CommonAttentionMetadata, first: int) -> list[Span]:
        """Return the spans of requests from ``first`` on, with the blocks of their contexts."""
        table = common.block_table_tensor
        assert table is not None
        counts = [-(-seq_len // BLOCK) for seq_len in common.seq_lens_cpu[first:].tolist()]
        bounds = common.query_start_loc_cpu[first:].tolist()
        most, requests = -(-self.context.max_model_len // BLOCK), len(counts)
        ends, span_blocks = [], 0
        for request, count in enumerate(counts):
            if span_blocks and span_blocks + count > most:
                ends.append(request)
                span_blocks = 0
            span_blocks += count
        if not requests:
            return []
        repeats = torch.tensor(counts)
        rows = torch.repeat_interleave(torch.arange(first, first + requests), repeats)
        # Each block's request and its place in that request's row of the table, for all spans in one copy.
        columns = torch.arange(len(rows)) - torch.repeat_interleave(repeats.cumsum(0) - repeats, repeats)
        row, column = to_device(torch.stack([rows, columns]), table.device).unbind(0)
        edges = list(pairwise([0, *ends, requests]))
        parts = table[row, column].long().split_with_sizes([sum(counts[begin:end]) for begin, end in edges])
        return [
            Span(slice(bounds[begin], bounds[end]), blocks=part)
            for (begin, end), part in zip(edges, parts, strict=True)
            if bounds[begin] < bounds[end]
        ]


class FlashMLASparseImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        adapter = adapter_for(_kernels(context)[0])
        self._decode, self._prefill = adapter.sparse_decode, adapter.sparse_prefill
        heads = context.config.num_heads
        self._heads, self._padded = heads, _padded_heads(heads)
        self._writes_output = adapter.writes_output and self._padded == heads
        self._decode_missing, self._prefill_missing = (-(context.config.sparse_top_k or 0) % size for size in (64, 128))
        self._one_kv_head = CacheView(lambda kv_cache: kv_cache.unsqueeze(2))
        self._tokens = CacheView(lambda kv_cache: kv_cache.view(-1, 1, kv_cache.shape[2]))
        self._own_sinks = self._sinks = None if terms.sinks is None else terms.sinks.float()
        if self._own_sinks is not None:
            self._sinks = functional.pad(self._own_sinks, (0, self._padded - heads))

    def forward_mqa(
        self,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashMLASparseMetadata,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``."""
        # kv_cache: bfloat16 ``(blocks, size, 576)`` or bytes ``(blocks, 64, 656)``
        # Padding of ``topk_indices`` is exactly -1: the decode kernel takes any other negative number for an address.
        # Checked mode refuses it.
        assert topk_indices is not None
        for span in attn_metadata.spans:
            rows = span.rows
            if rows.start < rows.stop:
                self._run(span, query[rows], kv_cache, outputs.rows(rows), topk_indices[rows])
        return outputs.output

    def _run(self, span: Span, query: Tensor, kv_cache: Tensor, outputs: Outputs, indices: Tensor) -> None:
        heads, padded, output = self._heads, self._padded, outputs.output
        in_place = self._writes_output and output.is_contiguous()
        if padded != heads:
            # What the padding's rows hold is never read: the kernel computes every head by itself.
            own, query = query, query.new_empty(query.shape[0], padded, query.shape[2])
            query[:, :heads] = own
        if span.schedule is not None:
            if self._decode_missing:
                indices = functional.pad(indices, (0, self._decode_missing), value=-1)
            cache, out = self._one_kv_head(kv_cache), output.unsqueeze(1) if in_place else None
            rows = (query.unsqueeze(1), cache, indices.unsqueeze(1))
            found, lse = self._decode(*rows, span.schedule, self.terms.scale, self._sinks, out)
        else:
            if span.blocks is None:
                latents = self._tokens(kv_cache)
            else:
                indices = span.position_of(indices, kv_cache.shape[0])
                latents = dequantised(kv_cache, span.blocks).unsqueeze(1)
            if self._prefill_missing:
                indices = functional.pad(indices, (0, self._prefill_missing), value=-1)
            out = output if in_place else None
            found, lse = self._prefill(query, latents, indices.unsqueeze(1), self.terms.scale, self._sinks, out)
        if not in_place:
            output.copy_(found.reshape(-1, padded, RANK)[:, :heads])
        if outputs.lse is not None:
            store_lse(outputs.lse, lse.reshape(-1, padded)[:, :heads], self._own_sinks)


def dequantised(kv_cache: Tensor, blocks: Tensor) -> Tensor:
    """Return bfloat16 ``(n * 64, 576)``: the tokens of blocks ``(n,)`` of 656-byte tokens ``(num_blocks, 64, 656)``."""
    num_tiles = RANK // TILE
    rope_bytes = kv_cache.shape[2] - RANK - 4 * num_tiles
    latents = torch.empty(len(blocks) * BLOCK, RANK + rope_bytes // 2, dtype=torch.bfloat16, device=kv_cache.device)
    for some, target in zip(
        torch.split(blocks, COPIED_BLOCKS), torch.split(latents, COPIED_BLOCKS * BLOCK), strict=True
    ):
        packed = kv_cache.index_select(0, some).flatten(0, 1)
        codes, scales, rope = packed.split_with_sizes([RANK, 4 * num_tiles, rope_bytes], dim=1)
        tiles = codes.view(torch.float8_e4m3fn).to(torch.bfloat16).view(-1, num_tiles, TILE)
        # Rounded once, or not at all where the scales are powers of two.
        by_tile = target[:, :RANK].view(-1, num_tiles, TILE)
        torch.mul(tiles, scales.view(torch.float32).unsqueeze(2), out=by_tile)
        target[:, RANK:] = rope.view(torch.bfloat16)
    return latents


def _padded_heads(heads: int) -> int:
    """Return for how many heads there is a kernel."""
    return MOST_HEADS // 2 if 2 * heads <= MOST_HEADS else MOST_HEADS


class FlashMLASparseBackend(AttentionBackend):
    """``FLASHMLA_SPARSE``."""

    impl_cls = FlashMLASparseImpl
    builder_cls = FlashMLASparseMetadataBuilder
