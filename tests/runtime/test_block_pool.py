"""The block pool against a model of it, and every misuse."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attn_select.runtime.block_pool import BlockPool, OutOfBlocksError, PoolError

BLOCKS, SIZE = 12, 4


class PoolMachine(RuleBasedStateMachine):
    """Random allocation, growth, sharing and freeing; the model counts references the slow way."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.model: dict[int, list[int]] = {}
        self.next = 0

    @rule(tokens=st.integers(0, 30))
    def new_request(self, tokens: int) -> None:
        self._allocate(self.next, tokens)
        self.next += 1

    @precondition(lambda self: self.model)
    @rule(tokens=st.integers(0, 30), data=st.data())
    def grow(self, tokens: int, data: st.DataObject) -> None:
        self._allocate(data.draw(st.sampled_from(sorted(self.model))), tokens)

    def _allocate(self, request: int, tokens: int) -> None:
        held = self.model.get(request, [])
        missing = max(0, -(-tokens // SIZE) - len(held))
        if missing > self._free():
            with pytest.raises(OutOfBlocksError, match=f"request {request} needs {missing} more blocks"):
                self.pool.allocate(request, tokens)
        else:
            added = self.pool.allocate(request, tokens)
            assert len(added) == missing
            assert not set(added) & {b for blocks in self.model.values() for b in blocks}
            self.model[request] = [*held, *added]

    @precondition(lambda self: any(self.model.values()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(r for r, b in self.model.items() if b)))
        count = data.draw(st.integers(1, len(self.model[source])))
        shared = self.pool.share_prefix(source, self.next, count * SIZE)
        assert list(shared) == self.model[source][:count]
        self.model[self.next] = list(shared)
        self.next += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.model)))
        blocks = self.model.pop(request)
        still_held = {b for others in self.model.values() for b in others}
        assert set(self.pool.free(request)) == set(blocks) - still_held
        with pytest.raises(PoolError, match=f"free: request {request} holds no blocks"):
            self.pool.free(request)

    def _free(self) -> int:
        return BLOCKS - len({b for blocks in self.model.values() for b in blocks})

    @invariant()
    def pool_equals_model(self) -> None:
        assert self.pool.num_free_blocks == self._free()
        assert list(self.pool.requests()) == list(self.model)
        assert all(list(self.pool.blocks(request)) == blocks for request, blocks in self.model.items())


TestPool = PoolMachine.TestCase


def test_misuse_names_the_request_and_leaves_the_pool_intact() -> None:
    pool = BlockPool(4, 16)
    pool.allocate("a", 40)
    with pytest.raises(OutOfBlocksError, match=r"request 'b' needs 2 more blocks for 20 tokens; 1 of 4 are free"):
        pool.allocate("b", 20)
    with pytest.raises(PoolError, match=r"blocks: request 'b' holds no blocks.*\n.*'a'"):
        pool.blocks("b")
    with pytest.raises(PoolError, match="request 'a' holds 48 tokens, fewer than the 64 to share with 'b'"):
        pool.share_prefix("a", "b", 64)
    with pytest.raises(PoolError, match="request 'a' already holds 3 blocks"):
        pool.share_prefix("a", "a", 16)
    with pytest.raises(ValueError, match="num_tokens = 20 to share must be a positive multiple of the block size 16"):
        pool.share_prefix("a", "b", 20)
    with pytest.raises(ValueError, match="num_tokens = -1"):
        pool.allocate("a", -1)
    assert pool.requests() == ("a",)
    assert pool.num_free_blocks == 1
    assert len(pool.blocks("a")) == 3


def test_freed_blocks_are_handed_out_first_and_in_their_order() -> None:
    pool = BlockPool(8, 16)
    blocks = pool.allocate("a", 48)
    pool.allocate("b", 16)
    assert pool.free("a") == blocks
    assert pool.allocate("c", 64)[:3] == blocks


def test_the_null_block_is_no_requests() -> None:
    pool = BlockPool(4, 16, null_block=True)
    assert pool.num_free_blocks == 3
    for _ in range(2):
        assert sorted(pool.allocate("a", 33)) == [1, 2, 3]
        with pytest.raises(OutOfBlocksError, match="0 of 4 are free"):
            pool.allocate("b", 1)
        assert sorted(pool.free("a")) == [1, 2, 3]
    with pytest.raises(ValueError, match="num_blocks = 1 with null_block = True: accepted are integers from 2"):
        BlockPool(1, 16, null_block=True)
