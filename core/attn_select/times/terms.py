"""What of a batch a kernel's time depends on: totals of its work, its tiles and waves, and its longest request.

Work is counted request by request and summed, so that unequal requests are described as equal ones are. Where a batch
holds prefills and decodes, each phase's requests have features of their own.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise
from math import log2
from operator import mul
from typing import Literal

from attn_select.layer.config import AttentionConfig
from attn_select.times.batch_shape import RequestGroup
from attn_select.times.roofline import keys_read, visible_keys, work_rates

TERMS = (
    "start",
    "bytes",
    "flops",
    "tiles",
    "waves",
    "tokens",
    "longest",
    "serial",
    "makespan",
    "parts",
    "last",
    "context",
    "cold_bytes",
)
"""Names of the features, in order.

1; bytes of the step; its FLOPs; tiles of work, each a thread block's; rounds in which the multiprocessors take them;
new tokens; keys of the longest request; those of them that one thread block reads where blocks are left over to share
them; keys that the busiest multiprocessor reads by a schedule; into how many parts the schedule cuts the longest
request, whose results are merged; keys of a block in a nearly empty last round; keys of earlier steps that prefills
read; bytes where they exceed what the L2 keeps from one run to the next.
"""
Split = Literal["fair", "equal", "rounded", "filled", "planned", "tiles"]
"""How a kernel cuts its work into parts, each a thread block's: the keys of decodes, or the tiles of prefills.

