"""Attention of few query tokens per request over a paged cache, the keys split over programs."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels.launch import (
    FP8,
    PLAIN,
    PRECISION,
    SLICED,
    Launch,
    Terms,
    cache_strides,
    compute_dtype,
    power_of_two,
)
from attn_select_triton.kernels.merge import MERGED_ROWS, merge_pieces, merged_parts
from attn_select_triton.kernels.pieces import read_piece, share_of
from attn_select_triton.kernels.primitives import (
    LOG2E,
    Operand,
    Scores,
    TermFlags,
    TileShape,
    attend_visible,
    key_bounds,
    mask_of,
    natural_lse,
    normalised,
    split_bounds,
)
from attn_select_triton.kernels.query_rows import (
    CacheStrides,
    Rows,
    RowShape,
    RowStrides,
    as_constants,
    begin,
    load_query,
    rows_of,
    write_rows,
)
from attn_select_triton.kernels.relaunch import Relaunch

# Tiles of so many rows compile to wgmma, which takes V from shared memory: splitting FP8 pairs in registers is for
# smaller ones. (With it, triton 3.6.0 gave wrong results on Hopper.)
WGMMA_ROWS = 64
E4M3_SHIFT = 256.0  # ``primitives.fp8_pairs`` gives e4m3 times 2 ** -8


@triton.jit
def write_partial(part_ptr, part_lse_ptr, result, lse, rows, part, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Write partial results ``(rows, PADDED)`` and their natural LSEs, each at its place ``part``."""
    width = tl.arange(0, PADDED)
    mask = mask_of(rows.inside, SIZE, PADDED)
    tl.store(part_lse_ptr + part, lse, mask=rows.inside)
    tl.store(part_ptr + part[:, None] * SIZE + width[None, :], result, mask=mask)


@triton.jit
def is_last(arrived_ptr, splits):
    """Say that this program's partial result is there, and return whether all of its request's are."""
    tl.debug_barrier()  # what all threads wrote is there before one says so
    # Released: the others' reads come behind what was written before. Acquired: the last one sees what they wrote.
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == splits - 1
    if last:  # zero again for the next launch
        tl.store(arrived_ptr, 0)
    return last


