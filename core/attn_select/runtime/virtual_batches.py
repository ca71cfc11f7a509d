"""Chunked local attention (Llama 4) for kernels that have no mask for it: each chunk becomes a request of its own.

A query sees the keys of its chunk up to itself, which is plain causal attention over the chunk's blocks. So a request
whose queries lie in three chunks is three requests to the kernel, with the block table cut accordingly (vLLM's
``make_local_attention_virtual_batches``). Tokens keep their order, and the cache and its slots are not touched.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_select.runtime.backend import BackendContext
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import CommonAttentionMetadata, prefix_sums
from attn_select.runtime.static_buffers import StaticBuffers


def most_requests(max_num_seqs: int, max_num_batched_tokens: int, chunk_size: int) -> int:
    """Return the most requests that a batch becomes: q queries lie in at most ``q // chunk_size + 2`` chunks, and q."""
    return max_num_seqs + min(max_num_batched_tokens, max_num_seqs + max_num_batched_tokens // chunk_size)


class VirtualBatches:
    """Cuts the batches of one backend's layers at the borders of chunks. Does not synchronise with the device."""

    # ``chunk_size`` is a multiple of ``context.block_size``. The context's ``max_num_seqs`` and ``max_model_len``
    # bound the cut batches. With CUDA graphs the tensors of a cut batch keep their addresses.

    def __init__(self, chunk_size: int, context: BackendContext, width_multiple: int) -> None:
        assert context.block_size is not None
        self._chunk, self._block, self._multiple = chunk_size, context.block_size, width_multiple
        self._device = context.device
        most = context.max_num_seqs
        self._static = StaticBuffers(context.device, captured=context.cuda_graphs)
        self._static.reserve("bounds", most + 1)
        self._static.reserve("lens", most)
        self._static.reserve("table", most, self._columns(context.max_model_len))

    def _columns(self, tokens: int) -> int:
        """Return the columns of a block table for sequences of so many tokens."""
        return max(1, -(-tokens // (self._block * self._multiple))) * self._multiple

    def cut(self, common: CommonAttentionMetadata, num_decodes: int | None) -> CommonAttentionMetadata:
        """Return the batch with a request for each chunk that a request's queries lie in."""
        # ``num_decodes`` of its first requests are decodes, None where the backend takes any order.
        size, ends = self._chunk, common.seq_lens_cpu
        firsts = ends - common.query_lens_cpu  # negative where a request has fewer keys than queries
        last_chunk = (ends - 1).clamp_(min=0) // size
        first_chunk = torch.minimum(firsts.clamp(min=0) // size, last_chunk)
        counts = last_chunk - first_chunk + 1
        # One row per (request, chunk): whose it is, and which of the chunks of its queries.
        request = torch.repeat_interleave(counts)
        within = torch.arange(len(request)) - (counts.cumsum(0) - counts)[request]
        start = (first_chunk[request] + within) * size
        end = torch.minimum(ends[request], start + size)
        lens = (end - start).int()
        # Rows without keys stand before the first chunk; where there is no query the last key's chunk is kept.
        query_lens = end - torch.where(within == 0, firsts[request], start)
        bounds = prefix_sums(query_lens)
        # One copy for all: bounds, lengths, the rows of the table, and the first columns of the chunks.
        packed = to_device(torch.cat([bounds, lens, request.int(), (start // self._block).int()]), self._device)
        count = len(request)
        bounds_here = packed[: count + 1]
        lens_here, rows, columns = packed[count + 1 :].view(3, count)
        longest = min(common.max_seq_len, size)
        table = self._table(common, rows, columns, longest)
        return replace(
            common,
            query_start_loc=self._static.hold("bounds", bounds_here),
            query_start_loc_cpu=bounds,
            seq_lens=self._static.hold("lens", lens_here),
            seq_lens_cpu=lens,
            num_reqs=count,
            max_query_len=int(query_lens.max()),
            max_seq_len=longest,
            block_table_tensor=table,
            num_decodes=None if num_decodes is None else int(counts[:num_decodes].sum()),
        )

    def _table(self, common: CommonAttentionMetadata, rows: Tensor, first: Tensor, longest: int) -> Tensor:
        """Return each chunk's blocks: columns ``first`` and up of the rows of its request."""
        table = common.block_table_tensor
        assert table is not None
        width = self._columns(longest)
        columns = torch.arange(width, dtype=torch.int32, device=self._device) + first[:, None]
        # Behind a request's last block any number may stand.
        found = table.index_select(0, rows).gather(1, columns.clamp_(max=table.shape[1] - 1).long())
        return self._static.hold("table", found)
