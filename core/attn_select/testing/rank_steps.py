"""One rank's part of a drawn step, and the step that the ranks' results make together.

A step is drawn for the whole layer: all query heads of all ranks, and one cache in the scheduler's blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.reference.oracle_paged import token_views
from attn_select.reference.problems import Problem
from attn_select.reference.running import Result, poison
from attn_select.runtime import ContextParallel, LayerGroup
from attn_select.runtime.context_parallel.shares import Shares
from attn_select.runtime.kv_cache import kv_cache_shape

__tracebackhide__ = True  # a failure shows the test and the plugin, not the suite between them


def whole_layer(config: AttentionConfig, ranks: ContextParallel, block_size: int) -> AttentionConfig:
    """Return the layer that all ranks together compute, its cache in blocks of ``size * block_size``."""
    changes = {"num_heads": ranks.gathered_heads(config.num_heads), "block_size": ranks.size * block_size}
    return config.model_copy(update={**changes, "decode_context_parallel_size": 1})


def heads_of(rank: int, config: AttentionConfig, ranks: ContextParallel) -> Tensor:
    """Return which of the whole layer's query heads a rank holds: of each KV head as many."""
    if not ranks.sharded:
        return torch.arange(config.num_heads)
    by_kv_head = torch.arange(config.num_heads * ranks.size).view(config.num_kv_heads, ranks.size, -1)
    return by_kv_head[:, rank].flatten()


def shares_of(rank: int, group: LayerGroup, ranks: ContextParallel) -> Shares:
    """Return a rank's share of the positions, on the CPU."""
    assert group.selection.block_size is not None
    return Shares(rank, ranks.size, ranks.interleave, group.selection.block_size, "cpu")


def part_of_rank(drawn: Problem, group: LayerGroup, ranks: ContextParallel) -> Problem:
    """Return this rank's step of ``whole_layer``: its heads, and a cache that holds its share of every block."""
    config = group.config
    assert drawn.kv_cache is not None
    assert drawn.layout is not None
    assert drawn.block_size is not None
    shares = shares_of(ranks.rank, group, ranks)
    views = token_views(drawn.kv_cache, drawn.layout, config)
    cache = poison(kv_cache_shape(drawn.layout, config, len(views[0]), shares.block_size), drawn.kv_cache)
    kept = shares.positions(drawn.block_size).to(cache.device)
    for own, every in zip(token_views(cache, drawn.layout, config), views, strict=True):
        own.copy_(every[:, kept])
    heads = heads_of(ranks.rank, config, ranks).to(cache.device)
    weight = drawn.kv_b_proj
    if weight is not None:
        weight = weight.view(drawn.config.num_heads, -1, weight.shape[1])[heads].flatten(0, 1)
    return dataclasses.replace(
        drawn,
        config=config,
        query=drawn.query[:, heads],
        **{name: None if tensor is None else tensor[heads] for name, tensor in drawn.per_head.items()},  # type: ignore[arg-type]
        kv_cache=cache,
        block_size=shares.block_size,
        kv_b_proj=weight,
    )


def joined(group: LayerGroup, drawn: Problem, ranks: ContextParallel, own: Result) -> Result:
    """Return the whole layer's result, of each rank's own; every rank calls it."""
    config = group.config
    assert own.kv_cache is not None
    assert drawn.kv_cache is not None
    assert drawn.layout is not None
    assert drawn.block_size is not None
    brought = [own.output, own.lse, *token_views(own.kv_cache, drawn.layout, config)]
    found = ranks.collectives.gather_objects([None if each is None else each.to("cpu", copy=True) for each in brought])
    device, tokens = own.output.device, len(own.output)
    output = own.output.new_empty(tokens, drawn.config.num_heads, own.output.shape[-1])
    lse = None if own.lse is None else own.lse.new_empty(output.shape[:2])
    cache = poison(tuple(drawn.kv_cache.shape), drawn.kv_cache)
    views = token_views(cache, drawn.layout, config)
    for rank, result in enumerate(found):
        moved: list[Any] = [None if each is None else each.to(device) for each in result]
        some, some_lse, *parts = moved
        heads = heads_of(rank, config, ranks).to(device)
        output[:, heads] = some
        if lse is not None:
            lse[:, heads] = some_lse
        kept = shares_of(rank, group, ranks).positions(drawn.block_size).to(device)
        for view, part in zip(views, parts, strict=True):
            view[:, kept] = part
    return Result(output, lse, cache, own.largest)
