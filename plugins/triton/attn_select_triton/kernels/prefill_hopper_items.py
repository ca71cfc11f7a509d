"""What the programs of the warp-specialised prefill work on: items, which their loading warp takes, tells and loads.

An item is some rows of one request and KV head. The loading warp takes the next from a counter, tells the groups that
attend, and loads its keys while they still write the results of the last: by TMA in boxes that lie in one page each, so
pages of 16 tokens need no copy into contiguous memory.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"
# mypy: disable-error-code="assignment"

# ruff: noqa: RUF005  Triton's language has no stars

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

PART = gl.constexpr(64)
"""Columns of one part of a tile: 128 bytes, the width of TMA's swizzle."""


@gluon.jit
def find_request(start_loc_ptr, tile, num_requests, GROUP: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return the request that row tile ``tile`` belongs to, as ``primitives.find_request``."""
    before = gl.load(start_loc_ptr)
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first = (gl.load(start_loc_ptr + middle) - before) * GROUP // BLOCK_M + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@gluon.jit
def load_tile(descriptor, boxes, ready, buffer, rows, column, PARTS: gl.constexpr, BOXES: gl.constexpr):
    """Load one tile of K or V: part by part, box by box."""
    bar = ready.index(buffer)
    mbarrier.expect(bar, BOXES * PARTS * descriptor.block_type.nbytes)
    for part in gl.static_range(PARTS):
        for i in gl.static_range(BOXES):
            box = boxes.index((buffer * PARTS + part) * BOXES + i)
            tma.async_copy_global_to_shared(descriptor, [rows[i], column + part * PART], bar, box)


@gluon.jit
def item_at(
    item, lengths, counts, window,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SPLIT: gl.constexpr, BLOCK_M: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """Return an item's request, and what ``publish`` tells of it.

    Row tiles come last first, and each for ``section`` KV heads before the next: long rows start before short ones, and
    L2 holds what a section reads. With ``SPLIT`` an item has one of at most ``num_splits`` even shares of the keys, of
    ``split_tiles`` tiles at least.
    """
    query_start_loc_ptr, seq_lens_ptr = lengths
    num_requests, row_tiles, section, num_splits, split_tiles = counts
    split = 0
    if SPLIT:
        split = item % num_splits
        item = item // num_splits
    place = item % (row_tiles * section)
    tile = row_tiles - 1 - place // section
    kv_head = item // (row_tiles * section) * section + place % section
    request = find_request(query_start_loc_ptr, tile, num_requests, GROUP, BLOCK_M)
    query_start = gl.load(query_start_loc_ptr + request)
    query_len = gl.load(query_start_loc_ptr + request + 1) - query_start
    tokens_before = query_start - gl.load(query_start_loc_ptr)
    first = (tile - tokens_before * GROUP // BLOCK_M - request) * BLOCK_M
    seq_len = gl.load(seq_lens_ptr + request)
    high = seq_len
    full_high = seq_len
    if CAUSAL:
        last_token = gl.minimum((first + BLOCK_M - 1) // GROUP, query_len - 1)
        high = gl.minimum(gl.maximum(seq_len + last_token + 1 - query_len, 0), seq_len)
        full_high = gl.minimum(gl.maximum(seq_len + first // GROUP + 1 - query_len, 0), high)
    tiles = (high + KEYS - 1) // KEYS
    full = gl.minimum(full_high // KEYS, tiles)
    start = 0
    full_start = 0
    if WINDOW:
        context = seq_len - query_len
        last_token = gl.minimum((first + BLOCK_M - 1) // GROUP, query_len - 1)
        start = gl.minimum(gl.maximum(context + first // GROUP - window + 1, 0) // KEYS, tiles)
        full_start = (gl.maximum(context + last_token - window + 1, 0) + KEYS - 1) // KEYS
    if SPLIT:
        splits = gl.maximum(gl.minimum((tiles - start + split_tiles - 1) // split_tiles, num_splits), 1)
        share = (tiles - start + splits - 1) // splits
        start = gl.minimum(start + split * share, tiles)
        tiles = gl.minimum(start + share, tiles)
        full = gl.minimum(full, tiles)
    return request, first, kv_head, query_start, query_len, seq_len, start, full_start, full, tiles, split


@gluon.jit
def publish(
    mail, turn, first, kv_head, query_start, query_len, seq_len, start, full_start, full, tiles, split
):  # fmt: skip
    """Tell the groups the next item, once they are through with the one before the last.

    Args:
        mail: int32 memory of two items, and barriers of those that are there and of those that were read.
        turn: items before this one.
        first: of the rows of its request, tokens x heads of a group; seq_len keys, of which rows see the tiles
            ``start .. tiles - 1``, and all rows all keys of ``full_start .. full - 1``.
        query_len: of its request; negative behind the last item.
    """
    memory, there, read = mail
    slot = turn % 2
    mbarrier.wait(read.index(slot), (turn // 2 & 1) ^ 1)
    i = gl.arange(0, 16, layout=gl.BlockedLayout([1], [32], [1], [0]))
    numbers = gl.where(i == 0, first, kv_head)
    numbers = gl.where(i == 2, query_start, numbers)
    numbers = gl.where(i == 3, query_len, numbers)
    numbers = gl.where(i == 4, seq_len, numbers)
    numbers = gl.where(i == 5, start, numbers)
    numbers = gl.where(i == 6, full_start, numbers)
    numbers = gl.where(i == 7, full, numbers)
    numbers = gl.where(i == 8, tiles, numbers)
    numbers = gl.where(i == 9, split, numbers)
    memory.index(slot).store(numbers)
    gl.thread_barrier()
    mbarrier.arrive(there.index(slot), count=1)


@gluon.jit
def number_of(numbers, place: gl.constexpr):
    """Return one of the numbers that every thread holds all of."""
    return gl.sum(gl.where(gl.arange(0, 16, layout=numbers.type.layout) == place, numbers, 0), 0)


@gluon.jit
def take(mail, turn):
    """Return what ``publish`` told of an item."""
    memory, there, _ = mail
    slot = turn % 2
    mbarrier.wait(there.index(slot), turn // 2 & 1)
    numbers = memory.index(slot).load(gl.BlockedLayout([16], [32], [4], [0]))
    first = number_of(numbers, 0)
    kv_head = number_of(numbers, 1)
    query_start = number_of(numbers, 2)
    query_len = number_of(numbers, 3)
    seq_len = number_of(numbers, 4)
    start = number_of(numbers, 5)
    full_start = number_of(numbers, 6)
    full = number_of(numbers, 7)
    tiles = number_of(numbers, 8)
    split = number_of(numbers, 9)
    return first, kv_head, query_start, query_len, seq_len, start, full_start, full, tiles, split


@gluon.jit
def load_items(loads, LOADS: gl.constexpr):
    """Take items as long as there are any, tell the groups, and load every tile once they are through with its buffer.

    Boxes behind the end read page 0. The program that ends last clears the counter.
    """
    descriptors, smem, barriers, mail, counter_ptr, items, lengths, counts, window, table, places = loads
    GROUP: gl.constexpr = LOADS[0]
    CAUSAL: gl.constexpr = LOADS[1]
    WINDOW: gl.constexpr = LOADS[2]
    SPLIT: gl.constexpr = LOADS[3]
    PAGED: gl.constexpr = LOADS[4]
    BLOCK_SIZE: gl.constexpr = LOADS[5]
    BOX: gl.constexpr = LOADS[6]
    BLOCK_M: gl.constexpr = LOADS[7]
    SHAPE: gl.constexpr = LOADS[8]
    PARTS: gl.constexpr = SHAPE[0]
    V_PARTS: gl.constexpr = SHAPE[1]
    KEYS: gl.constexpr = SHAPE[2]
    STAGES: gl.constexpr = SHAPE[3]
    BOXES: gl.constexpr = KEYS // BOX
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_descriptor, v_descriptor = descriptors
    k_smem, v_smem = smem
    k_ready, k_empty, v_ready, v_empty, _ = barriers
    table_ptr, stride_table, key_start_loc_ptr = table
    k_pages, k_head_rows, k_head_columns, v_pages, v_head_rows, v_head_columns = places
    k_boxes = k_smem._reinterpret(k_descriptor.dtype, [STAGES * PARTS * BOXES, BOX, PART], LAYOUT)
    v_boxes = v_smem._reinterpret(v_descriptor.dtype, [STAGES * V_PARTS * BOXES, BOX, PART], LAYOUT)
    turn = 0
    loaded = 0
    item = gl.program_id(0)
    while item < items:
        request, first, kv_head, query_start, query_len, seq_len, start, full_start, full, tiles, split = item_at(
            item, lengths, counts, window, GROUP, CAUSAL, WINDOW, SPLIT, BLOCK_M, KEYS
        )  # fmt: skip
        if first < query_len * GROUP:
            publish(
                mail, turn, first, kv_head, query_start, query_len, seq_len, start, full_start, full, tiles, split
            )  # fmt: skip
            k_row = kv_head * k_head_rows
            v_row = kv_head * v_head_rows
            pages_ptr = table_ptr
            if PAGED:
                pages_ptr += request.to(gl.int64) * stride_table
            else:
                key_start = gl.load(key_start_loc_ptr + request)
                k_row += key_start
                v_row += key_start
            for tile in range(start, tiles):
                count = loaded + tile - start
                buffer = count % STAGES
                free = (count // STAGES & 1) ^ 1
                k_rows = ()
                v_rows = ()
                for i in gl.static_range(BOXES):
                    token = tile * KEYS + i * BOX
                    if PAGED:
                        page = gl.load(pages_ptr + token // BLOCK_SIZE, mask=token < seq_len, other=0)
                        k_rows = k_rows + (k_row + page * k_pages + token % BLOCK_SIZE,)
                        v_rows = v_rows + (v_row + page * v_pages + token % BLOCK_SIZE,)
                    else:
                        k_rows = k_rows + (k_row + token,)
                        v_rows = v_rows + (v_row + token,)
                mbarrier.wait(k_empty.index(buffer), free)
                load_tile(k_descriptor, k_boxes, k_ready, buffer, k_rows, kv_head * k_head_columns, PARTS, BOXES)
                mbarrier.wait(v_empty.index(buffer), free)
                load_tile(v_descriptor, v_boxes, v_ready, buffer, v_rows, kv_head * v_head_columns, V_PARTS, BOXES)
            turn += 1
            loaded += tiles - start
        item = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
    publish(mail, turn, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0)
    ended = gl.atomic_add(counter_ptr + 1, 1)
    if ended == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)
