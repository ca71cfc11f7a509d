"""The pool of states: slots are shared until they are written, drafts are undone, and misuse is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

pytest.importorskip("torch")

from attn_select.errors import ConfigError
from attn_select.runtime.block_pool import PoolError
from attn_select.runtime.states import OutOfSlotsError, StatePool


def test_a_new_request_reads_no_slot_and_then_its_own() -> None:
    pool = StatePool(2)
    pool.add("a")
    first = pool.step({"a": 5})
    assert (first.read, len(first.write[0])) == ([-1], 1)
    second = pool.step({"a": 1})
    assert second.read == first.write[0] == second.write[0]


def test_a_reused_slot_starts_from_zero() -> None:
    pool = StatePool(1)
    pool.add("a")
    pool.step({"a": 1})
    pool.free("a")
    pool.add("b")
    assert pool.step({"b": 1}).read == [-1]


def test_a_fork_shares_the_state_until_both_have_written() -> None:
    pool = StatePool(3)
    pool.add("a")
    shared = pool.step({"a": 1}).write[0][0]
    pool.fork("a", "b")
    assert pool.num_free_slots == 2
    step = pool.step({"a": 1, "b": 1})
    assert step.read == [shared, shared]
    assert shared not in (step.write[0][0], step.write[1][0])
    assert step.write[0] != step.write[1]
    assert pool.num_free_slots == 1


def test_one_of_a_fork_may_go_on_alone() -> None:
    pool = StatePool(2)
    pool.add("a")
    shared = pool.step({"a": 1}).write[0][0]
    pool.fork("a", "b")
    pool.step({"a": 1})
    assert pool.step({"b": 1}).read == [shared]
    pool.free("a")
    assert pool.num_free_slots == 1


def test_rejected_drafts_are_undone() -> None:
    pool = StatePool(4, num_speculative_tokens=3)
    pool.add("a")
    pool.step({"a": 10})
    drafts = pool.step({"a": 4})
    assert len(set(drafts.write[0])) == 4
    pool.accept("a", 2)
    assert pool.step({"a": 4}).read == [drafts.write[0][1]]


def test_a_decode_needs_its_slots() -> None:
    pool = StatePool(3, num_speculative_tokens=3)
    pool.add("a")
    pool.step({"a": 10})
    with pytest.raises(OutOfSlotsError, match="needs 3 slots more than its requests hold, and 2 of 3 are free"):
        pool.step({"a": 4})
    assert pool.num_free_slots == 2
    assert pool.step({"a": 3}).read != [-1]


def test_misuse_is_refused() -> None:
    pool = StatePool(2)
    pool.add("a")
    with pytest.raises(PoolError, match="request 'a' is in the pool already"):
        pool.add("a")
    with pytest.raises(PoolError, match="request 'b' is not in the pool"):
        pool.step({"a": 1, "b": 1})
    with pytest.raises(PoolError, match="gets 0 tokens: accepted are integers from 1"):
        pool.step({"a": 0})
    with pytest.raises(PoolError, match="2 tokens accepted, of a step that wrote 0 states"):
        pool.accept("a", 2)
    with pytest.raises(PoolError, match="not in the pool"):
        pool.free("b")
    with pytest.raises(PoolError, match="not in the pool"):
        pool.fork("b", "c")
    with pytest.raises(ConfigError, match="num_slots = 0"):
        StatePool(0)
    with pytest.raises(ConfigError, match="num_speculative_tokens = -1"):
        StatePool(1, -1)


class Pools(RuleBasedStateMachine):
    """Any order of calls keeps every slot with those who hold it, and a request reads what it wrote last."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = StatePool(12, num_speculative_tokens=2)
        self.contents: dict[int, int] = {}
        self.expected: dict[int, int | None] = {}
        self.written: dict[int, list[int]] = {}
        self.clock = 0

    @rule()
    def add(self) -> None:
        self.clock += 1
        self.pool.add(self.clock)
        self.expected[self.clock] = None

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.expected)))
        self.clock += 1
        self.pool.fork(source, self.clock)
        self.expected[self.clock] = self.expected[source]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.expected)))
        self.pool.free(request)
        del self.expected[request]
        self.written.pop(request, None)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.expected)), min_size=1, unique=True))
        lens = {request: data.draw(st.integers(1, 6)) for request in chosen}
        try:
            slots = self.pool.step(lens)
        except OutOfSlotsError:
            return
        for request, slot in zip(chosen, slots.read, strict=True):
            assert (None if slot < 0 else self.contents[slot]) == self.expected[request]
        for request, writes in zip(chosen, slots.write, strict=True):
            stamps = []
            for slot in writes:
                self.clock += 1
                self.contents[slot] = self.clock
                stamps.append(self.clock)
            self.written[request], self.expected[request] = stamps, stamps[-1]

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.written)))
        kept = data.draw(st.integers(1, len(self.written[request])))
        self.pool.accept(request, kept)
        self.expected[request] = self.written[request][kept - 1]

    @invariant()
    def slots_are_held_or_free(self) -> None:
        held = {slot for request in self.expected for slot in self.pool.slots_of(request)}
        assert len(held) + self.pool.num_free_slots == self.pool.num_slots


TestPools = Pools.TestCase
