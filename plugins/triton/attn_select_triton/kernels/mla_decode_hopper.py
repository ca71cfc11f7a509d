"""Decode of multi-head latent attention on Hopper, warp-specialised: warp groups compute, one warp loads.

Written in Gluon, Triton's language of explicit layouts, since plain Triton neither gives each warp group a loop of its
own nor overlaps the softmax with the products. ``mla_decode`` decides when this kernel serves and launches it.

With 64 rows, one group computes the scores and hands the weights on through shared memory to two others, each of which
holds one half of the output's columns in registers, ``(64, R / 2)`` float32. With 16 or 32 rows, where memory is the
bound, one group holds all columns, and all products are transposed: ``wgmma`` has 64 rows whatever is in them, here
keys and columns of the output, and the few query rows are its other dimension, which may be 16.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_select_triton.kernels.gluon_names import barrier, reinterpret, tma_load
from attn_select_triton.kernels.hopper_barriers import barriers_of, hand_back
from attn_select_triton.kernels.launch import SLICED
from attn_select_triton.kernels.pieces import FIELDS
from attn_select_triton.kernels.primitives import LN2

# Keys of a tile. Two tiles of 576 columns and the query fill 216 of the 227 KiB of shared memory.
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(2)
SLACK = gl.constexpr(8.0)  # As ``softmax_tile`` has it: weights up to 256 lose nothing in 16 bits
# Of values that are read and stored again: 16 bytes a thread.
T = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


class Rows(NamedTuple):
    """What rows are; all of it is compiled in."""

    heads: int
    r: int  # columns of the latent
    rows: int  # of a program
    causal: bool


class Position(NamedTuple):
    """What a program works on."""

    first: Any  # of the rows of its request, tokens x heads
    splits: Any  # in how many pieces the request's keys are
    query_start: Any
    query_len: Any
    seq_len: Any
    # low, high: the keys of its piece
    low: Any
    high: Any
    # tiles, full: of keys from ``low`` on, and how many of them are seen whole by every row. Programs behind the
    # request's last row have none.
    tiles: Any
    full: Any


class Shared(NamedTuple):
    """The query and ``STAGES`` tiles of keys in shared memory: the latent's columns in two halves, and the rope."""

    q_left: Any
    q_right: Any
    q_pe: Any
    k_left: Any
    k_right: Any
    k_pe: Any


class Barriers(NamedTuple):
    """The query is there; of each stage a half was loaded, and all groups are through with it."""

    q_ready: Any
    left_ready: Any
    right_ready: Any
    left_empty: Any
    right_empty: Any


class Exchange(NamedTuple):
    """How one group hands weights to others: slots of them and of factors of earlier sums, that are given or taken."""

    weights: Any
    factors: Any
    given: Any
    taken: Any


class Pointers(NamedTuple):
    """Where the first row of a request is written, and that of its partial result where it is in several pieces."""

    out_ptr: Any
    lse_ptr: Any  # None: no log-sum-exp is asked for
    # part_ptr, part_lse_ptr: None: all requests are in one piece
    part_ptr: Any
    part_lse_ptr: Any


class Scales(NamedTuple):
    """Of scores, with log2(e), and of values."""

    score_scale: Any
    value_scale: Any


