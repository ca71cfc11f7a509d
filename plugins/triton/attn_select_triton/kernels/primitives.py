"""The named parts that the attention kernels are composed of.

Scores live in the base-2 domain: a score is ``q . k`` times ``scale * log2(e)``, so that ``exp2`` needs no product of
its own. Only the LSE that leaves a kernel is a natural logarithm.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def saturated(numbers, scale, limit):
    """Return float32 ``numbers / scale`` within the limits of an FP8 dtype; the division is exact, NaN stays NaN."""
    scaled = tl.div_rn(numbers.to(tl.float32), scale)
    return tl.clamp(scaled, -limit, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def as_output(result, scale_ptr, element: tl.constexpr):
    """Return float32 results as the output holds them: e4m3 over their scale and saturated where there is one."""
    if scale_ptr is not None:
        result = saturated(result, tl.load(scale_ptr), E4M3_MAX)
    return result.to(element)


@triton.jit
def mask_of(inside, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return the mask of rows of which ``SIZE`` of ``PADDED`` columns are there."""
    mask = inside[:, None]
    if SIZE != PADDED:
        mask = mask & (tl.arange(0, PADDED) < SIZE)[None, :]
    return mask


@triton.jit
def find_request(start_loc_ptr, tile, num_requests, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the request that row tile ``tile`` belongs to."""
    # A request of n tokens has ``n * GROUP`` rows (token-major, the heads of a KV head's group within a token) and owns
    # the tiles from ``start * GROUP // BLOCK_M + request`` on, ``start`` counted from the first request's: enough for
    # its rows, whatever the others have, so the grid needs no more than host bounds. Requests without tokens own one
    # empty tile.
    base = tl.load(start_loc_ptr)
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first = (tl.load(start_loc_ptr + middle) - base) * GROUP // BLOCK_M + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def pages_of(table_ptr, positions, mask, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Return the block of each position as int64; ``table_ptr`` points to the request's row of the block table."""
    if MASKED:
        return tl.load(table_ptr + positions // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return tl.load(table_ptr + positions // BLOCK_SIZE).to(tl.int64)


@triton.jit
def visible(rows, keys, seq_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return bool ``(rows, keys)``: whether the row at position i sees the key at position j."""
    # ``j < seq_len``; causal: ``j <= i``; window: ``|i - j| < window``.
    distance = rows[:, None] - keys[None, :]
    seen = (keys < seq_len)[None, :]
    if CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW:
        seen = seen & (distance < window)
        if not CAUSAL:
            seen = seen & (distance > -window)
    return seen


@triton.jit
def soft_cap(scores, cap_log2, EXACT: tl.constexpr):
    """Return ``cap * tanh(scores / cap)`` where both scores and cap carry the factor log2(e)."""
    # ``tanh(x) = 1 - 2 / (1 + exp(2 x))`` saturates to -1 and 1 without NaN at either end, but near 0 it is a
    # difference of large numbers: with ``EXACT`` the series, to ``x ** 9``, stands in its place there.
    capped = cap_log2 - 2 * cap_log2 / (1 + tl.exp2(scores * (2 * LOG2E / cap_log2)))
    if EXACT:
        square = (scores / cap_log2) * (scores / cap_log2)
        series = 2 / 15 + square * (-17 / 315 + square * (62 / 2835))
        series = scores * (1 + square * (-1 / 3 + square * series))
        capped = tl.where(square < 0.0625, series, capped)  # |scores / cap| below a quarter
    return capped


@triton.jit
def online_softmax(scores, row_max, row_sum, MASKED: tl.constexpr, factor=1.0):
    """Take one tile of base-2 scores ``(rows, keys)`` into the running maximum and sum (arXiv 1805.02867)."""
    # scores: float32, -inf where a row does not see a key.
    # MASKED: whether a row may have seen no key at all; its maximum is then taken as 0, since -inf - -inf is NaN.
    # factor: positive, what the scores are still to be multiplied by: it costs nothing here, in one FMA with the
    # subtraction of the maximum.
    # Returns weights ``exp2(score - maximum)``, the factor for what was summed before, the new maximum and sum.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    base = new_max
    if MASKED:
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * factor - base[:, None])
    rescale = tl.exp2(row_max - base)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def natural_lse(row_max, row_sum):
    """Return the natural logarithm of ``row_sum * 2 ** row_max``; -inf where the sum is 0."""
    some = row_sum > 0
    return tl.where(some, (row_max + tl.log2(tl.where(some, row_sum, 1.0))) * LN2, float("-inf"))


@triton.jit
def normalised(accumulator, row_sum):
    """Return the accumulator over the sum, 0 where no key was seen."""
    return accumulator * (1.0 / tl.where(row_sum > 0, row_sum, 1.0))[:, None]


@triton.jit
def split_bounds(split, num_splits, first, last, BLOCK_N: tl.constexpr):
    """Return the keys ``[low, high)`` of one split of ``[first, last)``, in whole tiles of ``BLOCK_N`` keys."""
    # The tiles are dealt out as evenly as they go; a split without tiles has ``low >= high``.
    origin = first // BLOCK_N
    tiles = tl.cdiv(last, BLOCK_N) - origin
    # Product first, division last: shares differ by one tile at most.
    low = (origin + split * tiles // num_splits) * BLOCK_N
    high = (origin + (split + 1) * tiles // num_splits) * BLOCK_N
    return tl.maximum(low, first), tl.minimum(high, last)


@triton.jit
def fp8_pairs(pairs, E5M2: tl.constexpr):
    """Split int16 elements, each two FP8 numbers, into float16 tiles of the even and of the odd ones."""
    # As 16-bit elements, tiles of V go through ``ldmatrix`` transposed, which FP8 cannot; the bits are moved two
    # elements at a time. E5M2 is the upper half of a float16. The exponent of E4M3 is biased by 7 and not by 15, so its
    # numbers come out times ``2 ** -8``; its NaN comes out as 1.875.
    # Two int16 elements in one register are four numbers: a mask and a shift serve both halves at once.
    if E5M2:
        even = tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 t, $1, 0x00FF00FF; shl.b32 $0, t, 8; }", "=r,r", [pairs],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        odd = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xFF00FF00;", "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        # The sign goes to bit 15, exponent and mantissa to bits 13 to 7: the four bits of E4M3's exponent are then the
        # lower ones of float16's five.
        even = tl.inline_asm_elementwise(
            "{ .reg .b32 s, t; shl.b32 s, $1, 8; and.b32 s, s, 0x80008000; shl.b32 t, $1, 7; "
            "and.b32 t, t, 0x3F803F80; or.b32 $0, s, t; }", "=r,r", [pairs],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        odd = tl.inline_asm_elementwise(
            "{ .reg .b32 s, t; and.b32 s, $1, 0x80008000; shr.b32 t, $1, 1; "
            "and.b32 t, t, 0x3F803F80; or.b32 $0, s, t; }", "=r,r", [pairs],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def load_tile(
    ptr,
    table_ptr,
    keys,
    inside,
    stride_b,
    stride_t,
    stride_d,
    PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PACK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return a ``(keys, PADDED)`` tile of K or V of one KV head, 0 where masked, by a pointer per row."""
    # ptr: at the head's first element; without a block table at the request's first token.
    # inside: which keys may be read; others may hold NaN, and 0 times NaN is NaN.
    # PACK: elements that lie together where the head dimension is split (classic K: ``d // PACK`` has the stride).
    size = tl.arange(0, PADDED)
    if PAGED:
        pages = pages_of(table_ptr, keys, inside, BLOCK_SIZE, MASKED)
        rows = pages * stride_b + (keys % BLOCK_SIZE) * stride_t
    else:
        rows = keys.to(tl.int64) * stride_t
    columns = size * stride_d
    if PACK > 0:
        columns = size // PACK * stride_d + size % PACK
    pointers = ptr + rows[:, None] + columns[None, :]
    if MASKED:
        if SIZE == PADDED:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        return tl.load(pointers, mask=inside[:, None] & (size < SIZE)[None, :], other=0.0)
    if SIZE == PADDED:
        return tl.load(pointers)
    return tl.load(pointers, mask=(size < SIZE)[None, :], other=0.0)


MOST_UNROLLED = tl.constexpr(8)  # Image ranges beyond which they are a loop: unrolled, 32 take 10 s to compile


@triton.jit
def in_range(rows, keys, ranges_ptr, index):
    """Return bool ``(rows, keys)``: whether both stand in one image range."""
    first = tl.load(ranges_ptr + 2 * index)
    last = tl.load(ranges_ptr + 2 * index + 1)
    return ((rows >= first) & (rows <= last))[:, None] & ((keys >= first) & (keys <= last))[None, :]


class Query(NamedTuple):
    """A tile of query rows."""

    tile: Any  # ``(rows, BLOCK_D)`` in the dtype of the products; K and V are cast to it
    rest: Any  # ``(rows, REST)``: the columns behind ``BLOCK_D`` of a head size that is a sum of two powers of two
    positions: Any  # int32 ``(rows,)`` within the request
    slopes: Any  # float32 ``(rows,)``, times log2(e); with ``alibi``


class Running(NamedTuple):
    """What a tile of query rows has seen so far: the sum of weighted values, and the running maximum and sum."""

    accumulator: Any  # float32 ``(rows, BLOCK_DV)``; with ``pairs`` of V's even columns
    odd: Any  # with ``pairs`` the same of V's odd columns
    # row_max, row_sum: float32 ``(rows,)``, base 2
    row_max: Any
    row_sum: Any


class Operand(NamedTuple):
    """K or V of one KV head."""

    source: Any  # a pointer at the head, or a tensor descriptor of all of K or V
    # stride_block, stride_token, stride_column: elements; of a descriptor only the first, in rows
    stride_block: Any
    stride_token: Any
    stride_column: Any
    # row, column: of a descriptor, where the head begins
    row: Any
    column: Any


class Scores(NamedTuple):
    """How products ``q . k`` become scores."""

    scale: Any  # scale * log2(e), with an FP8 cache times K's scale
    cap_log2: Any  # the soft cap times log2(e)
    window: Any  # as ``launch.Terms`` has it
    seq_len: Any  # keys of the request
    ranges_ptr: Any  # int32 ``(ranges, 2)`` of this request, inclusive positions; first > last where unused
    # tree_ptr, stride_tree: bytes of this request's tokens, ``TermFlags.tree`` of them each: whether a token sees token
    # j of its step. Read with a tree.
    tree_ptr: Any
    stride_tree: Any
    context: Any  # keys before the step's own


class TermFlags(NamedTuple):
    """Which of ``launch.Terms`` a kernel is compiled for."""

    causal: bool
    window: bool
    soft_cap: bool
    alibi: bool
    ranges: int  # image ranges of a request
    tree: int  # tokens of a step at most, where they form a tree of drafts; 0: they do not


class TileShape(NamedTuple):
    """How K and V lie in memory, and what tiles of them are read; all of it is compiled in."""

    paged: bool  # K and V lie in blocks of ``block_size`` tokens, found through a block table
    described: bool  # they are read through tensor descriptors
    clean: bool  # memory behind the keys holds finite numbers
    block_size: int
    # d, block_d, rest: head size of K; columns of its tile, and of a second tile behind it
    d: int
    block_d: int
    # dv, block_dv: head size of V, and columns of its tile
    dv: int
    block_dv: int
    rest: int
    pack: int  # elements of K that lie together (classic layout), else 0
    pairs: int  # V is FP8 read two by two, 1 as e4m3 and 2 as e5m2, else 0
    precision: str  # of float32 products
    block_n: int  # keys of a tile


@triton.jit
def final_scores(products, query, keys, inside, scores, TERMS: tl.constexpr, MASKED: tl.constexpr):
    """Return scores ``(rows, keys)`` of products ``q . k``: scale, soft cap, ALiBi, then the mask."""
    # Without soft cap and ALiBi the scale is left to ``online_softmax``.
    rows = query.positions
    found = products
    if TERMS.soft_cap or TERMS.alibi:
        found *= scores.scale
    if TERMS.soft_cap:
        found = soft_cap(found, scores.cap_log2, query.tile.dtype == tl.float32)
    if TERMS.alibi:
        found -= query.slopes[:, None] * tl.abs(rows[:, None] - keys[None, :]).to(tl.float32)
    if MASKED:
        seen = visible(rows, keys, scores.seq_len, scores.window, TERMS.causal, TERMS.window)
        if TERMS.tree > 0:  # before the ranges, which widen the mask
            own = keys - scores.context
            drafts = ((own >= 0) & (own < TERMS.tree))[None, :] & seen
            places = (rows - scores.context)[:, None] * scores.stride_tree + own[None, :]
            seen = seen & (tl.load(scores.tree_ptr + places, mask=drafts, other=1) != 0)
        if TERMS.ranges > MOST_UNROLLED:
            seen = tl.broadcast_to(seen, found.shape)
            for index in range(TERMS.ranges):
                seen = seen | in_range(rows, keys, scores.ranges_ptr, index)
        else:
            for index in tl.static_range(TERMS.ranges):
                seen = seen | in_range(rows, keys, scores.ranges_ptr, index)
        found = tl.where(seen & inside[None, :], found, float("-inf"))
    return found


@triton.jit
def described_tile(
    descriptor, operand, table_ptr, start, inside, FIRST_COLUMN: tl.constexpr, TILES: tl.constexpr, MASKED: tl.constexpr
):
    """Return a ``(block_n, size)`` tile of K or V through a tensor descriptor, 0 where masked."""
    # Memory is seen as rows of one token each. With a block table the tile lies in one page: ``block_size`` is a
    # multiple of the tile.
    # descriptor: ``operand.source``, or one whose boxes begin ``FIRST_COLUMN`` columns behind it.
    row = operand.row + start
    if TILES.paged:
        page = tl.load(table_ptr + start // TILES.block_size)
        row = operand.row + page * operand.stride_block + start % TILES.block_size
    tile = descriptor.load([row, operand.column + FIRST_COLUMN])
    if MASKED:
        tile = tl.where(inside[:, None], tile, 0.0)
    return tile


@triton.jit
def attend(
    query, running, low, high, first_visible, k, v, rest_descriptor, table_ptr, scores,
    TERMS: tl.constexpr, TILES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of query rows to the keys ``[low, high)``, in tiles of ``block_n``; the inner loop of all."""
    # Memory traffic: each K and V tile once. ``low`` is a multiple of ``block_n``; without ``MASKED`` so is ``high``,
    # and every row sees every key.
    # query: a ``Query``; ``running`` a ``Running``, k and v an ``Operand`` each, scores a ``Scores``.
    # first_visible: keys before it are seen by no row, and not read.
    # rest_descriptor: of K, whose boxes are the columns of ``query.rest``.
    # table_ptr: the request's row of the block table.
    # TERMS: a ``TermFlags``; TILES a ``TileShape``.
    # Returns ``running`` with these keys.
    accumulator, odd, row_max, row_sum = running
    q = query.tile
    for start in tl.range(low, high, TILES.block_n):
        keys = start + tl.arange(0, TILES.block_n)
        inside = (keys >= first_visible) & (keys < high)
        # Through a descriptor K is not masked: what lies behind the keys reaches its own scores alone, which are
        # replaced. V would spread it, 0 times NaN being NaN.
        if TILES.described:
            key = described_tile(k.source, k, table_ptr, start, inside, 0, TILES, False)
        else:
            key = load_tile(
                k.source, table_ptr, keys, inside, k.stride_block, k.stride_token, k.stride_column,
                TILES.paged, TILES.block_size, TILES.d, TILES.block_d, TILES.pack, MASKED,
            )  # fmt: skip
        products = tl.dot(q, tl.trans(key.to(q.dtype)), input_precision=TILES.precision)
        if TILES.rest > 0:
            rest = described_tile(rest_descriptor, k, table_ptr, start, inside, TILES.block_d, TILES, False)
            products = tl.dot(query.rest, tl.trans(rest), products)
        found = final_scores(products, query, keys, inside, scores, TERMS, MASKED)
        factor = 1.0 if TERMS.soft_cap or TERMS.alibi else scores.scale  # as ``final_scores`` left it
        weights, rescale, row_max, row_sum = online_softmax(found, row_max, row_sum, MASKED, factor)
        accumulator *= rescale[:, None]
        if TILES.described:
            value = described_tile(v.source, v, table_ptr, start, inside, 0, TILES, MASKED and not TILES.clean)
        else:
            value = load_tile(
                v.source, table_ptr, keys, inside, v.stride_block, v.stride_token, v.stride_column,
                TILES.paged, TILES.block_size, TILES.dv, TILES.block_dv, 0, MASKED,
            )  # fmt: skip
        if TILES.pairs > 0:
            odd *= rescale[:, None]
            even_values, odd_values = fp8_pairs(value, TILES.pairs == 2)
            weights = weights.to(q.dtype)
            accumulator = tl.dot(weights, even_values, accumulator)
            odd = tl.dot(weights, odd_values, odd)
        else:
            accumulator = tl.dot(
                weights.to(q.dtype), value.to(q.dtype), accumulator, input_precision=TILES.precision
            )  # fmt: skip
    return Running(accumulator, odd, row_max, row_sum)


@triton.jit
def attend_visible(
    query, running, low, full_low, full_high, high, first_visible, k, v, rest_descriptor, table_ptr, scores,
    TERMS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Attend to the keys ``[low, high)``, of which every row sees ``[full_low, full_high)``, whole tiles."""
    # Arguments as ``attend`` has them; ``low`` is a multiple of ``block_n``.
    # Three loops, of which the middle one has no mask: only tiles at the edge of a window and at the end pay for one.
    if TERMS.window:
        running = attend(
            query, running, low, tl.minimum(full_low, high), first_visible, k, v, rest_descriptor, table_ptr, scores,
            TERMS, TILES, True,
        )  # fmt: skip
    running = attend(
        query, running, full_low, full_high, first_visible, k, v, rest_descriptor, table_ptr, scores, TERMS, TILES,
        False,
    )  # fmt: skip
    return attend(
        query, running, full_high, high, first_visible, k, v, rest_descriptor, table_ptr, scores, TERMS, TILES, True
    )


@triton.constexpr_function
def power_of_two(count):
    """Return the least power of two that is not below ``count``."""
    # Not ``triton.next_power_of_2``: SGLang puts a plain function there (srt/utils/common.py 0.5.23), which kernels
    # refuse.
    return 1 << (count - 1).bit_length()


@triton.jit
def key_bounds(
    first_row, last_row, seq_len, window, ranges_ptr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return which keys the rows at positions ``first_row`` to ``last_row`` see: ``low, full_low, full_high, high``."""
    # Keys outside ``[low, high)`` are seen by no row, keys in ``[full_low, full_high)``, whole tiles, by every row.
    low = 0
    full_low = 0
    high = seq_len
    full_high = seq_len
    if WINDOW:
        # The first row's window begins first and the last row's last: between those some rows see a key and others not.
        low = tl.maximum(first_row - window + 1, 0)
        full_low = tl.maximum(last_row - window + 1, 0)
        if not CAUSAL:
            high = tl.minimum(seq_len, tl.maximum(last_row + window, 0))
            full_high = tl.minimum(seq_len, tl.maximum(first_row + window, 0))
    if CAUSAL:
        high = tl.minimum(seq_len, tl.maximum(last_row + 1, 0))
        full_high = tl.minimum(seq_len, tl.maximum(first_row + 1, 0))
    if RANGES > 0:
        # An image range that a row stands in adds keys on both sides. It takes none away, so the full tiles stay.
        index = tl.arange(0, power_of_two(RANGES))
        first = tl.load(ranges_ptr + 2 * index, mask=index < RANGES, other=1)
        last = tl.load(ranges_ptr + 2 * index + 1, mask=index < RANGES, other=0)
        meets = (first <= last_row) & (last >= first_row) & (index < RANGES)
        low = tl.minimum(low, tl.min(tl.where(meets, first, seq_len), 0))
        high = tl.minimum(tl.maximum(high, tl.max(tl.where(meets, last + 1, 0), 0)), seq_len)
    # Inwards to whole tiles.
    full_low = tl.cdiv(full_low, BLOCK_N) * BLOCK_N
    full_high = tl.maximum(full_high // BLOCK_N * BLOCK_N, full_low)
    return low, full_low, full_high, high
