"""The named parts that the attention kernels are composed of.

Scores live in the base-2 domain: a score is ``q . k`` times ``scale * log2(e)``, so that ``exp2`` needs no product of
its own. Only the LSE that leaves a kernel is a natural logarithm.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_request(start_loc_ptr, tile, num_requests, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the request that row tile ``tile`` belongs to.

    A request of n tokens has ``n * GROUP`` rows (token-major, the heads of a KV head's group within a token) and owns
    the tiles from ``start * GROUP // BLOCK_M + request`` on, ``start`` counted from the first request's: enough for its
    rows, whatever the others have, so the grid needs no more than host bounds. Requests without tokens own one empty
    tile.
    """
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
    """Return bool ``(rows, keys)``: whether the row at position i sees the key at position j.

    ``j < seq_len``; causal: ``j <= i``; window: ``|i - j| < window``.
    """
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
    """Return ``cap * tanh(scores / cap)`` where both scores and cap carry the factor log2(e).

    ``tanh(x) = 1 - 2 / (1 + exp(2 x))`` saturates to -1 and 1 without NaN at either end, but near 0 it is a difference
    of large numbers: with ``EXACT`` the series, to ``x ** 9``, stands in its place there.
    """
    capped = cap_log2 - 2 * cap_log2 / (1 + tl.exp2(scores * (2 * LOG2E / cap_log2)))
    if EXACT:
        square = (scores / cap_log2) * (scores / cap_log2)
        series = 2 / 15 + square * (-17 / 315 + square * (62 / 2835))
        series = scores * (1 + square * (-1 / 3 + square * series))
        capped = tl.where(square < 0.0625, series, capped)
    return capped


