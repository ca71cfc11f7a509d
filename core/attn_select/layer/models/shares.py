"""Which numbers of tensor-parallel ranks can share a layer."""

from __future__ import annotations


def divides(ranks: int, heads: int, kv_heads: int | None) -> bool:
    """Whether ``ranks`` can share the heads: KV heads below the number of ranks are replicated."""
    if heads % ranks:
        return False
    return kv_heads is None or kv_heads % ranks == 0 or ranks % kv_heads == 0
