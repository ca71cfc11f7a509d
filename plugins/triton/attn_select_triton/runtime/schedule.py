"""How a step is cut: the keys of decodes into pieces, and ``TRITON_ATTN``'s prefills into launches.

The host works it out from its copies of the lengths. A piece (also: split) is a run of one request's keys that one
program reads. More pieces fill the GPU, but each one has a cost of its own, and their partial results are merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attn_select.runtime.metadata import CommonAttentionMetadata, Ranges
from attn_select_triton import tuning
from attn_select_triton.kernels.cache import GATHER_ALIGN
from attn_select_triton.kernels.launch import Launch, num_splits_for
from attn_select_triton.kernels.mla_decode import mla_num_splits
from attn_select_triton.tuning import Cost, Gpu, Way

Lens = NDArray[np.int64]
# Batch-invariant splits: the most that a request has, and the fewest keys that one has.
MOST_FIXED_SPLITS, LEAST_FIXED_SPLIT = 16, 512
ORDER = 2.0**21  # A factor for ``in_order``, larger than the number of a request's pieces
TILE_ROWS = 64  # Rows of a tile, in the costs of ways; a program of the warp-specialised prefill has two tiles


def split_keys(
    lens: Lens, *, units: int, room: int, gpu: Gpu, launch: Launch, key_bytes: int, rows: int, apart: bool = False
) -> tuple[int, int]:  # fmt: skip
    """Return into how many pieces the longest request of a decode is cut, and how many keys each piece should have."""
    # lens: int64 ``(B,)``, the keys that the rows of each request see, at least 1.
    # units: programs of one request without a cut: KV heads x row tiles.
    # room: how many partial results of one request the workspace holds.
    by, requests, longest = tuning.decode_splits(), len(lens), int(lens.max())
    wanted = num_splits_for(requests * units, longest, gpu, launch, key_bytes, rows, apart)
    splits = max(1, min(wanted, room // requests))
    tokens = -(-longest // splits)
    if by.uneven * int(lens.sum()) < requests * longest:  # the longest is ``uneven`` times the mean or more
        tokens = uneven_tokens(lens, tokens, units, room, gpu, launch, key_bytes, rows, apart)
        splits = -(-longest // tokens)
    return splits, max(1, tokens)


def uneven_tokens(
    lens: Lens, even: int, units: int, room: int, gpu: Gpu, launch: Launch, key_bytes: int, rows: int, apart: bool
) -> int:  # fmt: skip
    """Return how many keys each piece should have where the lengths of requests differ."""
    # A few sizes are tried. The one with the least predicted time wins.
    # ``DecodeSplits.of_equal`` has the costs. Two bounds hold, and the larger one counts: reading all bytes takes a
    # time, and so do the last pieces (``last_of_waves``), which share the memory with others.
    # even: the size for equal lengths, which is tried too.
    by, share = tuning.decode_splits(), int(lens.sum()) * units / gpu.sms
    tried = [even, int(lens.max()), *[math.ceil(share / parts) for parts in by.uneven_parts]]
    sizes = np.array([max(size, by.least_keys) for size in tried])
    places = by.places(gpu, launch) / units
    keys = lens.astype(np.float64)  # quotients are rounded up as with integers, in half the time
    pieces = np.ceil(keys / sizes[:, None])
    merging = by.merging_us(pieces.max(1), rows, apart)
    own, placed = in_order(np.ceil(keys / pieces), pieces)
    # Here and below arrays are changed in place: this runs on the host in every step.
    busy = np.ceil(own / launch.block_n)
    busy *= by.tile_us
    own *= by.key_us
    busy += own
    count = placed[:, -1]
    waves = np.ceil(count / places)
    least = float(keys.sum()) * by.us_of_a_key(units, gpu, key_bytes)
    # ``least * (1 + idle * empty)`` of ``DecodeSplits.of_equal``, where ``empty`` is 1 - count / (waves * places).
    time = least * (1 + by.idle) - count / waves * (least * by.idle / places)
    np.maximum(time, last_of_waves(placed, busy, places) + by.beside * least, out=time)
    time += waves * by.start_us
    time += merging * (count > len(lens))
    # Only requests in several pieces need room: they are counted where all pieces together are too many.
    if count.max() > room:
        time[np.where(pieces > 1, pieces, 0).sum(1) > room] = np.inf
    return int(sizes[time.argmin()])


def in_order(own: NDArray[np.float64], pieces: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sort the requests of each way to cut by the size of their pieces, the largest first."""
    # own: whole numbers ``(ways, B)`` below 2**31, the size of a piece of each request.
    # pieces: ``(ways, B)``, the number of pieces of each request, from 1 to 2**20.
    # Returns the sorted sizes, and the running sum of pieces in that order, both ``(ways, B)``.
    # Sorted in one array, which takes a third of the time of an order and two arrays in it. Each number is
    # ``pieces - own * ORDER``: float64 holds it exactly (52 bits), and the largest size is the least of them. A size is
    # got back by rounding up, since pieces are less than ORDER; what is left is the pieces.
    both = own * -ORDER
    both += pieces
    both.sort(1)
    sizes = np.ceil(both * (-1 / ORDER))
    both += sizes * ORDER
    return sizes, both.cumsum(1)