@triton.jit
def online_softmax(scores, row_max, row_sum, MASKED: tl.constexpr, factor=1.0):
    """Take one tile of base-2 scores ``(rows, keys)`` into the running maximum and sum (arXiv 1805.02867).

    Args:
        scores: float32, -inf where a row does not see a key.
        MASKED: whether a row may have seen no key at all; its maximum is then taken as 0, since -inf - -inf is NaN.
        factor: positive, what the scores are still to be multiplied by: it costs nothing here, in one FMA with the
            subtraction of the maximum.

    Returns:
        Weights ``exp2(score - maximum)``, the factor for what was summed before, the new maximum and sum.
    """
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
    """Return the keys ``[low, high)`` of one split of ``[first, last)``, in whole tiles of ``BLOCK_N`` keys.

    The tiles are dealt out as evenly as they go; a split without tiles has ``low >= high``.
    """
    origin = first // BLOCK_N
    tiles = tl.cdiv(last, BLOCK_N) - origin
    low = (origin + split * tiles // num_splits) * BLOCK_N
    high = (origin + (split + 1) * tiles // num_splits) * BLOCK_N
    return tl.maximum(low, first), tl.minimum(high, last)


@triton.jit
def fp8_pairs(pairs, E5M2: tl.constexpr):
    """Split int16 elements, each two FP8 numbers, into float16 tiles of the even and of the odd ones.

    As 16-bit elements, tiles of V go through ``ldmatrix`` transposed, which FP8 cannot; the bits are moved two
    elements at a time. E5M2 is the upper half of a float16. The exponent of E4M3 is biased by 7 and not by 15,
    so its numbers come out times ``2 ** -8``; its NaN comes out as 1.875.
    """
    if E5M2:
        even = tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 t, $1, 0x00FF00FF; shl.b32 $0, t, 8; }", "=r,r", [pairs],
            dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        odd = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0xFF00FF00;", "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
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
    """Return a ``(keys, PADDED)`` tile of K or V of one KV head, 0 where masked, by a pointer per row.

    Args:
        ptr: at the head's first element; without a block table at the request's first token.
        inside: which keys may be read; others may hold NaN, and 0 times NaN is NaN.
        PACK: elements that lie together where the head dimension is split (classic K: ``d // PACK`` has the stride).
    """
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


MOST_UNROLLED = tl.constexpr(8)
"""Image ranges beyond which they are a loop: unrolled, 32 take 10 s to compile."""


@triton.jit
def in_range(rows, keys, ranges_ptr, index):
    """Return bool ``(rows, keys)``: whether both stand in one image range."""
    first = tl.load(ranges_ptr + 2 * index)
    last = tl.load(ranges_ptr + 2 * index + 1)
    return ((rows >= first) & (rows <= last))[:, None] & ((keys >= first) & (keys <= last))[None, :]


@triton.jit
def final_scores(
    products, rows, keys, inside, seq_len, score_scale, cap_log2, window, slopes, ranges_ptr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, RANGES: tl.constexpr,
    MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return scores ``(rows, keys)`` of products ``q . k``: scale, soft cap, ALiBi, then the mask.

    Without soft cap and ALiBi the scale is left to ``online_softmax``.
    """
    scores = products
    if SOFT_CAP or ALIBI:
        scores *= score_scale
    if SOFT_CAP:
        scores = soft_cap(scores, cap_log2, EXACT)
    if ALIBI:
        scores -= slopes[:, None] * tl.abs(rows[:, None] - keys[None, :]).to(tl.float32)
    if MASKED:
        seen = visible(rows, keys, seq_len, window, CAUSAL, WINDOW)
        if RANGES > MOST_UNROLLED:
            seen = tl.broadcast_to(seen, scores.shape)
            for index in range(RANGES):
                seen = seen | in_range(rows, keys, ranges_ptr, index)
        else:
            for index in tl.static_range(RANGES):
                seen = seen | in_range(rows, keys, ranges_ptr, index)
        scores = tl.where(seen & inside[None, :], scores, float("-inf"))
    return scores


@triton.jit
def described_tile(
    descriptor, table_ptr, start, inside, first_row, page_rows, column,
    PAGED: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return a ``(BLOCK_N, size)`` tile of K or V through a tensor descriptor, 0 where masked.

    Memory is seen as rows of one token each. With a block table the tile lies in one page: ``BLOCK_SIZE`` is a
    multiple of the tile.
    """
    row = first_row + start
    if PAGED:
        row = first_row + tl.load(table_ptr + start // BLOCK_SIZE) * page_rows + start % BLOCK_SIZE
    tile = descriptor.load([row, column])
    if MASKED:
        tile = tl.where(inside[:, None], tile, 0.0)
    return tile


@triton.jit
def attend(
    q,
    q_rest,
    accumulator,
    odd,
    row_max,
    row_sum,
    low,
    high,
    first_visible,
    rows,
    seq_len,
    k_ptr,
    v_ptr,
    table_ptr,
    stride_kb,
    stride_kt,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vd,
    k_row,
    k_column,
    v_row,
    v_column,
    rest_ptr,
    score_scale,
    cap_log2,
    window,
    slopes,
    ranges_ptr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    RANGES: tl.constexpr,
    PAGED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    CLEAN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    REST: tl.constexpr,
    PACK: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend from a tile of query rows to the keys ``[low, high)``, in tiles of ``BLOCK_N``; the inner loop of all.

    Memory traffic: each K and V tile once. ``low`` is a multiple of ``BLOCK_N``; without ``MASKED`` so is ``high``,
    and every row sees every key.

    Args:
        q: ``(rows, BLOCK_D)`` in the dtype of the products; K and V are cast to it.
        q_rest: ``(rows, REST)``: the columns behind ``BLOCK_D`` of a head size that is a sum of two powers of two.
        odd: with ``PAIRS`` the accumulator of V's odd columns, the other has the even ones.
        k_ptr, v_ptr, rest_ptr: pointers at the head, or with ``DESCRIBED`` descriptors of all of K and V, whose rows
            and columns ``k_row`` to ``v_column`` lead to the head, and whose page is ``stride_kb`` rows.
        first_visible: keys before it are seen by no row, and not read.
        rows: int32, position of each row.
        score_scale: scale * log2(e), with an FP8 cache times K's scale.
        slopes: float32 per row, times log2(e).
        ranges_ptr: int32 ``(RANGES, 2)`` of this request, inclusive positions; first > last where unused.

    Returns:
        accumulator, row_max, row_sum.
    """
    for start in tl.range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = (keys >= first_visible) & (keys < high)
        if DESCRIBED:
            k = described_tile(k_ptr, table_ptr, start, inside, k_row, stride_kb, k_column, PAGED, BLOCK_SIZE, False)
        else:
            k = load_tile(
                k_ptr, table_ptr, keys, inside, stride_kb, stride_kt, stride_kd,
                PAGED, BLOCK_SIZE, D, BLOCK_D, PACK, MASKED,
            )  # fmt: skip
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if REST > 0:
            rest = described_tile(
                rest_ptr, table_ptr, start, inside, k_row, stride_kb, k_column + BLOCK_D, PAGED, BLOCK_SIZE, False
            )
            scores = tl.dot(q_rest, tl.trans(rest), scores)
        scores = final_scores(
            scores, rows, keys, inside, seq_len, score_scale, cap_log2, window, slopes, ranges_ptr,
            CAUSAL, WINDOW, SOFT_CAP, ALIBI, RANGES, MASKED, q.dtype == tl.float32,
        )  # fmt: skip
        factor = 1.0 if SOFT_CAP or ALIBI else score_scale
        weights, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum, MASKED, factor)
        accumulator *= rescale[:, None]
        if DESCRIBED:
            v = described_tile(
                v_ptr, table_ptr, start, inside, v_row, stride_vb, v_column, PAGED, BLOCK_SIZE, MASKED and not CLEAN
            )
        else:
            v = load_tile(
                v_ptr, table_ptr, keys, inside, stride_vb, stride_vt, stride_vd,
                PAGED, BLOCK_SIZE, DV, BLOCK_DV, 0, MASKED,
            )  # fmt: skip
        if PAIRS > 0:
            odd *= rescale[:, None]
            v_even, v_odd = fp8_pairs(v, PAIRS == 2)
            weights = weights.to(q.dtype)
            accumulator = tl.dot(weights, v_even, accumulator)
            odd = tl.dot(weights, v_odd, odd)
        else:
            accumulator = tl.dot(weights.to(q.dtype), v.to(q.dtype), accumulator, input_precision=PRECISION)
    return accumulator, odd, row_max, row_sum


@triton.jit
def key_bounds(
    first_row, last_row, seq_len, window, ranges_ptr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RANGES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return which keys the rows at positions ``first_row`` to ``last_row`` see: ``low, full_low, full_high, high``.

    Keys outside ``[low, high)`` are seen by none; those in ``[full_low, full_high)``, whole tiles, by every one.
    """
    low = 0
    full_low = 0
    high = seq_len
    full_high = seq_len
    if WINDOW:
        low = tl.maximum(first_row - window + 1, 0)
        full_low = tl.maximum(last_row - window + 1, 0)
        if not CAUSAL:
            high = tl.minimum(seq_len, tl.maximum(last_row + window, 0))
            full_high = tl.minimum(seq_len, tl.maximum(first_row + window, 0))
    if CAUSAL:
        high = tl.minimum(seq_len, tl.maximum(last_row + 1, 0))
        full_high = tl.minimum(seq_len, tl.maximum(first_row + 1, 0))
    if RANGES > 0:
        index = tl.arange(0, triton.next_power_of_2(RANGES))
        first = tl.load(ranges_ptr + 2 * index, mask=index < RANGES, other=1)
        last = tl.load(ranges_ptr + 2 * index + 1, mask=index < RANGES, other=0)
        meets = (first <= last_row) & (last >= first_row) & (index < RANGES)
        low = tl.minimum(low, tl.min(tl.where(meets, first, seq_len), 0))
        high = tl.minimum(tl.maximum(high, tl.max(tl.where(meets, last + 1, 0), 0)), seq_len)
    full_low = tl.cdiv(full_low, BLOCK_N) * BLOCK_N
    full_high = tl.maximum(full_high // BLOCK_N * BLOCK_N, full_low)
    return low, full_low, full_high, high
