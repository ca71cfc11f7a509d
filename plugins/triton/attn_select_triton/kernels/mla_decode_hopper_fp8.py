"""Decode of multi-head latent attention over an FP8 cache on Hopper, warp-specialised as ``mla_decode_hopper``.

The query is rounded to e4m3 as well, so that scores are FP8 products of tiles as TMA brings them: half the arithmetic
and half the shared memory of 16 bits. ``wgmma`` cannot transpose 8-bit numbers, which the values would need: each
group that multiplies values widens its half of a tile's latents to float16, which holds e4m3 exactly, while the scores
are multiplied.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

# ruff: noqa: RUF005  Triton's language has no stars

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
from attn_select_triton.kernels.mla_decode_hopper import (
    KEYS,
    Pointers,
    Rows,
    Scales,
    attend_half_turned,
    attend_scores,
    attend_values,
    clear_behind,
    key_range,
    make_exchange,
    multiply_values,
    take_weights,
    weigh_turned,
)
from attn_select_triton.kernels.primitives import E4M3_MAX

# Three tiles of 576 bytes a key, the query and a widened tile fill 208 of the 227 KiB of shared memory.
STAGES = gl.constexpr(3)
SLOTS = gl.constexpr(2)
PART = gl.constexpr(128)  # Columns of the latent that one box of TMA and one product take: the width of the swizzle
ROPE = gl.constexpr(64)
# Of values in registers: 16 bytes a thread.
T = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


class Shared(NamedTuple):
    """The query and ``STAGES`` tiles of keys in e4m3, and both halves of a tile's latents widened to float16."""

    q: Any
    q_pe: Any
    k: Any
    k_pe: Any
    left_values: Any
    right_values: Any


class Barriers(NamedTuple):
    """The query is there; of each stage a tile was loaded, and all groups are through with it."""

    q_ready: Any
    ready: Any
    empty: Any


@gluon.jit
def rounded(numbers, scale):
    """Return numbers over their scale as e4m3, saturated."""
    scaled = numbers.to(gl.float32) / scale
    # Behind the largest number of e4m3 there is no infinity, only NaN.
    return gl.minimum(gl.maximum(scaled, -E4M3_MAX), E4M3_MAX).to(gl.float8e4nv)


