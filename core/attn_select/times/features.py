"""What of a layer and a batch a kernel's time depends on, in plain numbers, the same for every kind of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from attn_select.layer import dtypes
from attn_select.layer.config import AttentionConfig
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.roofline import keys_read, request_work, visible_keys

LAUNCH_US = 6.0
"""What any step takes, however small: a launch in a CUDA graph and the start of a kernel."""
_DECODE_ROWS, _PREFILL_ROWS = 64, 128
"""Rows that a thread block takes: of decodes, queries times heads of one KV head; of prefills, queries of one head."""
_MOST_FILL = 3.0
"""Beyond 8 tiles for each multiprocessor, or an eighth of one, more or fewer change nothing."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU reached when it was surveyed.

    Attributes:
        bytes_per_us: of a large copy, read and written.
        flops_per_us: of a large matrix product in bfloat16.
        sm_count: multiprocessors.
    """

    bytes_per_us: float
    flops_per_us: float
    sm_count: int


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """One layer's step in numbers.

    Attributes:
        floor_us: a launch, and for each phase the longer of its bytes and its products at the GPU's rates.
        values: by name. Sizes and numbers are logarithms to base 2, so that doubling any of them is one step.
    """

    floor_us: float
    values: dict[str, float]


@dataclass(slots=True)
class _PhaseWork:
    """The requests of one phase: bytes, FLOPs, tiles, and the keys that the busiest multiprocessor reads."""

    moved: float = 0.0
    flops: float = 0.0
    tiles: int = 0
    longest: int = 0
    busiest: float = 0.0


def step_features(config: AttentionConfig, batch: BatchShape, rates: Rates) -> StepFeatures:
    """Return the features of one layer's step over a batch."""
    longest_decode = config.max_decode_query_len if config.has_cache else 0
    prefills = [group for group in batch.groups if group.query_len > longest_decode]
    decodes = [group for group in batch.groups if group.query_len <= longest_decode]
    works = {
        decode: _phase_work(config, groups, decode, rates.sm_count)
        for decode, groups in ((False, prefills), (True, decodes))
        if groups
    }
    us = {
        decode: max(work.moved / rates.bytes_per_us, work.flops / rates.flops_per_us) for decode, work in works.items()
    }
    moved_us = sum([work.moved for work in works.values()]) / rates.bytes_per_us
    flops_us = sum([work.flops for work in works.values()]) / rates.flops_per_us
    tiles = sum([work.tiles for work in works.values()])
    keys = sum([group.count * keys_read(config, group.query_len, group.seq_len) for group in batch.groups])
    longest = max([work.longest for work in works.values()])
    new = sum([group.count * group.query_len for group in prefills])
    cached = sum([group.count * (group.seq_len - group.query_len) for group in prefills])
    values = {
        "floor": log2(sum(us.values()) + 1),
        "intensity": log2(flops_us / moved_us),
        "requests": log2(batch.num_requests),
        "new_tokens": log2(batch.num_tokens),
        "longest_query": log2(batch.max_query_len),
        "mean_keys": log2(keys / batch.num_requests),
        "longest_keys": log2(longest),
        "uneven": log2(longest * batch.num_requests / keys),
        "seen": log2(keys / batch.num_kv_tokens),
        "tiles": log2(tiles),
        "fill": max(-_MOST_FILL, min(_MOST_FILL, log2(tiles / rates.sm_count))),
        "busiest": log2(1 + sum([work.busiest for work in works.values()])),
        "prefill_share": us.get(False, 0.0) / sum(us.values()),
        "has_prefills": float(False in works),
        "has_decodes": float(True in works),
        "cached_per_new": log2(1 + cached / new) if new else 0.0,
        "heads": log2(config.num_heads),
        "kv_heads": log2(config.num_kv_heads),
        "group": log2(config.num_heads / config.num_kv_heads),
        "head_size": log2(config.head_size),
        "padding": log2(2 ** math.ceil(log2(config.head_size)) / config.head_size),
        "query_rows": log2(config.num_heads // config.num_kv_heads * config.max_decode_query_len),
        "drafts": log2(config.max_decode_query_len),
        "quantized": float(dtypes.is_quantized(config.kv_cache_dtype)),
        "window": float(config.sliding_window is not None),
        "sinks": float(config.sinks),
        "soft_cap": float(config.logits_soft_cap is not None),
        "latent_rank": log2(config.kv_lora_rank or 1),
        "latent_nope": log2(config.qk_nope_head_dim or 1),
    }
    return StepFeatures(LAUNCH_US + sum(us.values()), values)


def _phase_work(config: AttentionConfig, groups: Sequence[RequestGroup], decode: bool, sm_count: int) -> _PhaseWork:
    work = _PhaseWork()
    heads = config.num_kv_heads if decode else config.num_heads
    per_token = config.num_heads // config.num_kv_heads if decode else 1
    rows = _DECODE_ROWS if decode else _PREFILL_ROWS
    pairs = 0.0
    for group in groups:
        step = request_work(config, group.query_len, group.seq_len)
        tiles = group.count * heads * -(-group.query_len * per_token // rows)
        work.moved += group.count * step.bytes
        work.flops += group.count * step.flops
        work.tiles += tiles
        work.longest = max(work.longest, keys_read(config, group.query_len, group.seq_len))
        each = visible_keys(config, group.query_len, group.seq_len) / group.query_len
        pairs += tiles * (keys_read(config, group.query_len, group.seq_len) if decode else each)
    # The work is shared out evenly; where that leaves multiprocessors without any, the longest request is.
    alone = work.longest / max(1.0, sm_count / work.tiles)
    work.busiest = max(pairs / sm_count, alone)
    return work
