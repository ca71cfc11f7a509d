"""Attention of many query tokens per request, over a paged cache or over K and V as they come."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels.launch import (
    PLAIN,
    PRECISION,
    SLICED,
    Described,
    Launch,
    Terms,
    cache_strides,
    capability_of,
    compute_dtype,
    describable,
    describe,
    power_of_two,
    prefill_launch,
    two_powers,
)
from attn_select_triton.kernels.primitives import (
    LOG2E,
    Operand,
    Scores,
    TermFlags,
    TileShape,
    attend_visible,
    find_request,
    key_bounds,
    natural_lse,
    normalised,
)
from attn_select_triton.kernels.query_rows import (
    CacheStrides,
    RowShape,
    RowStrides,
    as_constants,
    begin,
    load_query,
    rows_of,
    write_rows,
)
from attn_select_triton.kernels.relaunch import Relaunch, dtypes
from attn_select_triton.tuning import keys_class


@triton.jit(do_not_specialize=["num_requests", "window", "stride_table"], do_not_specialize_on_alignment=SLICED)
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    rest_ptr,
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    table_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    seq_lens_ptr,
    slopes_ptr,
    sinks_ptr,
    ranges_ptr,
    num_requests,
    score_scale,
    v_scale,
    cap_log2,
    window,
    stride_table,
    row_strides,
    k_strides,
    v_strides,
    TERM_FLAGS: tl.constexpr,
    TILE_SHAPE: tl.constexpr,
    ROW_SHAPE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: ``block_m`` rows of one request and KV head, against all keys that they see."""
    # Rows are tokens x heads of the group, token by token, so a tile is full whatever the group. Requests' tiles come
    # last first: causal rows with the most keys start earliest. Memory traffic: Q and output once, each K and V tile
    # once per row tile, which L2 serves, since neighbouring programs share the KV head.
    # row_strides: a ``RowStrides``; k_strides and v_strides a ``CacheStrides`` each.
    # TERM_FLAGS: a ``TermFlags``; TILE_SHAPE a ``TileShape``, ROW_SHAPE a ``RowShape``, COMPUTE the dtype of the
    # products.
    TERMS: tl.constexpr = as_constants(TermFlags, TERM_FLAGS)
    TILES: tl.constexpr = as_constants(TileShape, TILE_SHAPE)
    SHAPE: tl.constexpr = as_constants(RowShape, ROW_SHAPE)
    BLOCK_N: tl.constexpr = TILES.block_n
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last first
    kv_head = tl.program_id(1)
    request = find_request(query_start_loc_ptr, tile, num_requests, SHAPE.group, SHAPE.block_m)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    tokens_before = query_start - tl.load(query_start_loc_ptr)
    # ``find_request`` says where a request's tiles begin. It has one more than some need: that one has no rows.
    first = (tile - tokens_before * SHAPE.group // SHAPE.block_m - request) * SHAPE.block_m
    if first >= query_len * SHAPE.group:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    context = seq_len - query_len
    rows = rows_of(first, kv_head, query_start, query_len, context, SHAPE)
    query = load_query(q_ptr, slopes_ptr, rows, row_strides, TERMS.alibi, TILES, COMPUTE)
    running = begin(sinks_ptr, rows, 0, TILES, SHAPE)

    if TERMS.ranges > 0:
        ranges_ptr += request * 2 * TERMS.ranges
    last_row = context + tl.minimum(first + SHAPE.block_m - 1, query_len * SHAPE.group - 1) // SHAPE.group
    low, full_low, full_high, high = key_bounds(
        context + first // SHAPE.group, last_row, seq_len, window, ranges_ptr, TERMS.causal, TERMS.window,
        TERMS.ranges, BLOCK_N,
    )  # fmt: skip
    origin = low // BLOCK_N * BLOCK_N
    key_start = 0
    if TILES.paged:
        table_ptr += request.to(tl.int64) * stride_table
    else:
        key_start = tl.load(key_start_loc_ptr + request)
    if TILES.described:
        # k_ptr and v_ptr are descriptors; the strides count rows and columns of their memory.
        k_row = key_start + kv_head * k_strides.token
        v_row = key_start + kv_head * v_strides.token
        k_column = kv_head * k_strides.head
        v_column = kv_head * v_strides.head
    else:
        k_row = 0
        v_row = 0
        k_column = 0
        v_column = 0
        k_ptr += kv_head * k_strides.head
        v_ptr += kv_head * v_strides.head
        if not TILES.paged:
            first_key = tl.load(key_start_loc_ptr + request).to(tl.int64)
            k_ptr += first_key * k_strides.token
            v_ptr += first_key * v_strides.token
    accumulator, _, row_max, row_sum = attend_visible(
        query, running, origin, full_low, full_high, high, low,
        Operand(k_ptr, k_strides.block, k_strides.token, k_strides.column, k_row, k_column),
        Operand(v_ptr, v_strides.block, v_strides.token, v_strides.column, v_row, v_column),
        rest_ptr, table_ptr, Scores(score_scale, cap_log2, window, seq_len, ranges_ptr, 0, 0, 0), TERMS, TILES,
    )  # fmt: skip
    result = normalised(accumulator, row_sum) * v_scale
    write_rows(
        out_ptr, out_scale_ptr, lse_ptr, result, natural_lse(row_max, row_sum), rows, row_strides, TILES.dv,
        TILES.block_dv, SHAPE,
    )  # fmt: skip


class _Kind:
    """What all calls share that differ in nothing by which Triton compiles or specialises the kernel."""

    # arguments: the kernel's last.

    __slots__ = ("_described", "arguments", "block_m", "launch")

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        max_seq_len: int,
        flags: TermFlags,
        paged: bool,
        clean: bool,
        launch: Launch | None,
    ) -> None:
        heads, head_size = query.shape[1:]
        kv_heads, value_size = value.shape[-2:]
        capability, cache_dtype = capability_of(query.device), value.dtype
        width = max(head_size, value_size) * (2 if 4 in (query.itemsize, cache_dtype.itemsize) else 1)
        block_d, rest = two_powers(head_size)
        block_dv = power_of_two(value_size)
        # Whether TMA can read K and V depends on the tile, and the tile on whether it does: first it is chosen for TMA.
        chosen = launch or prefill_launch(capability, width, query.dtype, True, paged, max_seq_len)
        described = (
            block_d > 0
            and value_size == block_dv
            and query.dtype != torch.float32
            and key.ndim < 5
            and all(describable(tensor, query.dtype, chosen.block_n, capability) for tensor in (key, value))
        )
        if not described and launch is None:
            chosen = prefill_launch(capability, width, query.dtype, False, paged, max_seq_len)
        block_size, pack = (key.shape[1] if paged else 1), 0
        self._described: tuple[Described, Described, Described | None] | None = None
        if described:
            keys, values = describe(key, chosen.block_n, block_d), describe(value, chosen.block_n, block_dv)
            self._described = keys, values, describe(key, chosen.block_n, rest) if rest else None
            k_strides = (keys.page_rows, keys.head_rows, keys.head_columns, 1)
            v_strides = (values.page_rows, values.head_rows, values.head_columns, 1)
        else:
            block_d, rest = power_of_two(head_size), 0
            block_size, pack, k_strides, v_strides = cache_strides(key, value, paged)
        self.block_m = chosen.block_m
        self.arguments = (
            RowStrides(*query.stride()[:2], *output.stride()[:2]), CacheStrides(*k_strides), CacheStrides(*v_strides),
            flags,
            TileShape(
                paged=paged, described=described, clean=clean, block_size=block_size, d=head_size, block_d=block_d,
                dv=value_size, block_dv=block_dv, rest=rest, pack=pack, pairs=0, precision=PRECISION,
                block_n=chosen.block_n,
            ),
            RowShape(heads, heads // kv_heads, chosen.block_m),
            compute_dtype(query.dtype, cache_dtype),
        )  # fmt: skip
        self.launch = Relaunch(prefill_kernel, num_warps=chosen.num_warps, num_stages=chosen.num_stages)

    def sources(self, key: Tensor, value: Tensor) -> tuple[Any, Any, Any]:
        """Return what the kernel reads K, V and the columns of K behind a power of two from."""
        if self._described is None:
            return key, value, None
        keys, values, rest = self._described
        return keys.over(key), values.over(value), None if rest is None else rest.over(key)


_kinds: dict[Any, _Kind] = {}


class Prefill:
    """A step's prefill, ready for its layers: what they share is worked out once. Nothing waits for the device.

    Args:
        query_start_loc, seq_lens, max_seq_len, block_table, key_start_loc, clean, num_tokens, launch: as
            ``prefill_attention`` has them.
    """

    def __init__(
        self,
        *,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        block_table: Tensor | None = None,
        key_start_loc: Tensor | None = None,
        clean: bool = False,
        num_tokens: int | None = None,
        launch: Launch | None = None,
    ) -> None:
        self._tensors = block_table, query_start_loc, key_start_loc, seq_lens
        self._paged, self._stride_table = block_table is not None, 0 if block_table is None else block_table.stride(0)
        self._longest, self._clean, self._num_tokens, self._launch = max_seq_len, clean, num_tokens, launch
        self._requests = len(seq_lens)
        # Of the layer before, which is most often like the next one.
        self._seen: Any = None
        self._found: tuple[_Kind, tuple[int, int, int]] | None = None

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
        num_ranges = 0 if ranges is None else ranges.shape[1]
        flags = terms.causal, terms.window > 0, terms.soft_cap > 0, slopes is not None, num_ranges
        layer = (
            query.dtype, key.dtype, value.dtype, output.dtype, query.data_ptr() % 16, key.data_ptr() % 16,
            value.data_ptr() % 16, output.data_ptr() % 16, *dtypes(slopes, sinks, output_scale), output_lse is not None,
        )  # fmt: skip
        strides = query.stride(), key.stride(), value.stride(), output.stride()
        seen = flags, layer, strides, query.shape, key.shape, value.shape
        if seen != self._seen or self._found is None:
            self._found, self._seen = self._lookup(query, key, value, output, flags, (layer, strides)), seen
        kind, grid = self._found
        kind.launch(
            grid, query, *kind.sources(key, value), output, output_scale, output_lse, *self._tensors, slopes, sinks,
            ranges, self._requests, scale * k_scale * LOG2E.value, v_scale, terms.soft_cap * LOG2E.value, terms.window,
            self._stride_table, *kind.arguments,
        )  # fmt: skip

    def _lookup(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        flags: tuple[bool, bool, bool, bool, int],
        layer: tuple[Any, ...],
    ) -> tuple[_Kind, tuple[int, int, int]]:
        """Return the kind of a layer, and the launch's grid."""
        same = (
            flags, layer, self._paged, self._clean, self._launch, keys_class("prefill", self._longest),
            query.shape[1:], key.shape[1:], value.shape[1:], key.numel() > 0, query.get_device(),
        )  # fmt: skip
        kind = _kinds.get(same)
        if kind is None:
            kind = _kinds[same] = _Kind(
                query, key, value, output, self._longest, TermFlags(*flags, 0), self._paged, self._clean, self._launch
            )  # fmt: skip
        tokens, heads, _ = query.shape
        tokens, kv_heads = tokens if self._num_tokens is None else self._num_tokens, value.shape[-2]
        # Tiles that ``find_request`` deals out, at most.
        return kind, (tokens * (heads // kv_heads) // kind.block_m + self._requests, kv_heads, 1)


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    block_table: Tensor | None = None,
    key_start_loc: Tensor | None = None,
    terms: Terms = PLAIN,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    output_scale: Tensor | None = None,
    output_lse: Tensor | None = None,
    clean: bool = False,
    num_tokens: int | None = None,
    launch: Launch | None = None,
) -> None:
    """Attend from many query tokens per request, causal or not, with every term: a ``Prefill`` for one layer.

    On Hopper and newer, K and V come through TMA where they lie in whole tiles: pages of 64 tokens or more, or
    contiguous memory, ``cache.gather_pages``'s for smaller pages. Else each thread looks its rows' pages up.

    Args:
        query: ``(T, H, D)``, last dimension contiguous; ``output`` ``(T, H, Dv)`` likewise.
        key: ``(num_blocks, block_size, Hkv, D)`` with a block table, the classic K
            ``(num_blocks, Hkv, D / x, block_size, x)``, or without a table ``(S, Hkv, D)``; any strides.
        value: ``(num_blocks, block_size, Hkv, Dv)`` or ``(S, Hkv, Dv)``; any strides.
        query_start_loc: int32 ``(B + 1,)``, rows of the query; those before the first and behind the last are left
            alone.
        seq_lens: int32 ``(B,)``, keys per request. Query rows are the last ones; with more rows than keys, the first
            see none and get 0 and -inf.
        max_seq_len: of ``seq_lens``, known to the host.
        scale: positive factor on ``q . k``.
        block_table: int32 ``(B, W)``.
        key_start_loc: int32 ``(B,)``, without a block table the row of each request's first key.
        k_scale: of an FP8 cache, positive; v_scale likewise.
        output_scale: float32 ``()``, with an output of e4m3: what its numbers are to be multiplied with.
        output_lse: float32 ``(T, H)``, contiguous; natural logarithm.
        clean: rows between the requests' keys hold finite numbers (``gather_pages`` sees to it).
        num_tokens: of these requests, or any bound above it; None: T.
        launch: another than the table's.
    """
    step = Prefill(
        query_start_loc=query_start_loc, seq_lens=seq_lens, max_seq_len=max_seq_len, block_table=block_table,
        key_start_loc=key_start_loc, clean=clean, num_tokens=num_tokens, launch=launch,
    )  # fmt: skip
    step(
        query, key, value, output, scale=scale, terms=terms, k_scale=k_scale, v_scale=v_scale,
        output_scale=output_scale, output_lse=output_lse,
    )  # fmt: skip
