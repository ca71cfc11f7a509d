"""Token-level cache pools: request → token slots → KV, the case ``block_size = 1``.

The two maps have the names of SGLang's design (sglang srt/mem_cache/memory_pool.py, arXiv 2312.07104):
``req_to_token`` holds the slots of every request row by row, a ``token_to_kv`` allocator hands out the slots. Kernels
that take any page size read a row as a block table.
"""

from __future__ import annotations

import torch

from attn_select.runtime.batch import to_device
from attn_select.runtime.block_pool import BlockPool, PoolError, RequestId
from attn_select.runtime.integers import size


class TokenToKVPool(BlockPool):
    """Hands out single token slots: a ``BlockPool`` of block size 1.

    Args:
        num_slots: tokens that the cache holds.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, 1)


class ReqToTokenPool:
    """One row of token slots per running request.

    Args:
        max_requests: rows, i.e. requests that run at a time.
        max_context_len: columns, i.e. tokens that one request may have.
        slots: where token slots come from.
        device: where the map lives.

    Attributes:
        req_to_token: int32 ``(max_requests, max_context_len)``; 0 behind a request's tokens and in rows that are free.

    Raises:
        ConfigError: a size is no integer from 1.
    """

    def __init__(
        self, max_requests: int, max_context_len: int, slots: TokenToKVPool, device: torch.device | str = "cpu"
    ) -> None:
        rows, columns = size("max_requests", max_requests), size("max_context_len", max_context_len)
        self.req_to_token = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.slots = slots
        self._free_rows = list(range(rows - 1, -1, -1))
        self._rows: dict[RequestId, int] = {}

    def row(self, request: RequestId) -> int:
        """Return the row of a request.

        Raises:
            PoolError: the request is not running.
        """
        try:
            return self._rows[request]
        except KeyError:
            raise PoolError(
                f"request {request!r} has no row: it was never added or is already freed", request
            ) from None

    def extend(self, request: RequestId, num_tokens: int) -> torch.Tensor:
        """Give a request, new or running, room for ``num_tokens`` tokens in all and write the new slots into its row.

        No device synchronisation.

        Returns:
            The new slots, int32 ``(added,)`` on the pool's device: the slot mapping of the tokens to be written.

        Raises:
            ConfigError: ``num_tokens`` is no integer from 0. The pools are unchanged.
            PoolError: no free row, or more tokens than a row holds. The pools are unchanged.
            OutOfBlocksError: too few free slots. The pools are unchanged.
        """
        most = self.req_to_token.shape[1]
        if self.slots.blocks_for(num_tokens) > most:
            raise PoolError(
                f"request {request!r} wants {num_tokens} tokens; a row holds {most} (max_context_len)", request
            )
        if request not in self._rows and not self._free_rows:
            raise PoolError(
                f"request {request!r}: all {self.req_to_token.shape[0]} rows are taken (max_requests)", request
            )
        added = self.slots.allocate(request, num_tokens)
        if request not in self._rows:
            self._rows[request] = self._free_rows.pop()
        slots = to_device(torch.tensor(added, dtype=torch.int32), self.req_to_token.device)
        owned = len(self.slots.blocks(request))
        self.req_to_token[self._rows[request], owned - len(added) : owned] = slots
        return slots

    def free(self, request: RequestId) -> None:
        """Let go of a request's row and slots. The row is zeroed: no later request finds slots of this one there.

        No device synchronisation.

        Raises:
            PoolError: the request is not running (a double free).
        """
        row = self.row(request)
        self.req_to_token[row, : len(self.slots.blocks(request))] = 0
        self.slots.free(request)
        del self._rows[request]
        self._free_rows.append(row)
