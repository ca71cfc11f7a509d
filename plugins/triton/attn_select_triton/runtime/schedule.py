"""How a step is cut: keys of decodes into splits, ``TRITON_ATTN``'s prefills into launches that gather their pages.

All of it is worked out on the host from host copies of the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.runtime.metadata import CommonAttentionMetadata, Ranges
from attn_select_triton.facts import tuning
from attn_select_triton.facts.tuning import Cost, Gpu, Way, prefill_cost
from attn_select_triton.kernels.cache import GATHER_ALIGN
from attn_select_triton.kernels.launch import Launch, num_splits_for
from attn_select_triton.kernels.mla_decode import mla_num_splits

LEAST_SPLIT = tuning.decode_splits().captured_least_keys
"""Keys of a split of a captured step, at least."""
MOST_FIXED_SPLITS, LEAST_FIXED_SPLIT = 16, 512
"""Batch-invariant splits: so many at most, of so many keys at least."""
TILE_ROWS = 64
"""Rows of a tile, in the costs of ways."""


def split_keys(
    *,
    requests: int,
    longest: int,
    total: int,
    units: int,
    most: int,
    gpu: Gpu,
    launch: Launch,
    key_bytes: int,
    fp8: bool,
) -> tuple[int, int]:
    """Return how many splits a decode may have, and how many keys each should have.

    Args:
        requests: in the batch; ``longest`` of them in keys, ``total`` of all.
        units: programs of one request, unsplit: KV heads x row tiles.
        most: splits that the workspace has room for.
        launch, key_bytes: as ``num_splits_for`` has them.
        fp8: the cache is FP8.
    """
    by = tuning.decode_splits()
    splits = max(1, min(num_splits_for(requests * units, longest, gpu, launch, key_bytes), most))
    tokens = -(-longest // splits)
    if by.uneven * total < requests * longest:
        # Programs of what each resident one would have if all keys were dealt out evenly would still leave a tail.
        part = max(by.uneven_least_keys, int(total * units / (by.uneven_parts * by.programs(gpu, fp8) * gpu.sms)))
        if part < tokens:
            splits = max(1, min(-(-longest // part), most))
            tokens = max(part, -(-longest // splits))
    return splits, max(1, tokens)


def worth_two_streams(tokens: int, decode_bytes: int) -> bool:
    """Whether a step's prefills of so many query tokens run beside its decodes, which read so many bytes."""
    least = tuning.two_streams()
    return tokens >= least["tokens"] and decode_bytes >= least["mib"] << 20