@gluon.jit
def round_query(
    query, q_smem, q_pe, q_ready, position, SHAPE: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    """Bring one half of the query's columns to shared memory in e4m3."""
    # All loads are issued before one is waited for.
    # query: pointer and strides of the latents' columns, the same of the rope part's, and the scale.
    # RIGHT: the right half of the latents' columns, or the left one and the rope part.
    q_ptr, query_strides, qr_ptr, rope_strides, scale = query
    HEADS: gl.constexpr = SHAPE.heads
    ROWS: gl.constexpr = SHAPE.rows
    rope_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HALF: gl.constexpr = SHAPE.r // PART // 2
    BEGIN: gl.constexpr = HALF if RIGHT else 0
    flat = position.first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T))
    rows = (
        q_ptr + (position.query_start + flat // HEADS).to(gl.int64) * query_strides[0] + flat % HEADS * query_strides[1]
    )
    inside = (flat < position.query_len * HEADS)[:, None]
    loaded = ()  # in registers first, so that no load waits for the conversion of the one before
    for part in gl.static_range(HALF):
        columns = (BEGIN + part) * PART + gl.arange(0, PART, layout=gl.SliceLayout(0, T))
        loaded = loaded + (gl.load(rows[:, None] + columns[None, :], mask=inside, other=0.0),)  # type: ignore[assignment]
    if not RIGHT:
        flat = position.first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, rope_layout))
        rows = (
            qr_ptr
            + (position.query_start + flat // HEADS).to(gl.int64) * rope_strides[0]
            + flat % HEADS * rope_strides[1]
        )
        columns = gl.arange(0, ROPE, layout=gl.SliceLayout(0, rope_layout))
        rope = gl.load(rows[:, None] + columns[None, :], mask=(flat < position.query_len * HEADS)[:, None], other=0.0)
        q_pe.store(rounded(rope, scale))
    for part in gl.static_range(HALF):
        q_smem.index(BEGIN + part).store(rounded(loaded[part], scale))
    fence_async_shared()  # wgmma is to see plain stores
    barrier()
    mbarrier.arrive(q_ready, count=1)  # one of two: each half of the columns is rounded by itself


@gluon.jit
def load_tiles(kv_part, kv_rope, k_smem, k_pe, ready, empty, table, low, tiles, page_rows, block_size):
    """Load every tile of keys as soon as both compute groups are through with its buffer."""
    PARTS: gl.constexpr = k_smem.shape[0] // STAGES
    for tile in range(tiles):
        buffer = tile % STAGES
        start = low + tile * KEYS
        key = gl.load(table + start // block_size) * page_rows + start % block_size
        mbarrier.wait(empty.index(buffer), (tile // STAGES & 1) ^ 1)
        bar = ready.index(buffer)
        mbarrier.expect(bar, PARTS * kv_part.block_type.nbytes + kv_rope.block_type.nbytes)
        for part in gl.static_range(PARTS):
            tma_load(kv_part, [key, part * PART], bar, k_smem.index(buffer * PARTS + part))
        tma_load(kv_rope, [key, PARTS * PART], bar, k_pe.index(buffer))


@gluon.jit
def widen(k_smem, values, buffer, first, high, RIGHT: gl.constexpr, MASKED: gl.constexpr):
    """Write this group's half of a tile's latents as float16, 0 for keys at ``high`` and behind: 0 times NaN is NaN."""
    HALF: gl.constexpr = values.shape[0]
    for part in gl.static_range(HALF):
        wide = k_smem.index(buffer * 2 * HALF + (HALF if RIGHT else 0) + part).load(T).to(gl.float16)
        if MASKED:
            keys = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, T))
            wide = gl.where((keys < high)[:, None], wide, gl.zeros_like(wide))
        values.index(part).store(wide)
    fence_async_shared()  # the barrier that must follow is ``hand_back``'s


@gluon.jit
def products(tile, smem, barriers, S: gl.constexpr):
    """Return the query's products with one tile of keys, as ``mla_decode_hopper.products``."""
    PARTS: gl.constexpr = smem.q.shape[0]
    buffer = tile % STAGES
    mbarrier.wait(barriers.ready.index(buffer), tile // STAGES & 1)
    ROWS: gl.constexpr = smem.q_pe.shape[0]
    scores = gl.zeros([ROWS, KEYS], gl.float32, S)
    scores = warpgroup_mma(smem.q_pe, smem.k_pe.index(buffer).permute((1, 0)), scores, use_acc=False, is_async=True)
    for part in gl.static_range(PARTS):
        keys_part = smem.k.index(buffer * PARTS + part).permute((1, 0))
        scores = warpgroup_mma(smem.q.index(part), keys_part, scores, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    hand_back(barriers.empty, buffer)
    return scores


@gluon.jit
def add_values(tile, first, second, position, smem, barriers, exchange, RIGHT: gl.constexpr):
    """Add one half of a tile's values to the sums of its quarters, as ``mla_decode_hopper.add_values``."""
    values = smem.right_values if RIGHT else smem.left_values
    buffer = tile % STAGES
    start = position.low + tile * KEYS
    mbarrier.wait(barriers.ready.index(buffer), tile // STAGES & 1)
    # Before the weights are there: the scores are multiplied meanwhile, and the tile's buffer goes back early.
    widen(smem.k, values, buffer, start, position.high, RIGHT, False)
    hand_back(barriers.empty, buffer)
    if start + KEYS > position.high:  # known when the kernel runs; ``widen``'s mask is compiled in
        HALF: gl.constexpr = values.shape[0]
        for part in gl.static_range(HALF):
            clear_behind(values.index(part), start, position.high, T)
    ACC: gl.constexpr = first.type.layout
    weights, factor, least = take_weights(tile, exchange, ACC)
    # Parts of 128 columns lie one behind the other, as a wide tile's do (``mla_decode_hopper.add_values``).
    quarters = reinterpret(values, gl.float16, [2, KEYS, first.shape[1]], values.type.layout)
    first, second = multiply_values(first, second, weights, factor, least, quarters.index(0), quarters.index(1))
    barrier()  # every warp is through with the values before one widens the next
    return first, second


@gluon.jit
def attend_tile_turned(
    tile, accumulator, row_max, sums, limits, position, score_scale, smem, weights_smem, barriers,
    RIGHT: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Attend to one tile, all products transposed, as ``mla_decode_hopper.attend_tile_turned``."""
    values = smem.right_values if RIGHT else smem.left_values
    PARTS: gl.constexpr = smem.q.shape[0]
    buffer = tile % STAGES
    mbarrier.wait(barriers.ready.index(buffer), tile // STAGES & 1)
    scores = gl.zeros([KEYS, limits.shape[0]], gl.float32, S)
    scores = warpgroup_mma(smem.k_pe.index(buffer), smem.q_pe.permute((1, 0)), scores, use_acc=False, is_async=True)
    for part in gl.static_range(PARTS):
        keys_part = smem.k.index(buffer * PARTS + part)
        scores = warpgroup_mma(keys_part, smem.q.index(part).permute((1, 0)), scores, is_async=True)
    widen(smem.k, values, buffer, position.low + tile * KEYS, position.high, RIGHT, MASKED)  # while the products run
    scores = warpgroup_mma_wait(0, [scores])
    hand_back(barriers.empty, buffer)
    half = reinterpret(values, gl.float16, [KEYS, accumulator.shape[0]], values.type.layout)
    accumulator, row_max, sums = weigh_turned(
        scores, tile, accumulator, row_max, sums, limits, position.low, score_scale, half, weights_smem, MASKED
    )  # fmt: skip
    barrier()  # as in add_values
    return accumulator, row_max, sums


@gluon.jit
def round_and_attend_values(
    query, pointers, smem, barriers, exchange, position, strides, SHAPE: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    """One half's group: rounds its half of the query beside the first loads, then attends."""
    round_query(query, smem.q, smem.q_pe, barriers.q_ready, position, SHAPE, RIGHT)
    staging = smem.right_values if RIGHT else smem.left_values  # its own, so no other group reads there
    attend_values(
        pointers, smem, barriers, exchange, staging, position, strides, SHAPE, RIGHT, gl.constexpr(add_values)
    )


@gluon.jit
def round_and_attend_turned(
    query, pointers, smem, weights_smem, barriers, position, scales, strides, SHAPE: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    """The same with few rows, of which one group rounds both halves."""
    if not RIGHT:
        round_query(query, smem.q, smem.q_pe, barriers.q_ready, position, SHAPE, False)
        round_query(query, smem.q, smem.q_pe, barriers.q_ready, position, SHAPE, True)
    attend_half_turned(
        pointers, smem, weights_smem, barriers, position, scales, strides, SHAPE, RIGHT,
        gl.constexpr(attend_tile_turned), 32,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["slot_rows", "stride_table"], do_not_specialize_on_alignment=SLICED)
def mla_decode_hopper_fp8_kernel(
    q_ptr,
    qr_ptr,
    kv_part,
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
    q_scale,
    page_rows,
    query_strides,
    rope_strides,
    strides,
    stride_table,
    HEADS: gl.constexpr,
    R: gl.constexpr,
    ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Attend from ``ROWS`` rows of one request to one piece of its keys; all else as ``mla_decode_hopper_kernel``."""
    # q_ptr, qr_ptr: 16-bit query ``(T, H, R)`` and its rope part ``(T, H, 64)``, the last dimensions contiguous.
    # kv_part, kv_rope: descriptors over the cache's rows ``(tokens, R + 64)`` of e4m3, blocks ``(64, 128)`` and ``(64,
    # 64)``.
    # score_scale: scale * log2(e), times the query's scale and the cache's.
    SHAPE: gl.constexpr = Rows(HEADS, R, ROWS, CAUSAL)
    position, part, table = key_range(
        table_ptr, query_start_loc_ptr, seq_lens_ptr, pieces_ptr, slot_rows, stride_table, SHAPE
    )  # fmt: skip
    PARTS: gl.constexpr = R // PART
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(kv_part.dtype, [PARTS, ROWS, PART], kv_part.layout)
    q_pe = gl.allocate_shared_memory(kv_rope.dtype, [ROWS, ROPE], kv_rope.layout)
    k_smem = gl.allocate_shared_memory(kv_part.dtype, [STAGES * PARTS, KEYS, PART], kv_part.layout)
    k_pe = gl.allocate_shared_memory(kv_rope.dtype, [STAGES, KEYS, ROPE], kv_rope.layout)
    left_values = gl.allocate_shared_memory(gl.float16, [PARTS // 2, KEYS, PART], wide)
    right_values = gl.allocate_shared_memory(gl.float16, [PARTS // 2, KEYS, PART], wide)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = barriers_of(STAGES)
    empty = barriers_of(STAGES)
    mbarrier.init(q_ready, count=2)  # two calls of ``round_query``
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        # All groups read a tile: scores and both halves' values, or with few rows two groups that do both.
        mbarrier.init(empty.index(stage), count=3 if ROWS == 64 else 2)
    fence_async_shared()

    barriers = Barriers(q_ready, ready, empty)
    query = (q_ptr, query_strides, qr_ptr, rope_strides, q_scale)
    start = position.query_start.to(gl.int64)
    pointers = Pointers(
        out_ptr + start * strides[0], None if lse_ptr is None else lse_ptr + start * HEADS,
        None if part_ptr is None else part_ptr + part * R, None if part_ptr is None else part_lse_ptr + part,
    )  # fmt: skip
    scales = Scales(score_scale, value_scale)
    smem = Shared(q_smem, q_pe, k_smem, k_pe, left_values, right_values)
    loader = kv_part, kv_rope, k_smem, k_pe, ready, empty, table, position.low, position.tiles, page_rows, BLOCK_SIZE
    # Registers as in ``mla_decode_hopper_kernel``.
    if ROWS == 64:
        exchange = make_exchange(gl.float16, SLOTS, ROWS, 2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend_scores, (pointers, smem, barriers, exchange, position, scales,
                 SHAPE, gl.constexpr(products), 32, 1)),
                (round_and_attend_values, (query, pointers, smem, barriers, exchange, position, strides, SHAPE, False)),
                (round_and_attend_values, (query, pointers, smem, barriers, exchange, position, strides, SHAPE, True)),
                (load_tiles, loader),
            ],
            [4, 4, 1],
            [192, 192, 24],
        )  # fmt: skip
    else:
        left_weights = gl.allocate_shared_memory(gl.float16, [ROWS, KEYS], wide)
        right_weights = gl.allocate_shared_memory(gl.float16, [ROWS, KEYS], wide)
        gl.warp_specialize(
            [
                (round_and_attend_turned, (query, pointers, smem, left_weights, barriers, position, scales, strides,
                 SHAPE, False)),
                (round_and_attend_turned, (query, pointers, smem, right_weights, barriers, position, scales, strides,
                 SHAPE, True)),
                (load_tiles, loader),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
