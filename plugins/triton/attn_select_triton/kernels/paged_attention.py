"""The classic paged attention of vLLM (arXiv 2309.06180): one query token per sequence over a cache that splits heads.

K is ``(num_blocks, num_kv_heads, head_size / x, block_size, x)`` with x elements in 16 bytes, V is
``(num_blocks, num_kv_heads, head_size, block_size)``: a block of one KV head is contiguous in both. Version 1 has one
program for all tokens of a sequence and KV head, version 2 one per partition of them, and a second kernel that reduces
over the partitions (vllm-project/vllm csrc/attention/attention_kernels.cuh 03f8611; nothing is copied from there).
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels.cache import GATHER_ALIGN, plain
from attn_select_triton.kernels.launch import (
    PRECISION,
    SLICED,
    Launch,
    capability_of,
    compute_dtype,
    power_of_two,
    sm_count,
)
from attn_select_triton.kernels.primitives import LOG2E, load_tile, mask_of, normalised, online_softmax, pages_of
from attn_select_triton.kernels.query_rows import as_constants
from attn_select_triton.kernels.relaunch import Relaunch, Relaunches, dtypes, specialised
from attn_select_triton.tuning import find_tile, tile_of

# Programs of version 2 per SM, at most: where a captured graph has room for more partitions, each takes several.
PROGRAMS_PER_SM = 64
MOST_ROWS = 32  # Query heads of a program, at most: with more, registers spill
REDUCE_CHUNK = 64  # Partitions that one step of the reduction takes
# Of the partial results' numbers no two that a thread reads lie at a known alignment, so one kernel serves all.
UNALIGNED = [*SLICED, "part_max_ptr", "part_sum_ptr"]


class ClassicHead(NamedTuple):
    """K and V of one KV head, as one sequence sees them."""

    # k_ptr, v_ptr: at the head's first element of all blocks
    k_ptr: Any
    v_ptr: Any
    table_ptr: Any  # the sequence's row of the block table
    # k_block, v_block: elements from one block to the next
    k_block: Any
    v_block: Any


class ClassicStrides(NamedTuple):
    """Elements of K and of V from one block and from one head to the next."""

    k_block: Any
    k_head: Any
    v_block: Any
    v_head: Any


class ClassicTiles(NamedTuple):
    """What rows and tiles of K and V are read; all of it is compiled in."""

    block_size: int  # tokens of a block
    x: int  # elements of K that lie together
    # d, block_d: head size, and columns of its tile
    d: int
    block_d: int
    block_n: int  # keys of a tile
    group: int = 0  # heads of the query that share a KV head
    block_m: int = 0  # of them, of a program
    alibi: bool = False  # scores have ALiBi
    precision: str = PRECISION  # of float32 products


@triton.jit
def head_of(k_ptr, v_ptr, table_ptr, request, kv_head, stride_table, strides):
    """Return a ``ClassicHead``; ``strides`` are ``ClassicStrides``."""
    return ClassicHead(
        k_ptr + kv_head * strides.k_head, v_ptr + kv_head * strides.v_head,
        table_ptr + request.to(tl.int64) * stride_table, strides.k_block, strides.v_block,
    )  # fmt: skip


@triton.jit
def classic_keys(k_ptr, k_block, table_ptr, start, high, TILES: tl.constexpr, MASKED: tl.constexpr):
    """Return K of one KV head transposed, ``(block_d, block_n)``, 0 where masked. Memory traffic: the tile once."""
    # Read as ``(block_d / x, block_n, x)``, the order it lies in: a warp takes 16 bytes of each of 32 tokens. The hint
    # of contiguity, which is true of the last dimension alone, orders the lanes; Triton's own order takes two tokens of
    # 16 columns each, 16 lines of memory instead of 4.
    X: tl.constexpr = TILES.x
    keys = start + tl.arange(0, TILES.block_n)
    inside = keys < high
    blocks = pages_of(table_ptr, keys, inside, TILES.block_size, MASKED)
    tokens = blocks * k_block + keys % TILES.block_size * X
    chunk = tl.arange(0, TILES.block_d // X)
    columns = chunk[:, None, None] * (TILES.block_size * X) + tl.arange(0, X)[None, None, :]
    pointers = tl.max_contiguous(k_ptr + tokens[None, :, None] + columns, (1, 2, X))
    if MASKED:
        tile = tl.load(pointers, mask=inside[None, :, None] & (chunk < TILES.d // X)[:, None, None], other=0.0)
    elif TILES.d != TILES.block_d:
        tile = tl.load(pointers, mask=(chunk < TILES.d // X)[:, None, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tl.reshape(tl.permute(tile, (0, 2, 1)), (TILES.block_d, TILES.block_n))


@triton.jit
def classic_values(v_ptr, v_block, table_ptr, start, high, TILES: tl.constexpr, MASKED: tl.constexpr):
    """Return V of one KV head, ``(block_n, block_d)``, 0 where masked. Memory traffic: the tile once."""
    keys = start + tl.arange(0, TILES.block_n)
    inside = keys < high
    return load_tile(
        v_ptr, table_ptr, keys, inside, v_block, 1, TILES.block_size,
        True, TILES.block_size, TILES.d, TILES.block_d, 0, MASKED,
    )  # fmt: skip


@triton.jit
def attend_tile(
    q, running, start, high, last, slopes, head, score_scale, TILES: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Attend from a tile of query rows to the ``block_n`` keys from ``start`` on, with ``MASKED`` only those before
    ``high``; return ``running`` with them. Memory traffic: the K and V tile once."""
    # q: ``(rows, block_d)`` in the dtype of the products; K and V are cast to it.
    # running: accumulator, row_max and row_sum so far.
    # last: position of the query token.
    # slopes: float32 per row, times log2(e); with ALiBi.
    # head: a ``ClassicHead``; TILES a ``ClassicTiles``.
    accumulator, row_max, row_sum = running
    keys = start + tl.arange(0, TILES.block_n)
    k = classic_keys(head.k_ptr, head.k_block, head.table_ptr, start, high, TILES, MASKED)
    scores = tl.dot(q, k.to(q.dtype), input_precision=TILES.precision)
    if TILES.alibi:
        scores = scores * score_scale - slopes[:, None] * (last - keys)[None, :].to(tl.float32)
    if MASKED:
        scores = tl.where((keys < high)[None, :], scores, float("-inf"))
    weights, rescale, row_max, row_sum = online_softmax(
        scores, row_max, row_sum, False, 1.0 if TILES.alibi else score_scale
    )  # fmt: skip
    v = classic_values(head.v_ptr, head.v_block, head.table_ptr, start, high, TILES, MASKED)
    accumulator *= rescale[:, None]
    accumulator = tl.dot(weights.to(q.dtype), v.to(q.dtype), accumulator, input_precision=TILES.precision)
    return accumulator, row_max, row_sum


