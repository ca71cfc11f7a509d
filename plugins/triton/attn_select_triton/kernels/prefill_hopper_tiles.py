"""How a compute group of the warp-specialised prefill attends to one tile of keys: products, softmax, products."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"
# mypy: disable-error-code="assignment"

# ruff: noqa: RUF005  Triton's language has no stars

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn_select_triton.kernels.gluon_names import barrier
from attn_select_triton.kernels.hopper_barriers import hand_back
from attn_select_triton.kernels.prefill_hopper_items import PART, ROWS

# Of an accumulator ``(ROWS, PART)``.
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART.value, 16]))
# Of what goes to global memory and comes from there: 16 bytes a thread.
T = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


class Scores(NamedTuple):
    """How a group's products ``q . k`` become scores."""

    scale: Any  # scale * log2(e), or with a soft cap scale / cap
    cap_log2: Any  # the soft cap times log2(e)
    window: Any  # as ``launch.Terms`` has it
    limits: Any  # int32 ``(ROWS,)``, the keys that each row sees; with a window the last ``window`` of them
    seq_len: Any  # keys of the request


class Running(NamedTuple):
    """What a group's rows have seen so far."""

    accumulators: Any  # float32 ``(ROWS, PART)`` for each part of V. One product for each is faster than one for all.
    row_max: Any  # float32 ``(ROWS,)``, base 2
    sums: Any  # float32 ``(ROWS,)``, of the weights; with ``apart`` ``(ROWS, 8)``, a thread's of its own keys


@gluon.constexpr_function
def score_layout(keys):
    """Return the layout of scores ``(ROWS, keys)``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, 16])


@gluon.jit
def clear_behind(v_smem, buffer, first, seq_len, OPTIONS: gl.constexpr):
    """Clear the values of keys at ``seq_len`` and behind: their memory may hold NaN, and 0 times NaN is NaN."""
    # All groups do so, each before its own product, and store the same numbers.
    V_PARTS: gl.constexpr = OPTIONS.v_parts
    rows = first + gl.arange(0, OPTIONS.keys, layout=gl.SliceLayout(1, T))
    for part in gl.static_range(V_PARTS):
        values = v_smem.index(buffer * V_PARTS + part)
        loaded = values.load(T)
        values.store(gl.where((rows < seq_len)[:, None], loaded, gl.zeros_like(loaded)))
    fence_async_shared()
    barrier()


@gluon.jit
def tanh(numbers):
    """Return the hyperbolic tangent by the GPU's own instruction: a relative error of 2^-11 at most (PTX ISA, tanh)."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [numbers], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def multiply_scores(q_smem, k_smem, buffer, OPTIONS: gl.constexpr):
    """Issue the products of a group's rows with a tile of keys."""
    PARTS: gl.constexpr = OPTIONS.parts
    scores = gl.zeros([ROWS, OPTIONS.keys], gl.float32, score_layout(OPTIONS.keys))
    for part in gl.static_range(PARTS):
        k = k_smem.index(buffer * PARTS + part)
        scores = warpgroup_mma(q_smem.index(part), k.permute((1, 0)), scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def multiply_values(p, v_smem, buffer, accumulators, OPTIONS: gl.constexpr):
    """Issue the products of weights with a tile of values, added to the accumulators."""
    V_PARTS: gl.constexpr = OPTIONS.v_parts
    products = ()
    for part in gl.static_range(V_PARTS):
        v = v_smem.index(buffer * V_PARTS + part)
        products = products + (warpgroup_mma(p, v, accumulators[part], is_async=True),)
    return products


@gluon.jit
def rescaled(accumulators, rescale, OPTIONS: gl.constexpr):
    """Return the accumulators times a factor for each row."""
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, ACC))[:, None]
    scaled = ()
    for part in gl.static_range(OPTIONS.v_parts):
        scaled = scaled + (accumulators[part] * factor,)
    return scaled


@gluon.jit
def soften(tile, products, row_max, sums, scores, MASKED: gl.constexpr, OPTIONS: gl.constexpr):
    """Return a tile's weights, the factor of earlier sums, the new maxima and the new sums."""
    KEYS: gl.constexpr = OPTIONS.keys
    factor = scores.scale
    if OPTIONS.soft_cap:
        products = tanh(products * scores.scale)
        factor = scores.cap_log2
    if MASKED:
        # The limits move and the keys stay 0 to KEYS - 1, which are constants.
        keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, score_layout(KEYS)))
        limits = scores.limits - tile * KEYS
        seen = keys[None, :] < limits[:, None]
        if OPTIONS.window:
            seen = seen & (keys[None, :] >= (limits - scores.window)[:, None])
        products = gl.where(seen, products, float("-inf"))
    # The factor is positive, so the largest product is the largest score: scaling costs one FMA with the subtraction.
    new_max = gl.maximum(row_max, gl.max(products, 1) * factor)
    base = new_max
    if MASKED:  # a row may have seen no key yet, and -inf - -inf is NaN
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
    weights = gl.exp2(products * factor - base[:, None])
    rescale = gl.exp2(row_max - base)
    if OPTIONS.apart:
        # In wgmma's layout a thread has the same two of every eight columns: each eighth column adds up within it.
        added = gl.sum(gl.reshape(weights, [ROWS, KEYS // 8, 8]), 1)
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, added.type.layout))[:, None] + added
    else:
        sums = sums * rescale + gl.sum(weights, 1)
    return weights, rescale, new_max, sums


@gluon.jit
def as_operand(weights, dtype):
    """Return weights as ``wgmma`` takes them: its left operand, from registers."""
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, ACC, 2))


