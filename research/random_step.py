"""A step of random numbers in random blocks on one GPU, and its error: what the plugins' benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_select.decide.selection import Selection
from attn_select.reference.oracle import attention_reference
from attn_select.runtime import BlockTable, Capacity, attention_group, prepare_batch


class RandomStep:
    """One batch of one kind of layers.

    Args:
        selection: for the GPU at hand; layers in bfloat16 whose K and V are equally wide.
        query_lens, seq_lens: of each request.
        shared: tokens at the start of every request that lie in the same blocks.
        graphs: the group is made for CUDA graphs.
    """

    def __init__(
        self,
        selection: Selection,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        shared: int = 0,
        *,
        graphs: bool = False,
        device: str = "cuda",
    ) -> None:
        torch.manual_seed(0)
        self.config = selection.config
        capacity = Capacity(len(seq_lens), max(8192, sum(query_lens)), max(seq_lens))
        self.group: Any = attention_group(selection, device, capacity, cuda_graphs=graphs)
        size = self.group.block_size
        width, prefix = -(-max(seq_lens) // size), shared // size
        blocks = torch.randperm(len(seq_lens) * width + 1).tolist()
        self.table = BlockTable(len(seq_lens), width, size, device)
        for row in range(len(seq_lens)):
            own = blocks[row * width : (row + 1) * width]
            self.table.set_row(row, [*blocks[:prefix], *own[prefix:]])
        self.cache = self.group.allocate_kv_cache(len(blocks))
        self.cache.normal_()
        self.query_lens, self.seq_lens = query_lens, seq_lens
        self.common = prepare_batch(query_lens, seq_lens, self.table)
        heads, tokens = self.config.num_heads, sum(query_lens)
        self.query = torch.randn(tokens, heads, self.config.head_size, device=device, dtype=torch.bfloat16)
        self.output = torch.empty(tokens, heads, self.config.value_head_size, device=device, dtype=torch.bfloat16)

    def error(self, layer: Any, metadata: Any) -> float:
        """Run a layer and return the largest relative error of some rows against float64."""
        self.output.fill_(torch.nan)
        layer(self.query, None, None, self.cache, metadata, self.output)
        worst, bounds = 0.0, self.common.query_start_loc_cpu.tolist()
        key, value = self.cache.unbind(0 if self.group.kv_layout == "FLASH_ATTN_NHD" else 1)
        for request in {0, len(self.seq_lens) // 2, len(self.seq_lens) - 1}:
            length, size = self.seq_lens[request], self.group.block_size
            table = self.table.device_table[request, : -(-length // size)].long()
            keys, values = (half[table].flatten(0, 1)[:length] for half in (key, value))
            rows = torch.arange(bounds[request], bounds[request + 1])[[0, -1]].unique().to(self.query.device)
            positions = rows - bounds[request + 1] + length
            query = self.query[rows]
            wanted = attention_reference(query, keys, values, scale=layer.terms.scale, query_positions=positions)[0]
            got = self.output[rows].double()
            worst = max(worst, float((got - wanted).norm() / wanted.norm()) if got.isfinite().all() else torch.inf)
        return worst
