"""Small memory-bound kernels beside attention: FP8 quantisation and the flattening of block tables."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels.launch import FP8
from attn_select_triton.kernels.primitives import saturated
from attn_select_triton.kernels.relaunch import Relaunches, dtypes, specialised

# Elements of one program of ``quantize_fp8``, and of the latent part in ``concat_and_quantize_mla_q``.
QUANTIZE_BLOCK = 2048
FLATTEN_BLOCK = 1024  # Columns of one step of ``flatten_block_table``
_LIMITS = {dtype: torch.finfo(dtype).max for dtype in FP8}


@triton.jit(do_not_specialize=["units", "stride", "tiles"], do_not_specialize_on_alignment=["scale_ptr"])
def quantize_fp8_kernel(
    numbers_ptr, out_ptr, scale_ptr, units, stride, tiles, UNIT: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Scale and cast ``BLOCK`` elements of a row of ``units * UNIT``; the next is ``stride * UNIT`` elements behind."""
    # Memory traffic: each number read once, its byte written once.
    columns = units.to(tl.int64) * UNIT
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    # What is masked is read as 1: an exact division of 0 takes many times as long.
    numbers = tl.load(numbers_ptr + row * stride * UNIT + column, mask=inside, other=1.0)
    quantized = saturated(numbers, tl.load(scale_ptr), LIMIT).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * columns + column, quantized, mask=inside)


_quantize = Relaunches(quantize_fp8_kernel, num_warps=4)


def quantize_fp8(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``attn_select.runtime.torch_ops.quantize_fp8``: one pass over the numbers. The result is contiguous."""
    out = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
    if not out.numel():
        return out
    rows, columns, stride = 1, numbers.numel(), 0
    if not numbers.is_contiguous():
        # Tokens cut from a wider tensor: queries, say, beside their keys.
        if numbers.stride()[1:] == out.stride()[1:] or numbers[0].is_contiguous():
            rows, stride = len(numbers), numbers.stride(0)
            columns //= rows
        else:
            numbers = numbers.contiguous()
    tiles = -(-columns // QUANTIZE_BLOCK)
    unit = 1 if columns % 8 or stride % 8 else 8
    units, stride = columns // unit, stride // unit
    key = (*specialised(numbers, out), scale.dtype, unit, units >> 31, stride >> 31)  # 32 or 64 bits, by their size
    grid = (rows * tiles, 1, 1)
    _quantize(key, grid, numbers, out, scale, units, stride, tiles, unit, _LIMITS[dtype], QUANTIZE_BLOCK)
    return out


@triton.jit(
    do_not_specialize=[
        "rows", "heads", "stride_latent", "stride_latent_head", "stride_rope", "stride_rope_head",
    ],
    do_not_specialize_on_alignment=["scale_ptr"],
)  # fmt: skip
def concat_and_quantize_mla_q_kernel(
    latent_ptr, rope_ptr, out_ptr, scale_ptr, rows, heads, stride_latent, stride_latent_head, stride_rope,
    stride_rope_head, UNIT: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, RANK_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Scale and cast the two parts of ``ROWS`` rows, each a head of a token, and write them side by side."""
    # Strides are counted in ``UNIT`` elements.
    # Memory traffic: each number read once, its byte written once.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // heads).to(tl.int64)[:, None] * UNIT, (row % heads).to(tl.int64)[:, None] * UNIT
    inside, scale = (row < rows)[:, None], tl.load(scale_ptr)
    out = out_ptr + row.to(tl.int64)[:, None] * (RANK + ROPE)
    column = tl.arange(0, RANK_BLOCK)[None, :]
    mask = inside & (column < RANK)
    numbers = tl.load(latent_ptr + token * stride_latent + head * stride_latent_head + column, mask=mask, other=1.0)
    tl.store(out + column, saturated(numbers, scale, LIMIT).to(out_ptr.dtype.element_ty), mask=mask)
    column = tl.arange(0, ROPE_BLOCK)[None, :]
    mask = inside & (column < ROPE)
    numbers = tl.load(rope_ptr + token * stride_rope + head * stride_rope_head + column, mask=mask, other=1.0)
    tl.store(out + RANK + column, saturated(numbers, scale, LIMIT).to(out_ptr.dtype.element_ty), mask=mask)


_concat_and_quantize = Relaunches(concat_and_quantize_mla_q_kernel, num_warps=4)


def concat_and_quantize_mla_q(latent: Tensor, rope: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``attn_select.runtime.torch_ops.concat_and_quantize_mla_q``: one pass over the numbers."""
    tokens, heads, rank = latent.shape
    width = rope.shape[2]
    out = torch.empty((tokens, heads, rank + width), dtype=dtype, device=latent.device)
    if not tokens:
        return out
    strides = (*latent.stride()[:2], *rope.stride()[:2])
    together = strides[0] | strides[1] | strides[2] | strides[3]
    unit = 1 if together % 8 else 8
    units = [stride // unit for stride in strides]
    sizes = _blocks(rank, width, _LIMITS[dtype])
    wide = together >> 31 and tuple([stride >> 31 for stride in units])  # 32 or 64 bits, by their size
    key = (*specialised(latent, rope, out), scale.dtype, unit, wide, sizes)
    rows = tokens * heads
    grid = (-(-rows // sizes[3]), 1, 1)
    _concat_and_quantize(key, grid, latent, rope, out, scale, rows, heads, *units, unit, *sizes)
    return out


@cache
def _blocks(rank: int, width: int, limit: float) -> tuple[int, int, float, int, int, int]:
    """Return the constants from ``RANK`` on."""
    blocks = triton.next_power_of_2(rank), triton.next_power_of_2(width)
    return rank, width, limit, max(1, QUANTIZE_BLOCK // blocks[0]), *blocks


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr", "indptr_ptr", "out_ptr"])
def flatten_block_table_kernel(table_ptr, indptr_ptr, out_ptr, stride_table, BLOCK: tl.constexpr):
    """Copy the blocks of one row of the table; one program per row. Memory traffic: each block id once."""
    row = tl.program_id(0)
    first = tl.load(indptr_ptr + row)
    count = tl.load(indptr_ptr + row + 1) - first
    for start in range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        blocks = tl.load(table_ptr + row.to(tl.int64) * stride_table + column, mask=column < count)
        tl.store(out_ptr + first + column, blocks, mask=column < count)


_flatten = Relaunches(flatten_block_table_kernel, num_warps=4)


def flatten_block_table(block_table: Tensor, indptr: Tensor, out: Tensor) -> None:
    """As ``attn_select.runtime.torch_ops.flatten_block_table``; the rows' elements and ``out`` are contiguous."""
    key = (out.get_device(), *dtypes(block_table, indptr, out))
    _flatten(key, (len(block_table), 1, 1), block_table, indptr, out, block_table.stride(0), FLATTEN_BLOCK)