@gluon.jit
def attend_tile(
    tile, loaded, turns, worked, running, scores, q_smem, tiles,
    MASKED: gl.constexpr, OPTIONS: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Attend from one group's rows to one tile."""
    # With turns a group's product with V and its next scores are issued together, while the others take exponentials.
    # Left to themselves groups may fall into step, and the tensor cores wait for all.
    # loaded: tiles that were loaded before this one, of all items.
    # turns: a barrier for each group; worked items with tiles before this one.
    # running: a ``Running``; scores a ``Scores``, tiles a ``Tiles``.
    # Returns ``running`` with this tile.
    accumulators, row_max, sums = running
    buffer = loaded % OPTIONS.stages
    phase = loaded // OPTIONS.stages & 1
    mbarrier.wait(tiles.k_ready.index(buffer), phase)
    products = multiply_scores(q_smem, tiles.k, buffer, OPTIONS)
    if OPTIONS.turns:
        mbarrier.arrive(turns.index((INDEX + 1) % OPTIONS.groups), count=1)
    products = warpgroup_mma_wait(0, [products])
    hand_back(tiles.k_empty, buffer)
    weights, rescale, new_max, sums = soften(tile, products, row_max, sums, scores, MASKED, OPTIONS)
    p = as_operand(weights, tiles.k.dtype)
    scaled = rescaled(accumulators, rescale, OPTIONS)
    mbarrier.wait(tiles.v_ready.index(buffer), phase)
    if OPTIONS.turns:
        # This group's barrier went through a phase for each tile and item before; groups behind the first have waited
        # for this item's start too (``attend_items``).
        mbarrier.wait(turns.index(INDEX), (loaded + worked + (1 if INDEX > 0 else 0)) & 1)
    if MASKED:  # noqa: SIM102  one is compiled in
        if (tile + 1) * OPTIONS.keys > scores.seq_len:
            clear_behind(tiles.v, buffer, tile * OPTIONS.keys, scores.seq_len, OPTIONS)
    added = multiply_values(p, tiles.v, buffer, scaled, OPTIONS)
    if OPTIONS.v_parts == 1:  # noqa: SIM108  one is compiled in
        accumulators = (warpgroup_mma_wait(0, added),)
    else:
        accumulators = warpgroup_mma_wait(0, added)
    hand_back(tiles.v_empty, buffer)
    return Running(accumulators, new_max, sums)


@gluon.jit
def first_weights(tile, loaded, running, scores, q_smem, tiles, OPTIONS: gl.constexpr):
    """Return the weights of an item's first tile, and ``running`` with its maxima and sums."""
    accumulators, row_max, sums = running
    buffer = loaded % OPTIONS.stages
    mbarrier.wait(tiles.k_ready.index(buffer), loaded // OPTIONS.stages & 1)
    products = warpgroup_mma_wait(0, [multiply_scores(q_smem, tiles.k, buffer, OPTIONS)])
    hand_back(tiles.k_empty, buffer)
    # Masked, since an item's only tile may be its last. There are no earlier values for the factor to scale.
    weights, _, new_max, sums = soften(tile, products, row_max, sums, scores, True, OPTIONS)
    return as_operand(weights, tiles.k.dtype), Running(accumulators, new_max, sums)


@gluon.jit
def attend_tile_ahead(
    tile, loaded, p, running, scores, q_smem, tiles, MASKED: gl.constexpr, OPTIONS: gl.constexpr
):  # fmt: skip
    """Issue one tile's scores and the product of the tile before with its values, which goes on beside the softmax."""
    # p: the weights ``(ROWS, keys)`` of the tile before; all else as ``attend_tile`` has it.
    # Returns the weights of this tile, and ``running`` with the values of the tile before.
    accumulators, row_max, sums = running
    buffer = loaded % OPTIONS.stages
    before = (loaded - 1) % OPTIONS.stages
    mbarrier.wait(tiles.k_ready.index(buffer), loaded // OPTIONS.stages & 1)
    mbarrier.wait(tiles.v_ready.index(before), (loaded - 1) // OPTIONS.stages & 1)
    products = multiply_scores(q_smem, tiles.k, buffer, OPTIONS)
    added = multiply_values(p, tiles.v, before, accumulators, OPTIONS)
    products = warpgroup_mma_wait(OPTIONS.v_parts, [products])  # so many were issued behind, and still run
    hand_back(tiles.k_empty, buffer)
    weights, rescale, new_max, sums = soften(tile, products, row_max, sums, scores, MASKED, OPTIONS)
    done = warpgroup_mma_wait(0, added + (p,))  # p stays where it is until then
    hand_back(tiles.v_empty, before)
    # Only now: the weights that were just multiplied are of the maximum before this tile.
    accumulators = rescaled(done, rescale, OPTIONS)
    return as_operand(weights, tiles.k.dtype), Running(accumulators, new_max, sums)


@gluon.jit
def last_values(tile, loaded, p, running, seq_len, tiles, OPTIONS: gl.constexpr):
    """Return ``running`` with the product of an item's last tile."""
    accumulators, row_max, sums = running
    buffer = loaded % OPTIONS.stages
    mbarrier.wait(tiles.v_ready.index(buffer), loaded // OPTIONS.stages & 1)
    # Of an item's tiles only the last may reach behind the keys: ``attend_tile_ahead`` need not clear.
    if (tile + 1) * OPTIONS.keys > seq_len:
        clear_behind(tiles.v, buffer, tile * OPTIONS.keys, seq_len, OPTIONS)
    done = warpgroup_mma_wait(0, multiply_values(p, tiles.v, buffer, accumulators, OPTIONS) + (p,))
    hand_back(tiles.v_empty, buffer)
    accumulators = ()
    for part in gl.static_range(OPTIONS.v_parts):
        accumulators = accumulators + (done[part],)
    return Running(accumulators, row_max, sums)
