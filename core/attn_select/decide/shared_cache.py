"""The KV layout and block size that several plans read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attn_select.backends.spec import BackendPlan

Cache = tuple[str | None, int | None]
"""KV layout and block size (tokens)."""


def shared_cache(plans: Sequence[BackendPlan], block_size: int | None, kv_layout: str | None = None) -> Cache | None:
    """Return the KV layout and block size (tokens) that all ``plans`` can read, by the first plan's preference.

    Plans without layouts read no cache and do not count; with no other, both are None. ``block_size`` fixes the
    allocator's size; otherwise it is the first preferred kernel block size that all can split, else the least common
    multiple of their first choices. ``kv_layout`` fixes the layout to a pool's. None: no common ground.
    """
    readers = [plan for plan in plans if plan.kv_layouts]
    if not readers:
        return None, None
    wanted = readers[0].kv_layouts if kv_layout is None else (kv_layout,)
    common = [name for name in wanted if all(name in plan.kv_layouts for plan in readers)]
    if not common:
        return None
    for size in readers[0].kernel_block_sizes if block_size is None else (block_size,):
        if all(any(size % kernel == 0 for kernel in plan.kernel_block_sizes) for plan in readers):
            return common[0], size
    if block_size is not None:
        return None
    return common[0], math.lcm(*(plan.kernel_block_sizes[0] for plan in readers))
