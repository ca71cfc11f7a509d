"""The KV layout and block sizes that several plans read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attn_select.backends.spec import BackendPlan
from attn_select.errors import ConfigError
from attn_select.layer.config import Phase
from attn_select.layer.layouts import SPLIT_IN_PLACE

Cache = tuple[str | None, int | None]
"""KV layout and block size (tokens)."""
PlansByBackend = Mapping[str, Mapping[Phase, BackendPlan]]
"""Per backend the plans of the phases that it serves."""


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
    if not readers[0].kernel_block_sizes:  # states have one slot per request
        return common[0], None
    for size in readers[0].kernel_block_sizes if block_size is None else (block_size,):
        if all(any(size % kernel == 0 for kernel in plan.kernel_block_sizes) for plan in readers):
            return common[0], size
    if block_size is not None:
        return None
    return common[0], math.lcm(*(plan.kernel_block_sizes[0] for plan in readers))


def kernel_block_sizes(plans: PlansByBackend, block_size: int | None, kv_layout: str | None) -> dict[str, int]:
    """Return the kernel block size per backend that reads the cache; one for all where the layout ties them."""
    able = _able_block_sizes(plans, block_size)
    # The allocator's own size where the kernel runs it, else the plan's first choice.
    wanted = {name: block_size if block_size in sizes else sizes[0] for name, sizes in able.items() if sizes}
    if len(wanted) == len(able):
        if kv_layout in SPLIT_IN_PLACE or len(set(wanted.values())) < 2:
            return wanted
        # K and V of one block lie next to each other: a block of another size is another place in memory.
        common = [size for size in next(iter(able.values())) if all(size in sizes for sizes in able.values())]
        if common:
            return dict.fromkeys(wanted, common[0])
    each = "; ".join(f"{name}: {', '.join(map(str, own)) or 'none'}" for name, own in able.items())
    raise ConfigError(
        f"block_size = {block_size}: kernels of {' and '.join(able)} share no block size in {kv_layout} "
        f"(their sizes that divide it: {each})",
        fields=["block_size"],
        hint="select without block_size, or name one backend for both phases",
    )


def _able_block_sizes(plans: PlansByBackend, block_size: int | None) -> dict[str, list[int]]:
    """Return per backend that reads the cache the kernel block sizes that divide the allocator's."""
    able: dict[str, list[int]] = {}
    if block_size is None:
        return able
    for name, own in plans.items():
        if readers := [plan.kernel_block_sizes for plan in own.values() if plan.kv_layouts]:
            able[name] = [k for k in readers[0] if block_size % k == 0 and all(k in other for other in readers)]
    return able
