"""The slots that tokens of sparse MLA attend to, put in order for kernels that read a row's first ones."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels.launch import power_of_two
from attn_select_triton.kernels.relaunch import Relaunches, dtypes, specialised

COLUMNS = 256  # Pages of a program of ``rows_of_pages_kernel``


@triton.jit(do_not_specialize=["stride"])
def slots_in_front_kernel(
    slots_ptr, front_ptr, counts_ptr, rows_ptr, stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Move the slots of one token to the front and count them. Memory traffic: the slots once each way."""
    # rows_ptr: of ``rows_of_pages``, for pages of ``PAGE`` tokens; 0: slots stay as they are.
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + token * stride + column, mask=column < TOP_K, other=-1)
    chosen = slots >= 0
    if PAGE > 0:
        rows = tl.load(rows_ptr + slots // PAGE, mask=chosen, other=0) + slots % PAGE
        slots = tl.where(chosen, rows, slots)
    seen = tl.cumsum(chosen.to(tl.int32), 0)
    count = tl.max(seen, 0)
    place = tl.where(chosen, seen - 1, count + column - seen)
    tl.store(front_ptr + token * TOP_K + place, tl.where(chosen, slots, -1), mask=column < TOP_K)
    tl.store(counts_ptr + token, count)


_in_front = Relaunches(slots_in_front_kernel, num_warps=4)


def slots_in_front(topk_indices: Tensor, rows: Tensor | None = None, page: int = 0) -> tuple[Tensor, Tensor]:
    """As ``attn_select.runtime.torch_ops.slots_in_front``; the last dimension is contiguous."""
    # rows: of ``rows_of_pages``: slots of pages of ``page`` tokens become the rows that they were copied to.
    tokens, top_k = topk_indices.shape
    front = torch.empty(tokens, top_k, dtype=torch.int32, device=topk_indices.device)
    counts = front.new_empty(tokens)
    if tokens:
        key = (top_k, page, *specialised(topk_indices, front, counts))
        _in_front(
            key, (tokens, 1, 1), topk_indices, front, counts, rows, topk_indices.stride(0), top_k, power_of_two(top_k),
            page,
        )  # fmt: skip
    return front, counts


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["table_ptr", "start_loc_ptr"])
def rows_of_pages_kernel(table_ptr, start_loc_ptr, rows_ptr, stride, PAGE: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the row of one request's ``COLUMNS`` pages. Memory traffic: a number read and one written for each."""
    request = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(start_loc_ptr + request)
    used = column * PAGE < tl.load(start_loc_ptr + request + 1) - start
    page = tl.load(table_ptr + request.to(tl.int64) * stride + column, mask=used, other=0)
    tl.store(rows_ptr + page, start + column * PAGE, mask=used)


_rows = Relaunches(rows_of_pages_kernel, num_warps=4)


def rows_of_pages(block_table: Tensor, start_loc: Tensor, num_blocks: int, page: int) -> Tensor:
    """Return to which row each page's first token goes where all keys of each request are copied one after the other.

    Args:
        block_table: int32 ``(B, W)``, each row contiguous.
        start_loc: int32 ``(B + 1,)``, prefix sums of the requests' lengths in whole pages: of a page that requests
            share, every copy is whole.
        num_blocks: of the cache, each of ``page`` tokens.

    Returns:
        int32 ``(num_blocks,)``; 0 for pages of no request.
    """
    requests, width = block_table.shape
    rows = block_table.new_zeros(num_blocks)
    key = (page, rows.get_device(), *dtypes(block_table, start_loc))
    grid = (requests, -(-width // COLUMNS), 1)
    _rows(key, grid, block_table, start_loc, rows, block_table.stride(0), page, COLUMNS)
    return rows
