"""Merging attention over disjoint sets of keys: the pieces of a decode, or a prefix and a suffix."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton import tuning
from attn_select_triton.kernels import launch, work_list
from attn_select_triton.kernels.pieces import FIELDS, read_piece, share_of
from attn_select_triton.kernels.primitives import LOG2E, as_output, natural_lse
from attn_select_triton.kernels.relaunch import Relaunches, dtypes, specialised
from attn_select_triton.kernels.work_list import WorkList

MERGED_ROWS = tl.constexpr(tuning.MERGED_ROWS)
IN_FLIGHT = tl.constexpr(tuning.MERGED_PARTS)  # Partial results of a row that ``merged_parts`` reads at once


@triton.jit
def merged_parts(
    part_ptr, part_lse_ptr, first, stride, splits, inside,
    SIZE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return the merged result ``(ROWS, PADDED)`` and natural LSE ``(ROWS,)`` of rows that other programs wrote."""
    # One split is taken after the other, so that a row's bits depend on its own splits alone.
    # first: int64 ``(ROWS,)``, each row's first partial result; ``stride`` to the next.
    width = tl.arange(0, PADDED)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, PADDED], tl.float32)
    # Unrolled in part: the loads of one round do not wait for each other, though the sums go in order.
    for start in range(0, splits, IN_FLIGHT):
        for index in tl.static_range(IN_FLIGHT):
            there = inside & (start + index < splits)
            part = first + (start + index) * stride
            # Through L2: what an L1 holds may be older.
            lse = tl.load(part_lse_ptr + part, mask=there, other=float("-inf"), cache_modifier=".cg")
            pointers = part_ptr + part[:, None] * SIZE + width[None, :]
            mask = there[:, None] & (width < SIZE)[None, :]
            numbers = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
            total, row_max, row_sum = merged(total, row_max, row_sum, numbers, lse)
    return total / tl.where(row_sum > 0, row_sum, 1.0)[:, None], natural_lse(row_max, row_sum)


@triton.jit
def merged(total, row_max, row_sum, numbers, lse):
    """Return the running sums ``(rows, columns)``, base-2 maxima and weights with one more partial result of each."""
    lse *= LOG2E
    new_max = tl.maximum(row_max, lse)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)  # no key so far, and -inf - -inf is NaN
    rescale = tl.exp2(row_max - base)
    weight = tl.exp2(lse - base)
    return total * rescale[:, None] + numbers * weight[:, None], new_max, row_sum * rescale + weight