def last_of_waves(placed: NDArray[np.float64], busy: NDArray[np.float64], places: float) -> NDArray[np.float64]:
    """Return, for each way to cut, the least time until the last piece ends; the longest pieces start first."""
    # With more pieces than places, some place runs two pieces as long as the last one of the first wave, or three as
    # long as the last one of the second.
    # placed: ``(ways, B)``, the running sum of pieces that ``in_order`` returns.
    # busy: ``(ways, B)``, the time of one piece of each request, in the same order.
    # places: how many pieces run at a time.
    # For each request: the wave in which its last piece stands, times what a piece takes that is no longer than any
    # before it.
    waves = np.ceil(placed / places)
    waves *= busy
    found: NDArray[np.float64] = waves.max(1)
    return found


def most_pieces(units: int, gpu: Gpu) -> int:
    """Return by how much the pieces that ``split_keys`` makes of any batch may outnumber its requests."""
    # Cut into shares of ``parts`` to a multiprocessor, all keys make so many pieces more than there are requests.
    by = tuning.decode_splits()
    return -(-max(by.most, *by.uneven_parts) * gpu.sms // units)


def worth_two_streams(tokens: int, decode_bytes: int) -> bool:
    """Whether a step's prefills, of ``tokens`` query tokens, run beside its decodes, which read ``decode_bytes``."""
    rows = tuning.two_streams().items()
    low, high = next((between for least, between in rows if decode_bytes >= least), (1, 0))
    return low <= tokens <= high


def few_keys(seen: int, width: int, decodes: bool) -> bool:
    """Whether rows see so few keys that one launch of the decode kernel for a step's prefills may be faster."""
    # seen: keys that a program's rows see, at most.
    # width: the larger of QK's and V's head size.
    # decodes: whether the step has decodes, whose own launch that spares.
    by = tuning.joined()
    # Keys of wider heads take longer: they count for more than those of 128 columns.
    return seen * max(1.0, width / 128) <= (by.keys if decodes else by.alone)


def few_programs(programs: int, gpu: Gpu) -> bool:
    """Whether a GPU has places for all programs of that launch at a time."""
    return programs <= tuning.joined().programs * gpu.sms


def latent_keys(lens: Lens, units: int, slots: int, sms: int) -> int:
    """Return how many keys each piece of a decode over latents should have."""
    # Where lengths differ a few sizes are tried. The one with the least predicted time wins.
    # lens: int64 ``(B,)``, keys of each request.
    # units: programs of one request without a cut: its row tiles.
    # slots: partial results that the workspace holds. A request in one piece has none.
    # sms: multiprocessors. One program fills one.
    requests, longest, by = len(lens), int(lens.max()), tuning.latent_splits()
    tiles = max(1, -(-longest // by.tile))
    # All below counts in tiles: a piece has whole ones.
    size = -(-tiles // max(1, min(slots // requests, mla_num_splits(requests * units, longest, sms))))
    if int(lens.sum()) < by.even * longest * requests:
        own = np.maximum(np.ceil(lens / by.tile), 1.0)
        share = float(own.sum()) * units / sms
        sizes = np.array([size, tiles, *[min(tiles, math.ceil(share / parts)) for parts in by.parts]])
        splits = np.ceil(own / sizes[:, None])
        tiles_each = np.ceil(own / splits)
        # Two bounds, as in ``uneven_tokens``: all work shared out evenly, and the last pieces.
        work = (splits * (tiles_each + by.program)).sum(1) * units / sms
        ordered, placed = in_order(tiles_each, splits)
        cut = np.where(splits > 1, splits, 0).sum(1)
        time = np.maximum(work, last_of_waves(placed, ordered + by.program, sms / units))
        time += by.end * ordered[:, 0] + by.merge * (cut > 0)
        # Neither the list nor the workspace has room for more.
        time[(placed[:, -1] > requests + latent_pieces(units, sms)) | (cut > slots)] = np.inf
        size = int(sizes[int(time.argmin())])
    return size * by.tile


def latent_pieces(units: int, sms: int) -> int:
    """Return by how much the pieces that ``latent_keys`` makes of a batch may outnumber its requests."""
    return -(-tuning.latent_splits().most * sms // units)


def fixed_split(max_keys: int, least: int = LEAST_FIXED_SPLIT, tile: int = 1) -> int:
    """Return the keys of a batch-invariant split. They depend on no batch."""
    # tile: the number of keys of a split is a multiple of this.
    # The longest request has ``MOST_FIXED_SPLITS`` at most, all in whole tiles.
    return max(least, -(-max_keys // (MOST_FIXED_SPLITS * tile)) * tile)


@dataclass(slots=True)
class Chunk:
    """Requests of one launch."""

    # first, last: requests ``first .. last - 1``.
    first: int
    last: int
    tokens: int  # query tokens of these requests
    # workspace row of each request's token 0, negative where the window begins after it; None: not gathered
    starts: list[int] | None
    most_rows: int  # rows of the request that takes the most


def copied_rows(query_lens: Sequence[int], seq_lens: Sequence[int], window: int) -> int:
    """Return how many rows the request takes that takes the most; arguments as ``gathered_chunks`` has them."""
    return max(_rows(*lens, window)[1] for lens in zip(query_lens, seq_lens, strict=True))


def _rows(query_len: int, seq_len: int, window: int) -> tuple[int, int]:
    """Return the first token that a request's copy has, and its rows."""
    # From the first key that the first new token sees, outwards to whole steps of the copy.
    begin = max(0, seq_len - query_len - window + 1) // GATHER_ALIGN * GATHER_ALIGN if window else 0
    return begin, -(-seq_len // GATHER_ALIGN) * GATHER_ALIGN - begin


def gathered_chunks(query_lens: Sequence[int], seq_lens: Sequence[int], window: int, room: int) -> list[Chunk]:
    """Cut requests into launches whose keys fit into ``room`` rows; one that does not fit is not gathered."""
    # window: keys that a row sees to its left, itself included; 0: all.
    chunks: list[Chunk] = []
    used = room  # so that the first request opens a chunk
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        begin, rows = _rows(query_len, seq_len, window)
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
        chunk.starts.append(used - begin)  # token 0 would lie there, though a window leaves it out
        used += rows
    return chunks


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """What the costs of ways ask of a step's prefills, of B requests."""

    query_lens: Lens  # int64 ``(B,)``
    seen: NDArray[np.float64]  # float64 ``(B,)``, keys that the last token of a request sees
    # mean, least: keys that its tokens see in the mean, and that its first token sees
    mean: NDArray[np.float64]
    least: NDArray[np.float64]
    keys: float  # of all requests
    heads: tuple[int, int]  # of the query, and of K and V
    # longest, tokens: the most of ``seen``, and all of ``query_lens``
    longest: float
    tokens: int
    # tiles, pairs: tiles of ``TILE_ROWS`` rows of one KV head, and pairs of such a tile and a key
    tiles: float
    pairs: float


@dataclass(frozen=True, slots=True)
class Shares:
    """Into how many shares the warp-specialised prefill cuts each request's keys, and the work of its programs."""

    counts: Lens  # int64 ``(B,)``
    # items, pairs: items of 128 rows, and pairs of an item and a key, on each multiprocessor
    items: float
    pairs: float
    last: float  # keys that the multiprocessor which ends last reads one after the other
    partials: int  # rows of partial results

    def cost(self, by: Cost) -> float:
        """Return the predicted time of all programs and of the merge, in ns."""
        merging = by.merge + by.row * self.partials if self.partials else 0.0
        return float(by.shared(self.pairs, self.items, self.last)) + merging


def prefill_work(
    query_lens: ArrayLike, seq_lens: ArrayLike, *, heads: tuple[int, int], causal: bool, window: int
) -> PrefillWork:  # fmt: skip
    """Return what costs ask of requests."""
    # query_lens, seq_lens: ``(B,)``, new tokens and keys of each request.
    # heads: of the query, and of K and V.
    # window: keys that a row sees to its left, itself included; 0: all.
    lens, keys = np.asarray(query_lens, dtype=np.int64), np.asarray(seq_lens, dtype=np.float64)
    seen = np.minimum(keys, window) if window else keys
    mean = least = seen
    if causal:
        least = np.maximum(seen - lens, 0)
        mean = (seen + least) / 2
    tiles, read = tiles_of(lens, heads, TILE_ROWS), float(np.minimum(keys, seen + lens).sum())
    return PrefillWork(
        lens, seen, mean, least, read, heads, float(seen.max()), int(lens.sum()), float(tiles.sum()),
        float((tiles * mean).sum()),
    )  # fmt: skip


def tiles_of(query_lens: Lens, heads: tuple[int, int], rows: int) -> NDArray[np.float64]:
    """Return how many tiles of so many rows the tokens of one KV head make, ``(B,)``."""
    found: NDArray[np.float64] = np.ceil(query_lens * (heads[0] // heads[1] / rows))
    return found


def prefill_shares(cost: Cost, work: PrefillWork, gpu: Gpu, room: int) -> Shares:
    """Return how to cut the keys of those requests that would keep some multiprocessors long after the others."""
    # A program fills a multiprocessor and has 128 rows. Few rows over many keys would leave most of them idle. A few
    # sizes of shares are tried. The one with the least predicted time wins.
    # cost: of the warp-specialised way.
    # room: rows of partial results that the workspace holds.
    tiles, each = tiles_of(work.query_lens, work.heads, 2 * TILE_ROWS), work.heads[1] / gpu.sms
    pairs = float((tiles * work.mean).sum()) * each
    whole = Shares(np.ones(len(tiles), dtype=np.int64), float(tiles.sum()) * each, pairs, work.longest, 0)
    if whole.last <= pairs or not room:  # nobody reads longer than the average: cutting would gain nothing
        return whole
    sizes = np.array([pairs / parts for parts in tuning.share_parts()])
    counts = np.ceil(work.seen / np.maximum(sizes, tuning.least_share())[:, None])
    np.maximum(counts, 1, out=counts)
    own = counts * tiles
    items = own.sum(1) * each
    # Of a request's items some multiprocessor has its share, whole ones.
    last = np.maximum(np.ceil(own * each) * work.least, work.seen) / counts
    partials = np.where(counts > 1, counts * (work.query_lens * work.heads[0]), 0).sum(1)  # one share is the result
    time = cost.shared(pairs, items, last.max(1)) + np.where(partials, cost.merge + cost.row * partials, 0.0)
    time[partials > room] = np.inf
    best = int(time.argmin())
    if time[best] >= whole.cost(cost):
        return whole
    return Shares(
        counts[best].astype(np.int64), float(items[best]), pairs, float(last[best].max()), int(partials[best])
    )  # fmt: skip


def prefill_way(
    ways: Mapping[Way, Cost], work: PrefillWork, shares: Shares | None, gpu: Gpu, copies: int = 1
) -> Way:  # fmt: skip
    """Return the cheapest way to run a prefill."""
    # shares: which the warp-specialised ways take.
    # copies: launches into which what is copied goes.

    def cost(way: Way) -> float:
        launches = copies if "gathered" in way else 1
        return prefill_cost(ways[way], work, shares if "warps" in way else None, gpu, launches)

    return min(ways, key=cost)


def prefill_cost(cost: Cost, work: PrefillWork, shares: Shares | None, gpu: Gpu, launches: int = 1) -> float:
    """Return the predicted time of a way to run a prefill, in ns."""
    # shares: None: by a kernel that cuts no keys.
    # Copies and launches cost the same with either kernel. The plain one's programs end when all work is done or, where
    # it is little, when the longest row is.
    each = work.heads[1] / gpu.sms
    others = each * cost.key / gpu.bandwidth_share * work.keys + cost.fixed * launches
    if shares is not None:
        return shares.cost(cost) + others
    busy = each * cost.tile * (work.pairs + work.tiles * cost.border)
    # A program alone on its multiprocessor is faster than two that share one.
    latency = cost.alone if 2 * work.tiles * work.heads[1] <= gpu.sms else cost.two
    return max(busy, work.longest * latency) + others + cost.row * work.tokens * work.heads[0]


def image_ranges(common: CommonAttentionMetadata, first: int, last: int) -> list[list[int]] | None:
    """Return, per request of ``first .. last - 1``, both ends of the image ranges that rows of this step lie in."""
    # Each list is filled up with ``1, 0`` to a power of two, since its length is a constant of the kernel. None: no row
    # lies in an image range.
    if common.mm_prefix_ranges is None:
        return None
    # A range that ends before the step's first new token holds none of its rows; of one token it changes nothing.
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
