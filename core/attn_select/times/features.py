"""What of a batch a kernel's time depends on: totals of its work, its tiles and waves, and its longest request.

Work is counted request by request and summed, so that batches of unequal requests have features like those of equal
ones. Where a batch holds prefills and decodes, each phase's requests have features of their own.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Literal

from attn_select.config import AttentionConfig
from attn_select.times.batch_shape import RequestGroup
from attn_select.times.roofline import keys_read, visible_keys, work_rates

FEATURES = ("start", "bytes", "flops", "tiles", "waves", "tokens", "longest", "serial", "makespan", "cold_bytes")
"""Names of the features, in order.

1; bytes of the step; its FLOPs; tiles of work, each a thread block's; rounds in which the multiprocessors take them;
new tokens; keys of the longest request; those of them that one thread block reads where blocks are left over to share
them; keys that the busiest multiprocessor reads by a schedule; bytes where they exceed what the L2 keeps from one run
to the next.
"""
Split = Literal["fair", "equal", "filled"]
"""How a kernel cuts the keys of decodes into parts, each a thread block's.

``fair``: every request into equal parts that are no longer than a multiprocessor's share of all keys and a tenth more
(FlashAttention 3, hopper/flash_prepare_scheduler.cu, ``blocks_per_sm``). ``equal``: every request into the same number
of parts, as many as fit at once (XQA, csrc/xqa/mha.cu, ``nbSubSeqPerSeq``). ``filled``: the same, but as many as fit in
one round or in two, whichever ends first.
"""
Schedule = tuple[Split, int]
"""How keys are cut, and how many thread blocks a multiprocessor holds."""
SCHEDULES: tuple[Schedule, ...] = (("fair", 1), ("fair", 2), ("equal", 1), ("equal", 4), ("filled", 1))
_BLOCK = 128
"""Keys that a thread block reads at a time."""
_PART_KEYS = 256
"""Keys whose time a part costs beside its own, where the schedule weighs that."""

_TILE_ROWS = {True: 64, False: 128}
"""Rows that a thread block takes: of decodes, queries times heads of one KV head; of prefills, queries of one head."""
_STEEP = 6
"""How sharply caches of more than ``l2_bytes`` fall out of the L2."""

Coordinates = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """One phase of one kind of layer on one device: makes the features of its batches. Made by ``phase_work``.

    Attributes:
        config: the layer.
        decode: whether it is the phase of decodes, which kernels split along the keys and pack along the heads.
        sm_count: multiprocessors of the device.
        key_bytes, token_bytes: bytes per key that a request reads, and per new token.
        pair_flops, key_flops, token_flops: FLOPs per visible pair, per key and per new token.
        tile_rows: rows of a tile that one new token of one request fills.
        tile_heads: heads of a request that have tiles of their own.
    """

    config: AttentionConfig
    decode: bool
    sm_count: int
    key_bytes: float
    token_bytes: float
    pair_flops: float
    key_flops: float
    token_flops: float
    tile_rows: int
    tile_heads: int

    def features(
        self, groups: Sequence[RequestGroup], l2_bytes: float, schedule: Schedule | None = None
    ) -> tuple[float, ...]:
        """Return the ``FEATURES`` of requests of this phase.

        Args:
            groups: the requests.
            l2_bytes: what stays in the L2 when a step is repeated; 0 where caches are cold.
            schedule: how decodes' keys are cut; None where no schedule explains a kernel's times.
        """
        config = self.config
        moved = flops = 0.0
        tiles = tokens = longest = 0
        for group in groups:
            count, query_len, seq_len = group.count, group.query_len, group.seq_len
            keys = keys_read(config, query_len, seq_len)
            moved += count * (keys * self.key_bytes + query_len * self.token_bytes)
            flops += count * (
                visible_keys(config, query_len, seq_len) * self.pair_flops
                + keys * self.key_flops
                + query_len * self.token_flops
            )
            tiles += count * self.tile_heads * -(-query_len * self.tile_rows // _TILE_ROWS[self.decode])
            tokens += count * query_len
            longest = max(longest, keys)
        cold = moved / (1 + (l2_bytes / moved) ** _STEEP) if l2_bytes else 0.0
        serial = longest / max(1.0, self.sm_count / tiles)
        waves = -(-tiles // self.sm_count)
        busiest = self._makespan(groups, tiles, schedule) if schedule is not None else 0.0
        return 1.0, moved, flops, float(tiles), float(waves), float(tokens), float(longest), serial, busiest, cold

    def _makespan(self, groups: Sequence[RequestGroup], tiles: int, schedule: Schedule) -> float:
        """Return the keys that the busiest multiprocessor reads, parts being dealt out longest first."""
        split, resident = schedule
        slots = self.sm_count * resident
        requests = [
            (
                group.count * self.tile_heads * -(-group.query_len * self.tile_rows // _TILE_ROWS[True]),
                keys_read(self.config, group.query_len, group.seq_len),
            )
            for group in groups
        ]
        parts: list[tuple[int, int]] = []
        if split == "fair":
            share = max(1, -(-11 * sum([count * -(-keys // _BLOCK) for count, keys in requests]) // (10 * slots)))
            for count, keys in requests:
                blocks = -(-keys // _BLOCK)
                parts += _parts(count, blocks * _BLOCK, -(-blocks // -(-blocks // share)) * _BLOCK, 0)
            return dealt_out(parts, slots) * resident
        if split == "equal":
            for count, keys in requests:
                parts += _parts(count, keys, max(64, -(-keys // max(1, slots // tiles))), 0)
            return dealt_out(parts, slots) * resident
        least = math.inf
        for each in sorted({1, max(1, slots // tiles), max(1, (2 * slots - 1) // tiles)}):
            parts = []
            for count, keys in requests:
                parts += _parts(count, keys, max(64, -(-keys // each)), _PART_KEYS)
            least = min(least, dealt_out(parts, slots) + (_PART_KEYS if each > 1 else 0))
        return least * resident


def _parts(count: int, keys: int, size: int, more: int) -> list[tuple[int, int]]:
    """Return the parts of equal requests, each part's keys (``more`` beside its own) with how many there are."""
    whole, rest = divmod(keys, size)
    return [(size + more, count * whole)] * (whole > 0) + [(rest + more, count)] * (rest > 0)