@triton.jit
def merge_rows(
    out_ptr, out_scale_ptr, lse_ptr, part_ptr, part_lse_ptr, first, kv_head, piece, slot_rows, strides,
    SIZE: tl.constexpr, PADDED: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of all rows of a program, and write them."""
    # A few rows at a time: registers hold a whole float32 row of each and the partial results in flight.
    end = tl.minimum(first + SHAPE.block_m, piece.query_len * SHAPE.group)
    for begins in range(first, end, MERGED_ROWS):
        flat = begins + tl.arange(0, MERGED_ROWS)
        token = flat // SHAPE.group
        head = kv_head * SHAPE.group + flat % SHAPE.group
        rows = Rows(token, head, token < piece.query_len, token, piece.query_start)
        part = piece.slot.to(tl.int64) * slot_rows + token * SHAPE.heads + head
        result, lse = merged_parts(
            part_ptr, part_lse_ptr, part, slot_rows, piece.splits, rows.inside, SIZE, MERGED_ROWS, PADDED
        )
        write_rows(out_ptr, out_scale_ptr, lse_ptr, result, lse, rows, strides, SIZE, PADDED, SHAPE)


@triton.jit(
    do_not_specialize=["slot_rows", "row_tiles", "window", "stride_table", "stride_tree"],
    do_not_specialize_on_alignment=SLICED,
)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    arrived_ptr,
    pieces_ptr,
    table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    slopes_ptr,
    sinks_ptr,
    ranges_ptr,
    tree_ptr,
    slot_rows,
    row_tiles,
    score_scale,
    v_scale,
    cap_log2,
    window,
    stride_table,
    stride_tree,
    row_strides,
    k_strides,
    v_strides,
    TERM_FLAGS: tl.constexpr,
    TILE_SHAPE: tl.constexpr,
    ROW_SHAPE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: up to ``block_m`` rows (heads of a KV head's group x tokens), against one piece of the keys."""
    # Of a request in one piece the result is written at once; of several, the program that is done last merges all, or
    # a launch of its own does (``merge.merge_pieces``). Memory traffic: each key and value that is seen, once; with
    # several pieces a float32 partial row and its LSE each, written and read.
    # part_ptr, part_lse_ptr: partial results, ``slot_rows`` rows for each slot.
    # arrived_ptr: int32, one for each slot and program of a request, of which a first slot's counts the pieces that are
    # done: 0 before and behind. None: they are merged by a launch of its own.
    # pieces_ptr: of ``pieces.list_pieces``; None: a program has a request's keys.
    # row_strides: a ``RowStrides``; k_strides and v_strides a ``CacheStrides`` each.
    # TERM_FLAGS: a ``TermFlags``; TILE_SHAPE a ``TileShape``, ROW_SHAPE a ``RowShape``, COMPUTE the dtype of the
    # products.
    TERMS: tl.constexpr = as_constants(TermFlags, TERM_FLAGS)
    TILES: tl.constexpr = as_constants(TileShape, TILE_SHAPE)
    SHAPE: tl.constexpr = as_constants(RowShape, ROW_SHAPE)
    BLOCK_N: tl.constexpr = TILES.block_n
    kv_head = tl.program_id(0) // row_tiles
    first = tl.program_id(0) % row_tiles * SHAPE.block_m
    if pieces_ptr is not None:
        piece = read_piece(pieces_ptr, tl.program_id(1))
        if piece.request < 0:
            return
    else:
        piece = share_of(query_start_loc_ptr, seq_lens_ptr, tl.program_id(1), 0, 1)
    if first >= piece.query_len * SHAPE.group:
        return

    context = piece.seq_len - piece.query_len
    rows = rows_of(first, kv_head, piece.query_start, piece.query_len, context, SHAPE)
    if TERMS.ranges > 0:
        ranges_ptr += piece.request * 2 * TERMS.ranges
    last_row = context + tl.minimum(first + SHAPE.block_m - 1, piece.query_len * SHAPE.group - 1) // SHAPE.group
    first_row = context + first // SHAPE.group
    if TERMS.tree > 0:  # of the step's own keys none is seen by every row for sure
        first_row = context - 1
        tree_ptr += piece.query_start.to(tl.int64) * stride_tree
    low, full_low, full_high, high = key_bounds(
        first_row, last_row, piece.seq_len, window, ranges_ptr, TERMS.causal, TERMS.window, TERMS.ranges, BLOCK_N
    )
    split_low = low
    split_high = high
    if pieces_ptr is not None:
        split_low, split_high = split_bounds(piece.split, piece.splits, low, high, BLOCK_N)
    query = load_query(q_ptr, slopes_ptr, rows, row_strides, TERMS.alibi, TILES, COMPUTE)
    running = begin(sinks_ptr, rows, piece.split, TILES, SHAPE)

    table_ptr += piece.request.to(tl.int64) * stride_table
    k_ptr += kv_head * k_strides.head
    v_ptr += kv_head * v_strides.head
    # Tiles begin at multiples of BLOCK_N even where a window does not: keys before ``low`` are masked. Of the tiles
    # that every row sees, those of this piece.
    origin = split_low // BLOCK_N * BLOCK_N
    full_low = tl.maximum(full_low, origin)
    full_high = tl.maximum(tl.minimum(full_high, split_high // BLOCK_N * BLOCK_N), full_low)
    accumulator, odd, row_max, row_sum = attend_visible(
        query, running, origin, full_low, full_high, split_high, low,
        Operand(k_ptr, k_strides.block, k_strides.token, k_strides.column, 0, 0),
        Operand(v_ptr, v_strides.block, v_strides.token, v_strides.column, 0, 0),
        k_ptr, table_ptr,
        Scores(score_scale, cap_log2, window, piece.seq_len, ranges_ptr, tree_ptr, stride_tree, context), TERMS, TILES,
    )  # fmt: skip

    SIZE: tl.constexpr = 2 * TILES.dv if TILES.pairs > 0 else TILES.dv
    PADDED: tl.constexpr = 2 * TILES.block_dv if TILES.pairs > 0 else TILES.block_dv
    if TILES.pairs > 0:  # even and odd columns were summed apart
        accumulator = tl.interleave(accumulator, odd)
    result = normalised(accumulator, row_sum) * v_scale
    lse = natural_lse(row_max, row_sum)
    if pieces_ptr is not None:  # noqa: SIM102
        if piece.splits > 1:
            part = piece.slot.to(tl.int64) * slot_rows + rows.token * SHAPE.heads + rows.head
            write_partial(part_ptr, part_lse_ptr, result, lse, rows, part + piece.split * slot_rows, SIZE, PADDED)
            if arrived_ptr is not None:
                # One counter for each request, row tile and KV head: the programs of its pieces share it.
                arrived_ptr += piece.slot * tl.num_programs(0) + tl.program_id(0)
                if is_last(arrived_ptr, piece.splits):
                    merge_rows(
                        out_ptr, out_scale_ptr, lse_ptr, part_ptr, part_lse_ptr, first, kv_head, piece, slot_rows,
                        row_strides, SIZE, PADDED, SHAPE,
                    )  # fmt: skip
            return
    write_rows(out_ptr, out_scale_ptr, lse_ptr, result, lse, rows, row_strides, SIZE, PADDED, SHAPE)


def decode_workspace(tokens: int, heads: int, value_size: int, slots: int) -> int:
    """Return how many float32 elements so many partial results of ``tokens`` query tokens each take."""
    return tokens * heads * slots * (value_size + 1)


@dataclass(frozen=True, slots=True)
class Shape:
    """Q, K and V of a kind of layers."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device  # where they live


_launches: dict[Any, Relaunch] = {}  # By all that Triton compiles and specialises the kernel for


class Decode:
    """A step's decode, ready for its layers: what they share is worked out once. Nothing waits for the device.

    Args:
        shape: of the layers.
        query_start_loc: int32 ``(B + 1,)``, rows of the query; those before the first and behind the last are left
            alone.
        seq_lens: int32 ``(B,)``, keys per request.
        block_table: int32 ``(B, W)``.
        max_query_len: most tokens of a request.
        pieces: of the requests' keys, by ``pieces.list_pieces``; None: each request's are one.
        slots: partial results of a request that there may be: pieces of the requests that have several.
        workspace: float32, ``decode_workspace`` elements at least; with slots.
        arrived: int32, as many elements as slots x heads x ``max_query_len`` at least, zeros before and behind each
            call; with slots, and without merges.
        merges: requests in several pieces that ``pieces`` lists behind all others, and whose partial results a launch
            of its own merges; 0: the programs do.
        tree_mask: bool ``(T, columns)``, which of its request's tokens in this step a token of the query sees;
            ``max_query_len`` is at most ``columns``. None: those up to itself, with causal terms.
        launch: of the kernel.

    Raises:
        ValueError: slots without a workspace that is large enough.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        max_query_len: int,
        launch: Launch,
        pieces: Tensor | None = None,
        slots: int = 0,
        workspace: Tensor | None = None,
        arrived: Tensor | None = None,
        merges: int = 0,
        tree_mask: Tensor | None = None,
    ) -> None:
        requests, group = len(seq_lens), shape.heads // shape.kv_heads
        self._merges, self._listed = merges, pieces
        if pieces is not None and merges:  # the decode takes the pieces, the merge what is listed behind them
            pieces = pieces[:-merges]
        self.shape, self.launch, self.pieces, self.seq_lens = shape, launch, pieces, seq_lens
        row_tiles = -(-group * max_query_len // launch.block_m)
        self._grid = (shape.kv_heads * row_tiles, requests if pieces is None else len(pieces), 1)
        compute = compute_dtype(shape.dtype, shape.cache_dtype)
        self._pairs = 0
        if shape.cache_dtype in FP8 and compute == tl.float16 and launch.block_m < WGMMA_ROWS:
            self._pairs = 2 if shape.cache_dtype == torch.float8_e5m2 else 1
        parts = part_lse = None
        if slots:
            wanted = decode_workspace(max_query_len, shape.heads, shape.value_size, slots)
            if workspace is None or workspace.numel() < wanted:
                have = 0 if workspace is None else workspace.numel()
                raise ValueError(
                    f"workspace has {have} float32 elements; {slots} partial results of {max_query_len} tokens need "
                    f"{wanted} (decode_workspace computes the number)"
                )
            partials = slots * max_query_len * shape.heads * shape.value_size
            parts, part_lse = workspace[:partials], workspace[partials:wanted]
        self._tensors = (parts, part_lse, arrived, pieces, block_table, query_start_loc, seq_lens)
        self._tree = None if tree_mask is None else tree_mask.view(torch.uint8)  # bytes, as ``Scores`` has them
        self._columns, self._stride_tree = (0, 0) if tree_mask is None else (tree_mask.shape[1], tree_mask.stride(0))
        self._sizes = (max_query_len * shape.heads, row_tiles)
        self._compute = compute
        self._stride_table = block_table.stride(0)
        self._kind = (shape, launch, slots > 0, arrived is None, pieces is None)
        # Of the layer before, which is most often like the next one.
        self._seen: Any = None
        self._found: tuple[int, tuple[Any, ...], Relaunch] | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        *,
        scale: float,
        terms: Terms = PLAIN,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        output_scale: Tensor | None = None,
        output_lse: Tensor | None = None,
    ) -> None:
        """Launch it for one layer, whose tensors are as ``prefill_attention`` has them."""
        slopes, sinks, ranges = terms.slopes, terms.sinks, terms.ranges
        flags = terms.causal, terms.window > 0, terms.soft_cap > 0, slopes is not None
        layer = (
            query.data_ptr() % 16, key.data_ptr() % 16, value.data_ptr() % 16, output.data_ptr() % 16, output.dtype,
            0 if ranges is None else ranges.shape[1], None if sinks is None else sinks.dtype, output_lse is not None,
        )  # fmt: skip
        seen = flags, layer, query.stride(), key.stride(), value.stride(), output.stride(), key.shape
        if seen != self._seen or self._found is None:
            self._found, self._seen = self._lookup(query, key, value, output, flags, layer), seen
        pairs, constants, decode = self._found
        if pairs:
            value = value.view(torch.int16)
            v_scale *= E4M3_SHIFT if pairs == 1 else 1.0
        decode(
            self._grid, query, key, value, output, output_scale, output_lse, *self._tensors,
            slopes, sinks, ranges, self._tree, *self._sizes, scale * k_scale * LOG2E.value, v_scale,
            terms.soft_cap * LOG2E.value, terms.window, self._stride_table, self._stride_tree, *constants,
        )  # fmt: skip
        if self._merges:
            parts, part_lse, *_ = self._tensors
            assert parts is not None
            assert part_lse is not None
            assert self._listed is not None
            merge_pieces(parts, part_lse, output, output_scale, output_lse, self._listed, self._merges, self._sizes[0])

    def _lookup(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        flags: tuple[bool, bool, bool, bool],
        layer: tuple[Any, ...],
    ) -> tuple[int, tuple[Any, ...], Relaunch]:
        """Return whether V is read in pairs, as ``_pairs``, the kernel's last arguments, and its launches."""
        shape, launch = self.shape, self.launch
        *_, ranges, _, _ = layer
        block_size, pack, k_strides, v_strides = cache_strides(key, value, True)
        pairs = self._pairs if v_strides[3] == 1 and value.is_cuda else 0
        size = shape.value_size
        if pairs:  # two FP8 numbers are one element: strides and columns count half
            v_strides = (v_strides[0] // 2, v_strides[1] // 2, v_strides[2] // 2, 1)
            size //= 2
        arguments = (
            RowStrides(*query.stride()[:2], *output.stride()[:2]), CacheStrides(*k_strides), CacheStrides(*v_strides),
            TermFlags(*flags, ranges, self._columns),
            TileShape(
                paged=True, described=False, clean=False, block_size=block_size, d=shape.head_size,
                block_d=power_of_two(shape.head_size), dv=size, block_dv=power_of_two(size), rest=0, pack=pack,
                pairs=pairs, precision=PRECISION, block_n=launch.block_n,
            ),
            RowShape(shape.heads, shape.heads // shape.kv_heads, launch.block_m),
            self._compute,
        )  # fmt: skip
        kind = (self._kind, arguments, layer)
        if kind not in _launches:
            _launches[kind] = Relaunch(decode_kernel, num_warps=launch.num_warps, num_stages=launch.num_stages)
        return pairs, arguments, _launches[kind]
