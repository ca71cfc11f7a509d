"""The sparse indexer (DeepSeek Sparse Attention): quantising keys, scoring them, and keeping the best of each token.

What is computed is in ``attn_select.runtime.torch_indexer``. Scores of tokens that see no more keys than are kept are
not computed at all.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select.runtime.torch_indexer import IndexedRows, index_key_views
from attn_select_triton.kernels import launch

E4M3_MAX = tl.constexpr(448.0)
LEAST = tl.constexpr(1e-4)
QUANTIZED_ROWS = 16  # Rows of one program that quantises
KEYS, BLOCK_N = 1024, 128  # Keys of one token that a program scores, and of one step of it
TOPK_BLOCK = 2048  # Scores of one step of the selection
LONG = 16384  # Of so many keys and less, one program selects all of a token's
CHUNK = 8192  # The most keys that one program selects among: a multiple of ``TOPK_BLOCK``
DIGITS = 4  # Digits of 8 bits of a score
MOST_LOGITS = 2**26  # Scores that are held at once: 256 MiB


@triton.jit(do_not_specialize=["rows"])
def quantize_rows_kernel(
    numbers_ptr, codes_ptr, scales_ptr, slots_ptr, rows, stride_n, stride_cb, stride_ct, stride_sb,
    BLOCK_SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write e4m3 codes of ``ROWS`` rows and a scale for each: a power of two, at least ``max |x| / 448``."""
    # With slots into the places of a paged cache, and nowhere at slot -1. Memory traffic: each number once.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (column < D)[None, :]
    numbers = tl.load(numbers_ptr + row.to(tl.int64)[:, None] * stride_n + column[None, :], mask=mask, other=0.0)
    numbers = numbers.to(tl.float32)
    least = tl.maximum(tl.max(tl.abs(numbers), 1), LEAST) / E4M3_MAX
    bits = least.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)  # rounded up
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    codes = tl.minimum(tl.maximum(numbers / scale[:, None], -E4M3_MAX), E4M3_MAX).to(codes_ptr.dtype.element_ty)
    slot = row.to(tl.int64)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row, mask=inside, other=-1)
        inside = inside & (slot >= 0)
        mask = mask & (slot >= 0)[:, None]
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    place = block * stride_cb + offset * stride_ct
    tl.store(codes_ptr + place[:, None] + column[None, :], codes, mask=mask)
    tl.store(scales_ptr + block * stride_sb + offset, scale, mask=inside)


