"""Writing a paged cache, and copying its pages into contiguous memory."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels.launch import FP8, SLICED, cache_strides, power_of_two
from attn_select_triton.kernels.primitives import saturated
from attn_select_triton.kernels.relaunch import Relaunch, Relaunches, dtypes, specialised

# ``gather_pages`` fills whole tiles of this many keys: no tile of a prefill then holds anything but keys and zeros.
GATHER_ALIGN = 64
GATHER_TOKENS = 8  # Tokens, all heads, of one program of the gather
WRITE_TOKENS = 4  # Tokens, all heads, of one program of the cache update


@triton.jit
def plain(numbers, element: tl.constexpr):
    """Return numbers cast to ``element``, FP8 by way of float32: the interpreter has no other way to bfloat16."""
    if numbers.dtype.is_fp8():
        numbers = numbers.to(tl.float32)
    return numbers.to(element)


@triton.jit(do_not_specialize=["stride_table", "window"], do_not_specialize_on_alignment=SLICED)
def gather_pages_kernel(
    k_ptr,
    v_ptr,
    k_out_ptr,
    v_out_ptr,
    table_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    seq_lens_ptr,
    window,
    stride_table,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_kot,
    stride_koh,
    stride_vot,
    stride_voh,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Copy ``TOKENS`` tokens of one request, all heads, into rows of ``BLOCK_D`` and ``BLOCK_DV`` elements a head."""
    # Memory traffic: each key and value that some query sees read once and written once, plus zeros up to ``ALIGN``.
    request = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + request)
    low = 0
    if window > 0:
        query_len = tl.load(query_start_loc_ptr + request + 1) - tl.load(query_start_loc_ptr + request)
        low = tl.maximum(seq_len - query_len - window + 1, 0)
    first = low // ALIGN * ALIGN + tl.program_id(0) * TOKENS
    if first >= tl.cdiv(seq_len, ALIGN) * ALIGN:
        return
    token = first + tl.arange(0, TOKENS)
    inside = (token >= low) & (token < seq_len)
    pages = tl.load(table_ptr + request.to(tl.int64) * stride_table + token // BLOCK_SIZE, mask=inside, other=0)
    pages = pages.to(tl.int64)
    rows = (tl.load(key_start_loc_ptr + request) + token).to(tl.int64)

    # All heads of a token side by side; what is not read is written as zeros, so that rows and heads are padded.
    element = tl.arange(0, BLOCK_K)
    head, column = element // BLOCK_D, element % BLOCK_D
    written = (head < HEADS)[None, :]
    source = (pages * stride_kb + token % BLOCK_SIZE * stride_kt)[:, None] + (head * stride_kh + column)[None, :]
    key = tl.load(k_ptr + source, mask=inside[:, None] & ((head < HEADS) & (column < D))[None, :], other=0.0)
    target = rows[:, None] * stride_kot + (head * stride_koh + column)[None, :]
    tl.store(k_out_ptr + target, plain(key, k_out_ptr.dtype.element_ty), mask=written)

    element = tl.arange(0, BLOCK_V)
    head, column = element // BLOCK_DV, element % BLOCK_DV
    written = (head < HEADS)[None, :]
    source = (pages * stride_vb + token % BLOCK_SIZE * stride_vt)[:, None] + (head * stride_vh + column)[None, :]
    value = tl.load(v_ptr + source, mask=inside[:, None] & ((head < HEADS) & (column < DV))[None, :], other=0.0)
    target = rows[:, None] * stride_vot + (head * stride_voh + column)[None, :]
    tl.store(v_out_ptr + target, plain(value, v_out_ptr.dtype.element_ty), mask=written)


_gather = Relaunches(gather_pages_kernel, num_warps=4)


def gather_pages(
    key: Tensor,
    value: Tensor,
    key_out: Tensor,
    value_out: Tensor,
    *,
    block_table: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    seq_lens: Tensor,
    max_keys: int,
    window: int = 0,
) -> None:
    """Copy the keys and values that a prefill needs from pages into contiguous rows, FP8 as plain numbers.

    Token j of request r goes to row ``key_start_loc[r] + j``. Rows in between up to a multiple of ``GATHER_ALIGN``
    tokens are zeroed, so requests must not come closer than that.

    Args:
        key: ``(num_blocks, block_size, Hkv, D)``, any strides but the last, 1; value ``(…, Dv)`` likewise.
        key_out: ``(rows, Hkv, power_of_two(D))``, written; value_out likewise. FP8 is cast, not scaled.
        block_table: int32 ``(B, W)``.
        key_start_loc: int32 ``(B,)``: the row of each request's token 0. May be negative with a window: the first row
            written is that of token ``max(0, seq_len - query_len - window + 1)``, rounded down to ``GATHER_ALIGN``.
        max_keys: no request copies more tokens, the rounding included; known to the host.
        window: as ``Terms.window``; 0 copies everything.
    """
    heads, size = key.shape[-2:]
    value_size = value.shape[-1]
    block_d, block_dv = key_out.shape[-1], value_out.shape[-1]
    tensors, of_step = (key, value, key_out, value_out), (block_table, query_start_loc, key_start_loc, seq_lens)
    strides = (*key.stride()[:3], *value.stride()[:3], *key_out.stride()[:2], *value_out.stride()[:2])
    sizes = key.shape[1], heads, size, block_d, value_size, block_dv
    _gather(
        (*strides, *sizes, *specialised(*tensors), *dtypes(*of_step)),
        (-(-max_keys // GATHER_TOKENS), len(seq_lens), 1), *tensors, *of_step, window, block_table.stride(0), *strides,
        *sizes, power_of_two(heads * block_d), power_of_two(heads * block_dv), GATHER_ALIGN, GATHER_TOKENS,
    )  # fmt: skip


@triton.jit
def stored(numbers, scale_ptr, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, head, limit, element: tl.constexpr):
    """Return numbers as the cache holds them: FP8 divided by its scale, saturated, rounded to nearest even."""
    if limit > 0:
        scale = tl.load(scale_ptr + head, mask=head < HEADS, other=1.0)[None, :] if PER_HEAD else tl.load(scale_ptr)
        numbers = saturated(numbers, scale, limit)
    return numbers.to(element)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=SLICED)
def reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tokens,
    stride_key,
    stride_keyh,
    stride_value,
    stride_valueh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_vd,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    PACK: tl.constexpr,
    LIMIT: tl.constexpr,
    PER_HEAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write ``TOKENS`` tokens, all heads, to their slots. Memory traffic: each key and value read and written once."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_ptr + token, mask=token < tokens, other=-1)
    kept = slot >= 0
    block = tl.where(kept, slot // BLOCK_SIZE, 0).to(tl.int64)
    offset = tl.where(kept, slot % BLOCK_SIZE, 0)
    token = token.to(tl.int64)

    # What is masked is read as 1: an exact division of 0 takes many times as long.
    element = tl.arange(0, BLOCK_K)
    head, column = element // D, element % D
    mask = kept[:, None] & (head < HEADS)[None, :]
    key = tl.load(key_ptr + token[:, None] * stride_key + (head * stride_keyh + column)[None, :], mask, 1.0)
    key = stored(key, k_scale_ptr, HEADS, PER_HEAD, head, LIMIT, k_ptr.dtype.element_ty)
    place = column * stride_kd
    if PACK > 0:
        place = column // PACK * stride_kd + column % PACK
    target = (block * stride_kb + offset * stride_kt)[:, None] + (head * stride_kh + place)[None, :]
    tl.store(k_ptr + target, key, mask=mask)

    element = tl.arange(0, BLOCK_V)
    head, column = element // DV, element % DV
    mask = kept[:, None] & (head < HEADS)[None, :]
    value = tl.load(value_ptr + token[:, None] * stride_value + (head * stride_valueh + column)[None, :], mask, 1.0)
    value = stored(value, v_scale_ptr, HEADS, PER_HEAD, head, LIMIT, v_ptr.dtype.element_ty)
    target = (block * stride_vb + offset * stride_vt)[:, None] + (head * stride_vh + column * stride_vd)[None, :]
    tl.store(v_ptr + target, value, mask=mask)


# The launches of the kernel and its last arguments, by all that these follow from.
_updates: dict[Any, tuple[Relaunch, tuple[Any, ...]]] = {}


def _update_of(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    k_scale: Tensor, v_scale: Tensor,
) -> tuple[Relaunch, tuple[Any, ...]]:  # fmt: skip
    """Return a value of ``_updates``; arguments as ``write_kv`` has them."""
    _, heads, size = key.shape
    value_size = value.shape[-1]
    same = (
        heads, size, value_size, key_cache.shape[1:], k_scale.ndim, key.stride(), value.stride(), key_cache.stride(),
        value_cache.stride(), *specialised(key, value, key_cache, value_cache), *dtypes(slot_mapping, k_scale, v_scale),
    )  # fmt: skip
    found = _updates.get(same)
    if found is None:
        block_size, pack, k_strides, v_strides = cache_strides(key_cache, value_cache, True)
        limit = torch.finfo(key_cache.dtype).max if key_cache.dtype in FP8 else 0.0
        arguments = (
            *key.stride()[:2], *value.stride()[:2], *k_strides, *v_strides, block_size, heads, size, value_size, pack,
            limit, k_scale.ndim > 0, power_of_two(heads * size), power_of_two(heads * value_size), WRITE_TOKENS,
        )  # fmt: skip
        found = _updates[same] = Relaunch(reshape_and_cache_kernel, num_warps=4), arguments
    return found


class CacheUpdate:
    """The update of one layer's cache, ready for its steps: what they share is worked out once.

    Args:
        key_cache, value_cache, k_scale, v_scale: as ``write_kv`` has them.
    """

    def __init__(self, key_cache: Tensor, value_cache: Tensor, k_scale: Tensor, v_scale: Tensor) -> None:
        self._caches, self._scales = (key_cache, value_cache), (k_scale, v_scale)
        # Of the step before, which is most often like the next one.
        self._seen: Any = None
        self._found: tuple[Relaunch, tuple[Any, ...]] | None = None

    def __call__(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Write the first keys and values, as many as there are slots; a layer's have one number of heads and size."""
        tokens = slot_mapping.shape[0]
        if not tokens:
            return
        seen = (
            key.dtype, value.dtype, slot_mapping.dtype, key.data_ptr() % 16, value.data_ptr() % 16, key.stride(),
            value.stride(),
        )  # fmt: skip
        if seen != self._seen or self._found is None:
            self._found, self._seen = _update_of(key, value, *self._caches, slot_mapping, *self._scales), seen
        launch, arguments = self._found
        launch(
            (-(-tokens // WRITE_TOKENS), 1, 1), key, value, *self._caches, slot_mapping, *self._scales, tokens,
            *arguments,
        )  # fmt: skip


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    k_scale: Tensor, v_scale: Tensor,
) -> None:  # fmt: skip
    """Write keys ``(T, Hkv, D)`` and values ``(T, Hkv, Dv)`` to their slots; a token with slot -1 is skipped.

    Args:
        key_cache: ``(num_blocks, block_size, Hkv, D)`` with any strides, or the classic K
            ``(num_blocks, Hkv, D / x, block_size, x)``.
        value_cache: ``(num_blocks, block_size, Hkv, Dv)`` with any strides (the classic V as a permuted view).
        slot_mapping: int64 ``(T,)``.
        k_scale: float32 on the device, ``()`` or ``(Hkv,)``, read where the cache is FP8; v_scale likewise.
    """
    CacheUpdate(key_cache, value_cache, k_scale, v_scale)(key, value, slot_mapping)
