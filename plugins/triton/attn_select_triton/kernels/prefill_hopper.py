"""Prefill on Hopper, warp-specialised: two or three groups of 64 query rows share each tile of keys, one warp loads.

Written in Gluon, Triton's language of explicit layouts. One program fills a multiprocessor and works on one item after
the other (``prefill_hopper_items``). Each tile of keys serves 128 rows or more, half the traffic from L2 of a program
of 64. One group multiplies while the other takes exponentials (``prefill_hopper_tiles``).
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"
# mypy: disable-error-code="assignment"

# ruff: noqa: RUF005  Triton's language has no stars

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia import hopper

from attn_select_triton.kernels.descriptors import Descriptors
from attn_select_triton.kernels.gluon_names import barrier
from attn_select_triton.kernels.hopper_barriers import barriers_of
from attn_select_triton.kernels.launch import (
    PLAIN,
    SLICED,
    Terms,
    describable,
    describe,
    hopper_prefill_launch,
    sm_count,
)
from attn_select_triton.kernels.merge import merge_shares
from attn_select_triton.kernels.prefill_hopper_items import (
    PART,
    ROWS,
    Batch,
    Mail,
    Options,
    Places,
    Source,
    Tiles,
    constants,
    load_items,
    take,
)
from attn_select_triton.kernels.prefill_hopper_tiles import (
    ACC,
    Running,
    Scores,
    T,
    as_operand,
    attend_tile,
    attend_tile_ahead,
    first_weights,
    last_values,
    score_layout,
)
from attn_select_triton.kernels.primitives import E4M3_MAX, LN2, LOG2E
from attn_select_triton.kernels.relaunch import Relaunch, specialised
from attn_select_triton.kernels.work_list import WorkList
from attn_select_triton.limits import GLUON_CAPABILITY
from attn_select_triton.tuning import section_of

LEAST_BOX = 16  # Tokens of the smallest box that was run


class Rows(NamedTuple):
    """The query's and the output's rows in global memory."""

    q_ptr: Any
    out_ptr: Any
    out_scale_ptr: Any  # of an e4m3 output
    lse_ptr: Any
    sinks_ptr: Any  # a logit for each head
    # query_strides, out_strides: elements from a token and from a head to the next
    query_strides: Any
    out_strides: Any


class Parts(NamedTuple):
    """Where partial results go: float32 ``(partials, Dv)`` and their LSEs."""

    part_ptr: Any
    part_lse_ptr: Any


class Scales(NamedTuple):
    """Factors of scores and values, as ``Scores`` has them, and the window."""

    score_scale: Any
    v_scale: Any
    cap_log2: Any
    window: Any


@gluon.jit
def with_columns(inside, columns, part: gl.constexpr, SIZE: gl.constexpr):
    """Return a mask of rows, ``(rows, 1)``, without the columns of the last part that a size does not have."""
    if (part + 1) * PART > SIZE:
        inside = inside & (part * PART + columns < SIZE)[None, :]
    return inside


@gluon.jit
def load_query(rows, item, row, OPTIONS: gl.constexpr):
    """Return the parts of one group's rows of the query, zeros behind the request's last."""
    GROUP: gl.constexpr = OPTIONS.group
    flat = item.first + row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T))
    columns = gl.arange(0, PART, layout=gl.SliceLayout(0, T))
    token = (item.query_start + flat // GROUP).to(gl.int64)
    places = token * rows.query_strides[0] + (item.kv_head * GROUP + flat % GROUP) * rows.query_strides[1]
    inside = (flat < item.query_len * GROUP)[:, None]
    parts = ()
    for part in gl.static_range(OPTIONS.parts):
        source = rows.q_ptr + places[:, None] + (part * PART + columns)[None, :]
        there = with_columns(inside, columns, part, OPTIONS.head_size)
        parts = parts + (gl.load(source, mask=there, other=0.0),)
    return parts


@gluon.jit
def begin(rows, item, flat, OPTIONS: gl.constexpr):
    """Return how many keys each of the rows ``flat`` sees, and a ``Running`` of no keys but the sinks."""
    S: gl.constexpr = score_layout(OPTIONS.keys)
    limits = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, S)) + item.seq_len
    if OPTIONS.causal:  # rows behind the request's last would see more keys than there are
        limits = gl.minimum(limits + flat // OPTIONS.group + 1 - item.query_len, item.seq_len)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    sums = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
    if OPTIONS.apart:  # written as ``soften`` adds up, so that the layout is the same
        sums = gl.sum(gl.reshape(gl.zeros([ROWS, OPTIONS.keys], gl.float32, S), [ROWS, OPTIONS.keys // 8, 8]), 1)
    if OPTIONS.sinks:
        sinks = gl.load(rows.sinks_ptr + item.kv_head * OPTIONS.group + flat % OPTIONS.group).to(gl.float32) * LOG2E
        # A sink is the maximum at first, so its weight is 1: an eighth of it in each of eight sums. Of a request's
        # shares only one counts it.
        row_max = gl.where(item.split == 0, sinks, row_max)
        sums += gl.where(item.split == 0, 1.0 / 8 if OPTIONS.apart else 1.0, 0.0)
    accumulators = ()
    for _ in gl.static_range(OPTIONS.v_parts):
        accumulators = accumulators + (gl.zeros([ROWS, PART], gl.float32, ACC),)
    return limits, Running(accumulators, row_max, sums)


@gluon.jit
def attend_ahead(item, before, running, scores, q_smem, tiles, OPTIONS: gl.constexpr):
    """Attend to all tiles of an item. A tile's scores begin beside the softmax of the tile before."""
    # before: what a tile's number lacks of the tiles that were loaded before it.
    # The first and the last loop have one turn or none: a share may have no tiles, and then nothing arrives. The zeros
    # only say what kind of tensor ``p`` is.
    p = as_operand(gl.zeros([ROWS, OPTIONS.keys], gl.float32, score_layout(OPTIONS.keys)), tiles.k.dtype)
    second = gl.minimum(item.start + 1, item.tiles)
    for tile in range(item.start, second):
        p, running = first_weights(tile, before + tile, running, scores, q_smem, tiles, OPTIONS)
    for tile in range(second, item.full):
        p, running = attend_tile_ahead(tile, before + tile, p, running, scores, q_smem, tiles, False, OPTIONS)
    for tile in range(gl.maximum(second, item.full), item.tiles):
        p, running = attend_tile_ahead(tile, before + tile, p, running, scores, q_smem, tiles, True, OPTIONS)
    for tile in range(gl.maximum(item.tiles - 1, item.start), item.tiles):
        running = last_values(tile, before + tile, p, running, item.seq_len, tiles, OPTIONS)
    return running


