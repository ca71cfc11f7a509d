"""Hands out slots of states to requests, shares them by reference count, and refuses every misuse by name.

Slots are plain Python integers; nothing here touches a tensor, and nothing is ever copied. A step reads each request's
state from one slot and writes it to another where the first one is shared: so a fork and a snapshot cost nothing, and
a rejected draft is undone by reading an earlier slot. A request that is new reads no slot: its state is zero, whatever
the slots hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_select.errors import ConfigError, show
from attn_select.runtime.block_pool import PoolError, RequestId

FROM_ZERO = -1
"""The slot that a request reads whose state is zero."""


class OutOfSlotsError(PoolError):
    """The pool has fewer free slots than a step needs. Free or preempt a request, then ask again."""

    code = "out-of-slots"


@dataclass(slots=True)
class StateSlots:
    """Where one step's requests read and write their states, request by request.

    Attributes:
        read: the slot of the state before the step; ``FROM_ZERO``: it is zero.
        write: one slot, of the state behind the request's last token; of decodes with drafts one slot for each token,
            of the state behind it.
    """

    read: list[int]
    write: list[list[int]]


@dataclass(slots=True)
class _Held:
    """The slots of one request: which it may write, which one holds its state, and its last step's tokens."""

    slots: list[int] = field(default_factory=list)
    state: int = FROM_ZERO
    written: list[int] = field(default_factory=list)


class StatePool:
    """A fixed number of slots with reference counts.

    Args:
        num_slots: slots in the pool, ids ``0 .. num_slots - 1``; the size of ``StateGroup.allocate``.
        num_speculative_tokens: draft tokens per request and step: decodes hold one slot more for each.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, num_slots: int, num_speculative_tokens: int = 0) -> None:
        for name, value, least in (("num_slots", num_slots, 1), ("num_speculative_tokens", num_speculative_tokens, 0)):
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} = {show(value)}: accepted are integers from {least}", fields=[name])
        self.num_slots = num_slots
        self._drafts = num_speculative_tokens
        self._free = list(range(num_slots - 1, -1, -1))
        self._references = [0] * num_slots
        self._requests: dict[RequestId, _Held] = {}

    @property
    def num_free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free)

    def add(self, request: RequestId) -> None:
        """Add a request, whose state is zero. It holds no slot before its first step.

        Raises:
            PoolError: the pool has it already.
        """
        if request in self._requests:
            raise PoolError(f"request {request!r} is in the pool already", request, hint="free it first")
        self._requests[request] = _Held()

    def fork(self, source: RequestId, target: RequestId) -> None:
        """Add ``target`` with the present state of ``source``. Both hold it until each has written one of its own.

        Raises:
            PoolError: there is no ``source``, or there is a ``target`` already.
        """
        held = self._of(source)
        self.add(target)
        if held.state != FROM_ZERO:
            self._references[held.state] += 1
            self._requests[target] = _Held([held.state], held.state)

    def free(self, request: RequestId) -> None:
        """Give back a request's slots.

        Raises:
            PoolError: the pool has no such request.
        """
        self._release(self._of(request).slots)
        del self._requests[request]

    def step(self, num_tokens: Mapping[Any, int]) -> StateSlots:
        """Return where a step's requests read and write, in the order of ``num_tokens``.

        A request of a pool with drafts that has a state and gets no more tokens than a decode writes one slot for each
        token; ``accept`` says afterwards which of them stay. Otherwise all tokens stay.

        Args:
            num_tokens: tokens of each request in the step, from 1.

        Raises:
            PoolError: the pool has no such request, or it gets no token.
            OutOfSlotsError: too few slots are free. The pool is unchanged.
        """
        # Which slots a request holds alone is settled before any changes: one that two requests of the step share is
        # read by both, and so written by neither.
        wanted: dict[RequestId, tuple[int, list[int]]] = {}
        for request, count in num_tokens.items():
            held = self._of(request)
            if count < 1:
                raise PoolError(f"request {request!r} gets {count} tokens: accepted are integers from 1", request)
            is_decode = self._drafts > 0 and held.state != FROM_ZERO and count <= 1 + self._drafts
            own = [slot for slot in held.slots if self._references[slot] == 1]
            wanted[request] = (count if is_decode else 1, own)
        missing = sum(max(0, count - len(own)) for count, own in wanted.values())
        if missing > len(self._free):
            raise OutOfSlotsError(
                f"the step needs {missing} slots more than its requests hold, and {len(self._free)} of "
                f"{self.num_slots} are free",
                next(iter(num_tokens)),
                hint="free a request, or leave some out of the step",
            )
        slots = StateSlots([], [])
        shared: list[int] = []
        for request, (count, own) in wanted.items():
            held, writes = self._requests[request], own[:count]
            while len(writes) < count:
                slot = self._free.pop()
                self._references[slot] = 1
                writes.append(slot)
            slots.read.append(held.state)
            slots.write.append(writes)
            shared += [slot for slot in held.slots if slot not in own]
            held.slots, held.state, held.written = [*writes, *own[count:]], writes[-1], writes
        self._release(shared)
        return slots

    def accept(self, request: RequestId, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens of a request's last step, which was a decode with drafts.

        Raises:
            PoolError: the last step did not write a state behind that token.
        """
        held = self._of(request)
        if not 1 <= num_tokens <= len(held.written):
            text = f"request {request!r}: {num_tokens} tokens accepted, of a step that wrote {len(held.written)} states"
            raise PoolError(f"{text} (accepted: from 1 to {len(held.written)})", request)
        held.state = held.written[num_tokens - 1]

    def written_of(self, request: RequestId) -> int:
        """Return how many states the request's last step wrote, of which ``accept`` takes one; 0 before the first step.

        Raises:
            PoolError: the pool has no such request.
        """
        return len(self._of(request).written)

    def slots_of(self, request: RequestId) -> Sequence[int]:
        """Return the slots that a request holds.

        Raises:
            PoolError: the pool has no such request.
        """
        return tuple(self._of(request).slots)

    def _of(self, request: RequestId) -> _Held:
        held = self._requests.get(request)
        if held is None:
            raise PoolError(f"request {request!r} is not in the pool", request, hint="add it first")
        return held

    def _release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._references[slot] -= 1
            if self._references[slot] == 0:
                self._free.append(slot)
