"""The rows of a program: heads of a KV head's group times tokens of one request, token by token.

``decode`` and ``prefill`` read their query here, begin, and write what came out.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_select_triton.kernels.primitives import LOG2E, Query, Running, as_output, mask_of


class RowShape(NamedTuple):
    """What rows are; all of it is compiled in."""

    # Plain numbers, since hooks of Triton's compiler write constants as JSON.
    heads: int  # of the query; ``group`` of them share a KV head
    group: int
    block_m: int  # rows of a program


class RowStrides(NamedTuple):
    """Elements from a token and from a head to the next, of the query and of the output."""

    query_token: Any
    query_head: Any
    output_token: Any
    output_head: Any


class CacheStrides(NamedTuple):
    """Elements of K or V from a block to the next, and likewise; with descriptors, rows and columns of their memory."""

    block: Any
    token: Any
    head: Any
    column: Any


class Rows(NamedTuple):
    """Rows of a program."""

    # token, head: int32 ``(block_m,)``: the token within its request's query, and the head
    token: Any
    head: Any
    inside: Any  # which of them are there
    position: Any  # of the token within the request
    query_start: Any  # the request's first token


@triton.constexpr_function
def as_constants(kind, given):
    """Return a named tuple of this kind of which each number is a constant by itself, as loops and shapes want them."""
    # Triton takes a named tuple for one constant. Its interpreter knows no constants, and passes a plain tuple.
    return kind(*given) if triton.knobs.runtime.interpret else kind(*map(tl.constexpr, given))


@triton.jit
def rows_of(first, kv_head, query_start, query_len, context, SHAPE: tl.constexpr):
    """Return the ``Rows`` from row ``first`` of a request on, whose query begins behind ``context`` keys."""
    flat = first + tl.arange(0, SHAPE.block_m)
    token = flat // SHAPE.group
    head = kv_head * SHAPE.group + flat % SHAPE.group
    return Rows(token, head, token < query_len, context + token, query_start)


@triton.jit
def load_query(q_ptr, slopes_ptr, rows, strides, ALIBI: tl.constexpr, TILES: tl.constexpr, COMPUTE: tl.constexpr):
    """Return the ``Query`` of these rows, in the dtype of the products."""
    size = tl.arange(0, TILES.block_d)
    token = (rows.query_start + rows.token).to(tl.int64)
    q_rows = token * strides.query_token + rows.head * strides.query_head
    mask = mask_of(rows.inside, TILES.d if TILES.d < TILES.block_d else TILES.block_d, TILES.block_d)
    tile = tl.load(q_ptr + q_rows[:, None] + size[None, :], mask=mask, other=0.0).to(COMPUTE)
    rest = tile
    if TILES.rest > 0:
        behind = TILES.block_d + tl.arange(0, TILES.rest)
        rest = tl.load(q_ptr + q_rows[:, None] + behind[None, :], mask=rows.inside[:, None], other=0.0)
        rest = rest.to(COMPUTE)
    slopes = rows.position
    if ALIBI:
        slopes = tl.load(slopes_ptr + rows.head).to(tl.float32) * LOG2E
    return Query(tile, rest, rows.position, slopes)


@triton.jit
def begin(sinks_ptr, rows, split, TILES: tl.constexpr, SHAPE: tl.constexpr):
    """Return the ``Running`` of no keys; a sink, a logit in the denominator alone, counts with the first split."""
    row_max = tl.full([SHAPE.block_m], float("-inf"), tl.float32)
    row_sum = tl.zeros([SHAPE.block_m], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102
        if split == 0:
            row_max = tl.load(sinks_ptr + rows.head).to(tl.float32) * LOG2E
            row_sum += 1.0
    accumulator = tl.zeros([SHAPE.block_m, TILES.block_dv], tl.float32)
    return Running(accumulator, accumulator, row_max, row_sum)


@triton.jit
def write_rows(
    out_ptr, out_scale_ptr, lse_ptr, result, lse, rows, strides,
    SIZE: tl.constexpr, PADDED: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Write the results ``(rows, PADDED)``, of which ``SIZE`` columns are there, and natural LSEs ``(rows,)``."""
    width = tl.arange(0, PADDED)
    mask = mask_of(rows.inside, SIZE, PADDED)
    token = (rows.query_start + rows.token).to(tl.int64)
    places = token * strides.output_token + rows.head * strides.output_head
    stored = as_output(result, out_scale_ptr, out_ptr.dtype.element_ty)
    tl.store(out_ptr + places[:, None] + width[None, :], stored, mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + token * SHAPE.heads + rows.head, lse, mask=rows.inside)
