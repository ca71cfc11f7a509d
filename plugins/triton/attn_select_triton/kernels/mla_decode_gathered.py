"""Sparse multi-head latent attention on Hopper: ``mla_decode_hopper`` with keys wherever they were chosen.

TMA reads rows that lie next to each other, which chosen tokens do not. So four warps copy them, 16 bytes a thread at a
time. With 64 rows the compute groups work as in the dense kernel. With 16 or 32 two groups hold one half of the columns
each, and both compute all scores.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn_select_triton.kernels.gluon_names import async_load, tma_load
from attn_select_triton.kernels.hopper_barriers import barriers_of
from attn_select_triton.kernels.launch import SLICED
from attn_select_triton.kernels.mla_decode_hopper import (
    KEYS,
    STAGES,
    Barriers,
    Pointers,
    Scales,
    Shared,
    Strides,
    add_values,
    attend_half_turned,
    attend_scores,
    attend_tile_turned,
    attend_values,
    key_range,
    make_exchange,
    products,
)

LOADERS = gl.constexpr(4)  # Warps that copy


@gluon.jit
def gather_tiles(
    q_half, q_rope, cache_ptr, smem, barriers, slots, row, low, high, tiles, stride_token,
    R: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Load the query once and then the latents at the slots of every tile; keys at ``high`` and behind are 0."""
    # A thread copies few rows, whose addresses it holds, and several columns of each, which are constants behind them.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [LOADERS, 1], [1, 0])
    if tiles > 0:
        mbarrier.expect(barriers.q_ready, 2 * q_half.block_type.nbytes + q_rope.block_type.nbytes)
        tma_load(q_rope, [row, 0], barriers.q_ready, smem.q_pe)
        tma_load(q_half, [row, 0], barriers.q_ready, smem.q_left)
        tma_load(q_half, [row, R // 2], barriers.q_ready, smem.q_right)
    keys = low + gl.arange(0, KEYS, layout=gl.SliceLayout(1, COPY))
    columns = gl.arange(0, R // 2, layout=gl.SliceLayout(0, COPY))[None, :]
    rope_columns = R + gl.arange(0, P, layout=gl.SliceLayout(0, COPY))[None, :]
    # A tile's slots are loaded one tile ahead: its latents wait for them.
    chosen = gl.load(slots + keys, mask=keys < high, other=0)
    for tile in range(tiles):
        buffer = tile % STAGES
        free = (tile // STAGES & 1) ^ 1
        there = (keys < high)[:, None]  # of other keys zeros are written
        rows = cache_ptr + (chosen.to(gl.int64) * stride_token)[:, None]
        keys += KEYS
        chosen = gl.load(slots + keys, mask=keys < high, other=0)
        mbarrier.wait(barriers.left_empty.index(buffer), free)
        async_load(smem.k_pe.index(buffer), rows + rope_columns, mask=there)
        async_load(smem.k_left.index(buffer), rows + columns, mask=there)
        # Each thread arrives when its own copies are there. The barrier was made for all of them, so none adds itself.
        async_copy.mbarrier_arrive(barriers.left_ready.index(buffer), increment_count=False)
        mbarrier.wait(barriers.right_empty.index(buffer), free)
        async_load(smem.k_right.index(buffer), rows + (R // 2 + columns), mask=there)
        async_copy.mbarrier_arrive(barriers.right_ready.index(buffer), increment_count=False)


@gluon.jit
def wait_for_tile(tile, barriers):
    """Wait until threads have written a tile. ``wgmma`` reads it behind a fence."""
    # TMA writes through the async proxy, as wgmma reads; copies of threads do not. The functions below call the dense
    # kernel's, which wait once more: for phases that are over, so they pass.
    mbarrier.wait(barriers.left_ready.index(tile % STAGES), tile // STAGES & 1)
    mbarrier.wait(barriers.right_ready.index(tile % STAGES), tile // STAGES & 1)
    fence_async_shared()


@gluon.jit
def gathered_products(tile, smem, barriers, S: gl.constexpr):
    """As ``products``."""
    wait_for_tile(tile, barriers)
    return products(tile, smem, barriers, S)


@gluon.jit
def add_gathered_values(
    tile, first, second, low, high, smem, barriers, exchange,
    R: gl.constexpr, RIGHT: gl.constexpr, SLOTS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """As ``add_values``."""
    wait_for_tile(tile, barriers)
    return add_values(tile, first, second, low, high, smem, barriers, exchange, R, RIGHT, SLOTS, ACC)


@gluon.jit
def attend_gathered_tile(
    tile, accumulator, row_max, sums, limits, low, high, score_scale, smem, barriers,
    ROWS: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """As ``attend_tile_turned``."""
    wait_for_tile(tile, barriers)
    return attend_tile_turned(
        tile, accumulator, row_max, sums, limits, low, high, score_scale, smem, barriers,
        ROWS, RIGHT, MASKED, S, ACC, T,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["slot_rows", "stride_table"], do_not_specialize_on_alignment=SLICED)
def mla_decode_gathered_kernel(
    q_half,
    q_rope,
    cache_ptr,
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
    stride_ot,
    stride_oh,
    stride_table,
    STRIDE_TOKEN: gl.constexpr,
    HEADS: gl.constexpr,
    R: gl.constexpr,
    P: gl.constexpr,
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Attend from some heads of one token to one piece of its chosen keys; all else as ``mla_decode_hopper_kernel``."""
    # q_half, q_rope: descriptors over the query's rows, ``R`` and ``P`` columns, boxes ``(ROWS, R / 2)`` and
    # ``(ROWS, P)``; 16, 32 or 64 rows.
    # cache_ptr: the cache as rows of ``STRIDE_TOKEN`` elements.
    # table_ptr: int32 slots, the ones that each request reads.
    position, part, slots = key_range(
        table_ptr, query_start_loc_ptr, seq_lens_ptr, pieces_ptr, slot_rows, stride_table, HEADS, CAUSAL, ROWS
    )  # fmt: skip
    DTYPE: gl.constexpr = cache_ptr.dtype.element_ty
    q_left = gl.allocate_shared_memory(q_half.dtype, q_half.block_type.shape, q_half.layout)
    q_right = gl.allocate_shared_memory(q_half.dtype, q_half.block_type.shape, q_half.layout)
    q_pe = gl.allocate_shared_memory(q_rope.dtype, q_rope.block_type.shape, q_rope.layout)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_left = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, R // 2], wide)
    k_right = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, R // 2], wide)
    k_pe = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, P], wide)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    left_ready = barriers_of(STAGES)
    right_ready = barriers_of(STAGES)
    left_empty = barriers_of(STAGES)
    right_empty = barriers_of(STAGES)
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(left_ready.index(stage), count=32 * LOADERS)  # every thread that copies arrives
        mbarrier.init(right_ready.index(stage), count=32 * LOADERS)
        mbarrier.init(left_empty.index(stage), count=2)
        mbarrier.init(right_empty.index(stage), count=2)
    fence_async_shared()

    smem = Shared(q_left, q_right, q_pe, k_left, k_right, k_pe, None)
    barriers = Barriers(q_ready, left_ready, right_ready, left_empty, right_empty)
    start = position.query_start.to(gl.int64)
    pointers = Pointers(
        out_ptr + start * stride_ot, lse_ptr + start * HEADS if LSE else None,
        part_ptr + part * R if SPLIT else None, part_lse_ptr + part if SPLIT else None,
    )  # fmt: skip
    strides = Strides(stride_ot, stride_oh)
    row = position.query_start * HEADS + position.first
    scales = Scales(score_scale, value_scale)
    # Registers as in ``mla_decode_hopper_kernel``, but the loaders need more: each of their threads holds the addresses
    # of its rows.
    if ROWS == 64:
        exchange = make_exchange(DTYPE, 1, ROWS, 2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend_scores, (pointers, smem, barriers, exchange, position, scales,
                 HEADS, CAUSAL, LSE, SPLIT, ROWS, gl.constexpr(gathered_products), 1, 16, 1)),
                (attend_values, (pointers, smem, barriers, exchange, q_left, position, strides,
                 HEADS, R, SPLIT, ROWS, False, gl.constexpr(add_gathered_values), 1)),
                (attend_values, (pointers, smem, barriers, exchange, q_right, position, strides,
                 HEADS, R, SPLIT, ROWS, True, gl.constexpr(add_gathered_values), 1)),
                (gather_tiles, (q_half, q_rope, cache_ptr, smem, barriers, slots, row, position.low, position.high,
                 position.tiles, STRIDE_TOKEN, R, P)),
            ],
            [4, 4, LOADERS],
            [192, 192, 32],
        )  # fmt: skip
    else:
        left_p = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], wide)
        right_p = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], wide)
        left = Shared(q_left, q_right, q_pe, k_left, k_right, k_pe, left_p)
        right = Shared(q_left, q_right, q_pe, k_left, k_right, k_pe, right_p)
        gl.warp_specialize(
            [
                (attend_half_turned, (pointers, left, barriers, position, scales, strides,
                 HEADS, R, CAUSAL, LSE, SPLIT, ROWS, False, gl.constexpr(attend_gathered_tile), 16)),
                (attend_half_turned, (pointers, right, barriers, position, scales, strides,
                 HEADS, R, CAUSAL, LSE, SPLIT, ROWS, True, gl.constexpr(attend_gathered_tile), 16)),
                (gather_tiles, (q_half, q_rope, cache_ptr, smem, barriers, slots, row, position.low, position.high,
                 position.tiles, STRIDE_TOKEN, R, P)),
            ],
            [4, LOADERS],
            [200, 96],
        )  # fmt: skip
