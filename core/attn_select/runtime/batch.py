"""From a scheduler's host-side lists to a step's ``CommonAttentionMetadata``, with one copy to the device.

Every step takes fresh staging memory from torch's caching pinned allocator, which does not hand out a block again
before the copy that reads it has finished. So nothing is overwritten too early, and the host never waits.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import gt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_select.errors import show
from attn_select.runtime.checks import checks_enabled
from attn_select.runtime.integers import integer, integers, size
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, Ranges

Integers = npt.NDArray[np.integer[Any]]
"""Numbers on the host. numpy works on some hundred of them in half the time that torch takes."""


def staging(length: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return an uninitialised host tensor ``(length,)`` that can be copied to ``device`` asynchronously."""
    return torch.empty(length, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on ``device`` without waiting for the copy; the tensor itself where that is the host."""
    if device.type == "cpu":
        return host
    pinned = host if host.is_pinned() else host.pin_memory()
    return pinned.to(device, non_blocking=True)


class BlockTable:
    """Block ids of the running requests, one row each, on the host and on the device.

    A request owns its row until ``clear_row`` or ``set_row``. In checked mode (``ATTN_SELECT_CHECK=1`` when the table
    is made) ``prepare_batch`` refuses a row that went to another request without being cleared: such a row still begins
    with the former owner's blocks, and another request may own those by now.

    Args:
        max_num_reqs: rows.
        max_num_blocks_per_req: columns.
        block_size: tokens per block of the allocator; 1 for token-level pools.
        device: where kernels read it.

    Attributes:
        host: int32 ``(max_num_reqs, max_num_blocks_per_req)``; to be read, since only the methods below note a change.
        num_blocks_per_row: int32 ``(max_num_reqs,)`` on the host, blocks in each row; the columns behind them hold 0.
        device_table: the same as ``host`` on the device, at one address for good; rows are current after ``commit``.
    """

    def __init__(
        self, max_num_reqs: int, max_num_blocks_per_req: int, block_size: int, device: torch.device | str
    ) -> None:
        max_num_reqs = size("max_num_reqs", max_num_reqs)
        max_num_blocks_per_req = size("max_num_blocks_per_req", max_num_blocks_per_req)
        self.device = torch.device(device)
        self.block_size = size("block_size", block_size)
        # The same memory three times: of an array single numbers are read in a tenth of the time that tensors take.
        self._ids = array("i", bytes(4 * max_num_reqs * max_num_blocks_per_req))
        self.host = torch.frombuffer(self._ids, dtype=torch.int32).view(max_num_reqs, max_num_blocks_per_req)
        on_host = self.device.type == "cpu"
        self._all_ids = self.host.view(-1).numpy()
        self._row_starts = np.arange(max_num_reqs, dtype=np.int32) * max_num_blocks_per_req
        self.device_table = self.host if on_host else torch.zeros_like(self.host, device=self.device)
        self._row_blocks = array("i", bytes(4 * max_num_reqs))
        self.num_blocks_per_row = torch.frombuffer(self._row_blocks, dtype=torch.int32)
        self._num_blocks = self.num_blocks_per_row.numpy()
        self._changed, self._committed = True, (0, 0)  # since the last copy; its rows and columns
        self._returned: Tensor | None = None  # by the last commit
        # What checked mode knows of each row's last step: tokens cached before it, tokens after it, blocks held in it.
        self._last_step = torch.zeros(max_num_reqs, 3, dtype=torch.int32) if checks_enabled() else None

    def append_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks to the end of a request's row.

        Args:
            row: of the request.
            block_ids: integers, in any sequence but text and bytes, an array or a host tensor of one dimension.

        Raises:
            BatchError: there is no such row, it has no room for them, or an id is no integer of 32 bits.
                The table is unchanged.
        """
        row = self._checked_row(row)
        self._write(row, self._row_blocks[row], self._packed(row, self._row_blocks[row], block_ids))

    def set_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Give a row to a request: clear it, then append the request's blocks. Raises as ``append_row`` does."""
        row = self._checked_row(row)
        ids = self._packed(row, 0, block_ids)
        self.clear_row(row)
        self._write(row, 0, ids)

    def _packed(self, row: int, start: int, block_ids: object) -> array[int]:
        """Return ids that a row has room for behind column ``start``."""
        ids = integers(block_ids)
        if ids is None or (ids and not -(1 << 31) <= min(ids) <= max(ids) < 1 << 31):
            text = f"block_ids = {show(block_ids)} for row {row}: accepted are integers of 32 bits, in a list or array"
            raise BatchError(text)
        if start + len(ids) > self.host.shape[1]:
            raise BatchError(
                f"row {row} of the block table: {start + len(ids)} blocks, but max_num_blocks_per_req = "
                f"{self.host.shape[1]}",
                hint="make the BlockTable with room for the longest request",
            )
        return array("i", ids)

    def _write(self, row: int, start: int, ids: array[int]) -> None:
        first = row * self.host.shape[1] + start
        self._ids[first : first + len(ids)] = ids
        self._row_blocks[row] = start + len(ids)
        self._changed = True

    def clear_row(self, row: int) -> None:
        """Empty a row when its request has finished or was preempted. ``BlockPool.free`` gives the blocks back."""
        row = self._checked_row(row)
        self._changed = True
        self.host[row, : self._row_blocks[row]] = 0
        for of_row in self._per_row():
            of_row[row] = 0

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows, for batches that are reordered."""
        first, second = self._checked_row(first), self._checked_row(second)
        self._changed = True
        for of_row in (self.host, *self._per_row()):
            of_row[[first, second]] = of_row[[second, first]]

    def note_step(self, new_lens: Sequence[int], seq_lens: Tensor) -> None:
        """Compare a step with the last step of each row, and remember it (checked mode; ``prepare_batch`` calls it)."""
        # A request goes on behind its last step's first token (drafts may have been rejected), at most where it ended.
        # The same step may be prepared twice. Anything else is another request in a row that was not cleared.
        # ``new_lens`` are the tokens that this step caches, ``seq_lens`` (int32, on the host) those after it.
        if self._last_step is None:
            return
        first_positions = seq_lens - torch.tensor(new_lens, dtype=torch.int32)
        last, row_blocks = self._last_step[: len(seq_lens)], self.num_blocks_per_row[: len(seq_lens)]
        began, ended, row_blocks_then = last.unbind(1)
        # Neither a new block nor another length: it is the same step again, and may begin where the last one began.
        goes_on = (row_blocks > row_blocks_then) | (seq_lens != ended)
        least = torch.minimum(began + goes_on.int(), ended)
        stale = (ended > 0) & ((first_positions < least) | (first_positions > ended))
        if bool(stale.any()):
            row = int(stale.int().argmax())
            raise BatchError(
                f"row {row} of the block table is stale: its last step held tokens {int(began[row])} to "
                f"{int(ended[row]) - 1} of a request, and this step begins at token {int(first_positions[row])}, so "
                "another request took the row over",
                hint="when a request finishes or is preempted, call BlockTable.clear_row(row) and BlockPool.free",
            )
        last.copy_(torch.stack((first_positions, seq_lens, row_blocks), dim=1))

    def _per_row(self) -> tuple[Tensor, ...]:
        return (self.num_blocks_per_row,) if self._last_step is None else (self.num_blocks_per_row, self._last_step)

    def _checked_row(self, row: object) -> int:
        found = integer(row)
        if found is None or not 0 <= found < len(self.host):
            raise BatchError(f"row {show(row)}: the block table has rows 0 to {len(self.host) - 1}")
        return found

    def write_slots(self, seq_lens: Integers, new_lens: Sequence[int] | None, out: Integers) -> None:
        """Write int64 slots of the first rows' new keys, their last ones; ``new_lens`` None: one key of each."""
        starts = self._row_starts[: len(seq_lens)]
        if new_lens is None:  # no need to spread requests over keys
            positions = seq_lens - 1
        else:
            counts = np.array(new_lens)
            positions = (seq_lens - counts.cumsum()).repeat(counts)
            positions += np.arange(len(positions))
            starts = starts.repeat(counts)
        columns, offsets = np.divmod(positions, self.block_size)
        columns += starts
        np.multiply(self._all_ids[columns], self.block_size, out=out, dtype=np.int64)
        out += offsets

    def check_room(self, seq_lens: Integers) -> None:
        """Raise BatchError for the first of the first rows' requests that has more keys than its blocks hold."""
        size, row_blocks = self.block_size, self._num_blocks[: len(seq_lens)]
        missing = seq_lens > row_blocks * size
        if missing.any():
            request = int(missing.argmax())
            raise BatchError(
                f"request {request}: seq_lens = {seq_lens[request]}, but its row of the block table holds "
                f"{row_blocks[request]} blocks of {size} tokens"
            )

    def commit(self, num_reqs: int) -> Tensor:
        """Copy the first rows to the device, not waiting; return int32 ``(num_reqs, W)``, W the longest row in use."""
        # Nothing is copied where the device has them already: most steps of a few decodes add no block.
        table = self._returned
        if table is not None and not self._changed and table.shape[0] == num_reqs:
            return table
        if not 0 < num_reqs <= self.host.shape[0]:
            raise BatchError(f"{num_reqs} requests: the block table has rows for 1 to {len(self.host)} (max_num_reqs)")
        width = max(1, int(self._num_blocks[:num_reqs].max()))
        table = self._returned = self.device_table[:num_reqs, :width]
        rows, columns = self._committed
        if self._changed or num_reqs > rows or width > columns:
            self._changed, self._committed = False, (num_reqs, width)
            if self.device_table is not self.host:
                # Fresh pinned memory each time: the copy may still read the last one when the next step changes
                # ``host``.
                pinned = torch.empty(num_reqs, width, dtype=torch.int32, pin_memory=True)
                pinned.copy_(self.host[:num_reqs, :width])
                table.copy_(pinned, non_blocking=True)
        return table


def prepare_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: BlockTable | None = None,
    *,
    new_lens: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    causal: bool = True,
    mm_prefix_ranges: Sequence[Ranges] | None = None,
    tree_mask: Tensor | None = None,
) -> CommonAttentionMetadata:
    """Return the metadata of a step whose request r is row r of ``block_table``.

    Args:
        query_lens: tokens of each request in this step: a sequence, array or host tensor of integers, like all lengths.
        seq_lens: keys of each request, this step's included.
        block_table: its first ``len(query_lens)`` rows are committed; None for layers without a cache.
        new_lens: keys of each request that this step writes, its last ones; None: as many as it has queries. In
            cross-attention the encoder's whole length in the step that brings it, and 0 afterwards.
        device: where the tensors go; None: the block table's device, without a table the CPU.
        causal: see ``CommonAttentionMetadata``.
        mm_prefix_ranges: see ``CommonAttentionMetadata``.
        tree_mask: see ``CommonAttentionMetadata``; on the device.

    Raises:
        BatchError: ``block_table`` is no ``BlockTable``, a length is no integer, there is no request, the counts
            differ, a request has more new keys than its sequence is long, its row of the table holds too few blocks, or
            (in checked mode) the row is stale.
    """
    if block_table is not None and not isinstance(block_table, BlockTable):
        text = f"block_table is a {type(block_table).__name__}: accepted is a BlockTable, or None without a cache"
        raise BatchError(text, hint="CommonAttentionMetadata takes a table that is a tensor, with its slot_mapping")
    target = block_table.device if device is None and block_table is not None else torch.device(device or "cpu")
    query_lens, seq_lens = _lens("query_lens", query_lens), _lens("seq_lens", seq_lens)
    new_lens = query_lens if new_lens is None else _lens("new_lens", new_lens)
    num_reqs = len(query_lens)
    if not num_reqs or len(seq_lens) != num_reqs or len(new_lens) != num_reqs:
        raise BatchError(
            f"{num_reqs} query_lens, {len(seq_lens)} seq_lens and {len(new_lens)} new_lens: accepted are equal numbers "
            "of them, at least 1"
        )
    try:
        single = new_lens is query_lens and new_lens.count(1) == num_reqs  # most steps: one token each
        if not single:
            _check_lens("query_lens", query_lens, seq_lens, limited=new_lens is query_lens)
            _check_lens("new_lens", new_lens, seq_lens)
        num_tokens = num_reqs if single else sum(query_lens)
        table = None if block_table is None else block_table.commit(num_reqs)
        # One buffer for slots, which are int64, bounds and lengths. ``struct`` takes integers alone, in numpy's time.
        num_slots = 0 if table is None else num_tokens if single else sum(new_lens)
        # The slots come first, so that they are aligned to 8 bytes; they count twice, being two int32 each.
        sizes = (2 * num_slots, num_reqs + 1, num_reqs)
        host = staging(sum(sizes), target)
        slots_cpu, bounds_cpu, seq_lens_cpu = host.split_with_sizes(sizes)
        numbers = host.numpy()
        lens = numbers[-num_reqs:]
        if single:
            numbers[2 * num_slots : -num_reqs] = np.arange(num_reqs + 1)
        else:
            struct.pack_into(f"{num_reqs + 1}i", numbers.data, 8 * num_slots, 0, *accumulate(query_lens))
        struct.pack_into(f"{num_reqs}i", lens.data, 0, *seq_lens)
        # ``single`` skipped the checks: one token a request is wrong only where a request has no key.
        if single and lens.min() < 1:
            _check_lens("query_lens", query_lens, seq_lens)
        if block_table is not None:
            block_table.check_room(lens)
            block_table.note_step(new_lens, seq_lens_cpu)
            block_table.write_slots(lens, None if single else new_lens, numbers[: 2 * num_slots].view(np.int64))
    except (TypeError, OverflowError, RuntimeError, struct.error):
        _check_integers(query_lens=query_lens, seq_lens=seq_lens, new_lens=new_lens)
        raise
    slots, bounds, on_device = slots_cpu, bounds_cpu, seq_lens_cpu
    if target.type != "cpu":
        slots, bounds, on_device = host.to(target, non_blocking=True).split_with_sizes(sizes)
    return CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds_cpu,
        seq_lens=on_device,
        seq_lens_cpu=seq_lens_cpu,
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=1 if single else max(query_lens),
        max_seq_len=int(lens.max()),
        block_table_tensor=table,
        slot_mapping=None if table is None else slots.view(torch.int64),
        causal=causal,
        mm_prefix_ranges=mm_prefix_ranges,
        tree_mask=tree_mask,
        block_size=None if block_table is None else block_table.block_size,
    )


