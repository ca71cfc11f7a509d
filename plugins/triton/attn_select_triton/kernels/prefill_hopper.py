"""Prefill on Hopper, warp-specialised: two warp groups of 64 query rows share each tile of keys, one warp loads.

Written in Gluon, Triton's language of explicit layouts. The loading warp fills a tile of keys by TMA in boxes that lie
in one page each, so pages of 16 tokens need no copy into contiguous memory; each tile serves 128 rows, half the traffic
from L2 of a program of 64. One group multiplies while the other takes exponentials.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"
# mypy: disable-error-code="assignment"

# ruff: noqa: RUF005  Triton's language has no stars

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia import hopper

from attn_select_triton.facts.triton_support import GLUON_CAPABILITY
from attn_select_triton.facts.tuning import find_tile, section_of, tile_of
from attn_select_triton.kernels.launch import PLAIN, SLICED, Terms, describable, describe
from attn_select_triton.kernels.merge import merge_rows
from attn_select_triton.kernels.primitives import E4M3_MAX as E4M3_LIMIT
from attn_select_triton.kernels.primitives import LOG2E
from attn_select_triton.kernels.relaunch import Relaunch, dtypes, specialised

LN2 = gl.constexpr(0.6931471805599453)
E4M3_MAX = gl.constexpr(E4M3_LIMIT.value)
ROWS = gl.constexpr(64)
"""Query rows of a compute group."""
LEAST_BOX = 16
"""Tokens of the smallest box that was run."""
PART = gl.constexpr(64)
"""Columns of one part of a tile: 128 bytes, the width of TMA's swizzle."""