@triton.jit(do_not_specialize=["stride_table", "stride_logits"])
def index_logits_kernel(
    query_ptr, query_scale_ptr, weights_ptr, keys_ptr, key_scale_ptr, table_ptr, request_ptr, num_keys_ptr, logits_ptr,
    stride_wt, stride_kb, stride_kt, stride_sb, stride_table, stride_logits,
    TOP_K: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, KEYS: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Score up to ``KEYS`` keys of one token: ``sum_h weights[h] * relu(query[h] . key)``."""
    # With scales queries and keys are e4m3; ``WIDEN`` multiplies them as float32. Memory traffic: the
    # keys, once for each token, and the scores.
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(num_keys_ptr + token)
    start = tl.program_id(1) * KEYS
    if (seen <= TOP_K) | (start >= seen):
        return
    head, column = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask = (head < HEADS)[:, None] & (column < D)[None, :]
    query = tl.load(query_ptr + (token * HEADS + head)[:, None] * D + column[None, :], mask=mask, other=0.0)
    weight = tl.load(weights_ptr + token * stride_wt + head, mask=head < HEADS, other=0.0)
    if query_scale_ptr is not None:
        weight *= tl.load(query_scale_ptr + token * HEADS + head, mask=head < HEADS, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    table = table_ptr + tl.load(request_ptr + token).to(tl.int64) * stride_table
    for first in range(start, tl.minimum(start + KEYS, seen), BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        inside = position < seen
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = position % BLOCK_SIZE
        place = block * stride_kb + offset * stride_kt
        there = inside[:, None] & (column < D)[None, :]
        keys = tl.load(keys_ptr + place[:, None] + column[None, :], mask=there, other=0.0)
        if WIDEN:
            keys = keys.to(tl.float32)
        products = tl.dot(query, tl.trans(keys), input_precision="ieee")
        scores = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
        if key_scale_ptr is not None:
            scores *= tl.load(key_scale_ptr + block * stride_sb + offset, mask=inside, other=0.0)
        tl.store(logits_ptr + token * stride_logits + position, scores, mask=inside)


@triton.jit
def _ordered(numbers):
    """Return uint32 in the order of float32 numbers."""
    # A float's bits are in order but for the sign: negative ones run backwards, and below positive ones.
    bits = numbers.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _counted(logits, low, high, least, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many scores of ``[low, high)`` that begin with the digits of ``least`` have each next digit."""
    shift: tl.constexpr = 24 - 8 * STEP
    counts = tl.zeros([256], tl.int32)
    for start in range(low, high, BLOCK):
        position = start + tl.arange(0, BLOCK)
        counted = position < high
        number = _ordered(tl.load(logits + position, mask=counted, other=0.0))
        if STEP > 0:
            counted = counted & ((number ^ least) >> (shift + 8) == 0)
        counts += tl.histogram(((number >> shift) & 255).to(tl.int32), 256, mask=counted)
    return counts


@triton.jit
def _with_digit(counts, least, wanted, STEP: tl.constexpr):
    """Return ``least`` with its next digit, and how many of the scores that begin so are kept."""
    # How many scores have a digit or a larger one: it falls with the digit, and the last that reaches ``wanted`` is it.
    from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.sum((from_here >= wanted).to(tl.int32), 0) - 1
    wanted -= tl.sum(tl.where(tl.arange(0, 256) == digit, from_here - counts, 0), 0)
    return least | (digit.to(tl.uint32) << (24 - 8 * STEP)), wanted


@triton.jit
def _write_all(table, out, seen, TOP_K: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the slots of the first ``seen`` positions and -1 behind them."""
    for start in range(0, TOP_K, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < seen
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0)
        slot = tl.where(inside, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(out + position, slot, mask=position < TOP_K)


@triton.jit
def _write_kept(
    logits, table, out, low, high, least, wanted, written, ties, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the slots of scores of ``[low, high)`` above ``least``, and of equal ones up to ``wanted`` in all."""
    # written: slots that stand in ``out`` before; ties, equal scores before ``low``.
    # Tensors from the start, since the loop makes them ones.
    written = written + tl.zeros((), tl.int32)
    ties = ties + tl.zeros((), tl.int32)
    for start in range(low, high, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < high
        number = _ordered(tl.load(logits + position, mask=inside, other=0.0))
        equal = (inside & (number == least)).to(tl.int32)
        before = ties + tl.cumsum(equal, 0) - equal
        kept = ((inside & (number > least)) | ((equal != 0) & (before < wanted))).to(tl.int32)
        place = written + tl.cumsum(kept, 0) - kept
        block = tl.load(table + position // BLOCK_SIZE, mask=kept != 0, other=0)
        tl.store(out + place, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=kept != 0)
        written += tl.sum(kept, 0)
        ties += tl.sum(equal, 0)


@triton.jit(do_not_specialize=["stride_table", "stride_logits"])
def index_topk_kernel(
    logits_ptr, table_ptr, request_ptr, num_keys_ptr, out_ptr, stride_logits, stride_table, stride_out,
    TOP_K: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the slots of one token's ``TOP_K`` largest scores in the order of positions, -1 behind the last."""
    # The smallest score that is kept is found digit by digit, of 8 bits each (radix select). Memory traffic: the scores
    # five times, mostly out of the L2 cache.
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(num_keys_ptr + token)
    table = table_ptr + tl.load(request_ptr + token).to(tl.int64) * stride_table
    out, logits = out_ptr + token * stride_out, logits_ptr + token * stride_logits
    if seen <= TOP_K:
        _write_all(table, out, seen, TOP_K, BLOCK_SIZE, BLOCK)
        return
    least = tl.zeros((), tl.uint32)  # of those that are kept, its leading digits so far
    wanted = TOP_K  # of those that begin with them
    for step in tl.static_range(4):
        least, wanted = _with_digit(_counted(logits, 0, seen, least, step, BLOCK), least, wanted, step)
    _write_kept(logits, table, out, 0, seen, least, wanted, 0, 0, BLOCK_SIZE, BLOCK)


@triton.jit
def _leading_digits(counts_ptr, token, tokens, TOP_K: tl.constexpr, STEPS: tl.constexpr):
    """Return what ``index_topk_kernel`` knows after ``STEPS`` digits, of the counts that all programs summed."""
    least = tl.zeros((), tl.uint32)
    wanted = TOP_K
    for step in tl.static_range(STEPS):
        counts = tl.load(counts_ptr + (step * tokens + token) * 256 + tl.arange(0, 256))
        least, wanted = _with_digit(counts, least, wanted, step)
    return least, wanted


@triton.jit(do_not_specialize=["tokens", "stride_logits"])
def index_digit_kernel(
    logits_ptr, num_keys_ptr, counts_ptr, tokens, stride_logits,
    TOP_K: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what one chunk of a token's scores has to the counts int32 ``(4, tokens, 256)`` of digit ``STEP``."""
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(num_keys_ptr + token)
    low = tl.program_id(1) * CHUNK
    if (seen <= TOP_K) | (low >= seen):
        return
    least, _ = _leading_digits(counts_ptr, token, tokens, TOP_K, STEP)
    counts = _counted(logits_ptr + token * stride_logits, low, tl.minimum(low + CHUNK, seen), least, STEP, BLOCK)
    tl.atomic_add(counts_ptr + (STEP * tokens + token) * 256 + tl.arange(0, 256), counts, mask=counts > 0)


@triton.jit(do_not_specialize=["tokens", "stride_logits"])
def index_kept_kernel(
    logits_ptr, num_keys_ptr, counts_ptr, kept_ptr, tokens, stride_logits,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write how many of a chunk's scores are above the least that is kept, and how many equal it."""
    # kept_ptr: int32 ``(tokens, chunks, 2)``.
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(num_keys_ptr + token)
    low = tl.program_id(1) * CHUNK
    if (seen <= TOP_K) | (low >= seen):
        return
    least, _ = _leading_digits(counts_ptr, token, tokens, TOP_K, 4)
    logits, high = logits_ptr + token * stride_logits, tl.minimum(low + CHUNK, seen)
    above, equal = 0, 0
    for start in range(low, high, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < high
        number = _ordered(tl.load(logits + position, mask=inside, other=0.0))
        above += tl.sum((inside & (number > least)).to(tl.int32), 0)
        equal += tl.sum((inside & (number == least)).to(tl.int32), 0)
    kept = kept_ptr + (token * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(kept, above)
    tl.store(kept + 1, equal)


@triton.jit(do_not_specialize=["tokens", "stride_table", "stride_logits"])
def index_write_kernel(
    logits_ptr, table_ptr, request_ptr, num_keys_ptr, counts_ptr, kept_ptr, out_ptr, tokens, stride_logits,
    stride_table, stride_out, TOP_K: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what of one chunk is kept, behind what is kept of the chunks before: as ``index_topk_kernel`` would."""
    # ``CHUNKS`` is a power of two, at least the chunks that there are.
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(num_keys_ptr + token)
    chunk = tl.program_id(1)
    low = chunk * CHUNK
    table = table_ptr + tl.load(request_ptr + token).to(tl.int64) * stride_table
    out = out_ptr + token * stride_out
    if seen <= TOP_K:
        if chunk == 0:
            _write_all(table, out, seen, TOP_K, BLOCK_SIZE, BLOCK)
        return
    if low >= seen:
        return
    least, wanted = _leading_digits(counts_ptr, token, tokens, TOP_K, 4)
    other = tl.arange(0, CHUNKS)
    kept = kept_ptr + (token * tl.num_programs(1) + other) * 2
    # Chunks before this one wrote all that are above, and of the equal ones no more than are wanted.
    above = tl.sum(tl.load(kept, mask=other < chunk, other=0), 0)
    ties = tl.sum(tl.load(kept + 1, mask=other < chunk, other=0), 0)
    written = above + tl.minimum(ties, wanted)
    logits = logits_ptr + token * stride_logits
    high = tl.minimum(low + CHUNK, seen)
    _write_kept(logits, table, out, low, high, least, wanted, written, ties, BLOCK_SIZE, BLOCK)


def _select(logits: Tensor, rows: IndexedRows, block_size: int, topk_indices: Tensor) -> None:
    """Write the slots of the largest of ``logits`` ``(T, max_seq_len)``; long rows are shared by several programs."""
    tokens, length = len(topk_indices), rows.max_seq_len
    table, top_k = rows.block_table, topk_indices.shape[1]
    strides = logits.stride(0), table.stride(0), topk_indices.stride(0)
    where = table, rows.request, rows.num_keys
    if length <= LONG:
        index_topk_kernel[(tokens,)](logits, *where, topk_indices, *strides, top_k, block_size, TOPK_BLOCK, num_warps=8)
        return
    chunks = -(-length // CHUNK)
    grid = tokens, chunks
    counts = torch.zeros(DIGITS, tokens, 256, dtype=torch.int32, device=logits.device)
    kept = torch.empty(tokens, chunks, 2, dtype=torch.int32, device=logits.device)
    # A launch for each digit: which scores count for the next one follows from the counts of all chunks.
    for step in range(DIGITS):
        index_digit_kernel[grid](
            logits, rows.num_keys, counts, tokens, strides[0], top_k, step, CHUNK, TOPK_BLOCK, num_warps=8
        )
    index_kept_kernel[grid](
        logits, rows.num_keys, counts, kept, tokens, strides[0], top_k, CHUNK, TOPK_BLOCK, num_warps=8
    )
    index_write_kernel[grid](
        logits, *where, counts, kept, topk_indices, tokens, *strides, top_k, block_size, launch.power_of_two(chunks),
        CHUNK, TOPK_BLOCK, num_warps=8,
    )  # fmt: skip


def _quantized(numbers: Tensor, codes: Tensor, scales: Tensor, slots: Tensor | None, block_size: int) -> None:
    """Quantise rows ``(N, D)`` into ``codes`` and ``scales``, at ``slots`` of blocks where those are given."""
    rows, size = numbers.shape
    if rows:
        quantize_rows_kernel[(-(-rows // QUANTIZED_ROWS),)](
            numbers, codes, scales, slots, rows, numbers.stride(0), codes.stride(0), codes.stride(1), scales.stride(0),
            block_size, size, launch.power_of_two(size), QUANTIZED_ROWS,
        )  # fmt: skip


def indexer_k_quant_and_cache(key: Tensor, index_cache: Tensor, slot_mapping: Tensor) -> None:
    """As ``attn_select.runtime.torch_indexer.indexer_k_quant_and_cache``, for FP8 caches."""
    codes, scales = index_key_views(index_cache, key.shape[1])
    assert scales is not None
    _quantized(key, codes.view(torch.float8_e4m3fn), scales, slot_mapping, codes.shape[1])


def indexer_topk(
    query: Tensor, weights: Tensor, index_cache: Tensor, rows: IndexedRows, block_size: int, topk_indices: Tensor
) -> None:
    """As ``attn_select.runtime.torch_indexer.indexer_topk``; the chosen slots are in the order of positions."""
    tokens, heads, size = query.shape
    keys, scales = index_key_views(index_cache, size)
    query, fp8 = query.contiguous(), scales is not None
    query_scales = None
    if fp8:
        keys = keys.view(torch.float8_e4m3fn)
        codes = torch.empty(query.shape, dtype=keys.dtype, device=query.device)
        query_scales = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
        by_row = codes.view(-1, 1, size)
        _quantized(query.view(-1, size), by_row, query_scales.view(-1, 1), None, 1)
        query = codes
    step = max(1, MOST_LOGITS // max(1, rows.max_seq_len))
    logits = torch.empty(min(step, tokens), rows.max_seq_len, dtype=torch.float32, device=query.device)
    table, top_k = rows.block_table, topk_indices.shape[1]
    block_h, block_d = max(16, launch.power_of_two(heads)), max(32, launch.power_of_two(size))
    widen = fp8 and query.device.type != "cuda"  # the interpreter has no products of FP8
    for first in range(0, tokens, step):
        part = slice(first, min(first + step, tokens))
        mine = replace(rows, request=rows.request[part], num_keys=rows.num_keys[part])
        if rows.max_seq_len > top_k:
            index_logits_kernel[(len(mine.request), -(-rows.max_seq_len // KEYS))](
                query[part], None if query_scales is None else query_scales[part], weights[part], keys, scales, table,
                mine.request, mine.num_keys, logits, weights.stride(0), keys.stride(0), keys.stride(1),
                0 if scales is None else scales.stride(0), table.stride(0), logits.stride(0), top_k, block_size, heads,
                block_h, size, block_d, KEYS, BLOCK_N, widen,
            )  # fmt: skip
        _select(logits, mine, block_size, topk_indices[part])