@gluon.jit
def attend_in_order(
    item, before, turns, worked, running, scores, q_smem, tiles, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """Attend to all tiles of an item, one after the other."""
    # worked: items with tiles before this one.
    # Three loops, so that only tiles at the edge of the window and at the end pay for a mask.
    middle = item.start
    if OPTIONS.window:
        middle = gl.maximum(gl.minimum(item.full_start, item.tiles), item.start)
        for tile in range(item.start, middle):
            running = attend_tile(
                tile, before + tile, turns, worked, running, scores, q_smem, tiles, True, OPTIONS, INDEX
            )
    for tile in range(middle, item.full):
        running = attend_tile(tile, before + tile, turns, worked, running, scores, q_smem, tiles, False, OPTIONS, INDEX)
    for tile in range(gl.maximum(middle, item.full), item.tiles):
        running = attend_tile(tile, before + tile, turns, worked, running, scores, q_smem, tiles, True, OPTIONS, INDEX)
    return running


@gluon.jit
def write_partial(parts, item, flat, lse, accumulators, norm, OPTIONS: gl.constexpr):
    """Write one group's partial result of a share of the keys, and its LSE: 0 and -inf where its rows see no key."""
    GROUP: gl.constexpr = OPTIONS.group
    inside = flat < item.query_len * GROUP
    place = item.partial + flat // GROUP * OPTIONS.heads + item.kv_head * GROUP + flat % GROUP
    gl.store(parts.part_lse_ptr + place, lse, mask=inside)
    # Rows are known in the layout of scores; accumulators have another.
    row = gl.convert_layout(place, gl.SliceLayout(1, ACC)).to(gl.int64)
    rows_inside = gl.convert_layout(inside, gl.SliceLayout(1, ACC))[:, None]
    columns = gl.arange(0, PART, gl.SliceLayout(0, ACC))
    target = (parts.part_ptr + row * OPTIONS.value_size)[:, None] + columns[None, :]
    for part in gl.static_range(OPTIONS.v_parts):
        there = with_columns(rows_inside, columns, part, OPTIONS.value_size)
        gl.store(target + part * PART, accumulators[part] * norm, mask=there)


@gluon.jit
def write_rows(rows, item, row, q_smem, accumulators, norm, OPTIONS: gl.constexpr):
    """Write one group's rows of the output through the query's memory: a thread writes 16 bytes of a row and not 4."""
    V_PARTS: gl.constexpr = OPTIONS.v_parts
    GROUP: gl.constexpr = OPTIONS.group
    if rows.out_scale_ptr is not None:
        norm = norm / gl.load(rows.out_scale_ptr)
    for part in gl.static_range(V_PARTS):
        result = accumulators[part] * norm
        if rows.out_scale_ptr is not None:
            result = gl.minimum(gl.maximum(result, -E4M3_MAX), E4M3_MAX)
        q_smem.index(part).store(result.to(q_smem.dtype))
    barrier()
    flat = item.first + row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T))
    token = (item.query_start + flat // GROUP).to(gl.int64)
    places = token * rows.out_strides[0] + (item.kv_head * GROUP + flat % GROUP) * rows.out_strides[1]
    columns = gl.arange(0, PART, layout=gl.SliceLayout(0, T))
    target = rows.out_ptr + places[:, None] + columns[None, :]
    inside = (flat < item.query_len * GROUP)[:, None]
    for part in gl.static_range(V_PARTS):
        result = q_smem.index(part).load(T)
        if rows.out_scale_ptr is not None:
            result = result.to(gl.float32)
        there = with_columns(inside, columns, part, OPTIONS.value_size)
        gl.store(target + part * PART, result.to(rows.out_ptr.dtype.element_ty), mask=there)


@gluon.jit
def write_whole(rows, item, row, flat, lse, q_smem, accumulators, norm, OPTIONS: gl.constexpr):
    """Write one group's rows of the output and their LSEs."""
    GROUP: gl.constexpr = OPTIONS.group
    if OPTIONS.lse:
        token = (item.query_start + flat // GROUP).to(gl.int64)
        place = token * OPTIONS.heads + item.kv_head * GROUP + flat % GROUP
        gl.store(rows.lse_ptr + place, lse, mask=flat < item.query_len * GROUP)
    write_rows(rows, item, row, q_smem, accumulators, norm, OPTIONS)


@gluon.jit
def attend_items(
    q_smem, rows, tiles, turns, mail, scales, parts, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """Attend from one group's 64 rows of each item to all its tiles, and write their output, or their partial result
    where several programs share the keys."""
    # The query of the next item is on its way meanwhile, where registers allow it (``EARLY``).
    # q_smem: shared memory of the query's parts.
    # rows: a ``Rows``; tiles a ``Tiles``, mail a ``Mail``, scales a ``Scales``, parts a ``Parts``.
    # turns: a barrier for each group.
    PARTS: gl.constexpr = OPTIONS.parts
    EARLY: gl.constexpr = OPTIONS.parts + OPTIONS.v_parts < 8
    S: gl.constexpr = score_layout(OPTIONS.keys)
    row = ROWS * INDEX
    turn = 0
    loaded = 0
    worked = 0
    item = take(mail, 0)
    query = load_query(rows, item, row, OPTIONS)
    for part in gl.static_range(PARTS):
        q_smem.index(part).store(query[part])
    more = item.query_len >= 0
    while more:
        # An item stays in the mail until its results are written: it is read again and not carried through the loop.
        item = take(mail, turn)
        fence_async_shared()  # wgmma is to see the query's plain stores, those of all warps
        barrier()

        flat = item.first + row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        limits, running = begin(rows, item, flat, OPTIONS)
        scores = Scores(scales.score_scale, scales.cap_log2, scales.window, limits, item.seq_len)
        # Each group arrives at the next one's barrier, once for each tile and once more for each item. No phase may be
        # missed: the first group waits for the end of the item before, the others for the start of this one.
        if OPTIONS.turns and item.tiles > item.start:
            if INDEX > 0:
                mbarrier.wait(turns.index(INDEX), (loaded + worked) & 1)
            elif worked > 0:
                mbarrier.wait(turns.index(INDEX), (loaded + worked - 1) & 1)
        before = loaded - item.start
        if OPTIONS.ahead:
            running = attend_ahead(item, before, running, scores, q_smem, tiles, OPTIONS)
        else:
            running = attend_in_order(item, before, turns, worked, running, scores, q_smem, tiles, OPTIONS, INDEX)
        if OPTIONS.turns and item.tiles > item.start:
            mbarrier.arrive(turns.index((INDEX + 1) % OPTIONS.groups), count=1)
            worked += 1
        loaded += item.tiles - item.start
        turn += 1

        accumulators, row_max, row_sum = running
        if OPTIONS.apart:
            row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, S))
        following = take(mail, turn)
        if EARLY:
            query = load_query(rows, following, row, OPTIONS)
        # Rows without keys give -inf and 0, not NaN. Values' scale rides on the division.
        lse = gl.where(row_sum > 0, (row_max + gl.log2(row_sum)) * LN2, float("-inf"))
        norm = gl.where(row_sum > 0, scales.v_scale / row_sum, 0.0)
        norm = gl.convert_layout(norm, gl.SliceLayout(1, ACC))[:, None]
        if not OPTIONS.split or item.partial < 0:
            write_whole(rows, item, row, flat, lse, q_smem, accumulators, norm, OPTIONS)
        else:
            write_partial(parts, item, flat, lse, accumulators, norm, OPTIONS)
        # All warps are through with the item, and with the output that lay in the query's memory.
        barrier()
        mbarrier.arrive(mail.read.index((turn - 1) % 2), count=1)
        if not EARLY:
            query = load_query(rows, following, row, OPTIONS)
        for part in gl.static_range(PARTS):
            q_smem.index(part).store(query[part])
        more = following.query_len >= 0


@gluon.jit(
    do_not_specialize=["items", "num_requests", "section", "window", "stride_table"],
    do_not_specialize_on_alignment=SLICED,
)
def prefill_hopper_kernel(
    q_ptr,
    k_descriptor,
    v_descriptor,
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    table_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    seq_lens_ptr,
    sinks_ptr,
    part_ptr,
    part_lse_ptr,
    counter_ptr,
    work_ptr,
    items,
    num_requests,
    section,
    score_scale,
    v_scale,
    cap_log2,
    window,
    query_strides,
    out_strides,
    stride_table,
    k_pages,
    k_head_rows,
    k_head_columns,
    v_pages,
    v_head_rows,
    v_head_columns,
    COMPILED_FOR: gl.constexpr,
):
    """Attend from the rows of all items, 64 (token-major, the heads of a KV head's group within a token) of each
    group."""
    # On chip: the query ``(64 * groups, D)`` and ``stages`` tiles each of K ``(keys, D)`` and V ``(keys, DV)`` in
    # shared memory; of each group scores ``(64, keys)`` and output ``(64, DV)`` in registers. Memory traffic: Q and
    # output once, K and V once per item, which L2 serves.
    # counter_ptr: two zeros, which the last program leaves there.
    # work_ptr: ``WorkList.rows`` of ``num_requests``.
    # items: of all KV heads.
    # COMPILED_FOR: an ``Options``.
    OPTIONS: gl.constexpr = constants(COMPILED_FOR)
    PARTS: gl.constexpr = OPTIONS.parts
    V_PARTS: gl.constexpr = OPTIONS.v_parts
    STAGES: gl.constexpr = OPTIONS.stages
    GROUPS: gl.constexpr = OPTIONS.groups
    gl.static_assert(not OPTIONS.ahead or not (OPTIONS.window or OPTIONS.turns))
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_first = gl.allocate_shared_memory(k_descriptor.dtype, [PARTS, ROWS, PART], LAYOUT)
    q_second = gl.allocate_shared_memory(k_descriptor.dtype, [PARTS, ROWS, PART], LAYOUT)
    tiles = Tiles(
        gl.allocate_shared_memory(k_descriptor.dtype, [STAGES * PARTS, OPTIONS.keys, PART], LAYOUT),
        gl.allocate_shared_memory(v_descriptor.dtype, [STAGES * V_PARTS, OPTIONS.keys, PART], LAYOUT),
        barriers_of(STAGES),
        barriers_of(STAGES),
        barriers_of(STAGES),
        barriers_of(STAGES),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(tiles.k_ready.index(stage), count=1)
        mbarrier.init(tiles.k_empty.index(stage), count=GROUPS)
        mbarrier.init(tiles.v_ready.index(stage), count=1)
        mbarrier.init(tiles.v_empty.index(stage), count=GROUPS)
    turns = barriers_of(GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    memory = gl.allocate_shared_memory(gl.int32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail = Mail(memory, barriers_of(2), barriers_of(2))
    for slot in gl.static_range(2):
        mbarrier.init(mail.there.index(slot), count=1)
        mbarrier.init(mail.read.index(slot), count=GROUPS)
    fence_async_shared()
    rows = Rows(q_ptr, out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, query_strides, out_strides)
    scales = Scales(score_scale, v_scale, cap_log2, window)
    parts = Parts(part_ptr, part_lse_ptr)
    head_items = items // (OPTIONS.heads // OPTIONS.group)
    batch = Batch(query_start_loc_ptr, seq_lens_ptr, num_requests, work_ptr, head_items, section, window)
    keys = Source(k_descriptor, k_pages, k_head_rows, k_head_columns)
    values = Source(v_descriptor, v_pages, v_head_rows, v_head_columns)
    places = Places(table_ptr, stride_table, key_start_loc_ptr)
    # The last lists are registers of a thread, of all groups but the first, which gets the rest of what all start with:
    # three times 168 or four times 128 (``_Kind``'s maxnreg), the loader's warp counting as a group. So all groups that
    # attend have the same. The loader gives up the most where a group has the most accumulators.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (attend_items, (q_first, rows, tiles, turns, mail, scales, parts, OPTIONS, 0)),
                (attend_items, (q_second, rows, tiles, turns, mail, scales, parts, OPTIONS, 1)),
                (load_items, (keys, values, tiles, mail, counter_ptr, items, batch, places, OPTIONS)),
            ],
            [4, 1],
            [232, 40] if PARTS + V_PARTS < 8 else [240, 24],
        )
    else:
        q_third = gl.allocate_shared_memory(k_descriptor.dtype, [PARTS, ROWS, PART], LAYOUT)
        gl.warp_specialize(
            [
                (attend_items, (q_first, rows, tiles, turns, mail, scales, parts, OPTIONS, 0)),
                (attend_items, (q_second, rows, tiles, turns, mail, scales, parts, OPTIONS, 1)),
                (attend_items, (q_third, rows, tiles, turns, mail, scales, parts, OPTIONS, 2)),
                (load_items, (keys, values, tiles, mail, counter_ptr, items, batch, places, OPTIONS)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def box_rows(block_size: int, paged: bool, keys: int) -> int:
    """Return the tokens of a box: the most, up to a tile of ``keys``, that lie in one page."""
    # The largest power of two that divides a page: boxes of it fill pages and tiles without a rest.
    return min(block_size & -block_size, keys) if paged else keys


_readable: dict[Any, bool] = {}


def readable(key: Tensor, value: Tensor) -> bool:
    """Whether TMA can read K and V, ``(num_blocks, block_size, heads, size)`` or ``(S, heads, size)``, in boxes."""
    # What lies between two heads of K may hold NaN, and a part that reaches there is multiplied.
    kind = (*key.shape[1:], *value.shape[1:], key.stride(), value.stride(), *specialised(key, value), key.numel() > 0)
    if kind not in _readable:
        tile = hopper_prefill_launch(key.shape[-1], value.shape[-1])
        box = 0 if tile is None else box_rows(key.shape[1], key.ndim == 4, tile.block_n)
        # Where a token's heads share a row, the last part of a size that is no multiple of ``PART`` reaches behind its
        # head: into the next head, whose numbers meet zeros of the query, or into what lies between.
        between = key.stride(-2) - key.shape[-1] if key.shape[-2] > 1 and key.stride(-2) < key.stride(-3) else 0
        _readable[kind] = (
            box >= LEAST_BOX
            and (between == 0 or key.shape[-1] % PART.value == 0)
            and all(describable(tensor, key.dtype, box, GLUON_CAPABILITY) for tensor in (key, value))
        )
    return _readable[kind]


class _Boxes:
    """Descriptors of boxes ``(box, PART)`` over K or V of one kind, whose addresses and first dimensions differ."""

    __slots__ = ("_boxes", "rows")

    def __init__(self, tensor: Tensor, box: int) -> None:
        self.rows = describe(tensor, box, PART.value)
        kind = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for([box, PART.value], kind)
        shape, strides = list(self.rows.shape), list(self.rows.strides)
        self._boxes = Descriptors(hopper.TensorDescriptor(tensor, shape, strides, [box, PART.value], layout))

    @property
    def places(self) -> tuple[int, int, int]:
        """Rows from a page to the next, and rows and columns from a head to the next."""
        return self.rows.page_rows, self.rows.head_rows, self.rows.head_columns

    def over(self, tensor: Tensor) -> Any:
        """Return the descriptor over a tensor."""
        return self.rows.over(tensor, self._boxes)


Flags = tuple[bool, bool, bool, bool, bool, bool]  # ``causal`` to ``split`` of ``Options``


class _Kind:
    """What all calls share that differ in nothing by which Triton compiles or specialises the kernel."""

    # row_bytes: of K and V of one token and KV head.
    # strides, places: of the kernel's arguments.
    # ahead: keys of the longest request beyond which scores are begun early, where that was measured; 0: nowhere.
    # options, launches: the kernel without and with scores begun early.

    __slots__ = ("ahead", "keys", "launches", "options", "places", "row_bytes", "sms", "strides", "values")

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, flags: Flags, paged: bool) -> None:
        heads, head_size = query.shape[1:]
        value_size, tile = output.shape[-1], hopper_prefill_launch(head_size, output.shape[-1])
        assert tile is not None
        groups = tile.block_m // ROWS.value
        block_size = key.shape[1] if paged else 1
        box = box_rows(block_size, paged, tile.block_n)
        self.keys, self.values = _Boxes(key, box), _Boxes(value, box)
        self.row_bytes = (head_size + value_size) * key.itemsize
        self.strides = query.stride()[:2], output.stride()[:2]
        self.places = *self.keys.places, *self.values.places
        plain = Options(
            heads, heads // value.shape[-2], *flags, paged, block_size, head_size, value_size,
            -(-head_size // PART.value), -(-value_size // PART.value), tile.block_n, tile.num_stages, box, tile.turns,
            tile.sums_apart, groups, False,
        )  # fmt: skip
        self.options = plain, plain._replace(apart=True, ahead=True)
        self.sms = sm_count(query.device)
        causal, window, cap, sinks, _, split = flags
        self.ahead = tile.ahead if causal and not (window or cap or sinks or split or paged) else 0
        # What threads start with, which the groups then share out (``prefill_hopper_kernel``): 12 warps or 16.
        self.launches = tuple(
            Relaunch(prefill_hopper_kernel, num_warps=4, maxnreg=168 if groups == 2 else 128) for _ in range(2)
        )


_kinds: dict[Any, _Kind] = {}


class Prefill:
    """A step's prefill, ready for its layers: what they share is worked out once. Nothing waits for the device.

    Takes bfloat16 and float16, K and V that are ``readable``; rows between the requests' keys may hold anything. No
    ALiBi and no image ranges, and a window only where it is causal. K and V may be wider than the query and the output:
    zeros behind each head.

    Args:
        query_start_loc, seq_lens, max_seq_len, block_table, key_start_loc: as ``prefill_attention`` has them.
        work: ``work_list.list_work`` of these requests, with the rows of ``launch.hopper_prefill_launch``.
        counter: int32 ``(2,)``, zeros, which the kernel leaves there; of launches that do not run side by side.
        workspace: float32, ``work.partials * (Dv + 1)`` elements at least, where requests are cut.
    """

    def __init__(
        self,
        *,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        work: WorkList,
        counter: Tensor,
        block_table: Tensor | None = None,
        key_start_loc: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> None:
        self._tensors = block_table, query_start_loc, key_start_loc, seq_lens
        self._paged, self._stride_table = block_table is not None, 0 if block_table is None else block_table.stride(0)
        self._longest, self._work, self._counter, self._workspace = max_seq_len, work, counter, workspace
        # Of the layer before, which is most often like the next one.
        self._seen: Any = None
        self._found: tuple[_Kind, tuple[int, ...], Tensor | None, Tensor | None] | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        *,
        scale: float,
        alone: bool = True,
        terms: Terms = PLAIN,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        output_scale: Tensor | None = None,
        output_lse: Tensor | None = None,
    ) -> None:
        """Launch it for one layer, whose tensors are as ``prefill_attention`` has them.

        Args:
            alone: a program for each multiprocessor works until the end; else there is one for each item, and programs
                of other kernels start in between.
        """
        work, sinks, cap, window = self._work, terms.sinks, terms.soft_cap, terms.window
        flags = terms.causal, window > 0, cap > 0, sinks is not None, output_lse is not None, work.partials > 0
        layer = (
            query.dtype, key.dtype, value.dtype, output.dtype, query.data_ptr() % 16, key.data_ptr() % 16,
            value.data_ptr() % 16, output.data_ptr() % 16, None if sinks is None else sinks.dtype,
            None if output_scale is None else output_scale.dtype,
        )  # fmt: skip
        strides = query.stride(), key.stride(), value.stride(), output.stride()
        seen = flags, layer, strides, query.shape, key.shape, value.shape
        if seen != self._seen or self._found is None:
            self._found, self._seen = self._lookup(query, key, value, output, flags, (layer, strides)), seen
        kind, counts, parts, part_lse = self._found
        items, ahead = counts[0], 0 < kind.ahead < self._longest
        kind.launches[ahead](
            (min(items, kind.sms) if alone else items, 1, 1), query, kind.keys.over(key), kind.values.over(value),
            output, output_scale, output_lse, *self._tensors, sinks, parts, part_lse, self._counter, work.rows, *counts,
            # Under a soft cap log2(e) comes behind the tanh, with the cap.
            scale * k_scale / cap if cap else scale * k_scale * LOG2E.value, v_scale, cap * LOG2E.value, window,
            *kind.strides, self._stride_table, *kind.places, kind.options[ahead],
        )  # fmt: skip
        if parts is not None and part_lse is not None:
            merge_shares(parts, part_lse, output, output_scale, output_lse, self._tensors[1], work)

    def _lookup(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, flags: Flags, layer: tuple[Any, ...]
    ) -> tuple[_Kind, tuple[int, ...], Tensor | None, Tensor | None]:
        """Return the kind of a layer, the kernel's counts, and where partial results and their LSE go."""
        kv_heads, work, workspace = value.shape[-2], self._work, self._workspace
        same = (
            flags, layer, self._paged, query.shape[1:], output.shape[1:], key.shape[1:], value.shape[1:],
            query.get_device(), None if workspace is None else workspace.data_ptr() % 16,
        )  # fmt: skip
        kind = _kinds.get(same)
        if kind is None:
            kind = _kinds[same] = _Kind(query, key, value, output, flags, self._paged)
        parts = part_lse = None
        if work.partials:
            assert workspace is not None
            parts, part_lse = workspace, workspace[work.partials * output.shape[-1] :]
        section = section_of(kv_heads, self._longest * kind.row_bytes)
        return kind, (work.items * kv_heads, len(work.rows), section), parts, part_lse
