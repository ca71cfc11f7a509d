"""Block tables and the step's metadata from host-side lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_select.runtime import (
    BatchError,
    BlockPool,
    BlockTable,
    common_prefix_len,
    prepare_batch,
)
from attn_select.testing import slot_mapping_reference


def test_rows_of_a_block_table() -> None:
    table = BlockTable(4, 5, 16, "cpu")
    table.append_row(0, [3, 1])
    table.append_row(0, [4])
    table.append_row(0, [])
    table.append_row(1, [7])
    table.append_row(3, [9, 8])
    assert table.num_blocks_per_row.tolist() == [3, 1, 0, 2]
    assert table.host[0, :3].tolist() == [3, 1, 4]
    table.swap_rows(0, 3)
    assert table.num_blocks_per_row.tolist() == [2, 1, 0, 3]
    assert table.host[0, :2].tolist() == [9, 8]
    assert table.host[3, :3].tolist() == [3, 1, 4]
    table.set_row(1, [6])
    assert (table.num_blocks_per_row[1], table.host[1].tolist()) == (1, [6, 0, 0, 0, 0])
    table.swap_rows(2, 2)
    assert table.num_blocks_per_row.tolist() == [2, 1, 0, 3]
    table.clear_row(0)
    assert (table.num_blocks_per_row[0], table.host[0].any()) == (0, False)


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_that_do_not_exist(row: int) -> None:
    table = BlockTable(4, 5, 16, "cpu")
    for call in (
        lambda: table.append_row(row, [1]),
        lambda: table.set_row(row, [1]),
        lambda: table.clear_row(row),
        lambda: table.swap_rows(row, 0),
        lambda: table.swap_rows(0, row),
    ):
        with pytest.raises(BatchError, match=f"row {row}: the block table has rows 0 to 3"):
            call()
    assert not table.num_blocks_per_row.any()


class TestStaleRows:
    """Checked mode: a row keeps its owner until it is cleared."""

    @pytest.fixture(autouse=True)
    def checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ATTN_SELECT_CHECK", "1")

    def table(self) -> BlockTable:
        table = BlockTable(2, 8, 4, "cpu")
        table.append_row(0, [0, 1])
        table.append_row(1, [2, 3])
        prepare_batch([6, 5], [6, 5], table)
        return table

    def test_a_row_that_was_not_cleared_is_refused(self) -> None:
        """Request 1 ended, its blocks went to others, and a new request was appended to its row."""
        table = self.table()
        table.append_row(1, [4, 5])
        with pytest.raises(BatchError, match=r"row 1 of the block table is stale: its last step held tokens 0 to 4"):
            prepare_batch([1, 7], [7, 7], table)
        table.clear_row(1)
        table.append_row(1, [4, 5])
        common = prepare_batch([1, 7], [7, 7], table)
        assert common.slot_mapping is not None
        assert common.slot_mapping.tolist() == [6, 16, 17, 18, 19, 20, 21, 22]

    def test_requests_that_go_on_are_fine(self) -> None:
        table = self.table()
        prepare_batch([6, 5], [6, 5], table)  # the same step again, for a second group
        table.append_row(0, [4])
        table.append_row(1, [5, 6])
        prepare_batch([4, 0], [10, 5], table)  # four draft tokens; request 1 waits
        table.append_row(1, [7])
        prepare_batch([2, 3], [9, 8], table)  # three drafts were rejected
        table.swap_rows(0, 1)
        prepare_batch([1, 1], [9, 10], table)
        table.swap_rows(0, 1)
        table.set_row(1, [9])
        prepare_batch([1, 2], [11, 2], table)  # a new request in the row
        table.set_row(1, [8])
        common = prepare_batch([1, 3], [12, 3], table)
        assert common.slot_mapping is not None
        assert common.slot_mapping.tolist() == [19, 32, 33, 34]


def test_commit_is_as_wide_as_the_longest_row_and_stays_where_it_is() -> None:
    table = BlockTable(3, 8, 4, "cpu")
    table.append_row(0, [5])
    table.append_row(1, [2, 6, 1])
    committed = table.commit(2)
    assert committed.dtype == torch.int32
    assert committed.shape == (2, 3)
    assert committed[0, 0] == 5
    assert committed[1].tolist() == [2, 6, 1]
    table.append_row(0, [4, 3, 0, 7])
    again = table.commit(1)
    assert again.tolist() == [[5, 4, 3, 0, 7]]
    assert again.data_ptr() == committed.data_ptr() == table.device_table.data_ptr()
    assert table.commit(3).shape == (3, 5)


Lens = list[tuple[int, int]]


def table_for(requests: Lens, block_size: int, seed: int) -> BlockTable:
    """A table with blocks in random order, one spare block per row."""
    needed = [-(-seq_len // block_size) + 1 for _, seq_len in requests]
    blocks = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed)).tolist()
    table = BlockTable(len(requests), max(needed), block_size, "cpu")
    for row, count in enumerate(needed):
        table.append_row(row, [blocks.pop() for _ in range(count)])
    return table


def reference_slots(table: BlockTable, requests: Lens) -> list[int]:
    slots = []
    for row, (new, seq_len) in zip(table.host, requests, strict=True):
        slots += slot_mapping_reference(row, torch.arange(seq_len - new, seq_len), table.block_size).tolist()
    return slots


requests_of_all_kinds = st.lists(
    st.integers(1, 40).flatmap(lambda seq: st.tuples(st.integers(0, seq) | st.just(1), st.just(seq))),
    min_size=1,
    max_size=7,
)


@given(requests_of_all_kinds, st.sampled_from([1, 3, 16]), st.integers(0, 99))
def test_prepared_batches(requests: Lens, block_size: int, seed: int) -> None:
    table = table_for(requests, block_size, seed)
    query_lens, seq_lens = zip(*requests, strict=True)
    common = prepare_batch(query_lens, seq_lens, table)
    bounds = [sum(query_lens[:r]) for r in range(len(requests) + 1)]
    for name in ("query_start_loc", "query_start_loc_cpu"):
        assert getattr(common, name).dtype == torch.int32
        assert getattr(common, name).tolist() == bounds
    for name in ("seq_lens", "seq_lens_cpu"):
        assert getattr(common, name).dtype == torch.int32
        assert getattr(common, name).tolist() == list(seq_lens)
    assert (common.num_reqs, common.num_actual_tokens) == (len(requests), bounds[-1])
    assert (common.max_query_len, common.max_seq_len) == (max(query_lens), max(seq_lens))
    assert common.query_lens_cpu.tolist() == list(query_lens)
    assert common.num_computed_tokens_cpu.tolist() == [seq - query for query, seq in requests]
    assert common.slot_mapping is not None
    assert common.slot_mapping.dtype == torch.int64
    assert common.slot_mapping.tolist() == reference_slots(table, requests)
    assert common.block_table_tensor is not None
    assert torch.equal(common.block_table_tensor, table.host[:, : common.block_table_tensor.shape[1]])


@given(requests_of_all_kinds, st.lists(st.integers(0, 9), min_size=7, max_size=7), st.integers(0, 99))
def test_cross_attention_writes_the_encoders_tokens(requests: Lens, query_lens: list[int], seed: int) -> None:
    """There the queries have nothing to do with the keys, and as many keys are written as come in."""
    table = table_for(requests, 4, seed)
    new_lens, seq_lens = zip(*requests, strict=True)
    query_lens = query_lens[: len(requests)]
    common = prepare_batch(query_lens, seq_lens, table, new_lens=new_lens)
    assert common.query_lens_cpu.tolist() == query_lens
    assert common.num_actual_tokens == sum(query_lens)
    assert common.slot_mapping is not None
    assert common.slot_mapping.tolist() == reference_slots(table, requests)


def test_bounds_and_room_of_many_single_tokens() -> None:
    number = 33
    table = BlockTable(number, 2, 4, "cpu")
    for row in range(number):
        table.append_row(row, [2 * row, 2 * row + 1])
    common = prepare_batch([1] * number, [8] * number, table)
    assert common.query_start_loc.tolist() == [*range(number + 1)]
    assert common.slot_mapping is not None
    assert common.slot_mapping.tolist() == [8 * row + 7 for row in range(number)]
    seq_lens = [8] * number
    seq_lens[number - 2] = 9
    with pytest.raises(BatchError, match=rf"request {number - 2}: seq_lens = 9, but its row .* holds 2 blocks of 4"):
        prepare_batch([1] * number, seq_lens, table)


@pytest.mark.parametrize("query_len", [1, 2])
def test_slots_beyond_32_bits(query_len: int) -> None:
    number = 3
    table = BlockTable(number, 2, 16, "cpu")
    for row in range(number):
        table.append_row(row, [2**31 - 1 - row, row])
    common = prepare_batch([query_len] * number, [16] * number, table)
    assert common.slot_mapping is not None
    last = [(2**31 - 1 - row) * 16 + 15 for row in range(number)]
    assert common.slot_mapping[query_len - 1 :: query_len].tolist() == last


def long_enough() -> BlockTable:
    table = BlockTable(3, 4, 4, "cpu")
    for row in range(3):
        table.append_row(row, [row * 2, row * 2 + 1])
    return table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), "0 query_lens, 0 seq_lens and 0 new_lens: accepted are equal numbers"),
        (([1, 1], [5]), "2 query_lens, 1 seq_lens"),
        (([1] * 4, [1] * 4), r"4 requests: the block table has rows for 1 to 3"),
        (([1, 6], [1, 5]), "request 1: query_lens = 6 with seq_lens = 5: accepted is 0 to seq_lens"),
        (([1, 1, -1], [1, 5, 5]), "request 2: query_lens = -1 with seq_lens = 5"),
        (([1, -50, 1], [1, 5, 5]), "request 1: query_lens = -50 with seq_lens = 5"),
        (([1, 1, 1], [8, 9, 8]), "request 1: seq_lens = 9, but its row of the block table holds 2 blocks of 4 tokens"),
    ],
)
def test_lengths_that_cannot_be(arguments: tuple[list[int], list[int]], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        prepare_batch(*arguments, long_enough())


@pytest.mark.parametrize(
    ("query_lens", "new_lens", "message"),
    [
        ([9, 2], [9, 0], "request 0: new_lens = 9 with seq_lens = 8: accepted is 0 to seq_lens"),
        ([9, 2], [8, -2], "request 1: new_lens = -2 with seq_lens = 3"),
        ([9, 2], [0, 4], "request 1: new_lens = 4 with seq_lens = 3"),
        ([9, -2], [8, 3], "request 1: query_lens = -2 with seq_lens = 3"),
        ([9, 2], [8], "2 query_lens, 2 seq_lens and 1 new_lens"),
    ],
)
def test_new_keys_that_cannot_be(query_lens: list[int], new_lens: list[int], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        prepare_batch(query_lens, [8, 3], long_enough(), new_lens=new_lens)


def test_a_shared_prefix_from_the_block_pool() -> None:
    """Two requests on one prefix: the same blocks in front, blocks of their own behind, and slots only there."""
    pool = BlockPool(12, 4)
    pool.allocate("a", 10)
    pool.share_prefix("a", "b", 8)
    pool.allocate("b", 11)
    table = BlockTable(2, 8, 4, "cpu")
    for row, request in enumerate("ab"):
        table.append_row(row, pool.blocks(request))
    common = prepare_batch([2, 3], [10, 11], table)
    assert common.slot_mapping is not None
    own_a, own_b = pool.blocks("a")[2], pool.blocks("b")[2]
    assert own_a != own_b
    assert common.slot_mapping.tolist() == [own_a * 4, own_a * 4 + 1, own_b * 4, own_b * 4 + 1, own_b * 4 + 2]
    assert common_prefix_len([pool.blocks("a"), pool.blocks("b")], [8, 8], 4) == 8
    # What "a" leaves behind stays with "b" and is not handed out.
    pool.free("a")
    pool.allocate("c", 12)
    assert not set(pool.blocks("c")) & set(pool.blocks("b"))