def _lens(name: str, lens: object) -> list[int] | tuple[int, ...]:
    """Return lengths that come in something else than a list or tuple as a list."""
    if isinstance(lens, (list, tuple)):
        return lens
    found = integers(lens)
    if found is None:
        raise BatchError(f"{name} = {show(lens)}: accepted is a sequence of integers on the host, one per request")
    return found


def _check_integers(**lens: Sequence[int]) -> None:
    """Raise BatchError for the first request with a length that is no integer of 32 bits."""
    for name, numbers in lens.items():
        for request, number in enumerate(numbers):
            if not isinstance(number, (int, np.integer)) or not abs(number) < 1 << 31:
                text = f"request {request}: {name} = {show(number)}: accepted are integers below 2 ** 31"
                raise BatchError(text) from None


def _check_lens(name: str, lens: Sequence[int], seq_lens: Sequence[int], *, limited: bool = True) -> None:
    """Raise BatchError for the first request that has a negative length or (limited) more new tokens than keys."""
    if min(lens) < 0 or (limited and any(map(gt, lens, seq_lens))):
        found = zip(lens, seq_lens, strict=True)
        request = next(index for index, (count, keys) in enumerate(found) if count < 0 or (limited and count > keys))
        raise BatchError(
            f"request {request}: {name} = {lens[request]} with seq_lens = {seq_lens[request]}: accepted is 0 "
            "to seq_lens, which includes this step's tokens (in cross-attention any query from 0)"
        )
