"""FlashAttention's log-sum-exp in the runtime's convention."""

from __future__ import annotations

import torch
from torch import Tensor


def by_token(lse: Tensor, version: int, sinks: Tensor | None = None) -> Tensor:
    """Return a kernel's LSE ``(num_heads, T)`` as ``(T, num_heads)``; a row without keys has -inf, or its sink."""
    # For such a row FA2 gives +inf (csrc/flash_attn/src/flash_fwd_kernel.h v2.8.3) and FA3 -inf without the sink
    # (hopper/epilogue_fwd.hpp 0251105, store_zero; seen on H100). Where all scores are so far below the sink that its
    # exponential overflows (some 88), FA3 gives +inf (seen on an H200, 2026-11-28): the sink is all that counts there.
    found = lse.T
    if version == 2:
        return torch.where(found.isposinf(), -torch.inf, found)
    return found if sinks is None else torch.where(found.isinf(), sinks, found)


def request_of_rows(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """Return int64 ``(num_tokens,)``, the request of each row. Does not synchronise."""
    rows = torch.arange(num_tokens, device=query_start_loc.device)
    return torch.searchsorted(query_start_loc[1:], rows, right=True).clamp_max(len(query_start_loc) - 2)


def row_positions(query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int) -> Tensor:
    """Return int64 ``(num_tokens,)``, the position of each query in its sequence. Does not synchronise."""
    request = request_of_rows(query_start_loc, num_tokens)
    return torch.arange(num_tokens, device=seq_lens.device) - query_start_loc[request + 1] + seq_lens[request]
