"""Token-level pools."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the runtime needs torch")

from attn_select.runtime.block_pool import OutOfBlocksError, PoolError
from attn_select.runtime.token_pool import ReqToTokenPool, TokenToKVPool


def test_rows_list_the_slots_of_each_request_in_token_order() -> None:
    slots = TokenToKVPool(10)
    pool = ReqToTokenPool(2, 8, slots)
    first = pool.extend("a", 3)
    other = pool.extend("b", 2)
    second = pool.extend("a", 5)
    row = pool.req_to_token[pool.row("a")]
    assert row[:5].tolist() == [*first.tolist(), *second.tolist()] == list(slots.blocks("a"))
    assert pool.req_to_token[pool.row("b"), :2].tolist() == other.tolist()
    assert not set(row[:5].tolist()) & set(other.tolist())
    pool.free("a")
    assert slots.num_free_blocks == 8
    assert set(pool.extend("c", 5).tolist()) <= set(range(10)) - set(other.tolist())


def test_a_freed_row_holds_nothing_of_its_last_request() -> None:
    pool = ReqToTokenPool(2, 8, TokenToKVPool(20))
    pool.extend("a", 1)
    kept = pool.extend("b", 7).tolist()
    pool.extend("a", 8)
    row = pool.row("a")
    pool.free("a")
    assert not pool.req_to_token[row].any()
    slots = pool.extend("c", 2).tolist()
    assert pool.row("c") == row
    assert pool.req_to_token[row].tolist() == [*slots, 0, 0, 0, 0, 0, 0]
    assert pool.req_to_token[pool.row("b")].tolist() == [*kept, 0]


def test_exhaustion_and_misuse_name_the_request_and_change_nothing() -> None:
    slots = TokenToKVPool(6)
    pool = ReqToTokenPool(2, 5, slots)
    pool.extend("a", 4)
    with pytest.raises(OutOfBlocksError, match="request 'b' needs 3 more blocks"):
        pool.extend("b", 3)
    assert slots.requests() == ("a",)
    with pytest.raises(PoolError, match="request 'b' has no row"):
        pool.row("b")
    with pytest.raises(PoolError, match=r"request 'a' wants 6 tokens; a row holds 5 \(max_context_len\)"):
        pool.extend("a", 6)
    pool.extend("b", 1)
    with pytest.raises(PoolError, match=r"request 'c': all 2 rows are taken \(max_requests\)"):
        pool.extend("c", 1)
    pool.free("b")
    with pytest.raises(PoolError, match="request 'b' has no row"):
        pool.free("b")
    assert slots.num_free_blocks == 2


def test_a_request_may_fill_its_row() -> None:
    pool = ReqToTokenPool(1, 5, TokenToKVPool(6))
    pool.extend("a", 3)
    pool.extend("a", 5)
    assert pool.req_to_token[0].tolist() == list(pool.slots.blocks("a"))
