"""The pool of states: slots are shared until they are written, steps and drafts are undone, and misuse is refused by
name."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

pytest.importorskip("torch")

from attn_select.errors import ConfigError
from attn_select.runtime.block_pool import PoolError
from attn_select.runtime.states import OutOfSlotsError, StatePool, StateSlots


def run(pool: StatePool, num_tokens: dict[str, int]) -> StateSlots:
    """Plan a step and commit it."""
    slots = pool.step(num_tokens)
    pool.commit(slots)
    return slots


def test_a_step_writes_beside_the_state_that_it_reads_while_a_slot_is_free() -> None:
    pool = StatePool(3)
    for name in ("a", "b"):
        pool.add(name)
    first = run(pool, {"a": 1, "b": 1})
    second = run(pool, {"a": 1, "b": 1})
    assert second.read == [slot for writes in first.write for slot in writes]
    beside = [writes != [slot] for slot, writes in zip(second.read, second.write, strict=True)]
    assert beside == [True, False]  # one slot was free
    assert pool.num_free_slots == 1


def test_a_step_with_drafts_keeps_the_state_that_it_reads() -> None:
    pool = StatePool(5, num_speculative_tokens=2)
    pool.add("a")
    run(pool, {"a": 9})
    for kept in (1, 3, 2):
        drafts = run(pool, {"a": 3})
        assert drafts.read[0] not in drafts.write[0]
        assert pool.num_free_slots == 2
        pool.accept("a", kept)


def test_a_step_changes_nothing_until_it_is_committed() -> None:
    pool = StatePool(4)
    pool.add("a")
    state = run(pool, {"a": 2}).write[0][0]
    planned = pool.step({"a": 3})
    assert pool.num_free_slots == 2
    pool.take_back(planned)
    assert pool.num_free_slots == 3
    again = pool.step({"a": 1})
    assert again.read == [state]
    pool.commit(again)
    pool.commit(again)  # by the next group of the pool
    assert pool.step({"a": 1}).read == again.write[0]


def test_a_planned_step_is_settled_before_its_requests_go_on() -> None:
    pool = StatePool(8, num_speculative_tokens=2)
    for name in ("a", "b"):
        pool.add(name)
    run(pool, {"a": 4, "b": 4})
    planned = pool.step({"a": 3})
    with pytest.raises(PoolError, match="request 'a': its last step was neither built nor taken back"):
        pool.step({"b": 1, "a": 3})
    with pytest.raises(PoolError, match="request 'a': its last step was neither built nor taken back"):
        pool.fork("a", "c")
    with pytest.raises(PoolError, match="request 'a': its last step was neither built nor taken back"):
        pool.accept("a", 1)
    run(pool, {"b": 3})  # a step of others is in nobody's way
    pool.commit(planned)
    pool.accept("a", 1)
    assert pool.step({"a": 3}).read == [planned.write[0][0]]


def test_what_is_committed_is_the_last_step() -> None:
    pool, other = StatePool(4), StatePool(4)
    for each in (pool, other):
        each.add("a")
    first = run(pool, {"a": 2})
    back = pool.step({"a": 1})
    pool.take_back(back)
    with pytest.raises(PoolError, match="was taken back, or that a later one followed"):
        pool.commit(back)
    with pytest.raises(PoolError, match="was built, or taken back before"):
        pool.take_back(back)
    run(pool, {"a": 1})
    with pytest.raises(PoolError, match="was taken back, or that a later one followed"):
        pool.commit(first)
    with pytest.raises(PoolError, match="was built, or taken back before"):
        pool.take_back(first)
    for slots in (other.step({"a": 1}), [[0]]):
        with pytest.raises(PoolError, match="none that a step of this pool returned"):
            pool.commit(slots)  # type: ignore[arg-type]


def test_misuse_is_refused() -> None:
    pool = StatePool(4, num_speculative_tokens=2)
    pool.add("a")
    with pytest.raises(PoolError, match="request 'a' is in the pool already"):
        pool.add("a")
    with pytest.raises(PoolError, match="request 'b' is not in the pool"):
        pool.step({"a": 1, "b": 1})
    for tokens in (0, -1, 1.5, True, "1", None):
        with pytest.raises(PoolError, match=f"gets {tokens!r} tokens: accepted are integers from 1"):
            pool.step({"a": tokens})  # type: ignore[dict-item]
    with pytest.raises(PoolError, match="num_tokens is a list: accepted is a mapping of requests to numbers of tokens"):
        pool.step([("a", 1)])  # type: ignore[arg-type]
    with pytest.raises(PoolError, match=r"2 tokens accepted, of a step that wrote 0 states$"):
        pool.accept("a", 2)
    run(pool, {"a": 5})
    with pytest.raises(PoolError, match="its last step was no decode, and all of its 5 tokens stay"):
        pool.accept("a", 1)
    run(pool, {"a": 3})
    for tokens in (0, 4, True, 1.0):
        with pytest.raises(PoolError, match=r"of a step that wrote 3 states \(accepted: from 1 to 3\)"):
            pool.accept("a", tokens)  # type: ignore[arg-type]
    pool.accept("a", 1)
    with pytest.raises(PoolError, match="tokens of its last step were accepted already"):
        pool.accept("a", 3)
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
        if data.draw(st.booleans()):
            self.pool.take_back(slots)
            return
        self.pool.commit(slots)
        for request, slot in zip(chosen, slots.read, strict=True):
            assert (None if slot < 0 else self.contents[slot]) == self.expected[request]
        for request, writes in zip(chosen, slots.write, strict=True):
            stamps = []
            for slot in writes:
                self.clock += 1
                self.contents[slot] = self.clock
                stamps.append(self.clock)
            self.written[request], self.expected[request] = stamps, stamps[-1]
            if len(stamps) < lens[request]:  # no decode: all tokens stay
                del self.written[request]

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.written)))
        kept = data.draw(st.integers(1, len(self.written[request])))
        self.pool.accept(request, kept)
        self.expected[request] = self.written.pop(request)[kept - 1]

    @invariant()
    def slots_are_held_or_free(self) -> None:
        held = {slot for request in self.expected for slot in self.pool.slots_of(request)}
        assert len(held) + self.pool.num_free_slots == self.pool.num_slots


TestPools = Pools.TestCase
