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

import torch
from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.runtime.checks import checks_enabled
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, Ranges, prefix_sums
from attn_select.times.dispatch import lead_of

FEW_SLOTS = 32
"""Up to as many, slots are worked out one by one: fewer take less time than the tensor operations for all at once."""


_COUNTED = array("i", range(1025)).tobytes()
"""The prefix sums of up to 1024 queries of one token, int32."""


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
        row_starts: int64 ``(max_num_reqs,)`` on the host, where each row begins in ``host``.
        num_blocks_per_row: int32 ``(max_num_reqs,)`` on the host, blocks in each row; the columns behind them hold 0.
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
        # The same memory as a tensor and as an array, of which single numbers are read in a tenth of the time.
        self._ids = array("i", bytes(4 * max_num_reqs * max_num_blocks_per_req))
        self.host = torch.frombuffer(self._ids, dtype=torch.int32).view(max_num_reqs, max_num_blocks_per_req)
        on_host = self.device.type == "cpu"
        self.row_starts = torch.arange(0, self.host.numel(), max_num_blocks_per_req)
        self.device_table = self.host if on_host else torch.zeros_like(self.host, device=self.device)
        self._held = array("i", bytes(4 * max_num_reqs))
        self.num_blocks_per_row = torch.frombuffer(self._held, dtype=torch.int32)
        self._changed, self._committed = True, (0, 0)  # since the last copy; its rows and columns
        self._returned: Tensor | None = None  # by the last commit
        # What checked mode knows of each row's last step: tokens cached before it, tokens after it, blocks held in it.
        self._last_step = torch.zeros(max_num_reqs, 3, dtype=torch.int32) if checks_enabled() else None

    def append_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks to the end of a request's row.

        Raises:
            BatchError: there is no such row, or it has no room for them.
        """
        self._check_row(row)
        start = self._held[row]
        end = start + len(block_ids)
        if end > self.host.shape[1]:
            raise BatchError(
                f"row {row} of the block table: {end} blocks, but max_num_blocks_per_req = {self.host.shape[1]}"
            )
        first = row * self.host.shape[1]
        self._ids[first + start : first + end] = array("i", block_ids)
        self._held[row] = end
        self._changed = True

    def set_row(self, row: int, block_ids: Sequence[int]) -> None:
        """Give a row to a request: clear it, then append the request's blocks."""
        self.clear_row(row)
        self.append_row(row, block_ids)

    def clear_row(self, row: int) -> None:
        """Empty a row when its request has finished or was preempted. ``BlockPool.free`` gives the blocks back."""
        self._check_row(row)
        self._changed = True
        self.host[row, : self._held[row]] = 0
        for of_row in self._per_row():
            of_row[row] = 0

    def move_row(self, source: int, target: int) -> None:
        """Move a request to another row and clear its old one, for batches that close a gap."""
        self._check_row(source)
        self._check_row(target)
        if source == target:
            return
        for of_row in (self.host, *self._per_row()):
            of_row[target] = of_row[source]
        self.clear_row(source)

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows, for batches that are reordered."""
        self._check_row(first)
        self._check_row(second)
        self._changed = True
        for of_row in (self.host, *self._per_row()):
            of_row[[first, second]] = of_row[[second, first]]

    def note_step(self, new_lens: Sequence[int], seq_lens: Tensor) -> None:
        """Compare a step with the last step of each row, and remember it (checked mode; ``prepare_batch`` calls it).

        A request goes on where its last step began or later (drafts may have been rejected), at most where it ended.
        Once blocks were appended it has gone on by at least one token. Anything else is another request in a row that
        was not cleared.

        Args:
            new_lens: tokens of each request that this step caches.
            seq_lens: int32 ``(B,)`` on the host, tokens after it.

        Raises:
            BatchError: names the row, where its last step ended and where this one begins.
        """
        if self._last_step is None:
            return
        first_positions = seq_lens - torch.tensor(new_lens, dtype=torch.int32)
        last, held = self._last_step[: len(seq_lens)], self.num_blocks_per_row[: len(seq_lens)]
        began, ended, held_then = last.unbind(1)
        least = torch.minimum(began + (held > held_then).int(), ended)
        stale = (ended > 0) & ((first_positions < least) | (first_positions > ended))
        if bool(stale.any()):
            row = int(stale.int().argmax())
            raise BatchError(
                f"row {row} of the block table is stale: its last step held tokens {int(began[row])} to "
                f"{int(ended[row]) - 1} of a request, and this step begins at token {int(first_positions[row])}, so "
                "another request took the row over",
                hint="when a request finishes or is preempted, call BlockTable.clear_row(row) and BlockPool.free",
            )
        last.copy_(torch.stack((first_positions, seq_lens, held), dim=1))

    def _per_row(self) -> tuple[Tensor, ...]:
        return (self.num_blocks_per_row,) if self._last_step is None else (self.num_blocks_per_row, self._last_step)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self.host):
            raise BatchError(f"row {row}: the block table has rows 0 to {len(self.host) - 1}")

    def slots(self, lens: Sequence[int], seq_lens: Sequence[int]) -> list[int]:
        """Return where the last ``lens`` keys of the first rows' requests go, ``block * block_size + offset``."""
        ids, size, width = self._ids, self.block_size, self.host.shape[1]
        return [
            ids[row * width + position // size] * size + position % size
            for row, (count, end) in enumerate(zip(lens, seq_lens, strict=True))
            for position in range(end - count, end)
        ]

    def check_room(self, seq_lens: Sequence[int], seq_lens_cpu: Tensor) -> None:
        """Raise BatchError for the first request whose row holds too few blocks for its sequence.

        Args:
            seq_lens: keys of the requests of the first rows.
            seq_lens_cpu: the same, int32 on the host.
        """
        size, held = self.block_size, self._held
        if len(seq_lens) <= FEW_SLOTS:
            missing = any(map(gt, seq_lens, [size * count for count in held[: len(seq_lens)]]))
        else:
            rows = self.num_blocks_per_row[: len(seq_lens)]
            missing = int(torch.add(seq_lens_cpu, rows, alpha=-size).max()) > 0
        if missing:
            request = next(index for index, keys in enumerate(seq_lens) if keys > size * held[index])
            raise BatchError(
                f"request {request}: seq_lens = {seq_lens[request]}, but its row of the block table holds "
                f"{held[request]} blocks of {size} tokens"
            )

    def commit(self, num_reqs: int) -> Tensor:
        """Copy the first rows to the device, not waiting; return int32 ``(num_reqs, W)``, W the longest row in use.

        Nothing is copied where the device has them already: most steps of a few decodes add no block.

        Raises:
            BatchError: no request, or more than there are rows.
        """
        table = self._returned
        if table is not None and not self._changed and table.shape[0] == num_reqs:
            return table
        if not 0 < num_reqs <= self.host.shape[0]:
            raise BatchError(f"{num_reqs} requests: the block table has rows for 1 to {len(self.host)} (max_num_reqs)")
        width = max(1, *self._held[:num_reqs])
        table = self._returned = self.device_table[:num_reqs, :width]
        rows, columns = self._committed
        if self._changed or num_reqs > rows or width > columns:
            self._changed, self._committed = False, (num_reqs, width)
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
    new_lens: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    causal: bool = True,
    mm_prefix_ranges: Sequence[Ranges] | None = None,
    tree_mask: Tensor | None = None,
) -> CommonAttentionMetadata:
    """Return the metadata of a step whose request r is row r of ``block_table``.

    Args:
        query_lens: tokens of each request in this step.
        seq_lens: keys of each request, this step's included.
        block_table: its first ``len(query_lens)`` rows are committed; None for layers without a cache.
        new_lens: keys of each request that this step writes, its last ones; None: as many as it has queries. In
            cross-attention the encoder's whole length in the step that brings it, and 0 afterwards.
        device: where the tensors go; None: the block table's device, without a table the CPU.
        causal: see ``CommonAttentionMetadata``.
        mm_prefix_ranges: see ``CommonAttentionMetadata``.
        tree_mask: see ``CommonAttentionMetadata``; on the device.

    Raises:
        BatchError: there is no request, the counts differ, a request has more new keys than its sequence is long, its
            row of the table holds too few blocks, or (in checked mode) the row is stale.
    """
    target = block_table.device if device is None and block_table is not None else torch.device(device or "cpu")
    num_reqs = len(query_lens)
    if new_lens is None:
        new_lens = query_lens
    if not num_reqs or len(seq_lens) != num_reqs or len(new_lens) != num_reqs:
        raise BatchError(
            f"{num_reqs} query_lens, {len(seq_lens)} seq_lens and {len(new_lens)} new_lens: accepted are equal numbers "
            "of them, at least 1"
        )
    single = new_lens is query_lens and new_lens.count(1) == num_reqs  # most steps: one token each
    many = single and num_reqs > FEW_SLOTS
    if not single or (not many and min(seq_lens) < 1):
        _check_lens("query_lens", query_lens, seq_lens, limited=new_lens is query_lens)
        _check_lens("new_lens", new_lens, seq_lens)
    num_tokens = num_reqs if single else sum(query_lens)
    table = None if block_table is None else block_table.commit(num_reqs)
    # One buffer: bounds, lengths, one number that aligns the int64 slots behind it, and these. The front is packed by
    # Python, since a tensor made of a list takes far longer.
    num_slots = 0 if table is None else num_tokens if single else sum(new_lens)
    sizes = (num_reqs + 1, num_reqs, 1, 2 * num_slots)
    front = bytearray(_bounds(query_lens, single) + struct.pack(f"{num_reqs + 1}i", *seq_lens, 0))
    host = staging(4 * sum(sizes), target).view(torch.int32)
    bounds_cpu, seq_lens_cpu, _, slots_cpu = host.split_with_sizes(sizes)
    host[: 2 * num_reqs + 2].copy_(torch.frombuffer(front, dtype=torch.int32))
    most: Tensor | int = 0
    if many:
        least, most = seq_lens_cpu.aminmax()  # of a list, min and max take longer
        if int(least) < 1:
            _check_lens("query_lens", query_lens, seq_lens)
    if block_table is not None:
        block_table.check_room(seq_lens, seq_lens_cpu)
        block_table.note_step(new_lens, seq_lens_cpu)
        if num_slots > FEW_SLOTS:
            _fill_slots(slots_cpu.view(torch.int64), None if single else new_lens, seq_lens_cpu, block_table)
        elif num_slots:
            found = array("q", block_table.slots(new_lens, seq_lens))
            slots_cpu.copy_(torch.frombuffer(found, dtype=torch.int32))
    bounds, on_device, slots = bounds_cpu, seq_lens_cpu, slots_cpu
    if target.type != "cpu":
        bounds, on_device, _, slots = host.to(target, non_blocking=True).split_with_sizes(sizes)
    lead = None if single else lead_of(query_lens, seq_lens)
    if not many:
        most = max(seq_lens) if lead is None else max((lead.longest, *lead.seq_lens))
    return CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds_cpu,
        seq_lens=on_device,
        seq_lens_cpu=seq_lens_cpu,
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=1 if single else max(query_lens),
        max_seq_len=int(most),
        block_table_tensor=table,
        slot_mapping=None if table is None else slots.view(torch.int64),
        causal=causal,
        mm_prefix_ranges=mm_prefix_ranges,
        tree_mask=tree_mask,
        block_size=None if block_table is None else block_table.block_size,
        num_keys=sum(seq_lens),
        lead=lead,
    )


