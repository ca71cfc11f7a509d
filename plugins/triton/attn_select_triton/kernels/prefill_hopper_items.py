"""What the programs of the warp-specialised prefill work on: items, which their loading warp takes, tells and loads.

An item is some rows of one request and KV head. The loading warp takes the next from a counter, tells the groups that
attend, and loads its keys while they still write the results of the last: by TMA in boxes that lie in one page each, so
pages of 16 tokens need no copy into contiguous memory.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"
# mypy: disable-error-code="assignment"

# ruff: noqa: RUF005  Triton's language has no stars

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn_select_triton.kernels import work_list
from attn_select_triton.kernels.gluon_names import barrier, reinterpret, tma_load
from attn_select_triton.limits import GLUON_PART

PART = gl.constexpr(GLUON_PART)
ROWS = gl.constexpr(64)  # Query rows of a compute group
FIELDS = gl.constexpr(work_list.FIELDS)


class Options(NamedTuple):
    """What the prefill is compiled for."""

    heads: int  # of the query; group of them share a KV head
    group: int
    # causal, window, soft_cap, sinks: which of ``launch.Terms`` there are. A window is causal.
    causal: bool
    window: bool
    soft_cap: bool
    sinks: bool
    lse: bool  # whether the log-sum-exp is written
    split: bool  # whether some requests are cut: programs share the keys of their rows
    paged: bool  # K and V lie in blocks of ``block_size`` tokens, found through a block table
    block_size: int
    head_size: int
    value_size: int
    # parts, v_parts: parts of ``PART`` columns of K and of V. Of a size that is no multiple, the last part has the next
    # head's columns, or zeros: the query has zeros there, and the output's are not written.
    parts: int
    v_parts: int
    # keys, stages: of a tile, and tiles of K and of V in shared memory
    keys: int
    stages: int
    box: int  # tokens that TMA loads at once
    turns: bool  # groups multiply in turns (``attend_tile``)
    apart: bool  # every thread keeps the sums of its own keys until the item ends
    groups: int  # compute groups
    ahead: bool  # scores are begun early (``attend_tile_ahead``): without a window and without turns


@gluon.constexpr_function
def constants(options):
    """Return options as the functions of a kernel take them: each one a constant."""
    return Options(*[gl.constexpr(option) for option in options])


class Item(NamedTuple):
    """Some rows of one request and KV head, and the keys that they see."""

    first: Any  # of the rows of its request, tokens x heads of a group
    kv_head: Any
    # query_start, query_len: of its request; the length is negative behind the last item
    query_start: Any
    query_len: Any
    seq_len: Any  # keys of its request
    # Rows see the tiles ``start .. tiles - 1``, and all rows see all keys of ``full_start .. full - 1``.
    start: Any
    full_start: Any
    full: Any
    tiles: Any
    split: Any  # which share of the keys
    partial: Any  # the first row of this share's partial results; negative where the share is the whole


class Tiles(NamedTuple):
    """Tiles of K and V in shared memory, and the barriers of each stage."""

    # k, v: ``(stages * parts, keys, PART)``
    k: Any
    v: Any
    # k_ready, v_ready: a tile was loaded
    k_ready: Any
    # k_empty, v_empty: all groups are through with one
    k_empty: Any
    v_ready: Any
    v_empty: Any


class Mail(NamedTuple):
    """How items are told: int32 memory of two, and barriers for items that are there and for items that were read."""

    memory: Any
    there: Any
    read: Any


class Batch(NamedTuple):
    """The requests."""

    query_start_loc_ptr: Any
    seq_lens_ptr: Any
    num_requests: Any
    work_ptr: Any  # ``WorkList.rows``
    head_items: Any  # of one KV head
    section: Any  # KV heads whose keys L2 holds
    window: Any  # as ``launch.Terms`` has it


class Source(NamedTuple):
    """K or V in global memory."""

    descriptor: Any  # over rows of one token each
    page_rows: Any  # rows from a page to the next
    # head_rows, head_columns: from a head to the next
    head_rows: Any
    head_columns: Any


class Places(NamedTuple):
    """Where a request's keys lie: by the block table, or from the request's first key on."""

    table_ptr: Any
    stride_table: Any
    key_start_loc_ptr: Any


@gluon.jit
def find_row(work_ptr, place, num_requests):
    """Return the row of the work list that item ``place`` of a KV head belongs to: the last one that begins by then."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if gl.load(work_ptr + middle * FIELDS) <= place:
            low = middle + 1
        else:
            high = middle
    return work_ptr + (low - 1) * FIELDS  # ``low`` is the first row that begins behind it


