"""Block tables in the blocks that kernels read."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attn_select.runtime.backend import BackendContext
from attn_select.runtime.kv_cache import kernel_block_table
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata


def width_multiple(context: BackendContext) -> int:
    """Return the number of columns of which a backend's block tables have a multiple."""
    return math.lcm(*(plan.block_table_width_multiple for plan in context.plans.values()))


class KernelTables:
    """The block tables of a group's batches, in each backend's kernel blocks; ``block_size`` is the allocator's."""

    def __init__(self, block_size: int | None, max_num_seqs: int, max_model_len: int) -> None:
        self._block_size, self._max_num_seqs, self._max_model_len = block_size, max_num_seqs, max_model_len
        self._persistent: dict[int, Tensor] = {}

    def in_kernel_blocks(self, context: BackendContext, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the batch with tables in the backend's kernel blocks and of the width that it wants."""
        table = common.block_table_tensor
        if table is None or context.block_size is None or self._block_size is None:
            return common
        ratio = self._block_size // context.block_size
        multiple = width_multiple(context)
        # A captured kernel reads one address: there a table that happens to be wide enough is copied as well.
        if ratio == 1 and (multiple == 1 or (table.shape[1] % multiple == 0 and not context.cuda_graphs)):
            return common
        # The buffer has the width of the longest request whatever the step has: its strides are captured too.
        most = -(-self._max_model_len // self._block_size)
        out = self._buffer(context, table.shape[1], most, -(-most * ratio // multiple) * multiple)
        table = kernel_block_table(table, ratio, multiple, out)
        return replace(common, block_table_tensor=table, block_size=context.block_size)

    def _buffer(self, context: BackendContext, columns: int, most: int, kernel_columns: int) -> Tensor | None:
        """Return where the table of a captured step stays; None where steps are not captured."""
        if not context.cuda_graphs:
            return None
        if columns > most:
            raise BatchError(
                f"block_table_tensor of {columns} columns: max_model_len = {self._max_model_len} reserved {most}",
                hint="make the group with a larger max_model_len in its Capacity, or cut the table",
            )
        if id(context) not in self._persistent:
            shape = (self._max_num_seqs, kernel_columns)
            self._persistent[id(context)] = torch.zeros(shape, dtype=torch.int32, device=context.device)
        return self._persistent[id(context)]
