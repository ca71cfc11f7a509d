"""Small memory-bound kernels beside attention: FP8 quantisation and the flattening of block tables."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels.cache import saturated

QUANTIZE_BLOCK = 2048
"""Elements of one program of ``quantize_fp8``."""
FLATTEN_BLOCK = 1024
"""Columns of one step of ``flatten_block_table``."""


@triton.jit(do_not_specialize=["units", "tiles"])
def quantize_fp8_kernel(
    numbers_ptr, out_ptr, scale_ptr, units, tiles, stride_row, UNIT: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Scale and cast ``BLOCK`` elements of a row of ``units * UNIT``.

    Memory traffic: each number read once, its byte written once.
    """
    columns = units * UNIT
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    numbers = tl.load(numbers_ptr + row * stride_row + column, mask=inside, other=0.0)
    quantized = saturated(numbers, tl.load(scale_ptr), LIMIT).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * columns + column, quantized, mask=inside)


def quantize_fp8(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``attn_select.runtime.torch_ops.quantize_fp8``: one pass over the numbers. The result is contiguous."""
    out = torch.empty(numbers.shape, dtype=dtype, device=numbers.device)
    if not out.numel():
        return out
    rows, columns, stride = 1, numbers.numel(), 0
    if not numbers.is_contiguous():
        if numbers[0].is_contiguous():  # tokens cut from a wider tensor: queries, say, beside their keys
            rows, columns, stride = len(numbers), numbers[0].numel(), numbers.stride(0)
        else:
            numbers = numbers.contiguous()
    tiles = -(-columns // QUANTIZE_BLOCK)
    unit = 8 if columns % 8 == 0 else 1
    quantize_fp8_kernel[(rows * tiles,)](
        numbers, out, scale, columns // unit, tiles, stride, unit, torch.finfo(dtype).max, QUANTIZE_BLOCK, num_warps=4
    )
    return out


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


def flatten_block_table(block_table: Tensor, indptr: Tensor, out: Tensor) -> None:
    """As ``attn_select.runtime.torch_ops.flatten_block_table``; the rows' elements and ``out`` are contiguous."""
    flatten_block_table_kernel[(len(block_table),)](
        block_table, indptr, out, block_table.stride(0), FLATTEN_BLOCK, num_warps=4
    )