@triton.jit
def attend_tokens(q, low, high, last, slopes, head, score_scale, TILES: tl.constexpr):
    """Attend from a tile of query rows to the keys ``[low, high)``, ``low`` a multiple of ``block_n``."""
    # Arguments as ``attend_tile`` has them.
    # Returns accumulator, row_max and row_sum, base 2; 0, -inf and 0 where there are no keys.
    row_max = tl.full([TILES.block_m], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILES.block_m], tl.float32)
    accumulator = tl.zeros([TILES.block_m, TILES.block_d], tl.float32)
    whole = high // TILES.block_n * TILES.block_n  # only what is behind it pays for a mask
    for start in tl.range(low, whole, TILES.block_n):
        accumulator, row_max, row_sum = attend_tile(
            q, (accumulator, row_max, row_sum), start, high, last, slopes, head, score_scale, TILES, False
        )
    if whole < high:
        accumulator, row_max, row_sum = attend_tile(
            q, (accumulator, row_max, row_sum), whole, high, last, slopes, head, score_scale, TILES, True
        )
    return accumulator, row_max, row_sum


@triton.jit
def query_rows(
    q_ptr, slopes_ptr, token, kv_head, first, strides, TILES: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """Return some heads of one token from the ``first`` of a KV head's group on: their numbers, which of them are
    there, the query ``(block_m, block_d)``, and their ALiBi slopes times log2(e)."""
    row = first + tl.arange(0, TILES.block_m)
    in_rows = row < TILES.group
    head = kv_head * TILES.group + row
    size = tl.arange(0, TILES.block_d)
    mask = mask_of(in_rows, TILES.d, TILES.block_d)
    rows = token.to(tl.int64) * strides[0] + head * strides[1]
    q = tl.load(q_ptr + rows[:, None] + size[None, :], mask=mask, other=0.0).to(COMPUTE)
    slopes = head
    if TILES.alibi:
        slopes = tl.load(slopes_ptr + head, mask=in_rows, other=0.0) * LOG2E
    return head, in_rows, q, slopes


@triton.jit
def store_rows(out_ptr, rows, result, in_rows, TILES: tl.constexpr):
    """Store ``(block_m, block_d)`` in the dtype of ``out_ptr``, each row at its offset."""
    size = tl.arange(0, TILES.block_d)
    mask = mask_of(in_rows, TILES.d, TILES.block_d)
    tl.store(out_ptr + rows[:, None] + size[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["row_tiles", "stride_table"], do_not_specialize_on_alignment=SLICED)
def paged_attention_v1_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    slopes_ptr,
    row_tiles,
    score_scale,
    v_scale,
    query_strides,
    out_strides,
    stride_table,
    strides,
    TILE_SHAPE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: up to ``block_m`` heads of a KV head's group, against all keys of one sequence."""
    # Tiles: query ``(block_m, block_d)``, K ``(block_d, block_n)``, V ``(block_n, block_d)``. Memory traffic: each key
    # and value once per tile of rows, query and output once.
    # strides: ``ClassicStrides``; TILE_SHAPE a ``ClassicTiles``, COMPUTE the dtype of the products.
    TILES: tl.constexpr = as_constants(ClassicTiles, TILE_SHAPE)
    kv_head = tl.program_id(0) // row_tiles
    request = tl.program_id(1)
    token = tl.load(query_start_loc_ptr + request)
    if tl.load(query_start_loc_ptr + request + 1) == token:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    head, in_rows, q, slopes = query_rows(
        q_ptr, slopes_ptr, token, kv_head, tl.program_id(0) % row_tiles * TILES.block_m, query_strides, TILES,
        COMPUTE,
    )  # fmt: skip
    # One turn. Where that is no secret ptxas keeps a float32 query in registers, and spills kilobytes.
    for _ in tl.range(0, tl.num_programs(2) if q.dtype == tl.float32 else 1):
        accumulator, _, row_sum = attend_tokens(
            q, 0, seq_len, seq_len - 1, slopes,
            head_of(k_ptr, v_ptr, table_ptr, request, kv_head, stride_table, strides), score_scale, TILES,
        )  # fmt: skip
        rows = token.to(tl.int64) * out_strides[0] + head * out_strides[1]
        store_rows(out_ptr, rows, normalised(accumulator, row_sum) * v_scale, in_rows, TILES)


@triton.jit(do_not_specialize=["row_tiles", "partitions", "stride_table"], do_not_specialize_on_alignment=UNALIGNED)
def paged_attention_v2_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    slopes_ptr,
    row_tiles,
    partitions,
    score_scale,
    v_scale,
    query_strides,
    stride_table,
    strides,
    TILE_SHAPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    PARTITION: tl.constexpr,
):
    """One program: up to ``block_m`` heads of a KV head's group, against every n-th partition of a sequence's keys."""
    # Partial results lie as ``(sequence, head, partition)``, normalised, with the maximum and the sum of base-2 scores.
    # All else as in version 1. Memory traffic: each key and value once per tile of rows, a partial result per
    # partition.
    TILES: tl.constexpr = as_constants(ClassicTiles, TILE_SHAPE)
    kv_head = tl.program_id(0) // row_tiles
    request = tl.program_id(1)
    token = tl.load(query_start_loc_ptr + request)
    seq_len = tl.load(seq_lens_ptr + request)
    first = tl.program_id(2)
    if (tl.load(query_start_loc_ptr + request + 1) == token) | (first * PARTITION >= seq_len):
        return
    head, in_rows, q, slopes = query_rows(
        q_ptr, slopes_ptr, token, kv_head, tl.program_id(0) % row_tiles * TILES.block_m, query_strides, TILES,
        COMPUTE,
    )  # fmt: skip
    kv = head_of(k_ptr, v_ptr, table_ptr, request, kv_head, stride_table, strides)
    heads = tl.num_programs(0) // row_tiles * TILES.group
    for partition in tl.range(first, tl.cdiv(seq_len, PARTITION), tl.num_programs(2)):
        low = partition * PARTITION
        accumulator, row_max, row_sum = attend_tokens(
            q, low, tl.minimum(low + PARTITION, seq_len), seq_len - 1, slopes, kv, score_scale, TILES
        )
        part = (request * heads + head).to(tl.int64) * partitions + partition
        store_rows(part_ptr, part * TILES.d, normalised(accumulator, row_sum) * v_scale, in_rows, TILES)
        tl.store(part_max_ptr + part, row_max, mask=in_rows)
        tl.store(part_sum_ptr + part, row_sum, mask=in_rows)


@triton.jit(do_not_specialize=["partitions"], do_not_specialize_on_alignment=UNALIGNED)
def paged_attention_v2_reduce_kernel(
    out_ptr,
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    partitions,
    out_strides,
    PARTITION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Reduce the partitions of one head of one sequence, ``(CHUNK, BLOCK_D)`` at a time; one program each."""
    # Memory traffic: each partial result once, the output once. A sequence without keys gives 0.
    head = tl.program_id(0)
    request = tl.program_id(1)
    token = tl.load(query_start_loc_ptr + request)
    if tl.load(query_start_loc_ptr + request + 1) == token:
        return
    count = tl.cdiv(tl.load(seq_lens_ptr + request), PARTITION)
    base = (request * tl.num_programs(0) + head).to(tl.int64) * partitions
    size = tl.arange(0, BLOCK_D)
    largest = float("-inf")
    total = 0.0
    accumulator = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.range(0, count, CHUNK):
        partition = start + tl.arange(0, CHUNK)
        filled = partition < count
        part = base + partition
        part_max = tl.load(part_max_ptr + part, mask=filled, other=float("-inf"))
        part_sum = tl.load(part_sum_ptr + part, mask=filled, other=0.0)
        mask = filled[:, None] & (size < D)[None, :]
        parts = tl.load(part_ptr + part[:, None] * D + size[None, :], mask=mask, other=0.0).to(tl.float32)
        # Never -inf: each partition that is counted has a key. Results are normalised, so they weigh by their sums.
        new_largest = tl.maximum(largest, tl.max(part_max, 0))
        weights = part_sum * tl.exp2(part_max - new_largest)
        rescale = tl.exp2(largest - new_largest)
        accumulator = accumulator * rescale + tl.sum(parts * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        largest = new_largest
    result = accumulator / tl.where(total > 0, total, 1.0)
    row = token.to(tl.int64) * out_strides[0] + head * out_strides[1]
    tl.store(out_ptr + row + size, result.to(out_ptr.dtype.element_ty), mask=size < D)


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=SLICED)
def gather_classic_kernel(
    k_ptr,
    v_ptr,
    k_out_ptr,
    v_out_ptr,
    table_ptr,
    key_start_loc_ptr,
    seq_lens_ptr,
    stride_table,
    strides,
    stride_kot,
    stride_koh,
    stride_vot,
    stride_voh,
    BLOCK_SIZE: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Copy ``ALIGN`` tokens of one KV head into rows ``(ALIGN, BLOCK_D)``, with zeros behind the sequence's end."""
    # Memory traffic: each key and value read once and written once.
    start = tl.program_id(0) * ALIGN
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    if start >= seq_len:
        return
    TILES: tl.constexpr = ClassicTiles(BLOCK_SIZE, X, D, BLOCK_D, ALIGN)
    table_ptr += request.to(tl.int64) * stride_table
    rows = (tl.load(key_start_loc_ptr + request) + start + tl.arange(0, ALIGN)).to(tl.int64)
    size = tl.arange(0, BLOCK_D)
    k_ptr += kv_head * strides.k_head
    keys = classic_keys(k_ptr, strides.k_block, table_ptr, start, seq_len, TILES, True)
    target = k_out_ptr + kv_head * stride_koh + (rows * stride_kot)[None, :] + size[:, None]
    tl.store(target, plain(keys, k_out_ptr.dtype.element_ty))
    v_ptr += kv_head * strides.v_head
    values = classic_values(v_ptr, strides.v_block, table_ptr, start, seq_len, TILES, True)
    target = v_out_ptr + kv_head * stride_voh + (rows * stride_vot)[:, None] + size[None, :]
    tl.store(target, plain(values, v_out_ptr.dtype.element_ty))


_gather = Relaunches(gather_classic_kernel, num_warps=8)


def gather_classic(
    key: Tensor,
    value: Tensor,
    key_out: Tensor,
    value_out: Tensor,
    *,
    block_table: Tensor,
    key_start_loc: Tensor,
    seq_lens: Tensor,
    max_keys: int,
) -> None:
    """Copy keys and values of whole sequences into contiguous rows, FP8 as plain numbers: ``cache.gather_pages`` for
    the classic layout.

    Args:
        key, value, block_table, seq_lens: as ``paged_attention_v1`` has them.
        key_out: ``(rows, Hkv, power_of_two(D))``, written; value_out likewise. FP8 is cast, not scaled.
        key_start_loc: int32 ``(B,)``: the row of each sequence's token 0; sequences take multiples of
            ``cache.GATHER_ALIGN`` rows.
        max_keys: of ``seq_lens``, or a bound above, known to the host.
    """
    kv_heads, _, block_size, x = key.shape[1:]
    tensors, of_step = (key, value, key_out, value_out), (block_table, key_start_loc, seq_lens)
    strides = ClassicStrides(*key.stride()[:2], *value.stride()[:2])
    strides_out = *key_out.stride()[:2], *value_out.stride()[:2]
    sizes = block_size, x, value.shape[2], key_out.shape[2]
    _gather(
        (strides, strides_out, *sizes, *specialised(*tensors), *dtypes(*of_step)),
        (-(-max_keys // GATHER_ALIGN), kv_heads, len(seq_lens)), *tensors, *of_step, block_table.stride(0), strides,
        *strides_out, *sizes, GATHER_ALIGN,
    )  # fmt: skip


def classic_prefill_launch(
    capability: tuple[int, int], width: int, dtype: torch.dtype, cache: torch.dtype
) -> Launch | None:
    """Return how ``prefill_attention`` is launched over the classic layout's blocks; None: by its own table."""
    # dtype: of the query; ``cache`` of K and V.
    bits = 8 * max(dtype.itemsize, cache.itemsize) if dtype.itemsize == cache.itemsize else 0
    return find_tile("classic_prefill", capability, width=width, bits=bits)


def paged_launch(capability: tuple[int, int], rows: int, width: int, dtype: torch.dtype, cache: torch.dtype) -> Launch:
    """Return the launch of either version."""
    # rows: query heads of a KV head's group.
    # dtype: of the query; ``cache`` of K and V.
    block_m = min(MOST_ROWS, power_of_two(rows))
    name = str(dtype).removeprefix("torch.")
    tile = tile_of("paged_attention", capability, rows=block_m, width=width, dtype=name)
    return replace(tile, block_m=min(block_m, tile.block_m))


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """Where version 2 keeps its partial results: N rows, one per sequence, head and partition."""

    outputs: Tensor  # ``(N, head_size)`` in the query's dtype
    # maxima, sums: float32 ``(N,)``, of base-2 scores
    maxima: Tensor
    sums: Tensor

    @classmethod
    def reserve(cls, rows: int, head_size: int, dtype: torch.dtype, device: torch.device) -> Partials:
        """Return room for ``rows`` rows."""
        numbers = torch.empty(2, rows, dtype=torch.float32, device=device)
        return cls(torch.empty(rows, head_size, dtype=dtype, device=device), numbers[0], numbers[1])


class _Prepared:
    """What the dtypes, sizes, strides and alignments of a call decide."""

    # strides: of query and output.
    # last: arguments of the version's kernel from ``strides`` on.

    __slots__ = ("attend", "last", "reduce", "row_tiles", "strides")

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, alibi: bool, partition_size: int,
        launch: Launch | None,
    ) -> None:  # fmt: skip
        heads, head_size = query.shape[1:]
        kv_heads, _, block_size, x = key.shape[1:]
        group = heads // kv_heads
        if launch is None:
            launch = paged_launch(capability_of(query.device), group, head_size, query.dtype, key.dtype)
        if partition_size % launch.block_n:
            raise ValueError(
                f"partition_size = {partition_size}: accepted are multiples of {launch.block_n}, the tile of keys"
            )
        self.row_tiles = -(-group // launch.block_m)
        self.strides = query.stride()[:2], output.stride()[:2]
        tiles = ClassicTiles(
            block_size, x, head_size, power_of_two(head_size), launch.block_n, group, launch.block_m, alibi
        )
        self.last = (
            ClassicStrides(*key.stride()[:2], *value.stride()[:2]), tiles, compute_dtype(query.dtype, key.dtype),
            *([partition_size] if partition_size else []),
        )  # fmt: skip
        kernel = paged_attention_v2_kernel if partition_size else paged_attention_v1_kernel
        self.attend = Relaunch(kernel, num_warps=launch.num_warps, num_stages=launch.num_stages)
        self.reduce = Relaunch(paged_attention_v2_reduce_kernel, num_warps=4)


_prepared: dict[Any, _Prepared] = {}


def _prepare(
    tensors: tuple[Tensor, ...], others: tuple[Tensor | None, ...], partition_size: int, launch: Launch | None
) -> _Prepared:
    """Return what a call needs that one before it may have worked out; ``partition_size`` 0 is version 1."""
    # tensors: query, K, V and output, and version 2's partial outputs.
    # others: ``SLICED`` ones, the slopes last.
    query, key, value, output = tensors[:4]
    sizes = query.shape[1:], key.shape[1:], query.stride()[:2], key.stride()[:2], value.stride()[:2]
    kind = (*sizes, output.stride()[:2], *specialised(*tensors), *dtypes(*others), partition_size, launch)
    prepared = _prepared.get(kind)
    if prepared is None:
        alibi = others[-1] is not None
        prepared = _prepared[kind] = _Prepared(query, key, value, output, alibi, partition_size, launch)
    return prepared


def paged_attention_v1(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    slopes: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    launch: Launch | None = None,
) -> None:
    """Attend from one query token per sequence, version 1; nothing waits for the device.

    Args:
        query: ``(T, H, D)``, last dimension contiguous; ``output`` likewise.
        key: ``(num_blocks, Hkv, D / x, block_size, x)``, a block of one head contiguous; x is 16 bytes of elements.
        value: ``(num_blocks, Hkv, D, block_size)``, likewise.
        query_start_loc: int32 ``(B + 1,)``: the token of each sequence; one that has none is left out.
        seq_lens: int32 ``(B,)``, keys per sequence, the query token's own last. Without keys the output is 0.
        block_table: int32 ``(B, W)``.
        scale: positive factor on ``q . k``.
        slopes: ALiBi, float32 ``(H,)``.
        k_scale: of an FP8 cache, positive; v_scale likewise.
        launch: another than the table's.
    """
    of_step = block_table, query_start_loc, seq_lens, slopes
    made = _prepare((query, key, value, output), of_step, 0, launch)
    made.attend(
        (key.shape[1] * made.row_tiles, len(seq_lens), 1), query, key, value, output, *of_step, made.row_tiles,
        scale * k_scale * LOG2E.value, v_scale, *made.strides, block_table.stride(0),
        *made.last,
    )  # fmt: skip


def paged_attention_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    partials: Partials,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    partition_size: int,
    block_table: Tensor,
    scale: float,
    slopes: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    launch: Launch | None = None,
) -> None:
    """Attend from one query token per sequence, version 2: as ``paged_attention_v1``, and

    Args:
        partials: where there is not room for all sequences they are taken in several launches.
        max_seq_len: of ``seq_lens``, or any bound above, known to the host.
        partition_size: tokens of a partition, a multiple of the tile (128 is one of all).

    Raises:
        ValueError: no room for the partitions of one sequence, or partitions of another size.
    """
    seqs, (heads, head_size), kv_heads = len(seq_lens), query.shape[1:], key.shape[1]
    parts = partials.outputs, partials.maxima, partials.sums
    of_step = block_table, query_start_loc, seq_lens, slopes
    made = _prepare((query, key, value, output, parts[0]), of_step, partition_size, launch)
    tiles = kv_heads * made.row_tiles
    partitions = max(1, -(-max_seq_len // partition_size))
    room = len(partials.maxima)
    if room < heads * partitions:
        raise ValueError(
            f"partials has {room} rows; one sequence of {partitions} partitions and {heads} heads needs "
            f"{heads * partitions} (Partials.reserve)"
        )
    # A launch takes whole sequences, so room counts in multiples of one's; the launches share them evenly.
    launches = -(-seqs * heads * partitions // (room - room % (heads * partitions)))
    step = -(-seqs // launches)
    programs = min(partitions, max(1, PROGRAMS_PER_SM * sm_count(query.device) // (tiles * step)))
    scores = scale * k_scale * LOG2E.value
    for first in range(0, seqs, step):
        if first or step < seqs:
            part = slice(first, first + step)
            # Starts need one more than there are sequences, and more does no harm.
            starts, lens, table = query_start_loc[first:], seq_lens[part], block_table[part]
        else:
            starts, lens, table = query_start_loc, seq_lens, block_table
        count = len(lens)
        made.attend(
            (tiles, count, programs), query, key, value, *parts, table, starts, lens, slopes, made.row_tiles,
            partitions, scores, v_scale, made.strides[0], table.stride(0), *made.last,
        )  # fmt: skip
        made.reduce(
            (heads, count, 1), output, *parts, starts, lens, partitions, made.strides[1],
            partition_size, head_size, power_of_two(head_size), REDUCE_CHUNK,
        )  # fmt: skip