def most_splits(max_keys: int, units: int, gpu: Gpu, fp8: bool) -> int:
    """Return how many splits the longest request of a captured step may need, whatever the others are."""
    resident = tuning.decode_splits().programs(gpu, fp8) * gpu.sms
    return max(1, min(-(-max_keys // LEAST_SPLIT), int(-(-resident // units))))


def latent_splits(seq_lens: Tensor, longest: int, units: int, most: int, sms: int) -> tuple[int, int]:
    """Return how many splits a decode over latents may have, and how many keys each should have.

    Args:
        seq_lens: int32 ``(B,)`` on the host.
        longest: of them.
        units: programs of one request, unsplit: its row tiles.
        most: splits that there is room for.
        sms: multiprocessors. One program fills one.
    """
    requests, by = len(seq_lens), tuning.latent_splits()
    tiles = max(1, -(-longest // by.tile))
    even = min(most, mla_num_splits(requests * units, longest, sms))
    if most > 1 and int(seq_lens.sum()) < by.even * longest * requests:
        counts = torch.tensor([count for count in by.counts if count <= min(most, tiles)])
        share = -(-tiles // counts)[:, None]
        own = seq_lens.long().add(by.tile - 1).div_(by.tile, rounding_mode="floor").clamp_(min=1)[None]
        splits = -(-own // share)
        time = -(-own // splits) + by.program
        programs = units * splits.sum(1)
        mean = units * (splits * time).sum(1) / programs
        waves = torch.maximum(time.amax(1), -(-programs // sms) * mean) + by.merge * (counts > 1)
        even = int(counts[int(waves.argmin())])
    return even, -(-tiles // even) * by.tile


def fixed_split(max_keys: int, least: int = LEAST_FIXED_SPLIT, tile: int = 1) -> int:
    """Return the keys of a batch-invariant split. They depend on no batch.

    Args:
        max_keys: the most keys that a request can have.
        least: keys of a split, at least.
        tile: a split has a multiple of so many keys.
    """
    return max(least, -(-max_keys // (MOST_FIXED_SPLITS * tile)) * tile)


@dataclass(slots=True)
class Chunk:
    """Requests of one launch.

    Attributes:
        first, last: requests ``first .. last - 1``.
        tokens: query tokens of these requests.
        starts: workspace row of each request's token 0, negative where a window begins behind it; None: not gathered.
        most_rows: the most rows that one of them takes.
    """

    first: int
    last: int
    tokens: int
    starts: list[int] | None
    most_rows: int


def gathered_chunks(query_lens: Sequence[int], seq_lens: Sequence[int], window: int, room: int) -> list[Chunk]:
    """Cut requests into launches whose keys fit into ``room`` rows; one that does not fit is not gathered.

    Args:
        window: keys that a row sees to its left, itself included; 0: all.
    """
    chunks: list[Chunk] = []
    used = room
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        begin = max(0, seq_len - query_len - window + 1) // GATHER_ALIGN * GATHER_ALIGN if window else 0
        rows = -(-seq_len // GATHER_ALIGN) * GATHER_ALIGN - begin
        if rows > room:
            chunks.append(Chunk(request, request + 1, query_len, None, 0))
            used = room
            continue
        if not chunks or chunks[-1].starts is None or used + rows > room:  # a request without keys needs no room
            chunks.append(Chunk(request, request, 0, [], 0))
            used = 0
        chunk = chunks[-1]
        assert chunk.starts is not None
        chunk.last, chunk.tokens, chunk.most_rows = request + 1, chunk.tokens + query_len, max(chunk.most_rows, rows)
        chunk.starts.append(used - begin)
        used += rows
    return chunks


def prefill_way(
    ways: Mapping[Way, Cost],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    heads: tuple[int, int],
    gpu: Gpu,
    causal: bool,
    window: int,
    room: int = 0,
) -> Way:
    """Return the cheapest of the ways that a prefill may be run.

    Args:
        heads: of the query, and of K and V.
        window: keys that a row sees to its left, itself included; 0: all.
        room: partial results of a query token that the workspace holds.
    """
    work = prefill_work(query_lens, seq_lens, heads=heads, causal=causal, window=window)
    splits = warp_splits(query_lens, seq_lens, heads=heads, gpu=gpu, room=room) if "warps_split" in ways else 1

    def cost(way: Way) -> float:
        if way != "warps_split":
            return prefill_cost(ways[way], work, heads=heads, gpu=gpu)
        return prefill_cost(ways[way], work, heads=heads, gpu=gpu, splits=splits) if splits > 1 else math.inf

    return min(ways, key=cost)


def warp_splits(
    query_lens: Sequence[int], seq_lens: Sequence[int], *, heads: tuple[int, int], gpu: Gpu, room: int
) -> int:
    """Return how many programs of the warp-specialised prefill share the keys of 128 rows: one fills an SM.

    More than fill the SMs gain nothing: a second wave takes as long as the first. Arguments as ``prefill_way``'s.
    """
    group = heads[0] // heads[1]
    programs = heads[1] * sum(-(-query_len * group // (2 * TILE_ROWS)) for query_len in query_lens)
    tiles = max(seq_lens, default=0) // (2 * TILE_ROWS)
    return max(1, min(gpu.sms // max(1, programs), tiles // 2, room // max(1, sum(query_lens))))


def prefill_work(
    query_lens: Sequence[int], seq_lens: Sequence[int], *, heads: tuple[int, int], causal: bool, window: int
) -> dict[str, float]:
    """Return what ``tuning.prefill_cost`` asks of a batch; arguments as ``prefill_way`` has them."""
    group = heads[0] // heads[1]
    tiles = rows = longest = 0
    pairs = keys = 0.0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        own = -(-query_len * group // TILE_ROWS)
        seen = min(seq_len, window) if window else seq_len
        pairs += own * (max(seen - query_len / 2, seen / 2) if causal else seen)
        keys += min(seq_len, seen + query_len)
        tiles, rows, longest = tiles + own, rows + query_len * heads[0], max(longest, seen)
    return {"tiles": tiles, "pairs": pairs, "keys": keys, "rows": rows, "longest": longest}


def image_ranges(common: CommonAttentionMetadata, first: int, last: int) -> list[list[int]] | None:
    """Return per request of ``first .. last - 1`` the ends of the image ranges that this step's rows stand in.

    Rows are filled up with ``1, 0`` to a power of two, since their number is a constant of the kernel. None: no row
    stands in any.
    """
    if common.mm_prefix_ranges is None:
        return None
    computed = common.num_computed_tokens_cpu[first:last].tolist()
    given: Sequence[Ranges] = common.mm_prefix_ranges[first:last]
    found = [
        [(low, high) for low, high in ranges if high >= before and high > low]
        for ranges, before in zip(given, computed, strict=True)
    ]
    most = max((len(ranges) for ranges in found), default=0)
    if not most:
        return None
    width = 1 << (most - 1).bit_length()
    return [[end for pair in [*ranges, *[(1, 0)] * (width - len(ranges))] for end in pair] for ranges in found]