@gluon.jit
def key_range(
    table_ptr, query_start_loc_ptr, seq_lens_ptr, pieces_ptr, slot_rows, stride_table, SHAPE: gl.constexpr
):  # fmt: skip
    """Return a program's ``Position``, the workspace row where its piece begins, and the block table of its request."""
    # The grid is ``mla_decode``'s.
    first = gl.program_id(0) * SHAPE.rows
    if pieces_ptr is not None:
        piece = pieces_ptr + gl.program_id(1) * FIELDS
        request = gl.load(piece)
        split = gl.load(piece + 1)
        splits = gl.load(piece + 2)
        slot = gl.load(piece + 3)
        query_start = gl.load(piece + 4)
        # Without rows a program that has no piece loads no tile and writes nothing, though all its warps still start.
        query_len = gl.where(request < 0, 0, gl.load(piece + 5))
        seq_len = gl.load(piece + 6)
    else:
        split = gl.program_id(1)
        splits = gl.num_programs(1)
        request = gl.program_id(2)
        slot = request * splits
        query_start = gl.load(query_start_loc_ptr + request)
        query_len = gl.load(query_start_loc_ptr + request + 1) - query_start
        seq_len = gl.load(seq_lens_ptr + request)
    high = seq_len
    full_high = seq_len
    if SHAPE.causal:
        # Rows are token-major: the last row's token sees the most keys (high), the first row's the fewest (full_high).
        last_token = gl.minimum((first + SHAPE.rows - 1) // SHAPE.heads, query_len - 1)
        high = gl.maximum(seq_len + last_token + 1 - query_len, 0)
        full_high = gl.maximum(seq_len + first // SHAPE.heads + 1 - query_len, 0)
    # Whole tiles are dealt out as evenly as they go, as in ``primitives.split_bounds``: only the last piece ends within
    # one.
    all_tiles = (high + KEYS - 1) // KEYS
    low = split * all_tiles // splits * KEYS
    high = gl.minimum(high, (split + 1) * all_tiles // splits * KEYS)
    tiles = gl.maximum(high - low + KEYS - 1, 0) // KEYS
    tiles = gl.where(first < query_len * SHAPE.heads, tiles, 0)
    full = gl.minimum(gl.maximum(gl.minimum(full_high, high) - low, 0) // KEYS, tiles)
    part = (slot + split).to(gl.int64) * slot_rows  # times R it is an offset, which may need 64 bits
    table = table_ptr + request * stride_table
    position = Position(first, splits, query_start, query_len, seq_len, low, high, tiles, full)
    return position, part, table


@gluon.jit
def shared_memory(q_half, q_rope, ARRIVALS: gl.constexpr):
    """Return a program's ``Shared`` and ``Barriers``; ``ARRIVALS`` say that a half was loaded."""
    # Keys have the query's dtype, and columns as its boxes have them.
    q_left = gl.allocate_shared_memory(q_half.dtype, q_half.block_type.shape, q_half.layout)
    q_right = gl.allocate_shared_memory(q_half.dtype, q_half.block_type.shape, q_half.layout)
    q_pe = gl.allocate_shared_memory(q_rope.dtype, q_rope.block_type.shape, q_rope.layout)
    k_left = gl.allocate_shared_memory(q_half.dtype, [STAGES, KEYS, q_half.block_type.shape[1]], q_half.layout)
    k_right = gl.allocate_shared_memory(q_half.dtype, [STAGES, KEYS, q_half.block_type.shape[1]], q_half.layout)
    k_pe = gl.allocate_shared_memory(q_rope.dtype, [STAGES, KEYS, q_rope.block_type.shape[1]], q_rope.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    left_ready = barriers_of(STAGES)
    right_ready = barriers_of(STAGES)
    left_empty = barriers_of(STAGES)
    right_empty = barriers_of(STAGES)
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(left_ready.index(stage), count=ARRIVALS)
        mbarrier.init(right_ready.index(stage), count=ARRIVALS)
        # The group of the scores and the one that sums the half's values; with few rows one group sums both halves, or
        # each of two groups does both for its half.
        mbarrier.init(left_empty.index(stage), count=2)
        mbarrier.init(right_empty.index(stage), count=2)
    fence_async_shared()
    smem = Shared(q_left, q_right, q_pe, k_left, k_right, k_pe)
    return smem, Barriers(q_ready, left_ready, right_ready, left_empty, right_empty)


@gluon.jit
def load_query(q_half, q_rope, smem, q_ready, row):
    """Load the query's rows from ``row`` on."""
    HALF: gl.constexpr = q_half.block_type.shape[1]
    mbarrier.expect(q_ready, 2 * q_half.block_type.nbytes + q_rope.block_type.nbytes)
    tma_load(q_rope, [row, 0], q_ready, smem.q_pe)
    tma_load(q_half, [row, 0], q_ready, smem.q_left)
    tma_load(q_half, [row, HALF], q_ready, smem.q_right)


@gluon.jit
def load_tiles(
    q_half, q_rope, kv_half, kv_rope, smem, barriers, table, row, low, tiles, page_rows, block_size
):  # fmt: skip
    """Load the query once and then every tile of keys, each half as soon as all groups are through with it."""
    HALF: gl.constexpr = q_half.block_type.shape[1]
    if tiles > 0:
        load_query(q_half, q_rope, smem, barriers.q_ready, row)
    for tile in range(tiles):
        buffer = tile % STAGES
        # The other parity than the readers': on a fresh barrier such a wait passes at once, so the first tile of each
        # buffer waits for nobody, and each later one for the readers of the tile before it there.
        free = (tile // STAGES & 1) ^ 1
        start = low + tile * KEYS
        # A tile lies in one page: blocks have multiples of 64 tokens (``limits.GLUON_BLOCK``).
        key = gl.load(table + start // block_size) * page_rows + start % block_size
        mbarrier.wait(barriers.left_empty.index(buffer), free)
        # A barrier for each half, since each half of the values has its own group (``add_values``). The rope part
        # serves the scores alone; it comes with the first half.
        bar = barriers.left_ready.index(buffer)
        mbarrier.expect(bar, kv_half.block_type.nbytes + kv_rope.block_type.nbytes)
        tma_load(kv_rope, [key, 2 * HALF], bar, smem.k_pe.index(buffer))
        tma_load(kv_half, [key, 0], bar, smem.k_left.index(buffer))
        mbarrier.wait(barriers.right_empty.index(buffer), free)
        bar = barriers.right_ready.index(buffer)
        mbarrier.expect(bar, kv_half.block_type.nbytes)
        tma_load(kv_half, [key, HALF], bar, smem.k_right.index(buffer))


@gluon.jit
def clear_behind(values, first, high, T: gl.constexpr):
    """Clear the values of keys at ``high`` and behind: their memory may hold NaN, and 0 times NaN is NaN."""
    rows = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, T))
    loaded = values.load(T)
    values.store(gl.where((rows < high)[:, None], loaded, gl.zeros_like(loaded)))
    # wgmma reads shared memory through the async proxy: without the fence it might miss plain stores, without the
    # barrier those of other warps.
    fence_async_shared()
    barrier()


@gluon.jit
def seen_keys(flat, position, SHAPE: gl.constexpr):
    """Return int32, how many keys of the request each of the rows ``flat`` sees."""
    limits = flat * 0 + position.seq_len
    if SHAPE.causal:
        limits = limits + flat // SHAPE.heads + 1 - position.query_len
    return limits


@gluon.jit
def softmax_tile(
    scores, tile, row_max, limits, low, score_scale, MASKED: gl.constexpr, AXIS: gl.constexpr, SLACK: gl.constexpr
):  # fmt: skip
    """Take a tile of products, whose keys lie along ``AXIS``, into the running maximum."""
    # SLACK: a maximum stays until a score exceeds it by more than this. Weights are up to ``2 ** SLACK`` then, and what
    # was summed before is seldom multiplied.
    # Returns weights, the factor for what was summed before, and the new maximum.
    scores *= score_scale
    if MASKED:
        keys = low + tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1 - AXIS, scores.type.layout))
        seen = gl.expand_dims(keys, 1 - AXIS) < gl.expand_dims(limits, AXIS)
        scores = gl.where(seen, scores, float("-inf"))
    tile_max = gl.max(scores, AXIS)
    new_max = gl.where(tile_max > row_max + SLACK, tile_max, row_max)
    base = new_max
    if MASKED:  # a row may have seen no key yet, and -inf - -inf is NaN
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
    return gl.exp2(scores - gl.expand_dims(base, AXIS)), gl.exp2(row_max - base), new_max


@gluon.jit
def natural_lse(row_max, row_sum):
    """Return the natural logarithm of ``row_sum * 2 ** row_max``; -inf where the sum is 0."""
    return gl.where(row_sum > 0, (row_max + gl.log2(row_sum)) * LN2, float("-inf"))


@gluon.jit
def write_lse(pointers, flat, lse, position, SHAPE: gl.constexpr):
    """Write the log-sum-exp of the rows ``flat``; to the workspace where the request is in several pieces."""
    inside = flat < position.query_len * SHAPE.heads
    if pointers.part_ptr is not None and position.splits > 1:
        gl.store(pointers.part_lse_ptr + flat, lse, mask=inside)
    elif pointers.lse_ptr is not None:
        gl.store(pointers.lse_ptr + flat, lse, mask=inside)


@gluon.jit
def write_at(
    ptr, total, position, strides, SHAPE: gl.constexpr, COLUMN: gl.constexpr, AXIS: gl.constexpr
):  # fmt: skip
    """Write columns from ``COLUMN`` on, along ``AXIS`` of ``total``; without strides rows lie one behind the other."""
    LAYOUT: gl.constexpr = total.type.layout
    columns = COLUMN + gl.arange(0, total.shape[AXIS], layout=gl.SliceLayout(1 - AXIS, LAYOUT))
    flat = position.first + gl.arange(0, total.shape[1 - AXIS], layout=gl.SliceLayout(AXIS, LAYOUT))
    mask = gl.expand_dims(flat < position.query_len * SHAPE.heads, AXIS)
    if strides is None:
        rows = gl.expand_dims(flat * SHAPE.r, AXIS)
    else:
        rows = gl.expand_dims(flat // SHAPE.heads * strides[0] + flat % SHAPE.heads * strides[1], AXIS)
    stored = total.to(ptr.dtype.element_ty)
    gl.store(ptr + rows + gl.expand_dims(columns, 1 - AXIS), stored, mask=mask)


@gluon.jit
def write_columns(pointers, total, position, strides, SHAPE: gl.constexpr, COLUMN: gl.constexpr, AXIS: gl.constexpr):
    """Write columns to the workspace or to the output, as ``write_at``."""
    if pointers.part_ptr is not None and position.splits > 1:
        write_at(pointers.part_ptr, total, position, None, SHAPE, COLUMN, AXIS)
    else:
        write_at(pointers.out_ptr, total, position, strides, SHAPE, COLUMN, AXIS)


@gluon.jit
def write_quarters(
    pointers, first, second, norm, staging, position, strides, SHAPE: gl.constexpr, COLUMN: gl.constexpr
):  # fmt: skip
    """Write two quarters of a program's columns from ``COLUMN`` on, times ``norm``; 16-bit ones through ``staging``."""
    # A thread has two numbers of a row in a row; from shared memory it takes eight, 16 bytes.
    # staging: shared memory that nothing else uses any more: two quarters of ``ROWS * R / 4`` numbers of 2 bytes.
    R: gl.constexpr = SHAPE.r
    first = first * norm
    second = second * norm
    if pointers.part_ptr is not None and position.splits > 1:
        write_at(pointers.part_ptr, first, position, None, SHAPE, COLUMN, 1)
        write_at(pointers.part_ptr, second, position, None, SHAPE, COLUMN + R // 4, 1)
    elif pointers.out_ptr.dtype.element_ty.primitive_bitwidth != 16:
        write_at(pointers.out_ptr, first, position, strides, SHAPE, COLUMN, 1)
        write_at(pointers.out_ptr, second, position, strides, SHAPE, COLUMN + R // 4, 1)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        quarters = reinterpret(staging, pointers.out_ptr.dtype.element_ty, [2, first.shape[0], R // 4], wide)
        quarters.index(0).store(first.to(pointers.out_ptr.dtype.element_ty))
        quarters.index(1).store(second.to(pointers.out_ptr.dtype.element_ty))
        barrier()
        for quarter in gl.static_range(2):
            total = quarters.index(quarter).load(layout)
            write_at(pointers.out_ptr, total, position, strides, SHAPE, COLUMN + quarter * R // 4, 1)


@gluon.jit
def score_tile(
    tile, row_max, sums, limits, low, score_scale, smem, barriers, exchange,
    MASKED: gl.constexpr, PRODUCTS: gl.constexpr, S: gl.constexpr, AXIS: gl.constexpr,
):  # fmt: skip
    """Compute one tile's weights and leave them to the other groups."""
    scores = PRODUCTS(tile, smem, barriers, S)
    weights, rescale, new_max = softmax_tile(scores, tile, row_max, limits, low, score_scale, MASKED, AXIS, SLACK)
    # Transposed, a row's keys lie across warps: each thread keeps sums of its own keys, and they meet once, at the end.
    sums = sums * rescale + gl.sum(weights, 1) if AXIS == 1 else sums * rescale[None, :] + weights
    SLOTS: gl.constexpr = exchange.factors.shape[0]
    slot = tile % SLOTS
    mbarrier.wait(exchange.taken.index(slot), (tile // SLOTS & 1) ^ 1)
    place = exchange.weights.index(slot) if AXIS == 1 else exchange.weights.index(slot).permute((1, 0))
    place.store(weights.to(exchange.weights.dtype))
    exchange.factors.index(slot).store(rescale)
    if AXIS == 0:
        fence_async_shared()  # wgmma reads the weights where they are; else ``take_weights`` takes them to registers
    hand_back(exchange.given, slot)
    return new_max, sums


@gluon.jit
def attend_scores(
    pointers, smem, barriers, exchange, position, scales,
    SHAPE: gl.constexpr, PRODUCTS: gl.constexpr, DEPTH: gl.constexpr, AXIS: gl.constexpr,
):  # fmt: skip
    """Compute the weights of all tiles for the groups that sum values, and write the log-sum-exp."""
    # exchange: shared memory for some tiles of weights and the factors of what was summed before; barriers, that they
    # are given and that they are taken. Behind the last tile the factors are the output's.
    # PRODUCTS: the function that multiplies one tile, ``products`` or one with its arguments.
    # DEPTH: elements that ``wgmma`` contracts at once for the scores: 32 bytes of them.
    # AXIS: of scores along which the keys lie: 1, or 0 where products are transposed.
    ROWS: gl.constexpr = SHAPE.rows
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS if AXIS == 1 else ROWS, DEPTH])
    flat = position.first + gl.arange(0, ROWS, layout=gl.SliceLayout(AXIS, S))
    limits = seen_keys(flat, position, SHAPE)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(AXIS, S))
    if AXIS == 1:
        sums = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
    else:
        sums = gl.zeros([KEYS, ROWS], gl.float32, S)  # a thread's of its own keys
    if position.tiles > 0:  # else no query was loaded, and nothing arrives
        mbarrier.wait(barriers.q_ready, 0)
    for masked in gl.static_range(2):  # only the tiles behind those that every row sees whole pay for a mask
        for tile in range(position.full if masked else 0, position.tiles if masked else position.full):
            row_max, sums = score_tile(
                tile, row_max, sums, limits, position.low, scales.score_scale, smem, barriers, exchange,
                masked, PRODUCTS, S, AXIS,
            )  # fmt: skip
    row_sum = sums
    if AXIS == 0:
        row_sum = gl.sum(sums, 0)
    # One more turn of the exchange hands on what the output is to be multiplied with: only this group knows the sums.
    SLOTS: gl.constexpr = exchange.factors.shape[0]
    slot = position.tiles % SLOTS
    mbarrier.wait(exchange.taken.index(slot), (position.tiles // SLOTS & 1) ^ 1)
    exchange.factors.index(slot).store(gl.where(row_sum > 0, scales.value_scale / row_sum, 0.0))
    hand_back(exchange.given, slot)
    write_lse(pointers, flat, natural_lse(row_max, row_sum), position, SHAPE)


@gluon.jit
def given_slot(tile, exchange):
    """Wait until a tile's weights and factors are given; return their slot."""
    SLOTS: gl.constexpr = exchange.factors.shape[0]
    slot = tile % SLOTS
    mbarrier.wait(exchange.given.index(slot), tile // SLOTS & 1)
    return slot


@gluon.jit
def take_weights(tile, exchange, ACC: gl.constexpr):
    """Return one tile's weights ``(rows, keys)``, the factors ``(rows,)`` of earlier sums, and the least."""
    EVERY: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    slot = given_slot(tile, exchange)
    weights = exchange.weights.index(slot).load(gl.DotOperandLayout(0, ACC, 2))
    factor = exchange.factors.index(slot).load(gl.SliceLayout(1, ACC))
    # 64 factors fill one warp of this layout, so every warp reads all, and none waits for another.
    least = gl.min(exchange.factors.index(slot).load(EVERY), 0)
    hand_back(exchange.taken, slot)
    return weights, factor, least


@gluon.jit
def attend_values(
    pointers, smem, barriers, exchange, staging, position, strides,
    SHAPE: gl.constexpr, RIGHT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Sum one half of the values' columns over all tiles, and write it."""
    # The half is two quarters: 256 columns at once are more than ``wgmma`` has registers for among 16 warps.
    # staging: as ``write_quarters`` has it. It may be a half of the query: the last factors are given when all scores
    # are done.
    # TILE: the function that adds one tile's values, ``add_values`` or one with its arguments.
    R: gl.constexpr = SHAPE.r
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R // 4, 16])
    first = gl.zeros([SHAPE.rows, R // 4], gl.float32, ACC)
    second = gl.zeros([SHAPE.rows, R // 4], gl.float32, ACC)
    for tile in range(position.tiles):
        first, second = TILE(tile, first, second, position, smem, barriers, exchange, RIGHT)
    slot = given_slot(position.tiles, exchange)
    norm = exchange.factors.index(slot).load(gl.SliceLayout(1, ACC))[:, None]
    write_quarters(pointers, first, second, norm, staging, position, strides, SHAPE, R // 2 if RIGHT else 0)


@gluon.jit
def multiply_values(first, second, weights, factor, least, first_values, second_values):
    """Return the sums of two quarters of the columns with one tile's values."""
    # Few tiles raise a maximum (``SLACK``): of the others all factors are 1, and the sums stay as they are.
    if least < 1.0:
        first = first * factor[:, None]
        second = second * factor[:, None]
    first = warpgroup_mma(weights, first_values, first, is_async=True)
    second = warpgroup_mma(weights, second_values, second, is_async=True)
    return warpgroup_mma_wait(0, [first, second])


@gluon.jit
def products(tile, smem, barriers, S: gl.constexpr):
    """Return the query's products with one tile of keys, and hand its halves back."""
    buffer = tile % STAGES
    phase = tile // STAGES & 1
    ROWS: gl.constexpr = smem.q_pe.shape[0]
    scores = gl.zeros([ROWS, KEYS], gl.float32, S)
    mbarrier.wait(barriers.left_ready.index(buffer), phase)
    mbarrier.wait(barriers.right_ready.index(buffer), phase)
    scores = warpgroup_mma(smem.q_pe, smem.k_pe.index(buffer).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(smem.q_left, smem.k_left.index(buffer).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(smem.q_right, smem.k_right.index(buffer).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    hand_back(barriers.left_empty, buffer)
    mbarrier.arrive(barriers.right_empty.index(buffer), count=1)  # ``hand_back``'s barrier stands for both
    return scores


@gluon.jit
def products_turned(tile, smem, barriers, S: gl.constexpr):
    """Return the same transposed, ``(KEYS, ROWS)``."""
    buffer = tile % STAGES
    phase = tile // STAGES & 1
    ROWS: gl.constexpr = smem.q_pe.shape[0]
    scores = gl.zeros([KEYS, ROWS], gl.float32, S)
    mbarrier.wait(barriers.left_ready.index(buffer), phase)
    scores = warpgroup_mma(smem.k_pe.index(buffer), smem.q_pe.permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(smem.k_left.index(buffer), smem.q_left.permute((1, 0)), scores, is_async=True)
    mbarrier.wait(barriers.right_ready.index(buffer), phase)
    scores = warpgroup_mma(smem.k_right.index(buffer), smem.q_right.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    hand_back(barriers.left_empty, buffer)
    mbarrier.arrive(barriers.right_empty.index(buffer), count=1)
    return scores


@gluon.jit
def add_values(tile, first, second, position, smem, barriers, exchange, RIGHT: gl.constexpr):
    """Add one half of a tile's values to the sums of its quarters, and hand it back."""
    ready, empty, halves = (
        (barriers.right_ready, barriers.right_empty, smem.k_right)
        if RIGHT
        else (barriers.left_ready, barriers.left_empty, smem.k_left)
    )
    buffer = tile % STAGES
    ACC: gl.constexpr = first.type.layout
    weights, factor, least = take_weights(tile, exchange, ACC)
    mbarrier.wait(ready.index(buffer), tile // STAGES & 1)
    # Swizzled memory holds 128 bytes of every key's columns, then the next 128 of every key: so the first quarter's
    # columns are the first part of a half's memory.
    quarters = reinterpret(halves, halves.dtype, [2 * STAGES, KEYS, first.shape[1]], halves.type.layout)
    first_values = quarters.index(2 * buffer)
    second_values = quarters.index(2 * buffer + 1)
    # No race with the scores, which read these columns as keys: the tile's weights were given, so they are done.
    if position.low + (tile + 1) * KEYS > position.high:
        clear_behind(first_values, position.low + tile * KEYS, position.high, T)
        clear_behind(second_values, position.low + tile * KEYS, position.high, T)
    first, second = multiply_values(first, second, weights, factor, least, first_values, second_values)
    hand_back(empty, buffer)
    return first, second


@gluon.jit
def attend_all_values(pointers, smem, barriers, exchange, position, strides, SHAPE: gl.constexpr):
    """Sum all of the values' columns over all tiles, transposed, and write them."""
    # The weights stay in shared memory, ``(ROWS, KEYS)``.
    R: gl.constexpr = SHAPE.r
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.rows, 16])
    EVERY: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    first = gl.zeros([R // 2, SHAPE.rows], gl.float32, ACC)
    second = gl.zeros([R // 2, SHAPE.rows], gl.float32, ACC)
    for tile in range(position.tiles):
        buffer = tile % STAGES
        left = smem.k_left.index(buffer)
        right = smem.k_right.index(buffer)
        slot = given_slot(tile, exchange)
        factor = exchange.factors.index(slot).load(gl.SliceLayout(0, ACC))[None, :]
        least = gl.min(exchange.factors.index(slot).load(EVERY), 0)  # as in take_weights
        mbarrier.wait(barriers.left_ready.index(buffer), tile // STAGES & 1)
        mbarrier.wait(barriers.right_ready.index(buffer), tile // STAGES & 1)
        if position.low + (tile + 1) * KEYS > position.high:  # no race, as in add_values
            clear_behind(left, position.low + tile * KEYS, position.high, T)
            clear_behind(right, position.low + tile * KEYS, position.high, T)
        if least < 1.0:
            first = first * factor
            second = second * factor
        weights = exchange.weights.index(slot).permute((1, 0))
        first = warpgroup_mma(left.permute((1, 0)), weights, first, is_async=True)
        second = warpgroup_mma(right.permute((1, 0)), weights, second, is_async=True)
        first = warpgroup_mma_wait(1, [first])  # the left half goes back while the second product still runs
        hand_back(barriers.left_empty, buffer)
        second = warpgroup_mma_wait(0, [second])
        hand_back(barriers.right_empty, buffer)
        mbarrier.arrive(exchange.taken.index(slot), count=1)  # not before: both products read the weights in place
    slot = given_slot(position.tiles, exchange)
    norm = exchange.factors.index(slot).load(gl.SliceLayout(0, ACC))[None, :]
    write_columns(pointers, first * norm, position, strides, SHAPE, 0, 0)
    write_columns(pointers, second * norm, position, strides, SHAPE, R // 2, 0)


@gluon.jit
def weigh_turned(
    scores, tile, accumulator, row_max, sums, limits, low, score_scale, values, weights_smem, MASKED: gl.constexpr
):  # fmt: skip
    """Take a tile of transposed products into what was summed, which is returned; ``values`` are its own."""
    # No slack: the accumulator is multiplied at every tile here, so a maximum that stays would spare nothing.
    weights, rescale, new_max = softmax_tile(scores, tile, row_max, limits, low, score_scale, MASKED, 0, 0.0)
    sums = sums * rescale[None, :] + weights
    accumulator = accumulator * gl.convert_layout(rescale, gl.SliceLayout(0, accumulator.type.layout))[None, :]
    weights_smem.permute((1, 0)).store(weights.to(weights_smem.dtype))
    fence_async_shared()  # wgmma takes its right operand from shared memory alone
    barrier()
    accumulator = warpgroup_mma(values.permute((1, 0)), weights_smem.permute((1, 0)), accumulator, is_async=True)
    accumulator = warpgroup_mma_wait(0, [accumulator])
    return accumulator, new_max, sums


@gluon.jit
def attend_tile_turned(
    tile, accumulator, row_max, sums, limits, position, score_scale, smem, weights_smem, barriers,
    RIGHT: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Attend to one tile, with all products transposed; the weights pass through shared memory, ``(ROWS, KEYS)``."""
    buffer = tile % STAGES
    mbarrier.wait(barriers.left_ready.index(buffer), tile // STAGES & 1)
    mbarrier.wait(barriers.right_ready.index(buffer), tile // STAGES & 1)
    left = smem.k_left.index(buffer)
    right = smem.k_right.index(buffer)
    values = right if RIGHT else left
    if MASKED:
        # The other group may multiply scores with this half meanwhile. What is cleared are keys that it masks.
        clear_behind(values, position.low + tile * KEYS, position.high, T)
    scores = gl.zeros([KEYS, limits.shape[0]], gl.float32, S)
    scores = warpgroup_mma(smem.k_pe.index(buffer), smem.q_pe.permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(left, smem.q_left.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(right, smem.q_right.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    # The other half served this group's scores alone; its own is its values too.
    hand_back(barriers.left_empty if RIGHT else barriers.right_empty, buffer)
    accumulator, row_max, sums = weigh_turned(
        scores, tile, accumulator, row_max, sums, limits, position.low, score_scale, values, weights_smem, MASKED
    )  # fmt: skip
    hand_back(barriers.right_empty if RIGHT else barriers.left_empty, buffer)
    return accumulator, row_max, sums


@gluon.jit
def attend_half_turned(
    pointers, smem, weights_smem, barriers, position, scales, strides,
    SHAPE: gl.constexpr, RIGHT: gl.constexpr, TILE: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Attend to all tiles and write one half of the output's columns; the left one writes the log-sum-exp as well."""
    # Products are transposed, and each half's group computes all scores.
    # weights_smem: of this group's own tile.
    # TILE: the function that attends to one tile, ``attend_tile_turned`` or one with its arguments.
    ROWS: gl.constexpr = SHAPE.rows
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, DEPTH])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    flat = position.first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, S))
    limits = seen_keys(flat, position, SHAPE)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, S))
    sums = gl.zeros([KEYS, ROWS], gl.float32, S)
    accumulator = gl.zeros([SHAPE.r // 2, ROWS], gl.float32, ACC)
    if position.tiles > 0:
        mbarrier.wait(barriers.q_ready, 0)
    for masked in gl.static_range(2):  # as in ``attend_scores``
        for tile in range(position.full if masked else 0, position.tiles if masked else position.full):
            accumulator, row_max, sums = TILE(
                tile, accumulator, row_max, sums, limits, position, scales.score_scale, smem, weights_smem, barriers,
                RIGHT, masked, S,
            )  # fmt: skip

    row_sum = gl.sum(sums, 0)
    norm = gl.where(row_sum > 0, scales.value_scale / row_sum, 0.0)
    total = accumulator * gl.convert_layout(norm, gl.SliceLayout(0, ACC))[None, :]
    write_columns(pointers, total, position, strides, SHAPE, SHAPE.r // 2 if RIGHT else 0, 0)
    if not RIGHT:
        write_lse(pointers, flat, natural_lse(row_max, row_sum), position, SHAPE)


@gluon.jit
def make_exchange(dtype, SLOTS: gl.constexpr, ROWS: gl.constexpr, TAKERS: gl.constexpr):
    """Return shared memory and barriers through which one group gives weights to ``TAKERS``, as ``attend_scores``."""
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    weights = gl.allocate_shared_memory(dtype, [SLOTS, ROWS, KEYS], wide)
    factors = gl.allocate_shared_memory(gl.float32, [SLOTS, ROWS], flat)
    given = barriers_of(SLOTS)
    taken = barriers_of(SLOTS)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(given.index(slot), count=1)
        mbarrier.init(taken.index(slot), count=TAKERS)  # each group that takes arrives once
    return Exchange(weights, factors, given, taken)


@gluon.jit(do_not_specialize=["slot_rows", "stride_table"], do_not_specialize_on_alignment=SLICED)
def mla_decode_hopper_kernel(
    q_half,
    q_rope,
    kv_half,
    kv_rope,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    pieces_ptr,
    slot_rows,
    score_scale,
    value_scale,
    page_rows,
    strides,
    stride_table,
    HEADS: gl.constexpr,
    R: gl.constexpr,
    ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Attend from 64 rows of one request to one piece of its keys; all else as ``mla_decode_kernel``."""
    # Memory traffic: the piece's latents once per row tile.
    # q_half, q_rope: descriptors over the query's rows, of ``R`` and ``P`` columns, boxes ``(ROWS, R / 2)`` and
    # ``(ROWS, P)``.
    # kv_half, kv_rope: descriptors over the cache's rows ``(tokens, R + P)``, likewise.
    # strides: elements of the output from a token and from a head to the next.
    SHAPE: gl.constexpr = Rows(HEADS, R, ROWS, CAUSAL)
    position, part, table = key_range(
        table_ptr, query_start_loc_ptr, seq_lens_ptr, pieces_ptr, slot_rows, stride_table, SHAPE
    )  # fmt: skip
    smem, barriers = shared_memory(q_half, q_rope, 1)
    start = position.query_start.to(gl.int64)
    pointers = Pointers(
        out_ptr + start * strides[0], None if lse_ptr is None else lse_ptr + start * HEADS,
        None if part_ptr is None else part_ptr + part * R, None if part_ptr is None else part_lse_ptr + part,
    )  # fmt: skip
    row = position.query_start * HEADS + position.first
    scales = Scales(score_scale, value_scale)
    loader = (
        q_half, q_rope, kv_half, kv_rope, smem, barriers, table, row, position.low, position.tiles, page_rows,
        BLOCK_SIZE,
    )  # fmt: skip
    # The last lists are registers of a thread, of all groups but the first, which gets the rest of what they start with
    # (``tuning.toml``, mla_hopper): four times 128, or three times 168 with few rows. The loader's warp counts as a
    # whole group. Groups that sum values get the most: with R = 512 an accumulator of (64, R / 2) float32 is 128
    # registers of each of 128 threads, and so is one of (R, 32). ``attend_scores`` ends with DEPTH and AXIS.
    if ROWS == 64:
        # One slot is enough: both groups take the weights to registers at once. Memory is full (``KEYS``).
        exchange = make_exchange(q_half.dtype, 1, ROWS, 2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend_scores, (pointers, smem, barriers, exchange, position, scales,
                 SHAPE, gl.constexpr(products), 16, 1)),
                (attend_values, (pointers, smem, barriers, exchange, smem.q_left, position, strides,
                 SHAPE, False, gl.constexpr(add_values))),
                (attend_values, (pointers, smem, barriers, exchange, smem.q_right, position, strides,
                 SHAPE, True, gl.constexpr(add_values))),
                (load_tiles, loader),
            ],
            [4, 4, 1],
            [192, 192, 24],
        )  # fmt: skip
    else:
        exchange = make_exchange(q_half.dtype, 2, ROWS, 1)  # wgmma reads one tile of weights while the next comes
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend_scores, (pointers, smem, barriers, exchange, position, scales,
                 SHAPE, gl.constexpr(products_turned), 16, 0)),
                (attend_all_values, (pointers, smem, barriers, exchange, position, strides, SHAPE)),
                (load_tiles, loader),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
