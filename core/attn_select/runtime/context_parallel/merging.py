"""How the ranks' partial results become one: heads are gathered before attention, outputs merged by LSE after it.

The gathered heads lie KV head by KV head, and within one rank by rank, so that every kernel's rule of which query heads
share a KV head holds. ``a2a`` is vLLM's name (``dcp_comm_backend``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.context_parallel.collectives import Collectives
from attn_select.runtime.rank_memory import RankLayout, RankMemory
from attn_select.times.ranks import shared_tokens

WAYS = ("a2a", "symm")
"""``a2a``: outputs and LSEs are exchanged head by head in one message, and each rank merges its own heads' results
in float32.
``symm``: heads and results lie in memory that all ranks read and write, so neither takes a collective; steps of more
tokens than it holds go by ``a2a``."""
ALIGNED = 16
"""Bytes: every message to a rank begins at a multiple."""


class Merger:
    """Gathers heads and merges results of one kind of layers; ``sharded``: ranks hold different query heads."""

    def __init__(self, collectives: Collectives, num_kv_heads: int, sharded: bool) -> None:
        self.collectives, self.kv_heads, self.sharded = collectives, num_kv_heads, sharded
        self.memory: RankMemory | None = None

    def share_memory(
        self, tokens: int, heads: int, query_width: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> bool:
        """Let steps of few tokens go by ``symm``, if ranks can share memory; return whether. Every rank calls it."""
        # ``heads`` are those of a partial result. Of ``tokens``, the most of a step, fewer may fit.
        query_width = query_width if self.sharded else 0
        tokens = min(tokens, shared_tokens(heads, query_width, width, dtype.itemsize))
        layout = RankLayout(self.collectives.size, tokens, heads, query_width, width, dtype)
        self.memory = self.collectives.share_memory(layout, device)
        return self.memory is not None

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """What ``symm`` takes of this rank's device memory, as ``AttentionGroup.workspace_bytes`` has it."""
        return {} if self.memory is None else {"ranks": self.memory.layout.num_bytes}

    def holds(self, tokens: int) -> bool:
        """Whether a step of so many tokens goes by ``symm``."""
        return self.memory is not None and 0 < tokens <= self.memory.layout.tokens

    def _memory_for(self, rows: Tensor) -> RankMemory | None:
        """Return the memory that a step's queries or results go through; None if by collectives."""
        memory = self.memory
        return memory if memory is not None and self.holds(len(rows)) and rows.dtype == memory.layout.dtype else None

    def gather_queries(self, query: Tensor) -> Tensor:
        """As ``gather_heads``; ``merge`` of the same step's results must follow."""
        memory = self._memory_for(query)
        if memory is None:
            return self.gather_heads(query)
        # Nothing is gathered, but results of the last step lie in the memory: no rank may write its next ones before
        # all have read these.
        if not self.sharded:
            memory.meet()
            return query
        gathered: Tensor = ops.gather_rank_heads(query, memory, self.kv_heads)
        return gathered

    def partials(self, query: Tensor, heads: int, width: int) -> tuple[Tensor, Tensor]:
        """Return where partial results go: ``(T, heads, width)`` and the LSEs, float32 ``(T, heads)``."""
        tokens, memory = len(query), self._memory_for(query)
        if memory is None:
            return query.new_empty(tokens, heads, width), query.new_empty(tokens, heads, dtype=torch.float32)
        return memory.partial(memory.rank, tokens), memory.lse(memory.rank, tokens)

    def gather_heads(self, rows: Tensor) -> Tensor:
        """Return ``(T, N * H, D)`` of every rank's ``(T, H, D)``; the rows themselves where each rank has all heads."""
        if not self.sharded:
            return rows
        size, (tokens, heads, width) = self.collectives.size, rows.shape
        gathered = rows.new_empty(size, tokens, heads, width)
        self.collectives.all_gather(gathered, rows.contiguous())
        # One token and one KV head: rank by rank is already the order that is wanted.
        if tokens == self.kv_heads == 1:
            return gathered.view(1, size * heads, width)
        # From rank by rank to KV head by KV head, and within one rank by rank.
        by_kv_head = gathered.view(size, tokens, self.kv_heads, heads // self.kv_heads, width).permute(1, 2, 0, 3, 4)
        return by_kv_head.reshape(tokens, size * heads, width)

    def merge(
        self,
        partial: Tensor,
        partial_lse: Tensor,
        output: Tensor,
        output_lse: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Merge this rank's partial result with the other ranks'."""
        # ``partial`` is ``(T, N * H, D)`` over this rank's keys, of gathered heads, or ``(T, H, D)`` where all ranks
        # have all heads; ``output`` ``(T, H, D)`` has this rank's own heads. ``sinks`` are counted once, of the
        # partial's heads.
        if not partial.shape[0]:
            return
        if (memory := self._memory_for(output)) is not None:
            tokens = len(output)
            for own, brought in (
                (memory.partial(memory.rank, tokens), partial),
                (memory.lse(memory.rank, tokens), partial_lse),
            ):
                # A kernel may have returned memory of its own instead of writing to what ``partials`` gave it.
                if own.data_ptr() != brought.data_ptr():
                    own.copy_(brought)
            ops.merge_rank_memory(output, output_lse, sinks, memory, self.kv_heads, self.sharded)
            return
        size, (tokens, heads, width) = self.collectives.size, output.shape
        rows = tokens * heads
        # A message to a rank: its outputs, then its LSEs at the next multiple of four bytes, since they are float32.
        at = rows * width * partial.element_size()
        at += -at % 4
        message = at + 4 * rows
        message += -message % ALIGNED
        count = size if self.sharded else 1
        sent = partial.new_empty(count, message, dtype=torch.uint8)
        came = partial.new_empty(size, message, dtype=torch.uint8)
        parts, lses = _unpacked(sent, at, rows, width, partial.dtype)
        grouped = (count, tokens, self.kv_heads, heads // self.kv_heads)
        if self.sharded:
            own, own_lse = self._by_rank(partial), self._by_rank(partial_lse)
        else:
            own, own_lse = partial.view(*grouped, width), partial_lse.view(grouped)
        ops.pack_attn_states(own, own_lse, parts.view(*grouped, width), lses.view(grouped))
        exchange: Any = self.collectives.all_to_all if self.sharded else self.collectives.all_gather
        exchange(came, sent if self.sharded else sent[0])
        parts, lses = _unpacked(came, at, rows, width, partial.dtype)
        shape = (size, tokens, heads)
        if sinks is not None and self.sharded:
            sinks = self._by_rank(sinks.view(1, -1))[self.collectives.rank].reshape(heads)
        ops.merge_rank_states(parts.view(*shape, width), lses.view(shape), -1, sinks, output, output_lse)

    def _by_rank(self, rows: Tensor) -> Tensor:
        """Return ``(T, N * H, …)`` as ``(N, T, Hkv, H / Hkv, …)``: each rank's own heads."""
        tokens, heads = rows.shape[:2]
        size, kv_heads = self.collectives.size, self.kv_heads
        grouped = rows.view(tokens, kv_heads, size, heads // (size * kv_heads), *rows.shape[2:])
        return grouped.permute(2, 0, 1, *range(3, grouped.ndim))


def _unpacked(messages: Tensor, at: int, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the outputs ``(n, rows * width)`` and the LSEs ``(n, rows)`` that messages ``(n, bytes)`` hold."""
    size = rows * width * dtype.itemsize
    return messages[:, :size].view(dtype), messages[:, at : at + 4 * rows].view(torch.float32)
