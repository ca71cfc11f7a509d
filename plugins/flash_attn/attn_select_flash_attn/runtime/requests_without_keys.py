"""Requests without keys (padding of CUDA graphs, an empty encoder), which FA2's paged kernel gets wrong.

For such a request the kernel writes +inf to the place that its log-sum-exp would have in a padded layout ``(B, H,
longest query)``, although the layout is packed. So its own LSE stays unwritten, another request's is overwritten, and
where queries differ in length the write may be out of bounds (csrc/flash_attn/src/flash_fwd_kernel.h v2.8.3,
compute_attn_1rowblock_splitkv; seen on H100 with vLLM 0.26.0). The outputs are right.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_select.runtime.backend import BackendContext
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.static_buffers import StaticBuffers
from attn_select_flash_attn.runtime.lse import request_of_rows


class KeylessRequests:
    """Gives such requests one key, the first of block 0, and says which rows of the result to discard."""

    def __init__(self, context: BackendContext) -> None:
        # context: of the builder. With CUDA graphs all tensors that are returned keep their addresses.
        self._graphs = context.cuda_graphs
        self._static = StaticBuffers(context.device, captured=context.cuda_graphs)
        self._static.reserve("lens", context.max_num_seqs)
        self._static.reserve("rows", context.max_num_batched_tokens, dtype=torch.bool)
        blocks = -(-context.max_model_len // (context.block_size or 1))
        self._static.reserve("table", context.max_num_seqs, blocks)

    def guarded(self, common: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, Tensor] | None:
        """Return the batch with a key for every request, and bool ``(T,)`` rows to discard. Does not synchronise."""
        # None where the host knows that every request has keys. With CUDA graphs it does not know.
        table = common.block_table_tensor
        if table is None or not (self._graphs or bool((common.seq_lens_cpu == 0).any())):
            return None
        empty = common.seq_lens == 0
        lens = self._static.hold("lens", common.seq_lens.clamp_min(1))
        tables = self._static.hold("table", table.masked_fill(empty.unsqueeze(1), 0))[:, : table.shape[1]]
        rows = empty[request_of_rows(common.query_start_loc, common.num_actual_tokens)]
        safe = replace(common, seq_lens=lens, block_table_tensor=tables, max_seq_len=max(common.max_seq_len, 1))
        return safe, self._static.hold("rows", rows)