@gluon.jit
def find_request(start_loc_ptr, tile, num_requests, GROUP: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return the request that row tile ``tile`` belongs to, as ``primitives.find_request``."""
    before = gl.load(start_loc_ptr)
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first = (gl.load(start_loc_ptr + middle) - before) * GROUP // BLOCK_M + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@gluon.jit
def load_tile(descriptor, boxes, ready, buffer, rows, column, PARTS: gl.constexpr, BOXES: gl.constexpr):
    """Load one tile of K or V: part by part, box by box."""
    bar = ready.index(buffer)
    mbarrier.expect(bar, BOXES * PARTS * descriptor.block_type.nbytes)
    for part in gl.static_range(PARTS):
        for i in gl.static_range(BOXES):
            box = boxes.index((buffer * PARTS + part) * BOXES + i)
            tma.async_copy_global_to_shared(descriptor, [rows[i], column + part * PART], bar, box)


@gluon.jit
def load_tiles(
    k_descriptor, v_descriptor, smem, barriers, table_ptr, places, pages, start, tiles, seq_len,
    PAGED: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, PARTS: gl.constexpr, V_PARTS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load every tile as soon as both compute groups are through with its buffer. Boxes behind the end read page 0."""
    k_smem, v_smem = smem
    k_ready, k_empty, v_ready, v_empty, _ = barriers
    k_row, k_column, v_row, v_column = places
    k_pages, v_pages = pages
    BOXES: gl.constexpr = KEYS // BOX
    k_boxes = k_smem._reinterpret(k_descriptor.dtype, [STAGES * PARTS * BOXES, BOX, PART], LAYOUT)
    v_boxes = v_smem._reinterpret(v_descriptor.dtype, [STAGES * V_PARTS * BOXES, BOX, PART], LAYOUT)
    for tile in range(start, tiles):
        buffer = (tile - start) % STAGES
        free = ((tile - start) // STAGES & 1) ^ 1
        k_rows = ()
        v_rows = ()
        for i in gl.static_range(BOXES):
            token = tile * KEYS + i * BOX
            if PAGED:
                page = gl.load(table_ptr + token // BLOCK_SIZE, mask=token < seq_len, other=0)
                k_rows = k_rows + (k_row + page * k_pages + token % BLOCK_SIZE,)
                v_rows = v_rows + (v_row + page * v_pages + token % BLOCK_SIZE,)
            else:
                k_rows = k_rows + (k_row + token,)
                v_rows = v_rows + (v_row + token,)
        mbarrier.wait(k_empty.index(buffer), free)
        load_tile(k_descriptor, k_boxes, k_ready, buffer, k_rows, k_column, PARTS, BOXES)
        mbarrier.wait(v_empty.index(buffer), free)
        load_tile(v_descriptor, v_boxes, v_ready, buffer, v_rows, v_column, V_PARTS, BOXES)


@gluon.jit
def hand_back(empty, buffer):
    """Tell the loader that this compute group is through with a tile of K or of V."""
    gl.thread_barrier()
    mbarrier.arrive(empty.index(buffer), count=1)


@gluon.jit
def clear_behind(v_smem, buffer, first, seq_len, PARTS: gl.constexpr, KEYS: gl.constexpr, T: gl.constexpr):
    """Clear the values of keys at ``seq_len`` and behind: their memory may hold NaN, and 0 times NaN is NaN.

    Both groups do so, each before its own product, and store the same numbers.
    """
    rows = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, T))
    for part in gl.static_range(PARTS):
        values = v_smem.index(buffer * PARTS + part)
        loaded = values.load(T)
        values.store(gl.where((rows < seq_len)[:, None], loaded, gl.zeros_like(loaded)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def tanh(numbers):
    """Return the hyperbolic tangent by the GPU's own instruction: a relative error of 2^-11 at most (PTX ISA, tanh)."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [numbers], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def attend_tile(
    tile, loaded, accumulators, row_max, row_sum, limits, seq_len, scores_like, q_smem, smem, barriers,
    MASKED: gl.constexpr, FLAGS: gl.constexpr, SHAPE: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr,
    T: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Attend from one group's rows to one tile.

    With turns at each tile, a group's product with V and its next scores are issued together, while the other group
    takes exponentials; with the first alone, the second group begins behind the first. Groups left to themselves may
    fall into step, and the tensor cores wait for both.

    Args:
        loaded: tiles that were loaded before this one.
        accumulators: float32 ``(ROWS, PART)`` for each part of V. One product for each is faster than one for all.
        limits: int32 ``(ROWS,)``, the keys that each row sees; with a window the last ``window`` of them.
        scores_like: scale * log2(e), or with a soft cap scale / cap; the soft cap times log2(e); and the window.
        FLAGS: whether there is a window, a soft cap, and turns.
        SHAPE: parts of K and of V, keys of a tile, and stages.
    """
    WINDOW: gl.constexpr = FLAGS[0]
    SOFT_CAP: gl.constexpr = FLAGS[1]
    TURNS: gl.constexpr = FLAGS[2]
    PARTS: gl.constexpr = SHAPE[0]
    V_PARTS: gl.constexpr = SHAPE[1]
    KEYS: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    k_smem, v_smem = smem
    k_ready, k_empty, v_ready, v_empty, turns = barriers
    score_scale, cap_log2, window = scores_like
    buffer = loaded % STAGES
    phase = loaded // STAGES & 1
    mbarrier.wait(k_ready.index(buffer), phase)
    scores = gl.zeros([ROWS, KEYS], gl.float32, S)
    for part in gl.static_range(PARTS):
        k = k_smem.index(buffer * PARTS + part)
        scores = warpgroup_mma(q_smem.index(part), k.permute((1, 0)), scores, use_acc=part > 0, is_async=True)
    if TURNS == "each":
        mbarrier.arrive(turns.index(0 if SECOND else 1), count=1)
    elif TURNS == "first" and not SECOND:  # noqa: SIM102  one is compiled in
        if loaded == 0:
            mbarrier.arrive(turns.index(1), count=1)
    scores = warpgroup_mma_wait(0, [scores])
    hand_back(k_empty, buffer)
    factor = score_scale
    if SOFT_CAP:
        scores = tanh(scores * score_scale)
        factor = cap_log2
    if MASKED:
        keys = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
        seen = keys[None, :] < limits[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] >= (limits - window)[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    base = new_max
    if MASKED:
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * factor - base[:, None])
    rescale = gl.exp2(row_max - base)
    row_sum = row_sum * rescale + gl.sum(weights, 1)
    p = gl.convert_layout(weights.to(k_smem.dtype), gl.DotOperandLayout(0, ACC, 2))
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, ACC))[:, None]
    scaled = ()
    for part in gl.static_range(V_PARTS):
        scaled = scaled + (accumulators[part] * factor,)
    mbarrier.wait(v_ready.index(buffer), phase)
    if TURNS == "each":
        mbarrier.wait(turns.index(1 if SECOND else 0), (loaded + (1 if SECOND else 0)) & 1)
    if MASKED:  # noqa: SIM102  one is compiled in
        if (tile + 1) * KEYS > seq_len:
            clear_behind(v_smem, buffer, tile * KEYS, seq_len, V_PARTS, KEYS, T)
    products = ()
    for part in gl.static_range(V_PARTS):
        v = v_smem.index(buffer * V_PARTS + part)
        products = products + (warpgroup_mma(p, v, scaled[part], is_async=True),)
    if V_PARTS == 1:  # noqa: SIM108  one is compiled in
        accumulators = (warpgroup_mma_wait(0, products),)
    else:
        accumulators = warpgroup_mma_wait(0, products)
    hand_back(v_empty, buffer)
    return accumulators, new_max, row_sum


@gluon.jit
def attend_rows(
    pointers, q_smem, smem, barriers, position, scales, strides, parts,
    HEADS: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr, PARTS: gl.constexpr, V_PARTS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, TURNS: gl.constexpr, SECOND: gl.constexpr,
):  # fmt: skip
    """Attend from one group's 64 rows to all tiles, and write their output, or with ``SPLIT`` their partial result."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    T: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    FLAGS: gl.constexpr = (WINDOW, SOFT_CAP, TURNS)
    SHAPE: gl.constexpr = (PARTS, V_PARTS, KEYS, STAGES)
    q_ptr, out_ptr, out_scale_ptr, lse_ptr, sinks_ptr = pointers
    tile_first, kv_head, query_start, query_len, seq_len, start, full_start, full, tiles = position
    score_scale, v_scale, cap_log2, window = scales
    stride_qt, stride_qh, stride_ot, stride_oh = strides
    part_ptr, part_lse_ptr, first_token, split, num_splits = parts
    first = tile_first + (ROWS if SECOND else 0)
    rows = query_len * GROUP

    flat = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T))
    columns = gl.arange(0, PART, layout=gl.SliceLayout(0, T))
    places = (query_start + flat // GROUP).to(gl.int64) * stride_qt + (kv_head * GROUP + flat % GROUP) * stride_qh
    for part in gl.static_range(PARTS):
        source = q_ptr + places[:, None] + (part * PART + columns)[None, :]
        q_smem.index(part).store(gl.load(source, mask=(flat < rows)[:, None], other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    flat = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    limits = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, S)) + seq_len
    if CAUSAL:
        limits = gl.minimum(limits + flat // GROUP + 1 - query_len, seq_len)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
    if SINKS:
        sinks = gl.load(sinks_ptr + kv_head * GROUP + flat % GROUP).to(gl.float32) * LOG2E
        row_max = gl.where(split == 0, sinks, row_max)
        row_sum += gl.where(split == 0, 1.0, 0.0)
    accumulators = ()
    for _ in gl.static_range(V_PARTS):
        accumulators = accumulators + (gl.zeros([ROWS, PART], gl.float32, ACC),)
    scores_like = (score_scale, cap_log2, window)
    turns = barriers[4]
    if TURNS != "" and SECOND:  # noqa: SIM102  one is compiled in
        if tiles > start:
            mbarrier.wait(turns.index(1), 0)
    middle = start
    if WINDOW:
        middle = gl.maximum(gl.minimum(full_start, tiles), start)
        for tile in range(start, middle):
            accumulators, row_max, row_sum = attend_tile(
                tile, tile - start, accumulators, row_max, row_sum, limits, seq_len, scores_like, q_smem, smem,
                barriers, True, FLAGS, SHAPE, S, ACC, T, SECOND,
            )  # fmt: skip
    for tile in range(middle, full):
        accumulators, row_max, row_sum = attend_tile(
            tile, tile - start, accumulators, row_max, row_sum, limits, seq_len, scores_like, q_smem, smem,
            barriers, False, FLAGS, SHAPE, S, ACC, T, SECOND,
        )  # fmt: skip
    for tile in range(gl.maximum(middle, full), tiles):
        accumulators, row_max, row_sum = attend_tile(
            tile, tile - start, accumulators, row_max, row_sum, limits, seq_len, scores_like, q_smem, smem,
            barriers, True, FLAGS, SHAPE, S, ACC, T, SECOND,
        )  # fmt: skip

    if TURNS == "each":
        mbarrier.arrive(turns.index(0 if SECOND else 1), count=1)
    lse = gl.where(row_sum > 0, (row_max + gl.log2(row_sum)) * LN2, float("-inf"))
    norm = gl.where(row_sum > 0, v_scale / row_sum, 0.0)
    norm = gl.convert_layout(norm, gl.SliceLayout(1, ACC))[:, None]
    lse_row = (query_start + flat // GROUP).to(gl.int64) * HEADS + kv_head * GROUP + flat % GROUP
    if SPLIT:
        lse_row = (lse_row - first_token.to(gl.int64) * HEADS) * num_splits + split
        gl.store(part_lse_ptr + lse_row, lse, mask=flat < rows)
        row = gl.convert_layout(lse_row, gl.SliceLayout(1, ACC))
        inside = gl.convert_layout((flat < rows) & (row_sum > 0), gl.SliceLayout(1, ACC))  # of others -inf says so
        target = (part_ptr + row * (V_PARTS * PART))[:, None] + gl.arange(0, PART, gl.SliceLayout(0, ACC))[None, :]
        for part in gl.static_range(V_PARTS):
            gl.store(target + part * PART, accumulators[part] * norm, mask=inside[:, None])
    else:
        if LSE:
            gl.store(lse_ptr + lse_row, lse, mask=flat < rows)
        # The query's memory is free by now: through it, a thread writes 16 bytes of a row and not 4.
        if out_scale_ptr is not None:
            norm = norm / gl.load(out_scale_ptr)
        for part in gl.static_range(V_PARTS):
            result = accumulators[part] * norm
            if out_scale_ptr is not None:
                result = gl.minimum(gl.maximum(result, -E4M3_MAX), E4M3_MAX)
            q_smem.index(part).store(result.to(q_smem.dtype))
        gl.thread_barrier()
        out_flat = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T))
        out_places = (query_start + out_flat // GROUP).to(gl.int64) * stride_ot
        out_places += (kv_head * GROUP + out_flat % GROUP) * stride_oh
        target = out_ptr + out_places[:, None] + columns[None, :]
        for part in gl.static_range(V_PARTS):
            result = q_smem.index(part).load(T)
            if out_scale_ptr is not None:
                result = result.to(gl.float32)
            gl.store(target + part * PART, result.to(out_ptr.dtype.element_ty), mask=(out_flat < rows)[:, None])


@gluon.jit(
    do_not_specialize=["num_splits", "split_tiles", "num_requests", "section", "window", "stride_table"],
    do_not_specialize_on_alignment=SLICED,
)
def prefill_hopper_kernel(
    q_ptr,
    k_descriptor,
    v_descriptor,
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    table_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    seq_lens_ptr,
    sinks_ptr,
    part_ptr,
    part_lse_ptr,
    num_splits,
    split_tiles,
    num_requests,
    section,
    score_scale,
    v_scale,
    cap_log2,
    window,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_table,
    k_pages,
    k_head_rows,
    k_head_columns,
    v_pages,
    v_head_rows,
    v_head_columns,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    LSE: gl.constexpr,
    SPLIT: gl.constexpr,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    D: gl.constexpr,
    DV: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    BOX: gl.constexpr,
    TURNS: gl.constexpr,
):
    """One program: 128 rows (token-major, the heads of a KV head's group within a token) against all keys they see, or
    with ``SPLIT`` against one of at most ``num_splits`` even shares of them, of ``split_tiles`` tiles at least.

    Tiles as ``prefill_kernel`` deals them out, each for ``section`` KV heads before the next tile, and all of them
    before the next heads: long rows start before short ones, and L2 holds what a section reads. On chip: the query
    ``(128, D)`` and ``STAGES`` tiles each of K ``(KEYS, D)`` and V ``(KEYS, DV)`` in shared memory; of each group
    scores ``(64, KEYS)`` and output ``(64, DV)`` in registers.

    Memory traffic: Q and output once, K and V once per row tile, which L2 serves. A window is causal.
    """
    PARTS: gl.constexpr = D // PART
    V_PARTS: gl.constexpr = DV // PART
    BLOCK_M: gl.constexpr = 2 * ROWS
    row_tiles = gl.num_programs(0) // (HEADS // GROUP)
    place = gl.program_id(0) % (row_tiles * section)
    tile = row_tiles - 1 - place // section
    kv_head = gl.program_id(0) // (row_tiles * section) * section + place % section
    request = find_request(query_start_loc_ptr, tile, num_requests, GROUP, BLOCK_M)
    query_start = gl.load(query_start_loc_ptr + request)
    query_len = gl.load(query_start_loc_ptr + request + 1) - query_start
    tokens_before = query_start - gl.load(query_start_loc_ptr)
    first = (tile - tokens_before * GROUP // BLOCK_M - request) * BLOCK_M
    seq_len = gl.load(seq_lens_ptr + request)
    high = seq_len
    full_high = seq_len
    if CAUSAL:
        last_token = gl.minimum((first + BLOCK_M - 1) // GROUP, query_len - 1)
        high = gl.minimum(gl.maximum(seq_len + last_token + 1 - query_len, 0), seq_len)
        full_high = gl.minimum(gl.maximum(seq_len + first // GROUP + 1 - query_len, 0), high)
    tiles = gl.where(first < query_len * GROUP, (high + KEYS - 1) // KEYS, 0)
    full = gl.minimum(full_high // KEYS, tiles)
    start = 0
    full_start = 0
    if WINDOW:
        context = seq_len - query_len
        last_token = gl.minimum((first + BLOCK_M - 1) // GROUP, query_len - 1)
        start = gl.minimum(gl.maximum(context + first // GROUP - window + 1, 0) // KEYS, tiles)
        full_start = (gl.maximum(context + last_token - window + 1, 0) + KEYS - 1) // KEYS
    split = gl.program_id(1)
    if SPLIT:
        splits = gl.maximum(gl.minimum((tiles - start + split_tiles - 1) // split_tiles, num_splits), 1)
        share = (tiles - start + splits - 1) // splits
        start = gl.minimum(start + split * share, tiles)
        tiles = gl.minimum(start + share, tiles)
        full = gl.minimum(full, tiles)
    k_row = kv_head * k_head_rows
    v_row = kv_head * v_head_rows
    if PAGED:
        table_ptr += request.to(gl.int64) * stride_table
    else:
        key_start = gl.load(key_start_loc_ptr + request)
        k_row += key_start
        v_row += key_start

    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_first = gl.allocate_shared_memory(k_descriptor.dtype, [PARTS, ROWS, PART], LAYOUT)
    q_second = gl.allocate_shared_memory(k_descriptor.dtype, [PARTS, ROWS, PART], LAYOUT)
    k_smem = gl.allocate_shared_memory(k_descriptor.dtype, [STAGES * PARTS, KEYS, PART], LAYOUT)
    v_smem = gl.allocate_shared_memory(v_descriptor.dtype, [STAGES * V_PARTS, KEYS, PART], LAYOUT)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    smem = (k_smem, v_smem)
    barriers = (k_ready, k_empty, v_ready, v_empty, turns)
    pointers = (q_ptr, out_ptr, out_scale_ptr, lse_ptr, sinks_ptr)
    position = (first, kv_head, query_start, query_len, seq_len, start, full_start, full, tiles)
    scales = (score_scale, v_scale, cap_log2, window)
    strides = (stride_qt, stride_qh, stride_ot, stride_oh)
    parts = (part_ptr, part_lse_ptr, query_start - tokens_before, split, num_splits)
    places = (k_row, kv_head * k_head_columns, v_row, kv_head * v_head_columns)
    gl.warp_specialize(
        [
            (attend_rows, (pointers, q_first, smem, barriers, position, scales, strides, parts, HEADS, GROUP, CAUSAL,
             WINDOW, SOFT_CAP, SINKS, LSE, PARTS, V_PARTS, KEYS, STAGES, SPLIT, TURNS, False)),
            (attend_rows, (pointers, q_second, smem, barriers, position, scales, strides, parts, HEADS, GROUP, CAUSAL,
             WINDOW, SOFT_CAP, SINKS, LSE, PARTS, V_PARTS, KEYS, STAGES, SPLIT, TURNS, True)),
            (load_tiles, (k_descriptor, v_descriptor, smem, barriers, table_ptr, places, (k_pages, v_pages), start,
             tiles, seq_len, PAGED, BLOCK_SIZE, BOX, PARTS, V_PARTS, KEYS, STAGES, LAYOUT)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def box_rows(block_size: int, paged: bool, keys: int) -> int:
    """Return the tokens of a box: the most, up to a tile of ``keys``, that lie in one page."""
    return min(block_size & -block_size, keys) if paged else keys


_readable: dict[Any, bool] = {}


def readable(key: Tensor, value: Tensor) -> bool:
    """Whether TMA can read K and V, ``(num_blocks, block_size, heads, size)`` or ``(S, heads, size)``, in boxes."""
    kind = (*key.shape[1:], *value.shape[1:], key.stride(), value.stride(), *specialised(key, value), key.numel() > 0)
    if kind not in _readable:
        tile = find_tile("prefill_hopper", GLUON_CAPABILITY, head_size=key.shape[-1], value_size=value.shape[-1])
        box = 0 if tile is None else box_rows(key.shape[1], key.ndim == 4, tile.block_n)
        _readable[kind] = box >= LEAST_BOX and all(
            describable(tensor, key.dtype, box, GLUON_CAPABILITY) for tensor in (key, value)
        )
    return _readable[kind]


class _Boxes:
    """Descriptors of boxes ``(box, PART)`` over K or V of one kind, whose addresses and first dimensions differ.

    Attributes:
        rows: K or V as a matrix of rows.
    """

    __slots__ = ("_boxes", "rows")

    def __init__(self, tensor: Tensor, box: int) -> None:
        self.rows = describe(tensor, box, PART.value)
        matrix = self.rows.descriptor
        kind = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for([box, PART.value], kind)
        self._boxes = hopper.TensorDescriptor(
            tensor, list(matrix.shape), list(matrix.strides), [box, PART.value], layout
        )  # fmt: skip

    @property
    def places(self) -> tuple[int, int, int]:
        """Rows from a page to the next, and rows and columns from a head to the next."""
        return self.rows.page_rows, self.rows.head_rows, self.rows.head_columns

    def over(self, tensor: Tensor) -> Any:
        """Return the descriptor over a tensor."""
        return self.rows.over(tensor, self._boxes)


class _Kind:
    """What all calls share that differ in nothing by which Triton compiles or specialises the kernel.

    Attributes:
        keys, values: of K and V.
        row_bytes: of K and V of one token and KV head.
        strides, constants: of the kernel's arguments.
        launch: the kernel.
    """

    __slots__ = ("constants", "keys", "launch", "row_bytes", "strides", "tile", "values")

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, flags: tuple[Any, ...], paged: bool
    ) -> None:
        heads, head_size = query.shape[1:]
        value_size = value.shape[-1]
        self.tile = tile_of("prefill_hopper", GLUON_CAPABILITY, head_size=head_size, value_size=value_size)
        block_size = key.shape[1] if paged else 1
        box = box_rows(block_size, paged, self.tile.block_n)
        self.keys, self.values = _Boxes(key, box), _Boxes(value, box)
        self.row_bytes = (head_size + value_size) * key.itemsize
        self.strides = (*query.stride()[:2], *output.stride()[:2])
        self.constants = (
            *self.keys.places, *self.values.places, heads, heads // value.shape[-2], *flags, paged, block_size,
            head_size, value_size, self.tile.block_n, self.tile.num_stages, box, self.tile.turns,
        )  # fmt: skip
        self.launch = Relaunch(prefill_hopper_kernel, num_warps=4, maxnreg=168)


_kinds: dict[Any, _Kind] = {}


def prefill_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    block_table: Tensor | None = None,
    key_start_loc: Tensor | None = None,
    terms: Terms = PLAIN,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    output_scale: Tensor | None = None,
    output_lse: Tensor | None = None,
    num_tokens: int | None = None,
    num_splits: int = 1,
    split_keys: int = 0,
    workspace: Tensor | None = None,
    first_token: int = 0,
) -> None:
    """Attend from many query tokens per request; arguments as ``prefill_attention`` has them.

    Takes bfloat16 and float16, K and V that are ``readable``; rows between the requests' keys may hold anything. No
    ALiBi and no image ranges, and a window only where it is causal.

    Args:
        num_splits: programs that may share the keys of 128 rows; their results are merged.
        split_keys: keys that one of them should have at least.
        workspace: float32, ``decode.decode_workspace`` elements at least; with splits.
        first_token: row of the first request's first token, as ``query_start_loc`` has it; with splits.
    """
    tokens, heads, _ = query.shape
    kv_heads, value_size = value.shape[-2:]
    paged, sinks, cap = block_table is not None, terms.sinks, terms.soft_cap
    tokens = tokens if num_tokens is None else num_tokens
    parts = part_lse = None
    if num_splits > 1:
        assert workspace is not None
        parts, part_lse = workspace, workspace[tokens * heads * num_splits * value_size :]
    flags = (terms.causal, terms.window > 0, cap > 0, sinks is not None, output_lse is not None, parts is not None)
    same = (
        flags, paged, query.shape[1:], key.shape[1:], kv_heads, value_size, query.stride(), key.stride(),
        value.stride(), output.stride(), *specialised(query, key, value, output), *dtypes(sinks, output_scale),
        None if workspace is None else workspace.data_ptr() % 16,
    )  # fmt: skip
    kind = _kinds.get(same)
    if kind is None:
        kind = _kinds[same] = _Kind(query, key, value, output, flags, paged)
    requests, tile = len(seq_lens), kind.tile
    row_tiles = tokens * (heads // kv_heads) // tile.block_m + requests
    kind.launch(
        (row_tiles * kv_heads, num_splits, 1), query, kind.keys.over(key), kind.values.over(value), output,
        output_scale, output_lse, block_table, query_start_loc, key_start_loc, seq_lens, sinks, parts, part_lse,
        num_splits, max(1, split_keys // tile.block_n), requests,
        section_of(kv_heads, max_seq_len * kind.row_bytes),
        scale * k_scale / cap if cap else scale * k_scale * LOG2E.value, v_scale, cap * LOG2E.value, terms.window,
        *kind.strides, 0 if block_table is None else block_table.stride(0), *kind.constants,
    )  # fmt: skip
    if parts is not None and part_lse is not None:
        rows = slice(first_token, first_token + tokens)
        lse = None if output_lse is None else output_lse[rows]
        merge_rows(parts, part_lse, output[rows], output_scale, lse, num_splits)
