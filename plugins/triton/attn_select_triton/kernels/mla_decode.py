"""Decode of multi-head latent attention over a paged cache of latents, the keys split over programs.

All heads share one KV head, whose value is the first part of its key: the latent. So a tile of the cache is read once
and serves both products, and the rows of a program are (token, head) pairs of one request, token-major.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_select_triton.kernels.descriptors import Descriptors
from attn_select_triton.kernels.launch import SLICED, capability_of, power_of_two
from attn_select_triton.kernels.merge import MERGE_NUMBERS, MERGE_PROGRAMS, merge_pieces_kernel
from attn_select_triton.kernels.pieces import read_piece, share_of
from attn_select_triton.kernels.primitives import LOG2E, natural_lse, normalised, online_softmax, pages_of, split_bounds
from attn_select_triton.kernels.query_rows import as_constants
from attn_select_triton.kernels.relaunch import Relaunch
from attn_select_triton.limits import GLUON_CAPABILITY, gluon_lacks
from attn_select_triton.tuning import latent_splits, tile_of


class Latents(NamedTuple):
    """The cache of latents, as one request sees it."""

    cache_ptr: Any  # the first element of all blocks
    # latent_descriptor, rope_descriptor: of rows of one token each; with ``described``
    latent_descriptor: Any
    rope_descriptor: Any
    page_rows: Any  # such rows from one block to the next
    table_ptr: Any  # the request's row of the block table
    # stride_block, stride_token: elements
    stride_block: Any
    stride_token: Any


class LatentTiles(NamedTuple):
    """What tiles of the cache are read; all of it is compiled in."""

    described: bool  # whole tiles are read through tensor descriptors
    block_size: int  # tokens of a block
    # r, block_r: size of the latent, and columns of its tile
    r: int
    block_r: int
    # p, block_p: size of the rope part, and columns of its tile
    p: int
    block_p: int
    block_n: int  # keys of a tile


@triton.jit
def latent_tile(latents, page, start, high, TILES: tl.constexpr, MASKED: tl.constexpr):
    """Return the latents ``(block_n, block_r)`` and rope parts ``(block_n, block_p)`` of keys from ``start`` on."""
    # Keys at ``high`` and behind are 0 where ``MASKED``: their memory may hold NaN, and 0 times NaN is NaN. A described
    # tile lies in one page: ``block_size`` is a multiple of ``block_n``.
    if TILES.described and not MASKED:  # TMA reads whole boxes: where keys are to be left out, pointers do it
        row = page * latents.page_rows + start % TILES.block_size
        return latents.latent_descriptor.load([row, 0]), latents.rope_descriptor.load([row, TILES.r])
    keys = start + tl.arange(0, TILES.block_n)
    if TILES.block_size % TILES.block_n == 0:
        rows = page.to(tl.int64) * latents.stride_block
        rows += (start % TILES.block_size + tl.arange(0, TILES.block_n)) * latents.stride_token
    else:
        pages = pages_of(latents.table_ptr, keys, keys < high, TILES.block_size, MASKED)
        rows = pages * latents.stride_block + (keys % TILES.block_size) * latents.stride_token
    latent_columns = tl.arange(0, TILES.block_r)
    rope_columns = tl.arange(0, TILES.block_p)
    latent_pointers = latents.cache_ptr + rows[:, None] + latent_columns[None, :]
    rope_pointers = latents.cache_ptr + rows[:, None] + (TILES.r + rope_columns)[None, :]
    if MASKED or TILES.r != TILES.block_r or TILES.p != TILES.block_p:
        inside = (keys < high)[:, None]
        latent = tl.load(latent_pointers, mask=inside & (latent_columns < TILES.r)[None, :], other=0.0)
        rope = tl.load(rope_pointers, mask=inside & (rope_columns < TILES.p)[None, :], other=0.0)
    else:
        latent = tl.load(latent_pointers)
        rope = tl.load(rope_pointers)
    return latent, rope


@triton.jit
def attend_latent(
    query, running, limits, low, high, score_scale, latents, TILES: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Attend from a tile of rows to the keys ``[low, high)`` in tiles of ``block_n``."""
    # ``low`` is a multiple of ``block_n``; without ``MASKED`` so is ``high``, and every row sees every key.
    # query: the parts ``(BLOCK_M, block_r)`` and ``(BLOCK_M, block_p)``: the latents are cast to their dtype.
    # running: accumulator, row_max and row_sum so far.
    # limits: int32 ``(BLOCK_M,)``, how many keys of the request each row sees.
    # score_scale: scale * log2(e), with an FP8 cache times its scale.
    # latents: a ``Latents``; TILES a ``LatentTiles``.
    # Returns ``running`` with these keys.
    q_latent, q_rope = query
    accumulator, row_max, row_sum = running
    # A tile's page is loaded one tile ahead, since its latents cannot be asked for before.
    next_page = tl.load(latents.table_ptr + low // TILES.block_size, mask=low < high, other=0)
    for start in tl.range(low, high, TILES.block_n):
        page = next_page
        behind = start + TILES.block_n
        next_page = tl.load(latents.table_ptr + behind // TILES.block_size, mask=behind < high, other=0)
        latent, rope = latent_tile(latents, page, start, high, TILES, MASKED)
        latent = latent.to(q_latent.dtype)
        rope = rope.to(q_latent.dtype)
        scores = tl.dot(q_rope, tl.trans(rope))
        scores = tl.dot(q_latent, tl.trans(latent), scores)
        scores *= score_scale
        if MASKED:
            keys = start + tl.arange(0, TILES.block_n)
            scores = tl.where(keys[None, :] < limits[:, None], scores, float("-inf"))
        weights, rescale, row_max, row_sum = online_softmax(scores, row_max, row_sum, MASKED)
        accumulator *= rescale[:, None]
        accumulator = tl.dot(weights.to(latent.dtype), latent, accumulator)
    return accumulator, row_max, row_sum


@triton.jit(do_not_specialize=["slot_rows", "stride_table"], do_not_specialize_on_alignment=SLICED)
def mla_decode_kernel(
    q_ptr,
    qr_ptr,
    cache_ptr,
    latent_descriptor,
    rope_descriptor,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    pieces_ptr,
    slot_rows,
    score_scale,
    value_scale,
    page_rows,
    query_strides,
    rope_strides,
    out_strides,
    stride_table,
    stride_b,
    stride_t,
    HEADS: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_SHAPE: tl.constexpr,
):
    """Attend from ``BLOCK_M`` rows of one request to one piece of its keys."""
    # Of a request in one piece the result is written at once; of several, to the workspace: ``merge_pieces_kernel``
    # says where a row's partial results lie.
    # Grid: row tiles x pieces; neighbours read the same keys at the same time, from L2. Without a list of pieces row
    # tiles x even shares of a request's keys x requests. Memory traffic: the piece's latents once per row tile. On
    # chip: q ``(BLOCK_M, R + P)`` and two or more tiles ``(BLOCK_N, R + P)`` in shared memory, ``(BLOCK_M, R)`` float32
    # in registers.
    # lse_ptr: None: no LSE is asked for.
    # part_ptr, part_lse_ptr: partial results, ``slot_rows`` rows for each slot; None: all requests are in one piece.
    # pieces_ptr: of ``pieces.list_pieces``, or None.
    # TILE_SHAPE: a ``LatentTiles``.
    TILES: tl.constexpr = as_constants(LatentTiles, TILE_SHAPE)
    first = tl.program_id(0) * BLOCK_M
    if pieces_ptr is not None:
        piece = read_piece(pieces_ptr, tl.program_id(1))
        if piece.request < 0:
            return
    else:
        piece = share_of(query_start_loc_ptr, seq_lens_ptr, tl.program_id(2), tl.program_id(1), tl.num_programs(1))
    request, split, splits, slot, query_start, query_len, seq_len = piece
    if first >= query_len * HEADS:
        return

    flat = first + tl.arange(0, BLOCK_M)
    token = flat // HEADS
    head = flat % HEADS
    in_rows = token < query_len
    limits = tl.full([BLOCK_M], 0, tl.int32) + seq_len
    full_high = seq_len
    high = seq_len
    if CAUSAL:
        limits += token + 1 - query_len
        full_high = tl.maximum(seq_len + first // HEADS + 1 - query_len, 0)
        last_token = tl.minimum((first + BLOCK_M - 1) // HEADS, query_len - 1)
        high = tl.maximum(seq_len + last_token + 1 - query_len, 0)
    low = 0
    if part_ptr is not None:
        low, high = split_bounds(split, splits, 0, high, TILES.block_n)
    full_high = tl.maximum(tl.minimum(full_high, high) // TILES.block_n * TILES.block_n, low)

    row = (query_start + token).to(tl.int64)
    q_rows = q_ptr + (row * query_strides[0] + head * query_strides[1])[:, None]
    latent_columns = tl.arange(0, TILES.block_r)
    rope_columns = tl.arange(0, TILES.block_p)
    mask = in_rows[:, None] & (latent_columns < TILES.r)[None, :]
    q_latent = tl.load(q_rows + latent_columns[None, :], mask=mask, other=0.0)
    rope_rows = qr_ptr + (row * rope_strides[0] + head * rope_strides[1])[:, None]
    rope_mask = in_rows[:, None] & (rope_columns < TILES.p)[None, :]
    q_rope = tl.load(rope_rows + rope_columns[None, :], mask=rope_mask, other=0.0)
    accumulator = tl.zeros([BLOCK_M, TILES.block_r], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    table_ptr += request.to(tl.int64) * stride_table
    query = (q_latent, q_rope)
    running = (accumulator, row_max, row_sum)
    latents = Latents(cache_ptr, latent_descriptor, rope_descriptor, page_rows, table_ptr, stride_b, stride_t)
    running = attend_latent(query, running, limits, low, full_high, score_scale, latents, TILES, False)
    accumulator, row_max, row_sum = attend_latent(
        query, running, limits, full_high, high, score_scale, latents, TILES, True
    )

    result = normalised(accumulator, row_sum) * value_scale
    if part_ptr is not None and splits > 1:
        part = (slot + split).to(tl.int64) * slot_rows + flat
        tl.store(part_ptr + part[:, None] * TILES.r + latent_columns[None, :], result, mask=mask)
        tl.store(part_lse_ptr + part, natural_lse(row_max, row_sum), mask=in_rows)
    else:
        out_rows = row * out_strides[0] + head * out_strides[1]
        out = result.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows[:, None] + latent_columns[None, :], out, mask=mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + row * HEADS + head, natural_lse(row_max, row_sum), mask=in_rows)


@dataclass(frozen=True, slots=True)
class MLALaunch:
    """How the decode is launched."""

    block_m: int  # query rows (heads x tokens) of a program
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    described: bool = False  # read the cache through tensor descriptors (TMA) where pages hold whole tiles
    # the warp-specialised kernel of ``mla_decode_hopper``, over an FP8 cache ``mla_decode_hopper_fp8``, of which only
    # ``block_m`` is free: 16, 32 or 64. Where a tensor's strides do not suit TMA, the other kernel serves.
    hopper: bool = False
    gathered: bool = False  # with ``hopper``, ``mla_decode_gathered`` for blocks of one token


def mla_launch(
    capability: tuple[int, int],
    rows: int,
    rank: int,
    rope: int,
    block_size: int,
    query: torch.dtype,
    cache: torch.dtype,
    gluon: bool = True,
) -> MLALaunch:
    """Return the launch parameters of a shape class."""
    # Found by measuring on compute capability 9.0; elsewhere what compiles into the chip's shared memory without
    # spilling. Below 8.0 ``tl.dot`` is scalar, and operands are held in float32.
    # rows: most query rows (heads x tokens) of a request.
    # rank, rope: sizes of the latent and of the rope part.
    # gluon: whether to take the warp-specialised kernel where it serves.
    names = str(query), "fp8_e4m3" if cache == torch.float8_e4m3fn else str(cache)
    lacks = gluon_lacks(capability, rank, rope, block_size, *names)
    if gluon and lacks is None:
        tile = tile_of("mla_hopper", capability, rows=rows)
        return MLALaunch(tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, True, True)
    columns = power_of_two(rank) + power_of_two(rope)
    whole = columns == rank + rope
    tile = tile_of("mla", capability, rows=rows, columns=columns, in_boxes=whole and block_size % 32 == 0)
    by_tma = tile.by_tma and whole and block_size % tile.block_n == 0
    return MLALaunch(tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, by_tma)


def gathered_launch(rows: int) -> MLALaunch:
    """Return the launch parameters of ``mla_decode_gathered`` for a token's query heads."""
    tile = tile_of("mla_hopper", GLUON_CAPABILITY, rows=rows)
    return MLALaunch(tile.block_m, tile.block_n, tile.num_warps, tile.num_stages, True, True, gathered=True)


@lru_cache(maxsize=4096)
def mla_num_splits(programs: int, max_seq_len: int, sms: int) -> int:
    """Return into how many splits the keys of a request go."""
    # One program fills an SM, so programs run in waves. Never gives 2 x ``sms`` programs or more where splitting.
    # programs: requests x row tiles.
    return latent_splits().of_equal(programs, max_seq_len, sms)


def _described(rows: int, tensor: Tensor, stride: int, block: list[int], gluon: bool) -> Descriptors:
    """Return tensor descriptors over rows like ``tensor``'s last dimension, of which it has ``rows``."""
    shape, strides = [rows, tensor.shape[-1]], [stride, 1]
    if not gluon:
        return Descriptors(TensorDescriptor(tensor, shape, strides, block))
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia import hopper

    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
    kind = kinds[tensor.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return Descriptors(hopper.TensorDescriptor(tensor, shape, strides, block, layout))


class _Prepared:
    """What the dtypes, sizes, strides and alignments of a call decide."""

    # page_rows: rows of a token each from one block of the cache to the next; 0 without descriptors.
    # hopper: the kernel is one in Gluon; of these, fp8 rounds the query to the cache's dtype, and gathered takes the
    # cache as it is and no descriptors of it.

    __slots__ = (
        "block_m", "cache_parts", "constants", "decode", "fp8", "gathered", "hopper", "merge", "merge_constants",
        "page_rows", "query_parts", "strides",
    )  # fmt: skip

    def __init__(
        self,
        query: Tensor,
        query_rope: Tensor,
        kv_cache: Tensor,
        output: Tensor,
        launch: MLALaunch,
        causal: bool,
    ) -> None:
        tokens, heads, rope = query_rope.shape
        rank, block_size, element = output.shape[2], kv_cache.shape[1], kv_cache.itemsize
        stride_b, stride_t, _ = kv_cache.stride()
        whole_rows = stride_b % stride_t == 0 and kv_cache.data_ptr() % 16 == 0 and stride_t * element % 16 == 0
        by_16_bytes = query.data_ptr() % 16 == 0 and query_rope.data_ptr() % 16 == 0
        fp8 = kv_cache.dtype == torch.float8_e4m3fn
        # The launch was chosen before addresses and the cache's strides were known: where they do not suit TMA, the
        # other kernel's. Over FP8 the kernel itself reads the query, to round it.
        if launch.hopper and not (whole_rows and (fp8 or by_16_bytes)):
            rows = launch.block_m
            launch = mla_launch(
                capability_of(query.device), rows, rank, rope, 1, query.dtype, kv_cache.dtype, gluon=False
            )  # fmt: skip
        block_r, block_p = power_of_two(rank), power_of_two(rope)
        in_boxes = block_size % launch.block_n == 0 and block_r == rank and block_p == rope
        described = launch.described and whole_rows and (launch.hopper or in_boxes)
        self.hopper, self.fp8, self.gathered = launch.hopper, launch.hopper and fp8, launch.gathered
        self.block_m, self.page_rows = launch.block_m, stride_b // stride_t if described else 0
        self.query_parts: tuple[Descriptors, ...] = ()
        self.cache_parts: tuple[Descriptors, ...] = ()
        output_strides = output.stride()[:2]
        self.strides: tuple[Any, ...] = query.stride()[:2], query_rope.stride()[:2], output_strides
        keys, columns = launch.block_n, rank  # of a box of the cache
        kernel: Any
        if launch.hopper:
            self.constants: tuple[Any, ...] = heads, rank, launch.block_m, causal, block_size
            keys, columns = 64, rank // 2
            if fp8:
                from attn_select_triton.kernels.mla_decode_hopper_fp8 import PART
                from attn_select_triton.kernels.mla_decode_hopper_fp8 import mla_decode_hopper_fp8_kernel as kernel

                columns = PART.value
            elif launch.gathered:
                from attn_select_triton.kernels.mla_decode_gathered import mla_decode_gathered_kernel as kernel

                self.constants = *self.constants[:-1], stride_t
            else:
                from attn_select_triton.kernels.mla_decode_hopper import mla_decode_hopper_kernel as kernel
            if not fp8:
                self.strides = (output_strides,)
                self.query_parts = tuple(
                    _described(tokens * heads, part, part.stride(1), [launch.block_m, size], True)
                    for part, size in ((query, columns), (query_rope, rope))
                )
            registers = tile_of("mla_hopper", capability_of(query.device), rows=launch.block_m).registers
            self.decode = Relaunch(kernel, num_warps=4, maxnreg=registers)
        else:
            tiles = LatentTiles(described, block_size, rank, block_r, rope, block_p, launch.block_n)
            self.constants = stride_b, stride_t, heads, causal, launch.block_m, tiles
            self.decode = Relaunch(mla_decode_kernel, num_warps=launch.num_warps, num_stages=launch.num_stages)
        if described and not launch.gathered:
            self.cache_parts = tuple(
                _described(block_size, kv_cache, stride_t, [keys, size], launch.hopper) for size in (columns, rope)
            )
        self.merge = Relaunch(merge_pieces_kernel, num_warps=4)
        self.merge_constants = *output_strides, heads, rank, block_r, MERGE_NUMBERS // block_r


_prepared: dict[Any, _Prepared] = {}


def mla_workspace(max_query_len: int, heads: int, rank: int) -> int:
    """Return how many float32 elements the partial results of one piece take."""
    return max_query_len * heads * (rank + 1)


def _in_rows(part: Tensor) -> Tensor:
    """Return a query ``(T, H, D)`` as TMA reads it, its T x H rows evenly apart; copied where they are not."""
    # vLLM 0.26 projects the latent head by head and leaves it so. The other kernel reads that as it is, and is slower.
    if part.stride(0) == part.shape[1] * part.stride(1):
        return part
    rows = part.flatten(0, 1)
    return rows.as_strided(part.shape, (part.shape[1] * rows.stride(0), rows.stride(0), 1))  # of one head too


def mla_decode(
    query: Tensor | tuple[Tensor, Tensor],
    kv_cache: Tensor,
    output: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    scale: float,
    launch: MLALaunch,
    num_splits: int = 1,
    pieces: Tensor | None = None,
    merges: int = 0,
    workspace: Tensor | None = None,
    causal: bool = True,
    kv_scale: float = 1.0,
    q_scale: float = 1.0,
    output_lse: Tensor | None = None,
) -> None:
    """Attend over the latents with the absorbed query. No synchronisation; may be captured in a CUDA graph.

    Args:
        query: ``(T, H, R + P)``, last dimension contiguous; or its parts ``(T, H, R)`` and ``(T, H, P)``.
        kv_cache: ``(num_blocks, block_size, R + P)`` of the query's dtype or another; last dimension contiguous.
        output: ``(T, H, R)``, written; rows of no request are left alone.
        query_start_loc: int32 ``(B + 1,)``; seq_lens int32 ``(B,)``, keys per request with the step's own; block_table
            int32 ``(B, W)``.
        max_query_len: the most query tokens of a request.
        scale: factor on ``q . k``.
        num_splits: even shares of every request's keys, without ``pieces``.
        pieces: of ``pieces.list_pieces``, with room for ``merges`` requests in several pieces behind them: the keys are
            split by these instead.
        workspace: float32, at 16 bytes: ``mla_workspace`` elements for each piece or share of the requests that have
            several.
        causal: query token i of n sees the first ``seq_len - n + 1 + i`` keys; else each sees all.
        kv_scale: what an FP8 cache's numbers are to be multiplied with.
        q_scale: what the query is divided by before a kernel rounds it to e4m3.
        output_lse: float32 ``(T, H)``, written where given: natural logarithm; -inf, with output 0, without keys.
    """
    rank = output.shape[2]
    latent, rope = query if isinstance(query, tuple) else (query, query[..., rank:])
    tokens, heads, _ = latent.shape
    if tokens == 0:
        return
    if launch.hopper and kv_cache.dtype != torch.float8_e4m3fn:
        latent, rope = _in_rows(latent), _in_rows(rope)
    split = num_splits > 1 or pieces is not None
    slot_rows = max_query_len * heads
    parts = part_lse = None
    if split:
        assert workspace is not None
        # As many slots as it holds, so that a captured step finds them where they were.
        slots = workspace.numel() // mla_workspace(max_query_len, heads, rank)
        parts, part_lse = workspace, workspace[slots * slot_rows * rank :]
    # All that Triton specialises on: a kernel that is launched again is not looked up.
    flags = causal, output_lse is not None, split
    addresses = latent.data_ptr() % 16, rope.data_ptr() % 16, kv_cache.data_ptr() % 16, output.data_ptr() % 16
    dtypes = latent.dtype, kv_cache.dtype, output.dtype, block_table.dtype, query_start_loc.dtype, seq_lens.dtype
    sizes = rope.shape[2], rank, kv_cache.shape[1], latent.stride(), rope.stride(), kv_cache.stride(), output.stride()
    key = (heads, *sizes, *addresses, *dtypes, *flags, pieces is None, launch, latent.get_device())
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepared[key] = _Prepared(latent, rope, kv_cache, output, launch, causal)
    page_rows = prepared.page_rows
    queries: list[Any] = [
        part.over(of, tokens * heads) for part, of in zip(prepared.query_parts, (latent, rope), strict=False)
    ]
    # The last block ends with its own tokens, where the stride to a next one may be longer.
    cache_rows = (kv_cache.shape[0] - 1) * page_rows + kv_cache.shape[1]
    keys: list[Any] = [part.over(kv_cache, cache_rows) for part in prepared.cache_parts]
    scales: tuple[float, ...] = (scale * kv_scale * LOG2E.value, kv_scale)
    if prepared.fp8:
        queries, scales = [latent, rope], (scales[0] * q_scale, kv_scale, q_scale)
    elif not prepared.hopper:
        queries, keys = [latent, rope, kv_cache], keys or [None, None]
    elif prepared.gathered:
        keys = [kv_cache]
    row_tiles, requests = -(-slot_rows // prepared.block_m), len(seq_lens)
    listed = 0 if pieces is None else len(pieces) - merges
    prepared.decode(
        (row_tiles, num_splits, requests) if pieces is None else (row_tiles, listed, 1),
        *queries, *keys, output, output_lse, parts, part_lse, block_table, query_start_loc, seq_lens,
        pieces, slot_rows, *scales, page_rows, *prepared.strides, block_table.stride(0), *prepared.constants,
    )  # fmt: skip
    merges = requests if pieces is None else merges
    if split and merges:
        prepared.merge(
            (slot_rows, min(merges, -(-MERGE_PROGRAMS // slot_rows)), 1), parts, part_lse, output, None, output_lse,
            pieces, query_start_loc, seq_lens, listed, merges, num_splits, *prepared.merge_constants,
        )  # fmt: skip
