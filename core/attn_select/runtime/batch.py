"""From a scheduler's host-side lists to a step's ``CommonAttentionMetadata``, with one copy to the device.

Staging memory is taken fresh from torch's caching pinned allocator at every step, which does not hand out a block again
before the copy that reads it is through: nothing is overwritten too early, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, Ranges


def staging(num_bytes: int, device: torch.device) -> Tensor:
    """Return uninitialised host bytes that can be copied to ``device`` asynchronously."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on ``device`` without waiting for the copy; the tensor itself where that is the host."""
    if device.type == "cpu":
        return host
    pinned = host if host.is_pinned() else host.pin_memory()
    return pinned.to(device, non_blocking=True)


class BlockTable:
    """Block ids of the running requests, one row each, on the host and on the device.

    Args:
        max_num_reqs: rows.
        max_num_blocks_per_req: columns.
        block_size: tokens per block of the allocator; 1 for token-level pools.
        device: where kernels read it.

    Attributes:
        host: int32 ``(max_num_reqs, max_num_blocks_per_req)``.
        num_blocks_per_row: int32 ``(max_num_reqs,)`` on the host, blocks in each row.
        device_table: the same as ``host`` on the device, at one address for good; rows are current after ``commit``.
    """

    def __init__(
        self, max_num_reqs: int, max_num_blocks_per_req: int, block_size: int, device: torch.device | str
    ) -> None:
        sizes = {
            "max_num_reqs": max_num_reqs,
            "max_num_blocks_per_req": max_num_blocks_per_req,
            "block_size": block_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name} = {size}: accepted are integers from 1", fields=[name])
        self.device = torch.device(device)
        self.block_size = block_size
        self.host = torch.zeros(max_num_reqs, max_num_blocks_per_req, dtype=torch.int32)
        on_host = self.device.type == "cpu"
        self.device_table = self.host if on_host else torch.zeros_like(self.host, device=self.device)
        self.num_blocks_per_row = torch.zeros(max_num_reqs, dtype=torch.int32)

    def append_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks to the end of a request's row.

        Raises:
            BatchError: the row has no room for them.
        """
        start = int(self.num_blocks_per_row[row])
        end = start + len(block_ids)
        if end > self.host.shape[1]:
            raise BatchError(
                f"row {row} of the block table: {end} blocks, but max_num_blocks_per_req = {self.host.shape[1]}"
            )
        if block_ids:
            self.host[row, start:end] = torch.tensor(block_ids, dtype=torch.int32)
        self.num_blocks_per_row[row] = end

    def set_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Replace a request's row."""
        self.num_blocks_per_row[row] = 0
        self.append_row(row, block_ids)

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another, for batches that close a gap."""
        self.host[target] = self.host[source]
        self.num_blocks_per_row[target] = self.num_blocks_per_row[source]

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows, for batches that are reordered."""
        for table in (self.host, self.num_blocks_per_row):
            table[[first, second]] = table[[second, first]]

    def commit(self, num_reqs: int) -> Tensor:
        """Copy the first rows to the device, not waiting; return int32 ``(num_reqs, W)``, W the longest row in use."""
        width = max(1, int(self.num_blocks_per_row[:num_reqs].max()))
        table = self.device_table[:num_reqs, :width]
        if self.device_table is not self.host:
            pinned = torch.empty(num_reqs, width, dtype=torch.int32, pin_memory=True)
            pinned.copy_(self.host[:num_reqs, :width])
            table.copy_(pinned, non_blocking=True)
        return table