def dealt_out(parts: Iterable[tuple[int, int]], slots: int) -> float:
    """Return the greatest sum where each part goes to the slot with the least, the longest parts first.

    Args:
        parts: sizes, each with how many there are of it.
        slots: how many sums there are.
    """
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


def phase_work(config: AttentionConfig, decode: bool, sm_count: int) -> PhaseWork:
    """Return what makes the features of one phase's batches."""
    rates = work_rates(config, decode)
    return PhaseWork(
        config,
        decode,
        sm_count,
        key_bytes=rates.kv_bytes_per_key + rates.projection_bytes_per_key,
        token_bytes=rates.query_bytes_per_token + rates.cache_write_bytes_per_token + rates.projection_bytes_per_token,
        pair_flops=rates.attention_flops_per_pair,
        key_flops=rates.projection_flops_per_key,
        token_flops=rates.projection_flops_per_token,
        tile_rows=config.num_heads // config.num_kv_heads if decode else 1,
        tile_heads=config.num_kv_heads if decode else config.num_heads,
    )


def coordinates(groups: Sequence[RequestGroup], cold_share: float) -> Coordinates:
    """Return where a batch lies among others: what is near has nearly the same deviation from a kernel's curve.

    The axes are the logarithms of requests, mean length, mean length per new token and of the longest length over the
    mean, and the share of cold bytes, which tells apart what fits into the L2 from what does not. Lengths differ by 1
    where they double.
    """
    count = sum([group.count for group in groups])
    length = sum([group.count * group.seq_len for group in groups]) / count
    new = sum([group.count * group.query_len for group in groups]) / count
    longest = max([group.seq_len for group in groups])
    return log2(count), log2(length), log2(length / new) / 2, 5 * cold_share, log2(longest / length)
