"""Attention of few query tokens per request over a paged cache, the keys split over programs."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels.launch import (
    FP8,
    PLAIN,
    PRECISION,
    Launch,
    Terms,
    cache_strides,
    capability_of,
    compute_dtype,
    decode_launch,
    power_of_two,
    sm_count,
)
from attn_select_triton.kernels.merge import merge_splits
from attn_select_triton.kernels.primitives import LOG2E, attend, key_bounds, natural_lse, normalised, split_bounds

WGMMA_ROWS = 64
"""Tiles of so many rows compile to wgmma, which takes V from shared memory: splitting FP8 pairs in registers is for
smaller ones. (With it, triton 3.6.0 gave wrong results on Hopper.)"""
E4M3_SHIFT = 256.0
"""``primitives.fp8_pairs`` gives e4m3 times 2 ** -8."""


@triton.jit(do_not_specialize=["num_splits", "split_tokens", "row_tiles", "window", "stride_table"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    slopes_ptr,
    sinks_ptr,
    ranges_ptr,
    num_splits,
    split_tokens,
    row_tiles,
    score_scale,
    v_scale,
    cap_log2,
    window,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_table,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vd,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    RANGES: tl.constexpr,
    LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PACK: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: up to ``BLOCK_M`` rows (all heads of a KV head's group x all tokens), against one split of the keys.

    Memory traffic: each key and value that is seen, once; with ``SPLIT`` a float32 partial row and its LSE.
    """
    kv_head = tl.program_id(0) // row_tiles
    first = tl.program_id(0) % row_tiles * BLOCK_M
    request = tl.program_id(1)
    split = tl.program_id(2)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    if first >= query_len * GROUP:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    context = seq_len - query_len

    flat = first + tl.arange(0, BLOCK_M)
    token = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    in_rows = token < query_len
    rows = context + token
    if RANGES > 0:
        ranges_ptr += request * 2 * RANGES
    last_row = context + tl.minimum(first + BLOCK_M - 1, query_len * GROUP - 1) // GROUP
    low, full_low, full_high, high = key_bounds(
        context + first // GROUP, last_row, seq_len, window, ranges_ptr, CAUSAL, WINDOW, RANGES, BLOCK_N
    )
    split_low = low
    split_high = high
    if SPLIT:
        if FIXED:
            split_low = tl.maximum(low, split * split_tokens)
            split_high = tl.minimum(high, (split + 1) * split_tokens)
        else:
            split_low, split_high = split_bounds(split, num_splits, low, high, BLOCK_N)

    size = tl.arange(0, BLOCK_D)
    q_rows = (query_start + token).to(tl.int64) * stride_qt + head * stride_qh
    q_mask = in_rows[:, None]
    if D != BLOCK_D:
        q_mask = q_mask & (size < D)[None, :]
    q = tl.load(q_ptr + q_rows[:, None] + size[None, :], mask=q_mask, other=0.0).to(COMPUTE)
    slopes = rows
    if ALIBI:
        slopes = tl.load(slopes_ptr + head).to(tl.float32) * LOG2E
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # noqa: SIM102
        if split == 0:
            row_max = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            row_sum += 1.0
    accumulator = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    odd = accumulator

    table_ptr += request.to(tl.int64) * stride_table
    k_ptr += kv_head * stride_kh
    v_ptr += kv_head * stride_vh
    if WINDOW or RANGES > 0:
        accumulator, odd, row_max, row_sum = attend(
            q, q, accumulator, odd, row_max, row_sum, split_low // BLOCK_N * BLOCK_N,
            tl.minimum(full_low, split_high), low, rows, seq_len,
            k_ptr, v_ptr, table_ptr, stride_kb, stride_kt, stride_kd, stride_vb, stride_vt, stride_vd,
            0, 0, 0, 0, k_ptr, score_scale, cap_log2, window, slopes, ranges_ptr,
            CAUSAL, WINDOW, SOFT_CAP, ALIBI, RANGES, True, False, False, BLOCK_SIZE, D, BLOCK_D, DV, BLOCK_DV,
            0, PACK, PAIRS, PRECISION, BLOCK_N, True,
        )  # fmt: skip
    full_low = tl.maximum(full_low, split_low // BLOCK_N * BLOCK_N)
    full_high = tl.maximum(tl.minimum(full_high, split_high // BLOCK_N * BLOCK_N), full_low)
    accumulator, odd, row_max, row_sum = attend(
        q, q, accumulator, odd, row_max, row_sum, full_low, full_high, low, rows, seq_len,
        k_ptr, v_ptr, table_ptr, stride_kb, stride_kt, stride_kd, stride_vb, stride_vt, stride_vd,
        0, 0, 0, 0, k_ptr, score_scale, cap_log2, window, slopes, ranges_ptr,
        CAUSAL, WINDOW, SOFT_CAP, ALIBI, RANGES, True, False, False, BLOCK_SIZE, D, BLOCK_D, DV, BLOCK_DV,
        0, PACK, PAIRS, PRECISION, BLOCK_N, False,
    )  # fmt: skip
    accumulator, odd, row_max, row_sum = attend(
        q, q, accumulator, odd, row_max, row_sum, full_high, split_high, low, rows, seq_len,
        k_ptr, v_ptr, table_ptr, stride_kb, stride_kt, stride_kd, stride_vb, stride_vt, stride_vd,
        0, 0, 0, 0, k_ptr, score_scale, cap_log2, window, slopes, ranges_ptr,
        CAUSAL, WINDOW, SOFT_CAP, ALIBI, RANGES, True, False, False, BLOCK_SIZE, D, BLOCK_D, DV, BLOCK_DV,
        0, PACK, PAIRS, PRECISION, BLOCK_N, True,
    )  # fmt: skip

    SIZE: tl.constexpr = 2 * DV if PAIRS > 0 else DV
    PADDED: tl.constexpr = 2 * BLOCK_DV if PAIRS > 0 else BLOCK_DV
    if PAIRS > 0:
        accumulator = tl.interleave(accumulator, odd)
    width = tl.arange(0, PADDED)
    o_mask = in_rows[:, None]
    if SIZE != PADDED:
        o_mask = o_mask & (width < SIZE)[None, :]
    result = normalised(accumulator, row_sum) * v_scale
    row = (query_start + token).to(tl.int64) * HEADS + head
    if SPLIT:
        parts = row * num_splits + split
        tl.store(part_ptr + parts[:, None] * SIZE + width[None, :], result, mask=o_mask)
        tl.store(part_lse_ptr + parts, natural_lse(row_max, row_sum), mask=in_rows)
    else:
        o_rows = (query_start + token).to(tl.int64) * stride_ot + head * stride_oh
        tl.store(out_ptr + o_rows[:, None] + width[None, :], result.to(out_ptr.dtype.element_ty), mask=o_mask)
        if LSE:
            tl.store(lse_ptr + row, natural_lse(row_max, row_sum), mask=in_rows)


def decode_workspace(tokens: int, heads: int, value_size: int, num_splits: int) -> int:
    """Return how many float32 elements ``decode_attention`` takes for partial results; 0 without splits."""
    return tokens * heads * num_splits * (value_size + 1) if num_splits > 1 else 0


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    scale: float,
    num_splits: int = 1,
    split_tokens: int = 0,
    workspace: Tensor | None = None,
    terms: Terms = PLAIN,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    output_lse: Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """Attend from few query tokens per request over a paged cache; nothing waits for the device.

    Args:
        query, key, value, output, query_start_loc, seq_lens, scale, block_table, k_scale, v_scale, output_lse: as
            ``prefill_attention`` has them. All T rows of ``output`` are written where splits are merged.
        max_query_len: most tokens of a request.
        num_splits: programs that share a request's keys (``launch.num_splits_for``); the same for all requests.
        split_tokens: keys of a split, a multiple of the tile (128 is one of all), so that a request's result does not
            depend on the others'; ``num_splits`` of them must cover the longest. 0: even shares of each request.
        workspace: float32, ``decode_workspace`` elements at least; with splits.
        launch: another than the table's.

    Raises:
        ValueError: splits without a workspace that is large enough.
    """
    tokens, heads, head_size = query.shape
    kv_heads, value_size = value.shape[-2:]
    group, requests = heads // kv_heads, len(seq_lens)
    rows = group * max_query_len
    if launch is None:
        load = requests * kv_heads / sm_count(query.device)
        capability = capability_of(query.device)
        launch = decode_launch(capability, rows, max(head_size, value_size), query.dtype, key.dtype, load)
    block_m, block_n = launch.block_m, launch.block_n
    row_tiles = -(-rows // block_m)
    compute = compute_dtype(query.dtype, value.dtype)
    block_size, pack, k_strides, v_strides = cache_strides(key, value, True)
    pairs, size = 0, value_size
    if value.dtype in FP8 and compute == tl.float16 and value.is_cuda and v_strides[3] == 1 and block_m < WGMMA_ROWS:
        pairs = 2 if value.dtype == torch.float8_e5m2 else 1
        value, size = value.view(torch.int16), value_size // 2
        v_strides = cache_strides(key, value, True)[3]
        v_scale *= E4M3_SHIFT if pairs == 1 else 1.0
    split, parts, part_lse = num_splits > 1, None, None
    if split:
        wanted = decode_workspace(tokens, heads, value_size, num_splits)
        if workspace is None or workspace.numel() < wanted:
            have = 0 if workspace is None else workspace.numel()
            raise ValueError(f"workspace of {have} elements: {num_splits} splits of {tokens} tokens take {wanted}")
        partials = tokens * heads * num_splits
        parts, part_lse = workspace[: partials * value_size], workspace[partials * value_size : wanted]
    decode_kernel[(kv_heads * row_tiles, requests, num_splits)](
        query, key, value, output, output_lse, parts, part_lse, block_table, query_start_loc, seq_lens,
        terms.slopes, terms.sinks, terms.ranges, num_splits, split_tokens, row_tiles,
        scale * k_scale * LOG2E.value, v_scale, terms.soft_cap * LOG2E.value, terms.window,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1), block_table.stride(0),
        *k_strides, *v_strides, heads, group, terms.causal, terms.window > 0, terms.soft_cap > 0,
        terms.slopes is not None, terms.sinks is not None, 0 if terms.ranges is None else terms.ranges.shape[1],
        output_lse is not None, split, split_tokens > 0,
        block_size, head_size, power_of_two(head_size), size, power_of_two(size), pack, pairs,
        PRECISION, compute, block_m, block_n, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if parts is not None and part_lse is not None:
        merge_splits(parts, part_lse, output, num_splits, output_lse)
