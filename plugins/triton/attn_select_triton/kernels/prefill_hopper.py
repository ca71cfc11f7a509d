"""Prefill on Hopper, warp-specialised: two or three groups of 64 query rows share each tile of keys, one warp loads.

Written in Gluon, Triton's language of explicit layouts. One program fills a multiprocessor and works on one item after
the other (``prefill_hopper_items``). Each tile of keys serves 128 rows or more, half the traffic from L2 of a program
of 64. One group multiplies while the other takes exponentials.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia import hopper

from attn_select_triton.kernels.descriptors import Descriptors
from attn_select_triton.kernels.launch import PLAIN, SLICED, Terms, describable, describe, sm_count
from attn_select_triton.kernels.merge import merge_rows
from attn_select_triton.kernels.prefill_hopper_items import PART, load_items, take
from attn_select_triton.kernels.primitives import E4M3_MAX as E4M3_LIMIT
from attn_select_triton.kernels.primitives import LOG2E
from attn_select_triton.kernels.relaunch import Relaunch, dtypes, specialised
from attn_select_triton.limits import GLUON_CAPABILITY
from attn_select_triton.tuning import find_tile, section_of, tile_of

LN2 = gl.constexpr(0.6931471805599453)
E4M3_MAX = gl.constexpr(E4M3_LIMIT.value)
ROWS = gl.constexpr(64)
"""Query rows of a compute group."""
LEAST_BOX = 16
"""Tokens of the smallest box that was run."""


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
def multiply_scores(q_smem, k_smem, buffer, PARTS: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr):
    """Issue the products of a group's rows with a tile of keys."""
    scores = gl.zeros([ROWS, KEYS], gl.float32, S)
    for part in gl.static_range(PARTS):
        k = k_smem.index(buffer * PARTS + part)
        scores = warpgroup_mma(q_smem.index(part), k.permute((1, 0)), scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def multiply_values(p, v_smem, buffer, accumulators, V_PARTS: gl.constexpr):
    """Issue the products of weights with a tile of values, added to the accumulators."""
    products = ()
    for part in gl.static_range(V_PARTS):
        v = v_smem.index(buffer * V_PARTS + part)
        products = products + (warpgroup_mma(p, v, accumulators[part], is_async=True),)
    return products


@gluon.jit
def rescaled(accumulators, rescale, V_PARTS: gl.constexpr, ACC: gl.constexpr):
    """Return the accumulators times a factor for each row."""
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, ACC))[:, None]
    scaled = ()
    for part in gl.static_range(V_PARTS):
        scaled = scaled + (accumulators[part] * factor,)
    return scaled