def _bounds(query_lens: Sequence[int], single: bool) -> bytes:
    """Return the prefix sums of the queries' lengths, int32; ``single``: each is 1."""
    if single and len(query_lens) < len(_COUNTED) // 4:
        return _COUNTED[: 4 * len(query_lens) + 4]
    return struct.pack(f"{len(query_lens) + 1}i", 0, *accumulate(query_lens))


def _fill_slots(slots: Tensor, lens: Sequence[int] | None, seq_lens: Tensor, block_table: BlockTable) -> None:
    """Write each new key's slot, ``block * block_size + offset``; ``lens`` None: one of each request."""
    num_slots, size = slots.shape[0], block_table.block_size
    if lens is None:  # no need to spread requests over tokens
        positions, rows = seq_lens - 1, block_table.row_starts[:num_slots]
    else:
        counts = torch.frombuffer(array("i", lens), dtype=torch.int32)
        request = torch.repeat_interleave(counts, output_size=num_slots)
        firsts = seq_lens - counts - prefix_sums(counts)[:-1]
        positions, rows = torch.arange(num_slots, dtype=torch.int32) + firsts[request], block_table.row_starts[request]
    column = torch.floor_divide(positions, size)
    blocks = block_table.host.view(-1).take(rows + column)
    # The offset is position - column * size, and so the slot position + (block - column) * size.
    torch.add(positions, blocks.sub_(column), alpha=size, out=slots)


def _check_lens(name: str, lens: Sequence[int], seq_lens: Sequence[int], *, limited: bool = True) -> None:
    """Raise BatchError for the first request that has a negative length or (limited) more new tokens than keys."""
    if min(lens) < 0 or (limited and any(map(gt, lens, seq_lens))):
        found = zip(lens, seq_lens, strict=True)
        request = next(index for index, (count, keys) in enumerate(found) if count < 0 or (limited and count > keys))
        raise BatchError(
            f"request {request}: {name} = {lens[request]} with seq_lens = {seq_lens[request]}: accepted is 0 "
            "to seq_lens, which includes this step's tokens (in cross-attention any query from 0)"
        )
