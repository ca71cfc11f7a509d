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

from attn_select_triton.kernels.gluon_names import async_load
from attn_select_triton.kernels.launch import SLICED
from attn_select_triton.kernels.mla_decode_hopper import (
    KEYS,
    STAGES,
    Pointers,
    Rows,
    Scales,
    add_values,
    attend_half_turned,
    attend_scores,
    attend_tile_turned,
    attend_values,
    key_range,
    load_query,
    make_exchange,
    products,
    shared_memory,
)

LOADERS = gl.constexpr(4)  # Warps that copy


@gluon.jit
def gather_tiles(q_half, q_rope, cache_ptr, smem, barriers, slots, row, low, high, tiles, stride_token):
    """Load the query once and then the latents at the slots of every tile; keys at ``high`` and behind are 0."""
    # A thread copies few rows, whose addresses it holds, and several columns of each, which are constants behind them.
    HALF: gl.constexpr = smem.k_left.shape[2]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [LOADERS, 1], [1, 0])
    if tiles > 0:
        load_query(q_half, q_rope, smem, barriers.q_ready, row)
    keys = low + gl.arange(0, KEYS, layout=gl.SliceLayout(1, COPY))
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, COPY))[None, :]
    rope_columns = 2 * HALF + gl.arange(0, smem.k_pe.shape[2], layout=gl.SliceLayout(0, COPY))[None, :]
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
        async_load(smem.k_right.index(buffer), rows + (HALF + columns), mask=there)
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
def add_gathered_values(tile, first, second, position, smem, barriers, exchange, RIGHT: gl.constexpr):
    """As ``add_values``."""
    wait_for_tile(tile, barriers)
    return add_values(tile, first, second, position, smem, barriers, exchange, RIGHT)


@gluon.jit
def attend_gathered_tile(
    tile, accumulator, row_max, sums, limits, position, score_scale, smem, weights_smem, barriers,
    RIGHT: gl.constexpr, MASKED: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """As ``attend_tile_turned``."""
    wait_for_tile(tile, barriers)
    return attend_tile_turned(
        tile, accumulator, row_max, sums, limits, position, score_scale, smem, weights_smem, barriers, RIGHT, MASKED, S
    )


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
    strides,
    stride_table,
    HEADS: gl.constexpr,
    R: gl.constexpr,
    ROWS: gl.constexpr,
    CAUSAL: gl.constexpr,
    STRIDE_TOKEN: gl.constexpr,
):
    """Attend from some heads of one token to one piece of its chosen keys; all else as ``mla_decode_hopper_kernel``."""
    # q_half, q_rope: descriptors over the query's rows, ``R`` and ``P`` columns, boxes ``(ROWS, R / 2)`` and
    # ``(ROWS, P)``; 16, 32 or 64 rows.
    # cache_ptr: the cache as rows of ``STRIDE_TOKEN`` elements.
    # table_ptr: int32 slots, the ones that each request reads.
    SHAPE: gl.constexpr = Rows(HEADS, R, ROWS, CAUSAL)
    position, part, slots = key_range(
        table_ptr, query_start_loc_ptr, seq_lens_ptr, pieces_ptr, slot_rows, stride_table, SHAPE
    )  # fmt: skip
    smem, barriers = shared_memory(q_half, q_rope, 32 * LOADERS)  # every thread that copies arrives
    start = position.query_start.to(gl.int64)
    pointers = Pointers(
        out_ptr + start * strides[0], None if lse_ptr is None else lse_ptr + start * HEADS,
        None if part_ptr is None else part_ptr + part * R, None if part_ptr is None else part_lse_ptr + part,
    )  # fmt: skip
    row = position.query_start * HEADS + position.first
    scales = Scales(score_scale, value_scale)
    loader = (
        q_half, q_rope, cache_ptr, smem, barriers, slots, row, position.low, position.high, position.tiles, STRIDE_TOKEN
    )  # fmt: skip
    # Registers as in ``mla_decode_hopper_kernel``, but the loaders need more: each of their threads holds the addresses
    # of its rows.
    if ROWS == 64:
        exchange = make_exchange(q_half.dtype, 1, ROWS, 2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend_scores, (pointers, smem, barriers, exchange, position, scales,
                 SHAPE, gl.constexpr(gathered_products), 16, 1)),
                (attend_values, (pointers, smem, barriers, exchange, smem.q_left, position, strides,
                 SHAPE, False, gl.constexpr(add_gathered_values))),
                (attend_values, (pointers, smem, barriers, exchange, smem.q_right, position, strides,
                 SHAPE, True, gl.constexpr(add_gathered_values))),
                (gather_tiles, loader),
            ],
            [4, 4, LOADERS],
            [192, 192, 32],
        )  # fmt: skip
    else:
        wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        left_weights = gl.allocate_shared_memory(q_half.dtype, [ROWS, KEYS], wide)
        right_weights = gl.allocate_shared_memory(q_half.dtype, [ROWS, KEYS], wide)
        gl.warp_specialize(
            [
                (attend_half_turned, (pointers, smem, left_weights, barriers, position, scales, strides,
                 SHAPE, False, gl.constexpr(attend_gathered_tile), 16)),
                (attend_half_turned, (pointers, smem, right_weights, barriers, position, scales, strides,
                 SHAPE, True, gl.constexpr(attend_gathered_tile), 16)),
                (gather_tiles, loader),
            ],
            [4, LOADERS],
            [200, 96],
        )  # fmt: skip
