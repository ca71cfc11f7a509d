"""What of a layer and a batch a kernel's time depends on, in plain numbers, the same for every kind of attention."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from attn_select.layer import dtypes
from attn_select.layer.config import AttentionConfig
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.roofline import keys_read, request_work

LAUNCH_US = 6.0
"""What any step takes, however small: a launch in a CUDA graph and the start of a kernel."""
_DECODE_ROWS, _PREFILL_ROWS = 64, 128
"""Rows that a thread block takes: of decodes, queries times heads of one KV head; of prefills, queries of one head."""
_BLOCK = 128
"""Keys that a thread block reads at a time."""
_MOST_FILL = 3.0
"""Beyond 8 tiles for each multiprocessor, or an eighth of one, more or fewer change nothing."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU reached when it was surveyed."""

    bytes_per_us: float  # of a large copy, read and written
    flops_per_us: float  # of a large matrix product in bfloat16
    sm_count: int


def fill_of(pieces: int, rates: Rates) -> float:
    """Return the logarithm of thread blocks without a split, or of states, for each multiprocessor, within bounds."""
    return max(-_MOST_FILL, min(_MOST_FILL, log2(pieces / rates.sm_count)))


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """One layer's step in numbers."""

    floor_us: float  # a launch, and for each phase the longer of its bytes and its products at the GPU's rates
    # by name. Sizes and numbers are logarithms to base 2, so that doubling any of them is one step
    values: dict[str, float]


@dataclass(slots=True)
class _PhaseWork:
    """The requests of one phase."""

    bytes_us: float = 0.0  # of moving all bytes, and of all products, at the GPU's rates
    flops_us: float = 0.0
    tiles: int = 0  # thread blocks without a split of the keys
    longest: int = 0  # keys of the longest request
    # the same of the keys that the busiest multiprocessor reads, as if it had its share of the rates
    busiest_us: float = 0.0

    @property
    def floor_us(self) -> float:
        return max(self.bytes_us, self.flops_us)


def step_features(config: AttentionConfig, batch: BatchShape, rates: Rates) -> StepFeatures:
    """Return the features of one layer's step over a batch."""
    longest_decode = config.max_decode_query_len if config.has_cache else 0
    prefills = [group for group in batch.groups if group.query_len > longest_decode]
    decodes = [group for group in batch.groups if group.query_len <= longest_decode]
    prefill, decode = _phase_work(config, prefills, False, rates), _phase_work(config, decodes, True, rates)
    bytes_us, flops_us = prefill.bytes_us + decode.bytes_us, prefill.flops_us + decode.flops_us
    floor_us = prefill.floor_us + decode.floor_us
    tiles = prefill.tiles + decode.tiles
    keys = sum([group.count * keys_read(config, group.query_len, group.seq_len) for group in batch.groups])
    longest = max(prefill.longest, decode.longest)
    new = sum([group.count * group.query_len for group in prefills])
    cached = sum([group.count * (group.seq_len - group.query_len) for group in prefills])
    values = {
        "floor": log2(floor_us + 1),
        "intensity": log2(flops_us / bytes_us),
        "requests": log2(batch.num_requests),
        "new_tokens": log2(batch.num_tokens),
        "longest_query": log2(batch.max_query_len),
        "mean_keys": log2(keys / batch.num_requests),
        "longest_keys": log2(longest),
        "uneven": log2(longest * batch.num_requests / keys),
        "seen": log2(keys / batch.num_kv_tokens),
        "tiles": log2(tiles),
        "fill": fill_of(tiles, rates),
        "stretch": log2((1 + prefill.busiest_us + decode.busiest_us) / (LAUNCH_US + floor_us)),
        "prefill_share": prefill.floor_us / floor_us,
        "has_prefills": float(bool(prefills)),
        "has_decodes": float(bool(decodes)),
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
    return StepFeatures(LAUNCH_US + floor_us, values)


def _phase_work(config: AttentionConfig, groups: Sequence[RequestGroup], decode: bool, rates: Rates) -> _PhaseWork:
    work = _PhaseWork()
    if not groups:
        return work
    packed = decode or config.sparse  # the heads of a KV head, into one tile
    heads = config.num_kv_heads if packed else config.num_heads
    per_token = config.num_heads // config.num_kv_heads if packed else 1
    rows = _DECODE_ROWS if packed else _PREFILL_ROWS
    counts = []
    for group in groups:
        step = request_work(config, group.query_len, group.seq_len)
        if config.sparse:  # each token has keys of its own
            counts.append(group.count * heads * group.query_len * -(-per_token // rows))
        else:
            counts.append(group.count * heads * -(-group.query_len * per_token // rows))
        work.bytes_us += group.count * step.bytes / rates.bytes_per_us
        work.flops_us += group.count * step.flops / rates.flops_per_us
        work.longest = max(work.longest, keys_read(config, group.query_len, group.seq_len))
    work.tiles = sum(counts)
    width = config.head_size + (0 if config.mla else config.value_head_size)  # a latent is read once
    if packed:
        keys = _dealt_out(_decode_parts(config, groups, counts, rates.sm_count), rates.sm_count)
        work.busiest_us = keys * width * 2 * rates.sm_count / rates.bytes_per_us
    else:
        keys = _dealt_out([part for group in groups for part in _prefill_parts(config, group)], rates.sm_count)
        work.busiest_us = keys * width * 2 * rows * rates.sm_count / rates.flops_per_us
    return work


def _decode_parts(
    config: AttentionConfig, groups: Sequence[RequestGroup], counts: Sequence[int], sm_count: int
) -> list[tuple[int, int]]:
    """Return the keys of each part of decodes with how many there are: every tile is cut into equal parts that are no
    longer than a multiprocessor's share of all keys and a tenth more (FlashAttention 3, hopper/
    flash_prepare_scheduler.cu)."""
    blocks = [-(-keys_read(config, group.query_len, group.seq_len) // _BLOCK) for group in groups]
    total = sum([count * each for count, each in zip(counts, blocks, strict=True)])
    share = max(1, -(-11 * total // (10 * sm_count)))
    found = []
    for count, each in zip(counts, blocks, strict=True):
        parts = -(-each // share)
        found.append((-(-each // parts) * _BLOCK, count * parts))
    return found


def _prefill_parts(config: AttentionConfig, group: RequestGroup) -> list[tuple[int, int]]:
    """Return the keys that the tiles of equal prefills read, with how many there are: later rows see more keys, so the
    tiles of a request count in four parts, each with the keys of its middle."""
    rows, cached = _PREFILL_ROWS, group.seq_len - group.query_len
    tiles = -(-group.query_len // rows)
    ends = sorted({tiles * part // 4 for part in range(5)})
    found = []
    for first, last in pairwise(ends):
        middle = min(group.query_len, (first + last + 1) * rows // 2)
        keys = keys_read(config, min(rows, middle), cached + middle)
        found.append((keys, group.count * config.num_heads * (last - first)))
    return found


def _dealt_out(parts: Sequence[tuple[int, int]], slots: int) -> float:
    """Return the greatest sum where each part goes to the slot with the least, the longest parts first."""
    loads = [(0, slots)]  # sums with how many slots have each, the least first
    for size, left in sorted(parts, reverse=True):
        while left:
            least, free = loads[0]
            if left >= slots and loads[-1][0] - least <= size:  # every slot takes its turn
                rounds, left = divmod(left, slots)
                loads = [(load + rounds * size, number) for load, number in loads]
                continue
            taken = min(left, free)
            left -= taken
            loads[:1] = [(least, free - taken)] if free > taken else []
            insort(loads, (least + size, taken))
    return float(loads[-1][0])
