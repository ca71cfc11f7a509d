"""Which numbers of tensor-parallel ranks can share a layer."""

from __future__ import annotations


def divides(ranks: int, heads: int, kv_heads: int | None) -> bool:
    """Whether ``ranks`` can share the heads: KV heads below the number of ranks are replicated."""
    if heads % ranks:
        return False
    return kv_heads is None or kv_heads % ranks == 0 or ranks % kv_heads == 0


def valid_ranks(heads: int, kv_heads: int | None) -> str:
    """Return the numbers of ranks that can share the heads, for a hint."""
    found = [ranks for ranks in range(1, min(heads, 4096) + 1) if divides(ranks, heads, kv_heads)]
    return f"valid: {', '.join(map(str, found))}"