def prepare_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: BlockTable | None = None,
    *,
    device: torch.device | str | None = None,
    causal: bool = True,
    mm_prefix_ranges: Sequence[Ranges] | None = None,
) -> CommonAttentionMetadata:
    """Return the metadata of a step whose request r is row r of ``block_table``.

    Args:
        query_lens: tokens of each request in this step.
        seq_lens: keys of each request, this step's included.
        block_table: its first ``len(query_lens)`` rows are committed; None for layers without a cache.
        device: None: the block table's, else the CPU.
        causal, mm_prefix_ranges: see ``CommonAttentionMetadata``.

    Raises:
        BatchError: no request, different counts, a query longer than its sequence, or a table too short for it.
    """
    target = block_table.device if device is None and block_table is not None else torch.device(device or "cpu")
    num_reqs = len(query_lens)
    if not num_reqs or len(seq_lens) != num_reqs:
        raise BatchError(
            f"{num_reqs} query_lens and {len(seq_lens)} seq_lens: accepted are as many of both, at least 1"
        )
    num_tokens, max_seq_len = sum(query_lens), max(seq_lens)
    ints = 2 * num_reqs + 1
    slots_at = -(-ints // 2) * 2 * 4
    host = staging(slots_at + 8 * num_tokens, target)
    header, slot_mapping = host[: 4 * ints].view(torch.int32), host[slots_at:].view(torch.int64)
    bounds_cpu, seq_lens_cpu = header[: num_reqs + 1], header[num_reqs + 1 :]
    lens = torch.tensor(query_lens, dtype=torch.int32)
    seq_lens_cpu.copy_(torch.tensor(seq_lens, dtype=torch.int32))
    bounds_cpu[0] = 0
    torch.cumsum(lens, 0, dtype=torch.int32, out=bounds_cpu[1:])
    first_positions = seq_lens_cpu - lens
    _check_lens(lens, seq_lens_cpu, first_positions, block_table)
    if block_table is not None:
        _fill_slots(slot_mapping, num_tokens, lens, bounds_cpu, first_positions, block_table)
    here = to_device(host, target)
    header = here[: 4 * ints].view(torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=header[: num_reqs + 1],
        query_start_loc_cpu=bounds_cpu,
        seq_lens=header[num_reqs + 1 :],
        seq_lens_cpu=seq_lens_cpu,
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=max(query_lens),
        max_seq_len=max_seq_len,
        block_table_tensor=None if block_table is None else block_table.commit(num_reqs),
        slot_mapping=None if block_table is None else here[slots_at:].view(torch.int64),
        causal=causal,
        mm_prefix_ranges=mm_prefix_ranges,
    )


def _fill_slots(
    slots: Tensor, num_tokens: int, lens: Tensor, bounds: Tensor, first_positions: Tensor, block_table: BlockTable
) -> None:
    """Write each token's slot, ``block * block_size + offset``."""
    if num_tokens == len(lens):  # one token each: no need to spread requests over tokens
        request: Tensor = torch.arange(num_tokens)
        positions = first_positions
    else:
        request = torch.repeat_interleave(lens, output_size=num_tokens)
        positions = torch.arange(num_tokens, dtype=torch.int32) + (first_positions - bounds[:-1])[request]
    size = block_table.block_size
    blocks = block_table.host[request, positions // size]
    slots.copy_(blocks).mul_(size).add_(positions % size)


def _check_lens(lens: Tensor, seq_lens: Tensor, first_positions: Tensor, block_table: BlockTable | None) -> None:
    """Find the request whose lengths cannot be."""
    bad = (first_positions < 0) | (lens < 0)
    if bool(bad.any()):
        request = int(bad.int().argmax())
        raise BatchError(
            f"request {request}: query_lens = {int(lens[request])} with seq_lens = {int(seq_lens[request])}: accepted "
            "is 0 to seq_lens, which includes this step's tokens"
        )
    if block_table is None:
        return
    size, held = block_table.block_size, block_table.num_blocks_per_row[: len(lens)]
    short = seq_lens > held * size
    if bool(short.any()):
        request = int(short.int().argmax())
        raise BatchError(
            f"request {request}: seq_lens = {int(seq_lens[request])}, but its row of the block table holds "
            f"{int(held[request])} blocks of {size} tokens"
        )