``fair``: every request into equal parts that are no longer than a multiprocessor's share of all keys and a tenth more
(FlashAttention 3, hopper/flash_prepare_scheduler.cu, ``blocks_per_sm``). ``equal``: every request into the same number
of parts, as many as fit at once (XQA, csrc/xqa/mha.cu, ``nbSubSeqPerSeq``). ``rounded``: the same, as many as fill
three quarters of the multiprocessors, rounded (XQA with an FP8 cache on Hopper, csrc/xqa/mha_sm90.cu). ``filled``: the
same, but as many as fit in one round or in two, whichever ends first.
``planned``: every request into parts of a multiprocessor's share, rounded up to 256 keys, which go in order to the one
that has least (FlashInfer's MLA, attention/scheduler.cuh, ``MLAPlan``).
``tiles``: every tile of a prefill reads the keys that its rows see.
"""
Schedule = tuple[Split, int]
"""How work is cut, and how many thread blocks a multiprocessor holds."""
DECODE_SCHEDULES: tuple[Schedule, ...] = (("fair", 1), ("fair", 2), ("equal", 1), ("equal", 4), ("filled", 1))
HEAD_SCHEDULES: tuple[Schedule, ...] = (*DECODE_SCHEDULES, ("rounded", 2))
LATENT_SCHEDULES: tuple[Schedule, ...] = (*DECODE_SCHEDULES, ("planned", 1))
PREFILL_SCHEDULES: tuple[Schedule, ...] = (("tiles", 1), ("tiles", 2))
_BLOCK = 128
"""Keys that a thread block reads at a time."""
_PART_KEYS = 256
"""Keys whose time a part costs beside its own, where the schedule weighs that."""

_TILE_ROWS = {True: 64, False: 128}
"""Rows that a thread block takes: of decodes, queries times heads of one KV head; of prefills, queries of one head."""
_PLANNED_SIZES = (8, 32), (16, 64), (32, 128), (64, 192)
"""A multiprocessor's share of keys up to which a planned part has so many; beyond the last a multiple of 256."""
_RESIDENT, _ALONE_BYTES = 4, 200
"""Thread blocks of decodes that a multiprocessor holds, where their last round is looked at, and the bytes of a key and
its value for which such blocks alone take as long as their share of a full round: fewer leave the memory idle."""
_MERGED = 2.0
"""Distance between prefills of MLA with context and those without, whose deviations have causes of their own."""
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

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """How this phase's work may be cut."""
        if not self.decode:
            return PREFILL_SCHEDULES
        return LATENT_SCHEDULES if self.config.mla else HEAD_SCHEDULES

    def features(
        self, groups: Sequence[RequestGroup], l2_bytes: float, schedule: Schedule | None = None
    ) -> tuple[float, ...]:
        """Return the ``TERMS`` of requests of this phase.

        Args:
            groups: the requests.
            l2_bytes: what stays in the L2 when a step is repeated; 0 where caches are cold.
            schedule: how the work is cut; None where no schedule explains a kernel's times.
        """
        config = self.config
        moved = flops = 0.0
        tiles = tokens = longest = context = 0
        shortest = math.inf
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
            if not self.decode:
                context += count * max(0, keys - query_len)
            longest = max(longest, keys)
            shortest = min(shortest, keys)
        serial = longest / max(1.0, self.sm_count / tiles)
        waves = -(-tiles // self.sm_count)
        busiest, parts = self._makespan(groups, tiles, schedule) if schedule is not None else (0.0, 0)
        if self.merges_context(groups):
            parts = 1
        work = float(tiles), float(waves), float(tokens), float(longest)
        last = self._last_round(tiles, longest) if longest == shortest else 0.0
        cold = cold_bytes(moved, l2_bytes)
        return 1.0, moved, flops, *work, serial, busiest, float(parts), last, float(context), cold

    def _last_round(self, tiles: int, keys: int) -> float:
        """Return the keys that blocks of decodes of one length read at less than the memory's rate, in a last round
        that leaves most places empty."""
        rounds = tiles / (_RESIDENT * self.sm_count)
        if not self.decode or rounds <= 1 or not rounds % 1:
            return 0.0
        return keys * max(0.0, 1 - self.key_bytes / self.tile_heads / _ALONE_BYTES * (rounds % 1))

    @property
    def hides_keys(self) -> bool:
        """Whether requests may have keys that none of their queries sees."""
        return self.config.sliding_window is not None or self.config.attention_chunk_size is not None

    def merges_context(self, groups: Sequence[RequestGroup]) -> bool:
        """Whether prefills read keys of earlier steps by products and launches of their own, as prefills of MLA do."""
        return self.config.mla and not self.decode and any([group.seq_len > group.query_len for group in groups])

    def coordinates(self, groups: Sequence[RequestGroup], cold_share: float, whole: bool = False) -> Coordinates:
        """Return where requests of this phase lie, by the keys that they read; ``whole``: by all that they have."""
        config = self.config
        if self.hides_keys and not whole:
            lengths = [max(g.query_len, keys_read(config, g.query_len, g.seq_len)) for g in groups]
        else:
            lengths = [group.seq_len for group in groups]
        found = place(groups, lengths, cold_share)
        return (*found[:4], found[4] + _MERGED) if self.merges_context(groups) else found

    def _makespan(self, groups: Sequence[RequestGroup], tiles: int, schedule: Schedule) -> tuple[float, int]:
        """Return the keys that the busiest multiprocessor reads, and how many parts the longest request has at most.

        Parts are dealt out longest first, planned ones in order.
        """
        split, resident = schedule
        slots = self.sm_count * resident
        parts: list[tuple[int, int]] = []
        if split == "tiles":
            for group in groups:
                parts += self._tiles(group)
            return dealt_out(parts, slots) * resident, 0
        if split == "planned":
            return self._planned(groups)
        requests = self._requests(groups, _TILE_ROWS[True])
        if split == "fair":  # by whole lengths, whatever a window leaves of them
            whole = [-(-group.seq_len // _BLOCK) for group in groups]
            total = sum([count * blocks for (count, _), blocks in zip(requests, whole, strict=True)])
            share = max(1, -(-11 * total // (10 * slots)))
            for (count, keys), all_blocks in zip(requests, whole, strict=True):
                blocks = -(-keys // _BLOCK)
                parts += _parts(count, blocks * _BLOCK, -(-blocks // -(-all_blocks // share)) * _BLOCK, 0)
            return dealt_out(parts, slots) * resident, -(-max(whole) // share)
        if split in ("equal", "rounded"):
            each = max(1, slots // tiles if split == "equal" else (3 * self.sm_count // tiles + 2) // 4)
            for count, keys in requests:
                parts += _parts(count, keys, max(64, -(-keys // each)), 0)
            return dealt_out(parts, slots) * resident, each
        least, most = math.inf, 1
        for each in sorted({1, max(1, slots // tiles), max(1, (2 * slots - 1) // tiles)}):
            parts = []
            for count, keys in requests:
                parts += _parts(count, keys, max(64, -(-keys // each)), _PART_KEYS)
            time = dealt_out(parts, slots) + (_PART_KEYS if each > 1 else 0)
            if time < least:
                least, most = time, each
        return least * resident, most

    def _requests(self, groups: Sequence[RequestGroup], rows: int) -> list[tuple[int, int]]:
        """Return for decodes how many tiles of so many rows they have, and the keys of each."""
        return [
            (
                group.count * self.tile_heads * -(-group.query_len * self.tile_rows // rows),
                keys_read(self.config, group.query_len, group.seq_len),
            )
            for group in groups
        ]

    def _planned(self, groups: Sequence[RequestGroup]) -> tuple[float, int]:
        """Return the greatest sum of planned parts, each with the keys that the plan counts for its rows beside its
        own, and the parts of the longest request. Two thread blocks share a tile of more than 64 rows."""
        count = sum([group.count for group in groups])
        rows = self.tile_rows * sum([group.count * group.query_len for group in groups])
        cluster = 2 if rows > 64 * count else 1
        slots, tile = self.sm_count // cluster, 64 * cluster
        requests = self._requests(groups, tile)
        share = -(-sum([count * keys for count, keys in requests]) // slots)
        size = next((size for most, size in _PLANNED_SIZES if share <= most), -(-share // 256) * 256)
        parts: list[int] = []
        for count, keys in requests:
            whole, rest = divmod(keys, size)
            parts += ([size + 2 * tile] * whole + [rest + 2 * tile] * (rest > 0)) * count
        loads = parts[:slots]
        if len(parts) > slots:
            heapify(loads)
            for part in parts[slots:]:
                heapreplace(loads, loads[0] + part)
        return float(max(loads)), -(-max([keys for _, keys in requests]) // size)

    def _tiles(self, group: RequestGroup) -> list[tuple[int, int]]:
        """Return the keys that the tiles of equal prefills read, each with how many there are. Later rows see more
        keys: the tiles of a request count in four parts, each with the keys of its middle."""
        rows = _TILE_ROWS[False]
        tiles, cached = -(-group.query_len // rows), group.seq_len - group.query_len
        ends = sorted({tiles * part // 4 for part in range(5)})
        found = []
        for first, last in pairwise(ends):
            middle = min(group.query_len, (first + last + 1) * rows // 2)
            keys = keys_read(self.config, min(rows, middle), cached + middle)
            found.append((keys, group.count * self.tile_heads * (last - first)))
        return found


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
    return place(groups, [group.seq_len for group in groups], cold_share)


def cold_bytes(moved: float, l2_bytes: float) -> float:
    """Return the bytes of a step that exceed what the L2 keeps from one run to the next; 0 where caches are cold."""
    return moved / (1 + (l2_bytes / moved) ** _STEEP) if l2_bytes else 0.0


def place(groups: Sequence[RequestGroup], lengths: Sequence[int], cold_share: float) -> Coordinates:
    """Return the coordinates of requests of these lengths."""
    counts = [group.count for group in groups]
    count = sum(counts)
    length = sum(map(mul, counts, lengths)) / count
    new = sum([group.count * group.query_len for group in groups]) / count
    return log2(count), log2(length), log2(length / new) / 2, 5 * cold_share, log2(max(lengths) / length)
