"""Block tables in the blocks that kernels read."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attn_select.runtime.backend import BackendContext
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.checks import check_columns
from attn_select.runtime.kv_cache import kernel_block_table
from attn_select.runtime.metadata import CommonAttentionMetadata


def width_multiple(context: BackendContext) -> int:
    """Return the number of columns of which a backend's block tables have a multiple."""
    return math.lcm(*(plan.block_table_width_multiple for plan in context.plans.values()))


class KernelTables:
    """The block tables of one backend's batches, in its kernel's blocks; ``block_size`` is the allocator's."""

    def __init__(self, context: BackendContext, block_size: int, capacity: Capacity) -> None:
        self._context, self._multiple = context, width_multiple(context)
        self._ratio = block_size // (context.block_size or block_size)
        # A captured kernel reads one address, with the strides of the longest request's table whatever the step has:
        # there a table that happens to be wide enough is copied as well.
        self._longest, self._columns = capacity.max_model_len, -(-capacity.max_model_len // block_size)
        self._kept: Tensor | None = None
        if context.cuda_graphs and (self._ratio > 1 or self._multiple > 1):
            columns = -(-self._columns * self._ratio // self._multiple) * self._multiple
            shape = (capacity.max_num_seqs, columns)
            self._kept = torch.zeros(shape, dtype=torch.int32, device=context.device)

    def in_kernel_blocks(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the batch with tables in the backend's kernel blocks and of the width that it wants."""
        table = common.block_table_tensor
        if table is None or (self._kept is None and self._ratio == 1 and table.shape[1] % self._multiple == 0):
            return common
        if self._kept is not None:
            check_columns(table, self._columns, self._longest)
        table = kernel_block_table(table, self._ratio, self._multiple, self._kept)
        return replace(common, block_table_tensor=table, block_size=self._context.block_size)
