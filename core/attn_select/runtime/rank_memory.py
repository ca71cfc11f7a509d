"""``RankMemory``: memory of every rank of a group that all of its ranks read and write, for steps of few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PROGRAMS = 256
"""The most programs of a kernel that meet the programs of the same number on the other ranks."""
ALIGNED = 256
"""Bytes: each part of the memory begins at a multiple."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What a rank's memory holds: counts of meetings, gathered queries, and this rank's partial results."""

    ranks: int
    tokens: int
    # Query heads of a partial result: the heads of all ranks.
    heads: int
    # Of a gathered query; 0 where none are gathered.
    query_width: int
    width: int
    dtype: torch.dtype
    # First bytes of queries, results and LSEs; the counts come before them.
    starts: tuple[int, ...] = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        rows, places = self.tokens * self.heads, [0]
        # A count of four bytes for each meeting (gathering, merging), program and rank.
        sizes = (2 * PROGRAMS * self.ranks * 4, rows * self.query_width * self.dtype.itemsize)
        for size in (*sizes, rows * self.width * self.dtype.itemsize, rows * 4):
            places.append(-(-(places[-1] + size) // ALIGNED) * ALIGNED)
        object.__setattr__(self, "starts", tuple(places[1:-1]))
        object.__setattr__(self, "num_bytes", places[-1])


@dataclass(frozen=True, slots=True)
class RankMemory:
    """All ranks' memory, as one of them sees it."""

    # Every step gathers, attends and merges. Both operations meet the other ranks, so nothing is overwritten that
    # another rank still reads: who gathers again has merged, and then all have attended.

    layout: RankLayout
    rank: int
    # uint8, of every rank; zeros when they are made.
    buffers: list[Tensor]
    # Returns, or lets the device go on, when all ranks have come.
    meet: Callable[[], Any]
    # Of the buffers, for kernels that wait for other ranks; None where none may.
    addresses: tuple[int, ...] | None = None
    # int32 zeros ``(2 * PROGRAMS,)`` on the device: how often each program has met; None likewise.
    met: Tensor | None = None
    # Seconds after which such a kernel gives up.
    timeout: int = 0

    def queries(self, rank: int, tokens: int) -> Tensor:
        """Return a rank's gathered queries ``(tokens, heads, query_width)``."""
        return self._part(rank, 0, tokens, self.layout.query_width)

    def partial(self, rank: int, tokens: int) -> Tensor:
        """Return a rank's partial results ``(tokens, heads, width)``."""
        return self._part(rank, 1, tokens, self.layout.width)

    def lse(self, rank: int, tokens: int) -> Tensor:
        """Return their LSEs, float32 ``(tokens, heads)``."""
        start, count = self.layout.starts[2], tokens * self.layout.heads
        return self.buffers[rank][start : start + 4 * count].view(torch.float32).view(tokens, self.layout.heads)

    def _part(self, rank: int, part: int, tokens: int, width: int) -> Tensor:
        layout, start = self.layout, self.layout.starts[part]
        size = tokens * layout.heads * width * layout.dtype.itemsize
        return self.buffers[rank][start : start + size].view(layout.dtype).view(tokens, layout.heads, width)
