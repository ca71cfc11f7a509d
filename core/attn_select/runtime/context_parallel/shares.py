"""Which rank keeps which positions of a request, and where in its own cache.

Position p lies on rank ``(p // interleave) % size``. A block of the scheduler's tables holds ``size * block_size``
positions, and each rank keeps ``block_size`` of them in its block of the same number. So every rank reads the same
tables, and a cache of as many blocks takes ``1 / size`` of the memory. The names are vLLM's
(``cp_kv_cache_interleave_size``, v1/worker/gpu/cp_utils.py 0.33).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError
from attn_select.runtime import ops
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.static_buffers import StaticBuffers

L = TypeVar("L", int, Tensor)


class Shares:
    """One rank's share of all positions; ``interleave`` divides ``block_size``, tokens per block of a rank's cache."""

    def __init__(self, rank: int, size: int, interleave: int, block_size: int, device: torch.device | str) -> None:
        if block_size % interleave:
            raise ConfigError(
                f"interleave = {interleave}: accepted are divisors of the block size, {block_size}",
                fields=["interleave"],
            )
        self.rank, self.size, self.interleave, self.block_size = rank, size, interleave, block_size
        offsets = torch.arange(size * block_size, device=device)
        row = interleave * size
        # Per position of a block: where in this rank's block it lies; negative for other ranks' positions.
        local = offsets // row * interleave + offsets % interleave
        self._local = torch.where(offsets // interleave % size == rank, local, -1)

    def length(self, tokens: L, rank: int | None = None) -> L:
        """Return how many of the first ``tokens`` positions a rank keeps, by default this one; any integer tensor."""
        own = self.rank if rank is None else rank
        row = self.interleave * self.size
        # Whole rows are shared evenly; of the one that is begun a rank has what lies behind the ranks before it.
        rest = tokens % row - own * self.interleave
        if isinstance(tokens, Tensor):
            return tokens // row * self.interleave + rest.clamp(0, self.interleave)
        return tokens // row * self.interleave + min(max(rest, 0), self.interleave)

    def slots(self, slot_mapping: Tensor) -> Tensor:
        """Return this rank's slots of tokens by the scheduler's, int64 ``(T,)``: -1 for other ranks' slots."""
        per_block = self.size * self.block_size
        offset = self._local[slot_mapping % per_block]
        own = torch.div(slot_mapping, per_block, rounding_mode="floor") * self.block_size + offset
        return torch.where((offset < 0) | (slot_mapping < 0), -1, own)

    def chosen(self, slots: Tensor) -> Tensor:
        """Return this rank's of each row's slots, int32 ``(T, K)``: in order, -1 behind the last."""
        front: Tensor = ops.slots_in_front(self.slots(slots.long()).to(slots.dtype))[0]
        return front

    def positions(self, tokens: int) -> Tensor:
        """Return the positions among the first ``tokens`` that this rank keeps, int64, in order."""
        positions = torch.arange(tokens, device=self._local.device)
        return positions[positions // self.interleave % self.size == self.rank]


def part_of(selection: Selection[Any], num_heads: int, **changes: Any) -> Selection:
    """Return the selection for one rank's kernels: plain layers of ``num_heads`` query heads."""
    # Sinks are counted where the partial results are merged, so the kernels get none, unless ``changes`` says so. An
    # output is quantised after that.
    fields: dict[str, Any] = {"num_heads": num_heads, "decode_context_parallel_size": 1, "sinks": False}
    fields |= {"output_quantization": "none", **changes}
    return replace(selection, config=selection.config.model_copy(update=fields))


def local_capacity(capacity: Capacity, per_block: int, block_size: int) -> Capacity:
    """Return the capacity of one rank's share: blocks of ``per_block`` positions, of which it keeps ``block_size``."""
    return replace(capacity, max_model_len=-(-capacity.max_model_len // per_block) * block_size)


class LocalBatches:
    """Turns the scheduler's batches into one rank's: its share of lengths, and its slots."""

    def __init__(self, shares: Shares, capacity: Capacity, device: torch.device, *, captured: bool) -> None:
        self.shares, self.static = shares, StaticBuffers(device, captured=captured)
        requests, tokens = capacity.max_num_seqs, capacity.max_num_batched_tokens
        self.static.reserve("seq_lens", requests)
        self.static.reserve("slots", tokens, dtype=torch.int64)
        self.static.reserve("bounds", requests + 1)
        self.static.reserve("table", requests, -(-capacity.max_model_len // (shares.size * shares.block_size)))

    def slots(self, common: CommonAttentionMetadata) -> Tensor:
        """Return where this rank's tokens of a batch go in its cache, int64 ``(T,)``, -1 for the others."""
        assert common.slot_mapping is not None
        return self.static.hold("slots", self.shares.slots(common.slot_mapping))

    def shared(self, common: CommonAttentionMetadata, slots: Tensor, *, own: bool = False) -> CommonAttentionMetadata:
        """Return the batch against this rank's share of the cache."""
        # ``own``: leave the step's own tokens out; every query then sees all that is left, and no mask is needed.
        lens, lens_cpu, most = common.seq_lens, common.seq_lens_cpu, common.max_seq_len
        if own:
            lens = (lens - common.query_start_loc.diff()).clamp_min(0)
            lens_cpu = (lens_cpu - common.query_lens_cpu).clamp_min(0)
        local_cpu = self.shares.length(lens_cpu)
        return replace(
            common,
            seq_lens=self.static.hold("seq_lens", self.shares.length(lens)),
            seq_lens_cpu=local_cpu,
            max_seq_len=self.shares.length(most),
            slot_mapping=slots[: common.num_actual_tokens],
            causal=common.causal and not own,
            mm_prefix_ranges=None,
            tree_mask=None,
            block_size=self.shares.block_size,
        )
