"""Counting decodes and prefills, and cutting a batch in parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_select.runtime import BatchError, CommonAttentionMetadata, decodes_first, split_decodes_and_prefills
from attn_select.runtime.metadata import Split

MakeBatch = Callable[..., CommonAttentionMetadata]


@pytest.mark.parametrize(
    ("query_lens", "threshold", "expected"),
    [
        ([1, 1, 1], 1, Split(3, 0, 3, 0)),
        ([5, 4], 1, Split(0, 2, 0, 9)),
        ([1, 1, 7, 3], 1, Split(2, 2, 2, 10)),
        ([4, 1, 2, 7], 4, Split(3, 1, 7, 7)),
        ([1], 1, Split(1, 0, 1, 0)),
        ([2], 1, Split(0, 1, 0, 2)),
        ([0, 1, 2], 1, Split(2, 1, 1, 2)),
    ],
)
def test_split(make_batch: MakeBatch, query_lens: list[int], threshold: int, expected: Split) -> None:
    common = make_batch([(length, 20) for length in query_lens])
    assert split_decodes_and_prefills(common, threshold) == expected


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.integers(1, 5))
def test_split_after_ordering(query_lens: list[int], threshold: int) -> None:
    order = decodes_first(query_lens, threshold)
    assert sorted(order) == list(range(len(query_lens)))
    ordered = [query_lens[i] for i in order]
    decodes = [length for length in query_lens if length <= threshold]
    # Each kind stays in the order it came in.
    assert ordered == decodes + [length for length in query_lens if length > threshold]
    bounds = torch.tensor([0, *ordered]).cumsum(0).int()
    lens = torch.full((len(ordered),), 9, dtype=torch.int32)
    common = CommonAttentionMetadata(bounds, bounds, lens, lens, len(ordered), sum(ordered), max(ordered), 9)
    expected = Split(len(decodes), len(ordered) - len(decodes), sum(decodes), sum(ordered) - sum(decodes))
    assert split_decodes_and_prefills(common, threshold) == expected
    out_of_order = query_lens != ordered
    common.query_start_loc = common.query_start_loc_cpu = torch.tensor([0, *query_lens]).cumsum(0).int()
    if out_of_order:
        with pytest.raises(BatchError, match="decode behind"):
            split_decodes_and_prefills(common, threshold)
    else:
        assert split_decodes_and_prefills(common, threshold) == expected


def test_requests_of_a_batch(make_batch: MakeBatch) -> None:
    ranges = [[(0, 1)], [], [(2, 3)], []]
    common = make_batch([(1, 9), (4, 7), (2, 30), (3, 3)], block_size=8, mm_prefix_ranges=ranges)
    part = common.requests(1, 3)
    assert part.query_start_loc.tolist() == part.query_start_loc_cpu.tolist() == [0, 4, 6]
    assert part.seq_lens.tolist() == part.seq_lens_cpu.tolist() == [7, 30]
    assert (part.num_reqs, part.num_actual_tokens, part.max_query_len, part.max_seq_len) == (2, 6, 4, 30)
    assert part.slot_mapping is not None
    assert common.slot_mapping is not None
    assert torch.equal(part.slot_mapping, common.slot_mapping[1:7])
    assert part.block_table_tensor is not None
    assert common.block_table_tensor is not None
    assert torch.equal(part.block_table_tensor, common.block_table_tensor[1:3])
    assert part.mm_prefix_ranges == [[], [(2, 3)]]
    assert part.num_computed_tokens_cpu.tolist() == [3, 28]
    assert part.tree_mask is None
    common.tree_mask = torch.eye(10, dtype=torch.bool)
    tree_mask = common.requests(1, 3).tree_mask
    assert tree_mask is not None
    assert torch.equal(tree_mask, common.tree_mask[1:7])
    # Views: what is written to the batch shows in its part.
    common.seq_lens[2] = 29
    assert part.seq_lens[1] == 29
