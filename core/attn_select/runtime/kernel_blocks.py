"""Blocks as kernels read them: which sizes they can have, and block tables in these blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.runtime.backend import BackendContext
from attn_select.runtime.dispatch import Plans
from attn_select.runtime.kv_cache import SPLIT_IN_PLACE, kernel_block_table
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata


def kernel_block_sizes(plans: Plans, block_size: int | None, kv_layout: str | None) -> dict[str, int]:
    """Return the kernel block size per backend that reads the cache; one for all where the layout ties them.

    Args:
        plans: per backend those of the phases that it serves.
        block_size: tokens per block of the allocator; None without a cache.
        kv_layout: of the cache; None without.

    Raises:
        ConfigError: the kernels share no block size within this layout.
    """
    sizes = shared_block_sizes(plans, block_size, kv_layout)
    if sizes is None:
        able = _able_block_sizes(plans, block_size)
        each = "; ".join(f"{name}: {', '.join(map(str, own)) or 'none'}" for name, own in able.items())
        raise ConfigError(
            f"block_size = {block_size}: kernels of {' and '.join(able)} share no block size in {kv_layout} "
            f"(their sizes that divide it: {each})",
            fields=["block_size"],
            hint="select without block_size, or name one backend for both phases",
        )
    return sizes


def shared_block_sizes(plans: Plans, block_size: int | None, kv_layout: str | None) -> dict[str, int] | None:
    """Return what ``kernel_block_sizes`` returns; None where the kernels share no block size."""
    able = _able_block_sizes(plans, block_size)
    # The allocator's own size where the kernel runs it, else the plan's first choice.
    wanted = {name: block_size if block_size in sizes else sizes[0] for name, sizes in able.items() if sizes}
    if len(wanted) == len(able):
        if kv_layout in SPLIT_IN_PLACE or len(set(wanted.values())) < 2:
            return wanted
        # K and V of one block lie next to each other: a block of another size is another place in memory.
        common = [size for size in next(iter(able.values())) if all(size in sizes for sizes in able.values())]
        if common:
            return dict.fromkeys(wanted, common[0])
    return None


def _able_block_sizes(plans: Plans, block_size: int | None) -> dict[str, list[int]]:
    """Return per backend that reads the cache the kernel block sizes that divide the allocator's."""
    able: dict[str, list[int]] = {}
    if block_size is None:
        return able
    for name, own in plans.items():
        if readers := [plan.kernel_block_sizes for plan in own.values() if plan.kv_layouts]:
            able[name] = [k for k in readers[0] if block_size % k == 0 and all(k in other for other in readers)]
    return able


def width_multiple(context: BackendContext) -> int:
    """Return the number of columns of which a backend's block tables have a multiple."""
    return math.lcm(*(plan.block_table_width_multiple for plan in context.plans.values()))


class KernelTables:
    """The block tables of a group's batches, in each backend's kernel blocks.

    Args:
        block_size: tokens per block of the allocator; None without a cache.
        max_num_seqs: most requests in a batch.
        max_model_len: most tokens of a request.
    """

    def __init__(self, block_size: int | None, max_num_seqs: int, max_model_len: int) -> None:
        self._block_size, self._max_num_seqs, self._max_model_len = block_size, max_num_seqs, max_model_len
        self._persistent: dict[int, Tensor] = {}

    def in_kernel_blocks(self, context: BackendContext, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the batch with tables in the backend's kernel blocks and of the width that it wants.

        Raises:
            BatchError: with CUDA graphs, the table is wider than requests of ``max_model_len`` tokens need.
        """
        table = common.block_table_tensor
        if table is None or context.block_size is None or self._block_size is None:
            return common
        ratio = self._block_size // context.block_size
        multiple = width_multiple(context)
        # A captured kernel reads one address: there a table that happens to be wide enough is copied as well.
        if ratio == 1 and (multiple == 1 or (table.shape[1] % multiple == 0 and not context.cuda_graphs)):
            return common
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
