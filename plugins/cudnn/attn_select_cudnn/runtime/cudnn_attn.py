"""``CUDNN_ATTN`` at run time: one graph for the decodes of a step and one for its prefills."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    BackendContext,
)
from attn_select.runtime.kv_cache import CacheView, key_value_unchecked
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, split_decodes_and_prefills
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select_cudnn.runtime import graphs
from attn_select_cudnn.runtime.graphs import Shape
from attn_select_cudnn.runtime.library import graphs_of

LEAST_KEYS = 256
"""Graphs are built for powers of two of keys from here on, so that a growing context needs few of them."""
LEAST_QUERY = 16
"""The same for the longest query of packed ones."""


@dataclass(slots=True)
class Part:
    """The requests of a step that one graph computes."""

    start: int  # start, end: their tokens
    end: int
    sizes: dict[str, Any]  # of ``graphs.Shape``, what the batch says
    tensors: dict[int, Tensor]  # lengths, tables and offsets, by the graph's names
    keyless: Tensor | None  # bool ``(end - start,)``, rows of requests without keys; None where there is none


class CudnnMetadataBuilder(AttentionMetadataBuilder[list[Part]]):
    """Builds a step's parts. Decodes come first in a batch, where both phases are run by this backend."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        graphs_of(context.device)
        self._splits = len(context.plans) > 1
        if "decode" in context.plans:
            self.reorder_batch_threshold = context.config.max_decode_query_len
        self._query_lens: dict[int, Tensor] = {}
        self._tables: Tensor | None = None
        self._keyless = torch.zeros(context.max_num_batched_tokens, dtype=torch.bool, device=context.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> list[Part]:
        """As ``AttentionMetadataBuilder.build``."""
        common = common_attn_metadata
        if not common.causal:
            raise BatchError("the step is not causal: accepted are causal ones", hint="choose another backend for it")
        bounds = [0, common.num_reqs]
        if self._splits and self.reorder_batch_threshold is not None:
            split = split_decodes_and_prefills(common, self.reorder_batch_threshold)
            bounds = [0, split.num_decodes, common.num_reqs]
        parts = []
        for first, last in pairwise(bounds):
            if first < last:
                start, end = (int(common.query_start_loc_cpu[request]) for request in (first, last))
                if start < end:
                    parts.append(self._part(common.requests(first, last), start, end))
        return parts

    def use_cascade_attention(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Never: ``build`` makes nothing of a common prefix."""
        return False

    def _part(self, common: CommonAttentionMetadata, start: int, end: int) -> Part:
        table, size = common.block_table_tensor, self.context.block_size
        assert table is not None
        assert size is not None
        keys = max(LEAST_KEYS, _power_of_two(common.max_seq_len))
        uniform = common.max_query_len * common.num_reqs == common.num_actual_tokens
        # Longer queries are faster packed, even where they are equal (B4 S4096: 1088 us beside 1220, H200).
        packed = not uniform or common.max_query_len > (self.reorder_batch_threshold or 0)
        if common.max_query_len == 1 and not packed:
            # Rows of a table lie in rows that are as long as the longest request may be. A graph may read what is
            # there, whatever it holds, and uses what belongs to the request's keys.
            keys = min(keys, table.stride(0) * size)
            table = table[:, : -(-keys // size)]
        else:
            table = self._without_stale(common, table, -(-keys // size))
            if not packed:
                table = self._kept(table)
        make = self._packed if packed else self._uniform
        requests, query_len, tensors = make(common, table)
        sizes = {
            "requests": requests,
            "query_len": query_len,
            "packed": packed,
            "keys": keys,
            "columns": -(-keys // size),
            "table_stride": tensors[graphs.KEY_TABLE].stride(0),
        }
        return Part(start, end, sizes, tensors, self._blank(common, packed))

    def _without_stale(self, common: CommonAttentionMetadata, table: Tensor, columns: int) -> Tensor:
        """Return int32 ``(B, columns)``: the table with its first block in the place of those behind the last key."""
        # The kernel for queries of several tokens loads whole tiles of keys and multiplies what is behind the last one
        # by 0, so that it must be finite.
        size, width = self.context.block_size or 1, table.shape[1]
        table = pad(table, (0, columns - width)) if width < columns else table[:, :columns]
        used = torch.div(common.seq_lens + (size - 1), size, rounding_mode="floor")
        order = torch.arange(columns, dtype=torch.int32, device=table.device)
        return torch.where(order < used[:, None], table, table[:, :1])

    def _kept(self, table: Tensor) -> Tensor:
        """Return a table of equal queries of several tokens at an address that stays, where steps are captured."""
        context, size = self.context, self.context.block_size or 1
        if not context.cuda_graphs or len(table) > context.max_num_seqs:  # a captured step has no more
            return table
        if self._tables is None:
            most = -(-max(LEAST_KEYS, _power_of_two(context.max_model_len)) // size)
            self._tables = table.new_zeros(context.max_num_seqs, most)
        return self._tables[: len(table), : table.shape[1]].copy_(table)

    def _uniform(self, common: CommonAttentionMetadata, table: Tensor) -> tuple[int, int, dict[int, Tensor]]:
        requests, query_len = common.num_reqs, common.max_query_len
        if query_len not in self._query_lens:
            most, device = self.context.max_num_batched_tokens, self.context.device
            self._query_lens[query_len] = torch.full((most,), query_len, dtype=torch.int32, device=device)
        lens = self._query_lens[query_len][:requests]
        return requests, query_len, _named(lens, common.seq_lens, table)

    def _packed(self, common: CommonAttentionMetadata, table: Tensor) -> tuple[int, int, dict[int, Tensor]]:
        """Return the tensors of requests whose queries differ in length, padded by empty ones to a power of two."""
        config, given = self.context.config, common.num_reqs
        requests = _power_of_two(given)
        bounds, seq_lens = common.query_start_loc, common.seq_lens
        if requests > given:
            more = requests - given
            bounds = torch.cat((bounds, bounds[-1:].expand(more)))
            seq_lens, table = pad(seq_lens, (0, more)), pad(table, (0, 0, 0, more))
        tensors = _named(bounds.diff(), seq_lens, table)
        tensors[graphs.LSE_OFFSETS] = offsets = bounds.long() * config.num_heads
        tensors[graphs.QUERY_OFFSETS] = offsets * config.head_size
        return requests, max(LEAST_QUERY, _power_of_two(common.max_query_len)), tensors

    def _blank(self, common: CommonAttentionMetadata, packed: bool) -> Tensor | None:
        """Return the rows of requests without keys. A step that may be captured always gets them, at one address."""
        captured = self.context.cuda_graphs and not packed
        if not captured and int(common.seq_lens_cpu.min()) > 0:
            return None
        tokens, lens = common.num_actual_tokens, common.query_start_loc.diff()
        rows = torch.repeat_interleave(common.seq_lens == 0, lens, output_size=tokens)
        return self._keyless[:tokens].copy_(rows) if captured else rows


def _named(query_lens: Tensor, seq_lens: Tensor, table: Tensor) -> dict[int, Tensor]:
    names = (graphs.QUERY_LENS, graphs.KEY_LENS, graphs.KEY_TABLE, graphs.VALUE_TABLE)
    return dict(zip(names, (query_lens, seq_lens, table, table), strict=True))


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


class CudnnImpl(AttentionImpl[list[Part]]):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        config, layout = context.config, context.kv_layout or ""
        self._graphs = graphs_of(context.device)
        self._dtype, self._heads = PLAIN_DTYPES[config.dtype], config.num_heads
        # As cuDNN has a cache: ``(num_blocks, num_kv_heads, block_size, head_size)`` with strides.
        self._views = CacheView(
            lambda kv_cache: tuple(half.transpose(1, 2) for half in key_value_unchecked(kv_cache, layout, config))
        )

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
        keys, values = self._views(kv_cache)
        self._graphs.on_this_stream()
        for part in attn_metadata:
            rows = slice(part.start, part.end)
            self._run(part, query[rows].contiguous(), keys, values, outputs.rows(rows))
        return outputs.output

    def _run(self, part: Part, query: Tensor, keys: Tensor, values: Tensor, outputs: Outputs) -> None:
        output, output_lse = outputs.output, outputs.lse
        out = output if output.is_contiguous() else torch.empty_like(query)
        lse = output_lse if output_lse is None or output_lse.is_contiguous() else output_lse.contiguous()
        tensors = {
            **part.tensors,
            graphs.QUERY: query,
            graphs.KEYS: keys,
            graphs.VALUES: values,
            graphs.OUTPUT: out,
        }
        if lse is not None:
            tensors[graphs.LSE] = lse
        shape = Shape(
            **part.sizes,
            heads=self._heads,
            cache=tuple(keys.shape),
            key_strides=keys.stride(),
            value_strides=values.stride(),
            dtype=self._dtype,
            scale=self.terms.scale,
            window=self.terms.sliding_window,
            lse=lse is not None,
        )
        graph = self._graphs.graph(shape)
        graph.run(tensors, torch.empty(graph.workspace_bytes, dtype=torch.uint8, device=query.device))
        if part.keyless is not None:
            out.masked_fill_(part.keyless.view(-1, 1, 1), 0.0)
        if out is not output:
            output.copy_(out)
        if output_lse is None or lse is None:
            return
        if part.keyless is not None:
            lse.masked_fill_(part.keyless.unsqueeze(1), -torch.inf)
        if lse is not output_lse:
            output_lse.copy_(lse)


class CudnnBackend(AttentionBackend):
    """``CUDNN_ATTN``."""

    impl_cls = CudnnImpl
    builder_cls = CudnnMetadataBuilder
