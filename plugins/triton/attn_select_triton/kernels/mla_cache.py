"""Writing a paged cache of latents, and copying parts of it into contiguous memory."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels.launch import FP8, power_of_two
from attn_select_triton.kernels.primitives import saturated
from attn_select_triton.kernels.relaunch import Relaunches, dtypes, specialised

WRITE_TOKENS = 4  # Tokens of one program of the cache update
GATHER_TOKENS = 16  # Tokens of one program of the gather
MOST_COLUMNS = 512  # Columns that the gather copies at a time
# Pointers into slices of a step's tensors, aligned to 16 bytes in one step and not in another: one kernel for both.
SLICED = ["slot_ptr", "table_ptr", "starts_ptr", "start_loc_ptr", "scale_ptr"]


@triton.jit
def write_part(
    source_ptr, target_ptr, scale_ptr, kept, stride_source, stride_target, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write ``SIZE`` columns of ``TOKENS`` rows, at which the pointers are; FP8 divided by its scale and saturated."""
    column = tl.arange(0, BLOCK)
    mask = kept[:, None] & (column < SIZE)[None, :]
    # What is masked is read as 1: an exact division of 0 takes many times as long.
    numbers = tl.load(source_ptr[:, None] + (column * stride_source)[None, :], mask=mask, other=1.0)
    if LIMIT > 0:
        numbers = saturated(numbers, tl.load(scale_ptr), LIMIT)
    target = target_ptr[:, None] + (column * stride_target)[None, :]
    tl.store(target, numbers.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=SLICED)
def concat_and_cache_mla_kernel(
    latent_ptr,
    rope_ptr,
    cache_ptr,
    slot_ptr,
    scale_ptr,
    tokens,
    stride_l,
    stride_ld,
    stride_r,
    stride_rd,
    stride_b,
    stride_t,
    stride_d,
    BLOCK_SIZE: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LIMIT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write ``TOKENS`` tokens to their slots. Memory traffic: each latent and rope part read and written once."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_ptr + token, mask=token < tokens, other=-1)
    kept = slot >= 0
    slot = tl.where(kept, slot, 0).to(tl.int64)
    row = cache_ptr + slot // BLOCK_SIZE * stride_b + slot % BLOCK_SIZE * stride_t
    token = token.to(tl.int64)
    write_part(latent_ptr + token * stride_l, row, scale_ptr, kept, stride_ld, stride_d, R, BLOCK_R, LIMIT, TOKENS)
    write_part(
        rope_ptr + token * stride_r, row + R * stride_d, scale_ptr, kept, stride_rd, stride_d, P, BLOCK_P, LIMIT, TOKENS
    )


_write = Relaunches(concat_and_cache_mla_kernel, num_warps=4)


def concat_and_cache_mla(
    kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scale: Tensor
) -> None:
    """Write latents and rope parts to their slots; a token with slot -1 is skipped.

    Args:
        kv_c_normed: ``(T, R)``, any strides; k_pe ``(T, P)`` likewise.
        kv_cache: ``(num_blocks, block_size, R + P)``, any strides.
        slot_mapping: int64 ``(T,)``.
        scale: float32 on the device, one number, read where the cache is FP8, which stores ``x / scale``.
    """
    tokens, (rank, rope) = slot_mapping.shape[0], (kv_c_normed.shape[1], k_pe.shape[1])
    if not tokens:
        return
    strides = (*kv_c_normed.stride(), *k_pe.stride(), *kv_cache.stride())
    sizes = kv_cache.shape[1], rank, power_of_two(rank), rope, power_of_two(rope)
    limit = torch.finfo(kv_cache.dtype).max if kv_cache.dtype in FP8 else 0.0
    tensors, others = (kv_c_normed, k_pe, kv_cache), (slot_mapping, scale)
    _write(
        (*strides, *sizes, *specialised(*tensors), *dtypes(*others)), (-(-tokens // WRITE_TOKENS), 1, 1),
        *tensors, *others, tokens, *strides, *sizes, limit, WRITE_TOKENS,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "steps", "stride_table"], do_not_specialize_on_alignment=SLICED
)
def gather_cache_mla_kernel(
    cache_ptr,
    out_ptr,
    table_ptr,
    starts_ptr,
    start_loc_ptr,
    scale_ptr,
    num_tokens,
    num_requests,
    steps,
    stride_table,
    stride_b,
    stride_t,
    stride_d,
    stride_o,
    stride_od,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Copy ``TOKENS`` tokens. Memory traffic: each latent read and written once."""
    # The request of a token is found by ``steps`` halvings of the sums of lengths, which stay in the caches.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    low = tl.zeros([TOKENS], tl.int32)
    high = low + num_requests
    for _ in range(steps):  # as many for each token of the tile: those that are found stay where they are
        middle = (low + high) // 2
        open_ = low < high
        behind = open_ & (tl.load(start_loc_ptr + 1 + middle, mask=open_, other=0) <= token)
        high = tl.where(open_ & (behind == 0), middle, high)
        low = tl.where(behind, middle + 1, low)
    position = token - tl.load(start_loc_ptr + low, mask=inside, other=0)
    position += tl.load(starts_ptr + low, mask=inside, other=0)
    entry = table_ptr + low.to(tl.int64) * stride_table + position // BLOCK_SIZE
    block = tl.load(entry, mask=inside, other=0).to(tl.int64)
    source = cache_ptr + block * stride_b + position % BLOCK_SIZE * stride_t
    target = out_ptr + token.to(tl.int64) * stride_o
    scale = tl.load(scale_ptr) if SCALED else 1.0
    for first in tl.static_range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = inside[:, None]
        if D % COLUMNS > 0:
            mask = mask & (column < D)[None, :]
        numbers = tl.load(source[:, None] + (column * stride_d)[None, :], mask=mask)
        if SCALED:
            numbers = numbers.to(tl.float32) * scale
        tl.store(target[:, None] + (column * stride_od)[None, :], numbers.to(out_ptr.dtype.element_ty), mask=mask)


_gather = Relaunches(gather_cache_mla_kernel, num_warps=4)


def gather_cache_mla(
    kv_cache: Tensor,
    output: Tensor,
    block_table: Tensor,
    starts: Tensor,
    start_loc: Tensor,
    num_tokens: int,
    block_size: int,
    scale: Tensor,
) -> None:
    """Copy a range of each request's cached latents into contiguous memory, FP8 times its scale.

    Args:
        kv_cache: ``(num_blocks, block_size, D)``, any strides.
        output: ``(at least num_tokens, D)``, any strides; rows from ``num_tokens`` on are left alone.
        block_table: int32 ``(B, W)``, each row contiguous.
        starts: int32 ``(B,)``, first position to copy of each request.
        start_loc: int32 ``(B + 1,)``, prefix sums of the lengths to copy.
        num_tokens: their sum, known to the host.
        block_size: tokens per block.
        scale: float32 on the device, one number, read where the cache is FP8.
    """
    if not num_tokens:
        return
    width, requests = kv_cache.shape[2], block_table.shape[0]
    columns = min(MOST_COLUMNS, max(16, width & -width))
    others, strides = (block_table, starts, start_loc, scale), (*kv_cache.stride(), *output.stride())
    _gather(
        (*strides, block_size, width, *specialised(kv_cache, output), *dtypes(*others)),
        (-(-num_tokens // GATHER_TOKENS), 1, 1), kv_cache, output, *others, num_tokens, requests,
        requests.bit_length(), block_table.stride(0), *strides, block_size, width, columns, kv_cache.dtype in FP8,
        GATHER_TOKENS,
    )  # fmt: skip