@gluon.jit
def load_tile(descriptor, boxes, ready, buffer, rows, column, PARTS: gl.constexpr, BOXES: gl.constexpr):
    """Load one tile of K or V: part by part, box by box."""
    bar = ready.index(buffer)
    # Boxes arrive whole even behind a tensor's end, so a tile always counts the same bytes.
    mbarrier.expect(bar, BOXES * PARTS * descriptor.block_type.nbytes)
    for part in gl.static_range(PARTS):
        for i in gl.static_range(BOXES):
            box = boxes.index((buffer * PARTS + part) * BOXES + i)
            tma_load(descriptor, [rows[i], column + part * PART], bar, box)


@gluon.jit
def item_at(index, batch, OPTIONS: gl.constexpr):
    """Return the item with this number, and its request."""
    # Requests come as they are listed, of each its last row tiles first, and each for ``section`` KV heads before the
    # next: long rows start before short ones, and L2 holds what a section reads. A request that is cut has an item for
    # each share of a row tile's keys.
    GROUP: gl.constexpr = OPTIONS.group
    KEYS: gl.constexpr = OPTIONS.keys
    BLOCK_M: gl.constexpr = OPTIONS.groups * ROWS
    # One section after the other; within one the KV head runs fastest, then the item.
    place = index % (batch.head_items * batch.section)
    kv_head = index // (batch.head_items * batch.section) * batch.section + place % batch.section
    row_ptr = find_row(batch.work_ptr, place // batch.section, batch.num_requests)
    number = place // batch.section - gl.load(row_ptr)
    request = gl.load(row_ptr + 1)
    shares = gl.load(row_ptr + 2)
    query_start = gl.load(batch.query_start_loc_ptr + request)
    query_len = gl.load(batch.query_start_loc_ptr + request + 1) - query_start
    # Row tiles come last first: causal rows at the end see the most keys.
    first = ((query_len * GROUP + BLOCK_M - 1) // BLOCK_M - 1 - number // shares) * BLOCK_M
    seq_len = gl.load(batch.seq_lens_ptr + request)
    high = seq_len
    full_high = seq_len
    if OPTIONS.causal:
        last_token = gl.minimum((first + BLOCK_M - 1) // GROUP, query_len - 1)
        # The last row sees the most keys, the first one the fewest: those every row sees.
        high = gl.minimum(gl.maximum(seq_len + last_token + 1 - query_len, 0), seq_len)
        full_high = gl.minimum(gl.maximum(seq_len + first // GROUP + 1 - query_len, 0), high)
    tiles = (high + KEYS - 1) // KEYS
    full = gl.minimum(full_high // KEYS, tiles)
    start = 0
    full_start = 0
    if OPTIONS.window:
        # The window of the first row begins first; from where the last row's begins on, every row sees the keys.
        context = seq_len - query_len
        last_token = gl.minimum((first + BLOCK_M - 1) // GROUP, query_len - 1)
        start = gl.minimum(gl.maximum(context + first // GROUP - batch.window + 1, 0) // KEYS, tiles)
        full_start = (gl.maximum(context + last_token - batch.window + 1, 0) + KEYS - 1) // KEYS
    split = 0
    partial = -1
    if OPTIONS.split:
        split = number % shares
        share = (tiles - start + shares - 1) // shares
        start = gl.minimum(start + split * share, tiles)
        tiles = gl.minimum(start + share, tiles)
        full = gl.minimum(full, tiles)
        if shares > 1:  # each share has room for all rows of its request
            partial = gl.load(row_ptr + 3) + split * query_len * OPTIONS.heads
    item = Item(first, kv_head, query_start, query_len, seq_len, start, full_start, full, tiles, split, partial)
    return request, item


@gluon.jit
def publish(mail, turn, item):
    """Tell the groups the next item, once they are through with the one before the last."""
    # turn: items before this one.
    slot = turn % 2
    mbarrier.wait(mail.read.index(slot), (turn // 2 & 1) ^ 1)
    # One store of 16 numbers: an item's fields in their order, and behind them what ``where`` leaves.
    i = gl.arange(0, 16, layout=gl.BlockedLayout([1], [32], [1], [0]))
    numbers = gl.where(i == 0, item.first, item.kv_head)
    for place in gl.static_range(2, 11):
        numbers = gl.where(i == place, item[place], numbers)
    mail.memory.index(slot).store(numbers)
    barrier()
    mbarrier.arrive(mail.there.index(slot), count=1)


@gluon.jit
def number_of(numbers, place: gl.constexpr):
    """Return one of the numbers that every thread holds all of."""
    return gl.sum(gl.where(gl.arange(0, 16, layout=numbers.type.layout) == place, numbers, 0), 0)


@gluon.jit
def take(mail, turn):
    """Return the item that ``publish`` told."""
    slot = turn % 2
    mbarrier.wait(mail.there.index(slot), turn // 2 & 1)
    # Every thread loads all 16, so that ``number_of`` asks no other thread.
    numbers = mail.memory.index(slot).load(gl.BlockedLayout([16], [32], [4], [0]))
    return Item(
        number_of(numbers, 0), number_of(numbers, 1), number_of(numbers, 2), number_of(numbers, 3),
        number_of(numbers, 4), number_of(numbers, 5), number_of(numbers, 6), number_of(numbers, 7),
        number_of(numbers, 8), number_of(numbers, 9), number_of(numbers, 10),
    )  # fmt: skip


@gluon.jit
def load_items(k, v, tiles, mail, counter_ptr, items, batch, places, OPTIONS: gl.constexpr):
    """Take items as long as there are any, tell the groups, and load every tile once its buffer is free."""
    # Boxes behind the end read page 0. The program that ends last clears the counter.
    # k, v: a ``Source`` each; tiles a ``Tiles``, mail a ``Mail``, batch a ``Batch``, places a ``Places``.
    # counter_ptr: of items that were taken, and of programs that ended.
    PARTS: gl.constexpr = OPTIONS.parts
    V_PARTS: gl.constexpr = OPTIONS.v_parts
    KEYS: gl.constexpr = OPTIONS.keys
    STAGES: gl.constexpr = OPTIONS.stages
    BOX: gl.constexpr = OPTIONS.box
    BLOCK_SIZE: gl.constexpr = OPTIONS.block_size
    BOXES: gl.constexpr = KEYS // BOX
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_boxes = reinterpret(tiles.k, k.descriptor.dtype, [STAGES * PARTS * BOXES, BOX, PART], LAYOUT)
    v_boxes = reinterpret(tiles.v, v.descriptor.dtype, [STAGES * V_PARTS * BOXES, BOX, PART], LAYOUT)
    turn = 0
    loaded = 0
    index = gl.program_id(0)
    while index < items:
        request, item = item_at(index, batch, OPTIONS)
        publish(mail, turn, item)
        k_row = item.kv_head * k.head_rows
        v_row = item.kv_head * v.head_rows
        pages_ptr = places.table_ptr
        if OPTIONS.paged:
            pages_ptr += request.to(gl.int64) * places.stride_table
        else:
            key_start = gl.load(places.key_start_loc_ptr + request)
            k_row += key_start
            v_row += key_start
        for tile in range(item.start, item.tiles):
            count = loaded + tile - item.start
            buffer = count % STAGES
            # Passes at once in the first round, as in ``mla_decode_hopper.load_tiles``.
            free = (count // STAGES & 1) ^ 1
            k_rows = ()
            v_rows = ()
            for i in gl.static_range(BOXES):
                token = tile * KEYS + i * BOX
                if OPTIONS.paged:
                    # A tile has all its boxes even behind the last token, where the table may say anything.
                    page = gl.load(pages_ptr + token // BLOCK_SIZE, mask=token < item.seq_len, other=0)
                    k_rows = k_rows + (k_row + page * k.page_rows + token % BLOCK_SIZE,)
                    v_rows = v_rows + (v_row + page * v.page_rows + token % BLOCK_SIZE,)
                else:
                    k_rows = k_rows + (k_row + token,)
                    v_rows = v_rows + (v_row + token,)
            # K and V have barriers of their own: scores need K alone, and K's buffer is free before V's.
            mbarrier.wait(tiles.k_empty.index(buffer), free)
            load_tile(k.descriptor, k_boxes, tiles.k_ready, buffer, k_rows, item.kv_head * k.head_columns, PARTS, BOXES)
            mbarrier.wait(tiles.v_empty.index(buffer), free)
            load_tile(
                v.descriptor, v_boxes, tiles.v_ready, buffer, v_rows, item.kv_head * v.head_columns, V_PARTS, BOXES
            )
        turn += 1
        loaded += item.tiles - item.start
        # A program's first item has its own number; the counter hands out those behind.
        index = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
    publish(mail, turn, Item(0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0))
    # Whoever ends last knows that nobody takes an item any more, and leaves zeros for the next launch.
    ended = gl.atomic_add(counter_ptr + 1, 1)
    if ended == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)
