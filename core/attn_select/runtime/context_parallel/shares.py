"""Which rank keeps which positions of a request, and where in its own cache.

Position p lies on rank ``(p // interleave) % size``. A block of the scheduler's tables holds ``size * block_size``
positions, and each rank keeps ``block_size`` of them in its block of the same number. So every rank reads the same
tables, and a cache of as many blocks takes ``1 / size`` of the memory. The names are vLLM's
(``cp_kv_cache_interleave_size``, v1/worker/gpu/cp_utils.py 0.33).
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.runtime import ops

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