@triton.jit
def merge_row(
    part_ptr, part_lse_ptr, first, stride, splits, SIZE: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr
):
    """Return the merged result ``(PADDED,)`` and natural LSE of one row."""
    # first: int64, of its first partial result; ``stride`` to the next.
    # CHUNK: partial results that are taken at once, in their order.
    width = tl.arange(0, PADDED)
    row_max = float("-inf")
    row_sum = 0.0
    total = tl.zeros([PADDED], tl.float32)
    for start in range(0, splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        part = first + split * stride
        lse = tl.load(part_lse_ptr + part, mask=split < splits, other=float("-inf")) * LOG2E
        mask = (lse > float("-inf"))[:, None] & (width < SIZE)[None, :]  # what weighs nothing is not read
        numbers = tl.load(part_ptr + part[:, None] * SIZE + width[None, :], mask=mask, other=0.0)
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - base)
        weights = tl.exp2(lse - base)
        total = total * rescale + tl.sum(numbers * weights[:, None], 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    return total / tl.where(row_sum > 0, row_sum, 1.0), natural_lse(row_max, row_sum)


@triton.jit
def request_of(pieces_ptr, listed, merges, index):
    """Return the number of a request whose pieces are merged; -1 behind the last."""
    if pieces_ptr is not None:
        request = tl.load(pieces_ptr + (listed + index) * FIELDS, mask=index < merges, other=-1)
    else:
        request = tl.where(index < merges, index, -1)
    return request


@triton.jit(do_not_specialize=["listed", "merges", "num_splits"], do_not_specialize_on_alignment=launch.SLICED)
def merge_pieces_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    pieces_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    listed,
    merges,
    num_splits,
    stride_ot,
    stride_oh,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merge the partial results of one row of requests in several pieces, one request after the other."""
    # Grid: rows of a slot (most tokens of a request x heads) x programs that share the requests. Memory traffic: each
    # partial result once. The bits of a row depend on its own partial results alone.
    # part_ptr, part_lse_ptr: float32, a row's results at ``(slot + split) * rows of a slot + token * HEADS + head``.
    # pieces_ptr: of ``pieces.list_pieces``, where ``merges`` requests in several pieces stand behind ``listed`` pieces;
    # None: ``merges`` requests have ``num_splits`` each.
    # CHUNK: partial results of a row that are read at once; half or a quarter of it where the row has fewer.
    row = tl.program_id(0)
    stride = tl.num_programs(0)
    width = tl.arange(0, PADDED)
    index = tl.program_id(1)
    request = request_of(pieces_ptr, listed, merges, index)
    while request >= 0:
        if pieces_ptr is not None:
            piece = read_piece(pieces_ptr, listed + index)
        else:
            piece = share_of(query_start_loc_ptr, seq_lens_ptr, request, 0, num_splits)
        if row < piece.query_len * HEADS:
            first = piece.slot.to(tl.int64) * stride + row
            splits = piece.splits
            # Three sizes are compiled in: a tile is as large as ``CHUNK`` says even where most of it is masked.
            if splits <= CHUNK // 4:
                merged_row = merge_row(part_ptr, part_lse_ptr, first, stride, splits, SIZE, PADDED, CHUNK // 4)
            elif splits <= CHUNK // 2:
                merged_row = merge_row(part_ptr, part_lse_ptr, first, stride, splits, SIZE, PADDED, CHUNK // 2)
            else:
                merged_row = merge_row(part_ptr, part_lse_ptr, first, stride, splits, SIZE, PADDED, CHUNK)
            result, lse = merged_row
            token = (piece.query_start + row // HEADS).to(tl.int64)
            stored = as_output(result, out_scale_ptr, out_ptr.dtype.element_ty)
            tl.store(out_ptr + token * stride_ot + row % HEADS * stride_oh + width, stored, mask=width < SIZE)
            if lse_ptr is not None:
                tl.store(lse_ptr + token * HEADS + row % HEADS, lse)
        index += tl.num_programs(1)
        request = request_of(pieces_ptr, listed, merges, index)


# About as many programs of ``merge_pieces_kernel`` share the requests: two waves on an H100. A captured step launches
# for as many requests as may ever be in several pieces, of which most steps have few.
MERGE_PROGRAMS = 1024
# Numbers of a row's partial results that ``merge_pieces_kernel`` reads at once, unless the row has fewer.
MERGE_NUMBERS = 8192
_merge_pieces = Relaunches(merge_pieces_kernel, num_warps=4)


def merge_pieces(
    parts: Tensor,
    part_lse: Tensor,
    output: Tensor,
    output_scale: Tensor | None,
    output_lse: Tensor | None,
    pieces: Tensor,
    merges: int,
    slot_rows: int,
) -> None:
    """Merge the partial results of a decode's requests in several pieces: float32 ``(rows, Dv)`` and LSEs ``(rows,)``.

    Args:
        output: ``(T, H, Dv)``, last dimension contiguous; output_lse float32 ``(T, H)``, contiguous.
        output_scale: as ``prefill_attention`` has it.
        pieces: of ``pieces.list_pieces``, the last ``merges`` of them requests in several pieces.
        slot_rows: rows of a slot: most tokens of a request x heads.
    """
    heads, size = output.shape[1:]
    strides = output.stride()[:2]
    key = (heads, size, strides, *specialised(output, parts, part_lse), *dtypes(output_scale, output_lse))
    _merge_pieces(
        key, (slot_rows, min(merges, -(-MERGE_PROGRAMS // slot_rows)), 1), parts, part_lse, output, output_scale,
        output_lse, pieces, None, None, len(pieces) - merges, merges, 0, *strides, heads, size,
        launch.power_of_two(size), MERGE_NUMBERS // launch.power_of_two(size),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=launch.SLICED)
def merge_shares_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    query_start_loc_ptr,
    cut_ptr,
    stride_ot,
    stride_oh,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge ``ROWS`` query rows of one request that is cut. Memory traffic: each partial once."""
    cut_ptr += tl.program_id(1) * FIELDS
    query_start = tl.load(query_start_loc_ptr + tl.load(cut_ptr))
    shares = tl.load(cut_ptr + 1)
    first = tl.load(cut_ptr + 2)
    rows = tl.load(cut_ptr + 3)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS >= rows:
        return
    inside = row < rows
    result, lse = merged_parts(
        part_ptr, part_lse_ptr, (first + row).to(tl.int64), rows, shares, inside, DV, ROWS, BLOCK_DV
    )  # fmt: skip
    width = tl.arange(0, BLOCK_DV)
    token = (query_start + row // HEADS).to(tl.int64)
    target = out_ptr + (token * stride_ot + row % HEADS * stride_oh)[:, None] + width[None, :]
    stored = as_output(result, out_scale_ptr, out_ptr.dtype.element_ty)
    tl.store(target, stored, mask=inside[:, None] & (width < DV)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + token * HEADS + row % HEADS, lse, mask=inside)


# Numbers of the rows that one program of ``merge_shares`` merges. With the partial results in flight they fill half of
# a thread's registers.
SHARED_NUMBERS = 1024
_merge_shares = Relaunches(merge_shares_kernel, num_warps=4)


def merge_shares(
    parts: Tensor,
    part_lse: Tensor,
    output: Tensor,
    output_scale: Tensor | None,
    output_lse: Tensor | None,
    query_start_loc: Tensor,
    work: WorkList,
) -> None:
    """Merge the partial results of requests that are cut: float32 ``(partials, Dv)``, and their LSEs ``(partials,)``.

    Args:
        output: ``(T, H, Dv)``, last dimension contiguous; output_lse float32 ``(T, H)``, contiguous.
        output_scale: as ``prefill_attention`` has it.
        query_start_loc: int32 ``(B + 1,)``, rows of the output.
    """
    heads, size = output.shape[1:]
    strides, width = output.stride()[:2], launch.power_of_two(size)
    rows = max(1, SHARED_NUMBERS // width)
    key = (heads, size, strides, *specialised(output, parts, part_lse), *dtypes(output_scale, output_lse))
    _merge_shares(
        key, (-(-work.most_cut // rows), len(work.cut), 1), parts, part_lse, output, output_scale, output_lse,
        query_start_loc, work.cut, *strides, heads, size, width, work_list.FIELDS, rows,
    )  # fmt: skip


@triton.jit(
    # Strides of LSEs: a transposed one has the step's tokens among them.
    do_not_specialize=["rows", "stride_lt", "stride_lh", "stride_plt", "stride_plh", "stride_slt", "stride_slh"],
    do_not_specialize_on_alignment=launch.SLICED,
)
def merge_attn_states_kernel(
    out_ptr,
    lse_ptr,
    prefix_ptr,
    prefix_lse_ptr,
    suffix_ptr,
    suffix_lse_ptr,
    rows,
    out_strides,
    prefix_strides,
    suffix_strides,
    stride_lt,
    stride_lh,
    stride_plt,
    stride_plh,
    stride_slt,
    stride_slh,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge ``ROWS`` rows (a head of a token) of two partials."""
    # Memory traffic: each partial read, but none whose LSE is -inf; the result written.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    prefix_lse = tl.load(prefix_lse_ptr + token * stride_plt + head * stride_plh, mask=inside, other=float("-inf"))
    suffix_lse = tl.load(suffix_lse_ptr + token * stride_slt + head * stride_slh, mask=inside, other=float("-inf"))
    largest = tl.maximum(prefix_lse, suffix_lse)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    prefix_weight = tl.exp2((prefix_lse - base) * LOG2E)
    suffix_weight = tl.exp2((suffix_lse - base) * LOG2E)
    total = prefix_weight + suffix_weight
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    width = tl.arange(0, BLOCK_DV)
    mask = inside[:, None] & (width < DV)[None, :]
    prefix = tl.load(
        prefix_ptr + (token * prefix_strides[0] + head * prefix_strides[1])[:, None] + width[None, :],
        mask=mask & (prefix_weight > 0)[:, None], other=0.0,
    ).to(tl.float32)  # fmt: skip
    suffix = tl.load(
        suffix_ptr + (token * suffix_strides[0] + head * suffix_strides[1])[:, None] + width[None, :],
        mask=mask & (suffix_weight > 0)[:, None], other=0.0,
    ).to(tl.float32)  # fmt: skip
    merged = prefix * (prefix_weight * inverse)[:, None] + suffix * (suffix_weight * inverse)[:, None]
    target = out_ptr + (token * out_strides[0] + head * out_strides[1])[:, None] + width[None, :]
    tl.store(target, merged.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        lse = natural_lse(base * LOG2E, total)
        tl.store(lse_ptr + token * stride_lt + head * stride_lh, lse, mask=inside)


MERGE_ROWS = 16  # Rows of one program of ``merge_attn_states``
_merge = Relaunches(merge_attn_states_kernel, num_warps=4)


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """As ``attn_select.runtime.ops.merge_attn_states``; the last dimension of the outputs is contiguous."""
    tokens, heads, size = output.shape
    rows = tokens * heads
    if not rows:
        return
    lse_strides = (0, 0) if output_lse is None else output_lse.stride()
    strides = output.stride()[:2], prefix_output.stride()[:2], suffix_output.stride()[:2]
    key = (
        heads, size, strides, *specialised(output, prefix_output, suffix_output),
        *dtypes(output_lse, prefix_lse, suffix_lse),
    )  # fmt: skip
    _merge(
        key, (-(-rows // MERGE_ROWS), 1, 1), output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse,
        rows, *strides, *lse_strides, *prefix_lse.stride(), *suffix_lse.stride(), heads, size,
        launch.power_of_two(size), MERGE_ROWS,
    )  # fmt: skip