@gluon.jit
def soften(
    tile, scores, row_max, sums, limits, scores_like,
    MASKED: gl.constexpr, FLAGS: gl.constexpr, SHAPE: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Return a tile's weights, the factor of earlier sums, the new maxima and the new sums."""
    WINDOW: gl.constexpr = FLAGS[0]
    SOFT_CAP: gl.constexpr = FLAGS[1]
    APART: gl.constexpr = FLAGS[3]
    KEYS: gl.constexpr = SHAPE[2]
    score_scale, cap_log2, window = scores_like
    factor = score_scale
    if SOFT_CAP:
        scores = tanh(scores * score_scale)
        factor = cap_log2
    if MASKED:
        keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
        own_limits = limits - tile * KEYS
        seen = keys[None, :] < own_limits[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] >= (own_limits - window)[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    base = new_max
    if MASKED:
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(scores * factor - base[:, None])
    rescale = gl.exp2(row_max - base)
    if APART:
        added = gl.sum(gl.reshape(weights, [ROWS, KEYS // 8, 8]), 1)
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, added.type.layout))[:, None] + added
    else:
        sums = sums * rescale + gl.sum(weights, 1)
    return weights, rescale, new_max, sums


@gluon.jit
def attend_tile(
    tile, loaded, worked, accumulators, row_max, sums, limits, seq_len, scores_like, q_smem, smem, barriers,
    MASKED: gl.constexpr, FLAGS: gl.constexpr, SHAPE: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr,
    T: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Attend from one group's rows to one tile.

    With ``TURNS`` a group's product with V and its next scores are issued together, while the others take
    exponentials. Left to themselves groups may fall into step, and the tensor cores wait for all.

    Args:
        loaded: tiles that were loaded before this one, of all items.
        accumulators: float32 ``(ROWS, PART)`` for each part of V. One product for each is faster than one for all.
        sums: float32 ``(ROWS,)``, of the weights; with ``APART`` ``(ROWS, 8)``, a thread's of its own keys.
        limits: int32 ``(ROWS,)``, the keys that each row sees; with a window the last ``window`` of them.
        scores_like: scale * log2(e), or with a soft cap scale / cap; the soft cap times log2(e); and the window.
        worked: items with tiles before this one.
        FLAGS: whether there is a window, a soft cap, turns, sums apart, and scores begun early.
        SHAPE: parts of K and of V, keys of a tile, stages, and groups.
    """
    TURNS: gl.constexpr = FLAGS[2]
    PARTS: gl.constexpr = SHAPE[0]
    V_PARTS: gl.constexpr = SHAPE[1]
    KEYS: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    GROUPS: gl.constexpr = SHAPE[4]
    k_smem, v_smem = smem
    k_ready, k_empty, v_ready, v_empty, turns = barriers
    buffer = loaded % STAGES
    phase = loaded // STAGES & 1
    mbarrier.wait(k_ready.index(buffer), phase)
    scores = multiply_scores(q_smem, k_smem, buffer, PARTS, KEYS, S)
    if TURNS:
        mbarrier.arrive(turns.index((INDEX + 1) % GROUPS), count=1)
    scores = warpgroup_mma_wait(0, [scores])
    hand_back(k_empty, buffer)
    weights, rescale, new_max, sums = soften(tile, scores, row_max, sums, limits, scores_like, MASKED, FLAGS, SHAPE, S)
    p = gl.convert_layout(weights.to(k_smem.dtype), gl.DotOperandLayout(0, ACC, 2))
    scaled = rescaled(accumulators, rescale, V_PARTS, ACC)
    mbarrier.wait(v_ready.index(buffer), phase)
    if TURNS:
        mbarrier.wait(turns.index(INDEX), (loaded + worked + (1 if INDEX > 0 else 0)) & 1)
    if MASKED:  # noqa: SIM102  one is compiled in
        if (tile + 1) * KEYS > seq_len:
            clear_behind(v_smem, buffer, tile * KEYS, seq_len, V_PARTS, KEYS, T)
    products = multiply_values(p, v_smem, buffer, scaled, V_PARTS)
    if V_PARTS == 1:  # noqa: SIM108  one is compiled in
        accumulators = (warpgroup_mma_wait(0, products),)
    else:
        accumulators = warpgroup_mma_wait(0, products)
    hand_back(v_empty, buffer)
    return accumulators, new_max, sums


@gluon.jit
def first_weights(
    tile, loaded, row_max, sums, limits, scores_like, q_smem, smem, barriers,
    FLAGS: gl.constexpr, SHAPE: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Return the weights of an item's first tile, the maxima and the sums."""
    k_smem, _ = smem
    k_ready, k_empty, _, _, _ = barriers
    STAGES: gl.constexpr = SHAPE[3]
    buffer = loaded % STAGES
    mbarrier.wait(k_ready.index(buffer), loaded // STAGES & 1)
    scores = warpgroup_mma_wait(0, [multiply_scores(q_smem, k_smem, buffer, SHAPE[0], SHAPE[2], S)])
    hand_back(k_empty, buffer)
    weights, _, new_max, sums = soften(tile, scores, row_max, sums, limits, scores_like, True, FLAGS, SHAPE, S)
    return gl.convert_layout(weights.to(k_smem.dtype), gl.DotOperandLayout(0, ACC, 2)), new_max, sums


@gluon.jit
def attend_tile_ahead(
    tile, loaded, p, accumulators, row_max, sums, limits, scores_like, q_smem, smem, barriers,
    MASKED: gl.constexpr, FLAGS: gl.constexpr, SHAPE: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Issue one tile's scores and the product of the tile before with its values, which goes on beside the softmax.

    Args:
        p: the weights ``(ROWS, KEYS)`` of the tile before; all else as ``attend_tile`` has it.
    """
    PARTS: gl.constexpr = SHAPE[0]
    V_PARTS: gl.constexpr = SHAPE[1]
    KEYS: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    k_smem, v_smem = smem
    k_ready, k_empty, v_ready, v_empty, _ = barriers
    buffer = loaded % STAGES
    before = (loaded - 1) % STAGES
    mbarrier.wait(k_ready.index(buffer), loaded // STAGES & 1)
    mbarrier.wait(v_ready.index(before), (loaded - 1) // STAGES & 1)
    scores = multiply_scores(q_smem, k_smem, buffer, PARTS, KEYS, S)
    products = multiply_values(p, v_smem, before, accumulators, V_PARTS)
    scores = warpgroup_mma_wait(V_PARTS, [scores])
    hand_back(k_empty, buffer)
    weights, rescale, new_max, sums = soften(tile, scores, row_max, sums, limits, scores_like, MASKED, FLAGS, SHAPE, S)
    done = warpgroup_mma_wait(0, products + (p,))  # p stays where it is until then
    hand_back(v_empty, before)
    accumulators = rescaled(done, rescale, V_PARTS, ACC)
    p = gl.convert_layout(weights.to(k_smem.dtype), gl.DotOperandLayout(0, ACC, 2))
    return p, accumulators, new_max, sums


@gluon.jit
def last_values(
    tile, loaded, p, accumulators, seq_len, smem, barriers, SHAPE: gl.constexpr, T: gl.constexpr
):  # fmt: skip
    """Return the sums with the product of an item's last tile."""
    V_PARTS: gl.constexpr = SHAPE[1]
    KEYS: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    _, v_smem = smem
    _, _, v_ready, v_empty, _ = barriers
    buffer = loaded % STAGES
    mbarrier.wait(v_ready.index(buffer), loaded // STAGES & 1)
    if (tile + 1) * KEYS > seq_len:
        clear_behind(v_smem, buffer, tile * KEYS, seq_len, V_PARTS, KEYS, T)
    done = warpgroup_mma_wait(0, multiply_values(p, v_smem, buffer, accumulators, V_PARTS) + (p,))
    hand_back(v_empty, buffer)
    accumulators = ()
    for part in gl.static_range(V_PARTS):
        accumulators = accumulators + (done[part],)
    return accumulators


@gluon.jit
def load_query(
    q_ptr, first, query_start, query_len, kv_head, strides,
    GROUP: gl.constexpr, PARTS: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Return the parts of one group's rows of the query, zeros behind the request's last."""
    stride_qt, stride_qh, _, _ = strides
    flat = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T))
    columns = gl.arange(0, PART, layout=gl.SliceLayout(0, T))
    places = (query_start + flat // GROUP).to(gl.int64) * stride_qt + (kv_head * GROUP + flat % GROUP) * stride_qh
    parts = ()
    for part in gl.static_range(PARTS):
        source = q_ptr + places[:, None] + (part * PART + columns)[None, :]
        parts = parts + (gl.load(source, mask=(flat < query_len * GROUP)[:, None], other=0.0),)
    return parts


@gluon.jit
def write_rows(
    pointers, q_smem, accumulators, norm, first, query_start, query_len, kv_head, strides,
    GROUP: gl.constexpr, V_PARTS: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Write one group's rows of the output through the query's memory: a thread writes 16 bytes of a row and not 4."""
    _, out_ptr, out_scale_ptr, _, _ = pointers
    _, _, stride_ot, stride_oh = strides
    if out_scale_ptr is not None:
        norm = norm / gl.load(out_scale_ptr)
    for part in gl.static_range(V_PARTS):
        result = accumulators[part] * norm
        if out_scale_ptr is not None:
            result = gl.minimum(gl.maximum(result, -E4M3_MAX), E4M3_MAX)
        q_smem.index(part).store(result.to(q_smem.dtype))
    gl.thread_barrier()
    flat = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T))
    places = (query_start + flat // GROUP).to(gl.int64) * stride_ot + (kv_head * GROUP + flat % GROUP) * stride_oh
    target = out_ptr + places[:, None] + gl.arange(0, PART, layout=gl.SliceLayout(0, T))[None, :]
    for part in gl.static_range(V_PARTS):
        result = q_smem.index(part).load(T)
        if out_scale_ptr is not None:
            result = result.to(gl.float32)
        gl.store(target + part * PART, result.to(out_ptr.dtype.element_ty), mask=(flat < query_len * GROUP)[:, None])


@gluon.jit
def attend_items(q_smem, state, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Attend from one group's 64 rows of each item to all its tiles, and write their output, or with ``SPLIT`` their
    partial result. The query of the next item is on its way meanwhile, where registers allow it.

    Args:
        q_smem: shared memory of the query's parts.
        state, OPTIONS: what all groups share, as ``prefill_hopper_kernel`` makes it.
        INDEX: of the group.
    """
    HEADS: gl.constexpr = OPTIONS[0]
    GROUP: gl.constexpr = OPTIONS[1]
    CAUSAL: gl.constexpr = OPTIONS[2]
    SINKS: gl.constexpr = OPTIONS[3]
    LSE: gl.constexpr = OPTIONS[4]
    SPLIT: gl.constexpr = OPTIONS[5]
    FLAGS: gl.constexpr = OPTIONS[6]
    SHAPE: gl.constexpr = OPTIONS[7]
    WINDOW: gl.constexpr = FLAGS[0]
    TURNS: gl.constexpr = FLAGS[2]
    APART: gl.constexpr = FLAGS[3]
    AHEAD: gl.constexpr = FLAGS[4]
    PARTS: gl.constexpr = SHAPE[0]
    V_PARTS: gl.constexpr = SHAPE[1]
    KEYS: gl.constexpr = SHAPE[2]
    GROUPS: gl.constexpr = SHAPE[4]
    EARLY: gl.constexpr = PARTS + V_PARTS < 8
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    T: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    pointers, smem, barriers, mail, scales, strides, parts = state
    q_ptr, _, _, lse_ptr, sinks_ptr = pointers
    score_scale, v_scale, cap_log2, window = scales
    scores_like = (score_scale, cap_log2, window)
    part_ptr, part_lse_ptr, query_start_loc_ptr, num_splits = parts
    turns = barriers[4]
    _, _, read = mail
    own_row = ROWS * INDEX
    turn = 0
    loaded = 0
    worked = 0
    first, kv_head, query_start, query_len, _, _, _, _, _, _ = take(mail, 0)
    query = load_query(q_ptr, first + own_row, query_start, query_len, kv_head, strides, GROUP, PARTS, T)
    for part in gl.static_range(PARTS):
        q_smem.index(part).store(query[part])
    more = query_len >= 0
    while more:
        first_row, kv_head, query_start, query_len, seq_len, start, full_start, full, tiles, split = take(mail, turn)
        first = first_row + own_row
        fence_async_shared()
        gl.thread_barrier()

        flat = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        limits = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, S)) + seq_len
        if CAUSAL:
            limits = gl.minimum(limits + flat // GROUP + 1 - query_len, seq_len)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        sums = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
        if APART:
            sums = gl.sum(gl.reshape(gl.zeros([ROWS, KEYS], gl.float32, S), [ROWS, KEYS // 8, 8]), 1)
        if SINKS:
            sinks = gl.load(sinks_ptr + kv_head * GROUP + flat % GROUP).to(gl.float32) * LOG2E
            row_max = gl.where(split == 0, sinks, row_max)
            sums += gl.where(split == 0, 1.0 / 8 if APART else 1.0, 0.0)
        accumulators = ()
        for _ in gl.static_range(V_PARTS):
            accumulators = accumulators + (gl.zeros([ROWS, PART], gl.float32, ACC),)
        # A group's barrier is reached once for each tile and once more for each item, so that no phase is missed: the
        # first group waits for the end of the item before, the others for the start of this one.
        if TURNS and tiles > start:
            if INDEX > 0:
                mbarrier.wait(turns.index(INDEX), (loaded + worked) & 1)
            elif worked > 0:
                mbarrier.wait(turns.index(INDEX), (loaded + worked - 1) & 1)
        before = loaded - start
        if AHEAD:
            p = gl.zeros([ROWS, KEYS], smem[0].dtype, gl.DotOperandLayout(0, ACC, 2))
            second = gl.minimum(start + 1, tiles)
            for tile in range(start, second):
                p, row_max, sums = first_weights(
                    tile, before + tile, row_max, sums, limits, scores_like, q_smem, smem, barriers, FLAGS, SHAPE, S,
                    ACC,
                )  # fmt: skip
            for tile in range(second, full):
                p, accumulators, row_max, sums = attend_tile_ahead(
                    tile, before + tile, p, accumulators, row_max, sums, limits, scores_like, q_smem, smem, barriers,
                    False, FLAGS, SHAPE, S, ACC,
                )  # fmt: skip
            for tile in range(gl.maximum(second, full), tiles):
                p, accumulators, row_max, sums = attend_tile_ahead(
                    tile, before + tile, p, accumulators, row_max, sums, limits, scores_like, q_smem, smem, barriers,
                    True, FLAGS, SHAPE, S, ACC,
                )  # fmt: skip
            for tile in range(gl.maximum(tiles - 1, start), tiles):
                accumulators = last_values(
                    tile, before + tile, p, accumulators, seq_len, smem, barriers, SHAPE, T
                )  # fmt: skip
        else:
            middle = start
            if WINDOW:
                middle = gl.maximum(gl.minimum(full_start, tiles), start)
                for tile in range(start, middle):
                    accumulators, row_max, sums = attend_tile(
                        tile, before + tile, worked, accumulators, row_max, sums, limits, seq_len, scores_like, q_smem,
                        smem, barriers, True, FLAGS, SHAPE, S, ACC, T, INDEX,
                    )  # fmt: skip
            for tile in range(middle, full):
                accumulators, row_max, sums = attend_tile(
                    tile, before + tile, worked, accumulators, row_max, sums, limits, seq_len, scores_like, q_smem,
                    smem, barriers, False, FLAGS, SHAPE, S, ACC, T, INDEX,
                )  # fmt: skip
            for tile in range(gl.maximum(middle, full), tiles):
                accumulators, row_max, sums = attend_tile(
                    tile, before + tile, worked, accumulators, row_max, sums, limits, seq_len, scores_like, q_smem,
                    smem, barriers, True, FLAGS, SHAPE, S, ACC, T, INDEX,
                )  # fmt: skip
        if TURNS and tiles > start:
            mbarrier.arrive(turns.index((INDEX + 1) % GROUPS), count=1)
            worked += 1
        loaded += tiles - start
        turn += 1

        row_sum = sums
        if APART:
            row_sum = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, S))
        next_row, next_head, next_start, next_len, _, _, _, _, _, _ = take(mail, turn)
        if EARLY:
            query = load_query(q_ptr, next_row + own_row, next_start, next_len, next_head, strides, GROUP, PARTS, T)
        lse = gl.where(row_sum > 0, (row_max + gl.log2(row_sum)) * LN2, float("-inf"))
        norm = gl.where(row_sum > 0, v_scale / row_sum, 0.0)
        norm = gl.convert_layout(norm, gl.SliceLayout(1, ACC))[:, None]
        lse_row = (query_start + flat // GROUP).to(gl.int64) * HEADS + kv_head * GROUP + flat % GROUP
        inside = flat < query_len * GROUP
        if SPLIT:
            lse_row = (lse_row - gl.load(query_start_loc_ptr).to(gl.int64) * HEADS) * num_splits + split
            gl.store(part_lse_ptr + lse_row, lse, mask=inside)
            row = gl.convert_layout(lse_row, gl.SliceLayout(1, ACC))
            some = gl.convert_layout(inside & (row_sum > 0), gl.SliceLayout(1, ACC))  # of others -inf says so
            target = (part_ptr + row * (V_PARTS * PART))[:, None] + gl.arange(0, PART, gl.SliceLayout(0, ACC))[None, :]
            for part in gl.static_range(V_PARTS):
                gl.store(target + part * PART, accumulators[part] * norm, mask=some[:, None])
        else:
            if LSE:
                gl.store(lse_ptr + lse_row, lse, mask=inside)
            write_rows(
                pointers, q_smem, accumulators, norm, first, query_start, query_len, kv_head, strides, GROUP, V_PARTS, T
            )  # fmt: skip
        gl.thread_barrier()
        mbarrier.arrive(read.index((turn - 1) % 2), count=1)
        if not EARLY:
            query = load_query(q_ptr, next_row + own_row, next_start, next_len, next_head, strides, GROUP, PARTS, T)
        for part in gl.static_range(PARTS):
            q_smem.index(part).store(query[part])
        more = next_len >= 0


@gluon.jit(
    do_not_specialize=["items", "num_splits", "split_tiles", "num_requests", "section", "window", "stride_table"],
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
    counter_ptr,
    items,
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
    APART: gl.constexpr,
    GROUPS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Attend from the rows of all items, 64 (token-major, the heads of a KV head's group within a token) of each group.

    On chip: the query ``(64 * GROUPS, D)`` and ``STAGES`` tiles each of K ``(KEYS, D)`` and V ``(KEYS, DV)`` in shared
    memory; of each group scores ``(64, KEYS)`` and output ``(64, DV)`` in registers. Memory traffic: Q and output once,
    K and V once per item, which L2 serves. A window is causal.

    Args:
        counter_ptr: two zeros, which the last program leaves there.
        items: row tiles that all requests may own, as ``find_request`` counts them, x KV heads x ``num_splits``.
    """
    PARTS: gl.constexpr = D // PART
    V_PARTS: gl.constexpr = DV // PART
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    gl.static_assert(not AHEAD or not (WINDOW or TURNS))
    FLAGS: gl.constexpr = (WINDOW, SOFT_CAP, TURNS, APART or AHEAD, AHEAD)
    SHAPE: gl.constexpr = (PARTS, V_PARTS, KEYS, STAGES, GROUPS)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_first = gl.allocate_shared_memory(k_descriptor.dtype, [PARTS, ROWS, PART], LAYOUT)
    q_second = gl.allocate_shared_memory(k_descriptor.dtype, [PARTS, ROWS, PART], LAYOUT)
    k_smem = gl.allocate_shared_memory(k_descriptor.dtype, [STAGES * PARTS, KEYS, PART], LAYOUT)
    v_smem = gl.allocate_shared_memory(v_descriptor.dtype, [STAGES * V_PARTS, KEYS, PART], LAYOUT)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    memory = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    there = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(there.index(slot), count=1)
        mbarrier.init(read.index(slot), count=GROUPS)
    fence_async_shared()
    smem = (k_smem, v_smem)
    barriers = (k_ready, k_empty, v_ready, v_empty, turns)
    mail = (memory, there, read)
    pointers = (q_ptr, out_ptr, out_scale_ptr, lse_ptr, sinks_ptr)
    scales = (score_scale, v_scale, cap_log2, window)
    strides = (stride_qt, stride_qh, stride_ot, stride_oh)
    parts = (part_ptr, part_lse_ptr, query_start_loc_ptr, num_splits)
    row_tiles = items // num_splits // (HEADS // GROUP)
    counts = (num_requests, row_tiles, section, num_splits, split_tiles)
    places = (k_pages, k_head_rows, k_head_columns, v_pages, v_head_rows, v_head_columns)
    state = (pointers, smem, barriers, mail, scales, strides, parts)
    loads = (
        (k_descriptor, v_descriptor), smem, barriers, mail, counter_ptr, items, (query_start_loc_ptr, seq_lens_ptr),
        counts, window, (table_ptr, stride_table, key_start_loc_ptr), places,
    )  # fmt: skip
    OPTIONS: gl.constexpr = (HEADS, GROUP, CAUSAL, SINKS, LSE, SPLIT, FLAGS, SHAPE)
    LOADS: gl.constexpr = (GROUP, CAUSAL, WINDOW, SPLIT, PAGED, BLOCK_SIZE, BOX, BLOCK_M, SHAPE)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend_items, (q_first, state, OPTIONS, 0)),
                (attend_items, (q_second, state, OPTIONS, 1)),
                (load_items, (loads, LOADS)),
            ],
            [4, 1],
            [232, 40] if PARTS + V_PARTS < 8 else [240, 24],
        )
    else:
        q_third = gl.allocate_shared_memory(k_descriptor.dtype, [PARTS, ROWS, PART], LAYOUT)
        gl.warp_specialize(
            [
                (attend_items, (q_first, state, OPTIONS, 0)),
                (attend_items, (q_second, state, OPTIONS, 1)),
                (attend_items, (q_third, state, OPTIONS, 2)),
                (load_items, (loads, LOADS)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


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
        kind = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for([box, PART.value], kind)
        shape, strides = list(self.rows.shape), list(self.rows.strides)
        self._boxes = Descriptors(hopper.TensorDescriptor(tensor, shape, strides, [box, PART.value], layout))

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
        sms: multiprocessors.
        row_bytes: of K and V of one token and KV head.
        strides, constants: of the kernel's arguments.
        ahead: keys of the longest request beyond which scores are begun early, where that was measured; 0: nowhere.
        launches: the kernel without and with scores begun early.
    """

    __slots__ = ("ahead", "constants", "keys", "launches", "row_bytes", "sms", "strides", "tile", "values")

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, flags: tuple[Any, ...], paged: bool
    ) -> None:
        heads, head_size = query.shape[1:]
        value_size = value.shape[-1]
        self.tile = tile_of("prefill_hopper", GLUON_CAPABILITY, head_size=head_size, value_size=value_size)
        groups = self.tile.block_m // ROWS.value
        block_size = key.shape[1] if paged else 1
        box = box_rows(block_size, paged, self.tile.block_n)
        self.keys, self.values = _Boxes(key, box), _Boxes(value, box)
        self.row_bytes = (head_size + value_size) * key.itemsize
        self.strides = (*query.stride()[:2], *output.stride()[:2])
        self.constants = (
            *self.keys.places, *self.values.places, heads, heads // value.shape[-2], *flags, paged, block_size,
            head_size, value_size, self.tile.block_n, self.tile.num_stages, box, self.tile.turns,
            self.tile.sums_apart, groups,
        )  # fmt: skip
        self.sms = sm_count(query.device)
        causal, window, cap, sinks, _, split = flags
        self.ahead = self.tile.ahead if causal and not (window or cap or sinks or split or paged) else 0
        self.launches = tuple(
            Relaunch(prefill_hopper_kernel, num_warps=4, maxnreg=168 if groups == 2 else 128) for _ in range(2)
        )


_kinds: dict[Any, _Kind] = {}


class Prefill:
    """A step's prefill, ready for its layers: what they share is worked out once. Nothing waits for the device.

    Takes bfloat16 and float16, K and V that are ``readable``; rows between the requests' keys may hold anything. No
    ALiBi and no image ranges, and a window only where it is causal.

    Args:
        query_start_loc, seq_lens, max_seq_len, block_table, key_start_loc: as ``prefill_attention`` has them.
        num_tokens: of these requests, or any bound above it.
        counter: int32 ``(2,)``, zeros, which the kernel leaves there; of launches that do not run side by side.
        num_splits: programs that may share the keys of 128 rows; their results are merged.
        split_keys: keys that one of them should have at least.
        workspace: float32, ``decode.decode_workspace`` elements at least; with splits.
        first_token: row of the first request's first token, as ``query_start_loc`` has it; with splits.
    """

    def __init__(
        self,
        *,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        num_tokens: int,
        counter: Tensor,
        block_table: Tensor | None = None,
        key_start_loc: Tensor | None = None,
        num_splits: int = 1,
        split_keys: int = 0,
        workspace: Tensor | None = None,
        first_token: int = 0,
    ) -> None:
        self._tensors = block_table, query_start_loc, key_start_loc, seq_lens
        self._paged, self._stride_table = block_table is not None, 0 if block_table is None else block_table.stride(0)
        self._requests, self._longest, self._tokens, self._counter = len(seq_lens), max_seq_len, num_tokens, counter
        self._splits, self._split_keys, self._workspace = num_splits, split_keys, workspace
        self._rows = slice(first_token, first_token + num_tokens)
        # Of the layer before, which is most often like the next one.
        self._seen: Any = None
        self._found: tuple[_Kind, tuple[int, ...], Tensor | None, Tensor | None] | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        *,
        scale: float,
        alone: bool = True,
        terms: Terms = PLAIN,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        output_scale: Tensor | None = None,
        output_lse: Tensor | None = None,
    ) -> None:
        """Launch it for one layer, whose tensors are as ``prefill_attention`` has them.

        Args:
            alone: a program for each multiprocessor works until the end; else there is one for each item, and programs
                of other kernels start in between.
        """
        sinks, cap, window = terms.sinks, terms.soft_cap, terms.window
        flags = terms.causal, window > 0, cap > 0, sinks is not None, output_lse is not None, self._splits > 1
        layer = (
            query.dtype, key.dtype, value.dtype, output.dtype, query.data_ptr() % 16, key.data_ptr() % 16,
            value.data_ptr() % 16, output.data_ptr() % 16, *dtypes(sinks, output_scale),
        )  # fmt: skip
        strides = query.stride(), key.stride(), value.stride(), output.stride()
        seen = flags, layer, strides, query.shape, key.shape, value.shape
        if seen != self._seen or self._found is None:
            self._found, self._seen = self._lookup(query, key, value, output, flags, (layer, strides)), seen
        kind, counts, parts, part_lse = self._found
        items, ahead = counts[0], 0 < kind.ahead < self._longest
        kind.launches[ahead](
            (min(items, kind.sms) if alone else items, 1, 1), query, kind.keys.over(key), kind.values.over(value),
            output, output_scale, output_lse, *self._tensors, sinks, parts, part_lse, self._counter, *counts,
            scale * k_scale / cap if cap else scale * k_scale * LOG2E.value, v_scale, cap * LOG2E.value, window,
            *kind.strides, self._stride_table, *kind.constants, ahead,
        )  # fmt: skip
        if parts is not None and part_lse is not None:
            lse = None if output_lse is None else output_lse[self._rows]
            merge_rows(parts, part_lse, output[self._rows], output_scale, lse, self._splits)

    def _lookup(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, flags: tuple[bool, ...], layer: tuple[Any, ...]
    ) -> tuple[_Kind, tuple[int, ...], Tensor | None, Tensor | None]:
        """Return the kind of a layer, the kernel's counts, and where partial results and their LSE go."""
        heads, kv_heads, value_size = query.shape[1], value.shape[-2], value.shape[-1]
        workspace, splits = self._workspace, self._splits
        same = (
            flags, layer, self._paged, query.shape[1:], key.shape[1:], value.shape[1:], query.get_device(),
            None if workspace is None else workspace.data_ptr() % 16,
        )  # fmt: skip
        kind = _kinds.get(same)
        if kind is None:
            kind = _kinds[same] = _Kind(query, key, value, output, flags, self._paged)
        parts = part_lse = None
        if splits > 1:
            assert workspace is not None
            parts, part_lse = workspace, workspace[self._tokens * heads * splits * value_size :]
        row_tiles = self._tokens * (heads // kv_heads) // kind.tile.block_m + self._requests
        counts = (
            row_tiles * kv_heads * splits, splits, max(1, self._split_keys // kind.tile.block_n), self._requests,
            section_of(kv_heads, self._longest * kind.row_bytes),
        )  # fmt: skip
        return kind, counts, parts, part_lse


def prefill_hopper(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    scale: float,
    num_tokens: int | None = None,
    alone: bool = True,
    terms: Terms = PLAIN,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    output_scale: Tensor | None = None,
    output_lse: Tensor | None = None,
    **step: Any,
) -> None:
    """Attend from many query tokens per request: a ``Prefill`` for one layer.

    Args:
        num_tokens: None: the query's.
        step: as ``Prefill`` has it; the other arguments as its call has them.
    """
    prefill = Prefill(num_tokens=len(query) if num_tokens is None else num_tokens, **step)
    prefill(
        query, key, value, output, scale=scale, alone=alone, terms=terms, k_scale=k_scale, v_scale=v_scale,
        output_scale=output_scale, output_lse=output_lse,
    )  # fmt: skip
