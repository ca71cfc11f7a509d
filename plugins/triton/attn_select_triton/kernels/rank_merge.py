"""Merging the partial results of several ranks: packing what is sent, and merging or weighing what came.

Rows have four dimensions, since the heads of a rank lie KV head by KV head among the heads of all ranks.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels import launch
from attn_select_triton.kernels.primitives import LOG2E, natural_lse
from attn_select_triton.kernels.relaunch import Relaunches, dtypes, specialised

ROWS = 8  # Rows of one program: few, since a step of few tokens has few, and all SMs should take part
# LSEs lie behind the outputs of a message, at any multiple of 4 bytes.
FLEXIBLE = ["lse_ptr", "lses_ptr", "packed_lse_ptr", "sinks_ptr"]


@triton.jit
def offsets_of(row, strides, SHAPE: tl.constexpr):
    """Return where rows lie in a tensor, of which ``SHAPE`` has the last three dimensions of four."""
    last = row % SHAPE[2]
    rest = row // SHAPE[2]
    third = rest % SHAPE[1]
    rest = rest // SHAPE[1]
    second = rest % SHAPE[0]
    first = (rest // SHAPE[0]).to(tl.int64)
    return first * strides[0] + second * strides[1] + third * strides[2] + last * strides[3]


@triton.jit(do_not_specialize=["rows", "tokens"], do_not_specialize_on_alignment=FLEXIBLE)
def pack_attn_states_kernel(
    out_ptr,
    lse_ptr,
    packed_ptr,
    packed_lse_ptr,
    rows,
    tokens,
    out_strides,
    lse_strides,
    packed_strides,
    packed_lse_strides,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy ``ROWS`` rows of a result to where they are sent from. The rank is the first dimension of rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    last = row % GROUP
    kv_head = row // GROUP % KV_HEADS
    token = row // (GROUP * KV_HEADS) % tokens
    rank = (row // (GROUP * KV_HEADS) // tokens).to(tl.int64)
    width = tl.arange(0, BLOCK_DV)
    mask = inside[:, None] & (width < DV)[None, :]
    source = rank * out_strides[0] + token * out_strides[1] + kv_head * out_strides[2] + last * out_strides[3]
    target = (
        rank * packed_strides[0] + token * packed_strides[1] + kv_head * packed_strides[2] + last * packed_strides[3]
    )
    values = tl.load(out_ptr + source[:, None] + width[None, :], mask=mask, other=0.0)
    tl.store(packed_ptr + target[:, None] + width[None, :], values, mask=mask)
    source = rank * lse_strides[0] + token * lse_strides[1] + kv_head * lse_strides[2] + last * lse_strides[3]
    target = (
        rank * packed_lse_strides[0]
        + token * packed_lse_strides[1]
        + kv_head * packed_lse_strides[2]
        + last * packed_lse_strides[3]
    )
    tl.store(packed_lse_ptr + target, tl.load(lse_ptr + source, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["rows", "own"], do_not_specialize_on_alignment=FLEXIBLE)
def merge_rank_states_kernel(
    parts_ptr,
    lses_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    rows,
    own,
    part_strides,
    lses_strides,
    out_strides,
    lse_strides,
    RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SHAPE: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Merge ``ROWS`` rows of the ranks' partial results, or weigh rank ``own``'s results."""
    # Memory traffic: each partial once, but none whose LSE is -inf, and the result.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    ranks = tl.arange(0, BLOCK_RANKS)
    where = offsets_of(row, (lses_strides[1], lses_strides[2], lses_strides[3], lses_strides[4]), SHAPE)
    some = (ranks < RANKS)[:, None] & inside[None, :]
    lses = tl.load(
        lses_ptr + ranks.to(tl.int64)[:, None] * lses_strides[0] + where[None, :], mask=some, other=float("-inf")
    )
    largest = tl.max(lses, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % (SHAPE[0] * SHAPE[1] * SHAPE[2]), mask=inside, other=float("-inf"))
        largest = tl.maximum(largest, sink)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2((lses - base[None, :]) * LOG2E)
    total = tl.sum(weights, 0)
    if sinks_ptr is not None:
        total += tl.exp2((sink - base) * LOG2E)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    width = tl.arange(0, BLOCK_DV)
    mask = inside[:, None] & (width < DV)[None, :]
    where = offsets_of(row, (part_strides[1], part_strides[2], part_strides[3], part_strides[4]), SHAPE)
    merged = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for part in tl.static_range(RANKS if MERGED else 1):
        chosen = part if MERGED else own
        weight = tl.sum(tl.where((ranks == chosen)[:, None], weights, 0.0), 0)
        source = parts_ptr + part * part_strides[0] + where[:, None] + width[None, :]
        values = tl.load(source, mask=mask & (weight > 0)[:, None], other=0.0).to(tl.float32)
        merged += values * (weight * inverse)[:, None]
    target = out_ptr + offsets_of(row, out_strides, SHAPE)[:, None] + width[None, :]
    tl.store(target, merged.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + offsets_of(row, lse_strides, SHAPE), natural_lse(base * LOG2E, total), mask=inside)


_pack = Relaunches(pack_attn_states_kernel, num_warps=4)
_merge = Relaunches(merge_rank_states_kernel, num_warps=4)


def pack_attn_states(output: Tensor, lse: Tensor, packed_output: Tensor, packed_lse: Tensor) -> None:
    """As ``attn_select.runtime.ops.pack_attn_states``; the last dimension of the outputs is contiguous."""
    ranks, tokens, kv_heads, group, width = output.shape
    rows = ranks * tokens * kv_heads * group
    if not rows:
        return
    strides = output.stride()[:4], lse.stride(), packed_output.stride()[:4], packed_lse.stride()
    key = kv_heads, group, width, strides, *specialised(output, packed_output), *dtypes(lse, packed_lse)
    _pack(
        key, (-(-rows // ROWS), 1, 1), output, lse, packed_output, packed_lse, rows, tokens, *strides,
        kv_heads, group, width, launch.power_of_two(width), ROWS,
    )  # fmt: skip


def merge_rank_states(
    parts: Tensor, lses: Tensor, own: int, sinks: Tensor | None, output: Tensor, output_lse: Tensor | None = None
) -> None:
    """As ``attn_select.runtime.ops.merge_rank_states``; the last dimension of the outputs is contiguous."""
    shape, width = output.shape[:-1], output.shape[-1]
    rows = output.numel() // width
    if not rows:
        return
    ranks = lses.shape[0]
    missing = (0,) * (4 - len(shape))
    of_lse = (0,) * len(shape) if output_lse is None else output_lse.stride()
    strides = (
        (parts.stride(0), *parts.stride()[1:-1], *missing), (lses.stride(0), *lses.stride()[1:], *missing),
        (*output.stride()[:-1], *missing), (*of_lse, *missing),
    )  # fmt: skip
    sizes = (*shape[1:], *(1,) * len(missing))
    if sinks is not None:
        sinks = sinks.contiguous()
    key = (
        ranks, sizes, width, own < 0, strides, *specialised(parts, output), *dtypes(lses, sinks, output_lse),
    )  # fmt: skip
    _merge(
        key, (-(-rows // ROWS), 1, 1), parts, lses, sinks, output, output_lse, rows, own, *strides,
        ranks, launch.power_of_two(ranks), sizes, width, launch.power_of_two(width), ROWS,
        own < 0,
    )  # fmt: skip
