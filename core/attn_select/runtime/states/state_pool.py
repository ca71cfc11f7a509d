"""Hands out slots of states to requests, shares them by reference count, and refuses every misuse by name.

Slots are plain Python integers; nothing here touches a tensor, and nothing is ever copied. A step reads each request's
state from one slot and writes it to another, so a fork and a snapshot cost nothing, a step can run again, and a
rejected draft is undone by reading an earlier slot. Only where too few slots are free does a request that holds its
state alone write over it. A request that is new reads no slot: its state is zero, whatever the slots hold.

``step`` plans, and ``commit`` makes it so: the pool goes on from what was built, never from what was refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from attn_select.errors import ConfigError, show
from attn_select.runtime.block_pool import CountedPool, PoolError, RequestId
from attn_select.runtime.integers import size

_STAMPS = count(1)
FROM_ZERO = -1
"""The slot that a request reads whose state is zero."""


class OutOfSlotsError(PoolError):
    """The pool has fewer free slots than a step needs. Free or preempt a request, then ask again."""

    code = "out-of-slots"


@dataclass(slots=True, eq=False)
class StateSlots:
    """A step that ``StatePool.step`` planned: where its requests read and write their states, request by request.

    Attributes:
        pool: which planned it.
        num_tokens: new tokens of each request, in the order of the slots.
        read: the slot of the state before the step; ``FROM_ZERO``: it is zero.
        write: one slot, of the state behind the request's last token; of decodes with drafts one slot for each token,
            of the state behind it.
    """

    pool: StatePool
    num_tokens: dict[RequestId, int]
    read: list[int] = field(default_factory=list)
    write: list[list[int]] = field(default_factory=list)
    # Tokens that each request's state has seen before the step.
    before: list[int] = field(default_factory=list)
    # The ``stamp`` of the step that wrote the state that each request reads; 0: it is zero, or no layer wrote it.
    read_stamps: list[int] = field(default_factory=list)
    # A number of the step's own, from when it is committed; 0 where no layer writes its states.
    stamp: int = 0
    # Whether the last group that was to build it refused: its requests may be planned anew.
    refused: bool = False


@dataclass(slots=True)
class _Owned:
    """The slots of one request: which it holds, which one is its state, and its last step."""

    slots: list[int] = field(default_factory=list)
    state: int = FROM_ZERO
    # Tokens that the state has seen, and the slots of the last step's states.
    seen: int = 0
    written: list[int] = field(default_factory=list)
    # The last step, built; its drafts stay or go by ``accept``, once.
    last: StateSlots | None = None
    accepted: bool = False
    # The step that was planned since, not yet built; the slots of its states, and those taken from the pool for them.
    next: StateSlots | None = None
    writes: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    # The slots that it will hold beside these.
    keeps: list[int] = field(default_factory=list)


class StatePool(CountedPool):
    """A fixed number of slots with reference counts.

    A step is planned by ``step`` and committed by ``StateGroup.build`` (``CudaGraphRunner`` commits what it replays),
    or by ``commit`` where neither runs it. Until then the requests have the state that they had; a second step of
    theirs is refused, unless a group refused the first one or it was taken back.

    A slot that a commit gives back may be written by the next step: steps run in the order in which they were planned.

    Args:
        num_slots: slots in the pool, ids ``0 .. num_slots - 1``; the size of ``StateGroup.allocate``.
        num_speculative_tokens: draft tokens per request and step: decodes hold one slot more for each.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, num_slots: int, num_speculative_tokens: int = 0) -> None:
        if type(num_speculative_tokens) is not int or num_speculative_tokens < 0:
            text = f"num_speculative_tokens = {show(num_speculative_tokens)}: accepted are integers from 0"
            raise ConfigError(text, fields=["num_speculative_tokens"])
        self.num_slots, self.num_speculative_tokens = size("num_slots", num_slots), num_speculative_tokens
        super().__init__(self.num_slots)
        self._stamps = [0] * num_slots
        self._requests: dict[RequestId, _Owned] = {}

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
        self._requests[request] = _Owned()

    def fork(self, source: RequestId, target: RequestId) -> None:
        """Add ``target`` with the present state of ``source``. Both hold it until each has written one of its own.

        Raises:
            PoolError: there is no ``source``, a step of it is planned, or there is a ``target`` already.
        """
        owned = self._settled(source)
        self.add(target)
        if owned.state != FROM_ZERO:
            self._references[owned.state] += 1
            self._requests[target] = _Owned([owned.state], owned.state, owned.seen)

    def free(self, request: RequestId) -> None:
        """Give back a request's slots, those of a planned step too: that step can no longer be built.

        Raises:
            PoolError: the pool has no such request.
        """
        owned = self._of(request)
        if owned.next is not None:
            self._release(owned.taken)
        self._release(owned.slots)
        del self._requests[request]

    def step(self, num_tokens: Mapping[Any, int]) -> StateSlots:
        """Plan a step: return where its requests read and write, in the order of ``num_tokens``.

        Give the slots to ``StateGroup.build`` before the next step of these requests. A request of a pool with drafts
        that has a state and gets no more tokens than a decode writes one slot for each token; ``accept`` says
        afterwards which of them stay. Otherwise all tokens stay.

        Args:
            num_tokens: tokens of each request in the step, from 1.

        Raises:
            PoolError: the pool has no such request, it gets no token, or its last step was neither built nor refused
                nor taken back, or not built by all groups.
            OutOfSlotsError: too few slots are free. The pool is unchanged.
        """
        if not isinstance(num_tokens, Mapping):
            text = (
                f"num_tokens is a {type(num_tokens).__name__}: accepted is a mapping of requests to numbers of tokens"
            )
            raise PoolError(text, None)
        refused: list[StateSlots] = []
        for request, tokens in num_tokens.items():
            owned = self._of(request)
            if type(tokens) is not int or tokens < 1:
                text = f"request {request!r} gets {show(tokens)} tokens: accepted are integers from 1"
                raise PoolError(text, request)
            if owned.next is not None:
                if not owned.next.refused:
                    raise _unsettled(request)
                refused.append(owned.next)
            elif owned.last is not None and owned.last.refused:
                raise PoolError(
                    f"request {request!r}: a group refused its last step, which another group built",
                    request,
                    hint="build that step's slots with every group of the pool, or free the request",
                )
        for step in refused:
            self._drop(step)
        # Which slots a request holds alone is settled before any changes: one that two requests of the step share is
        # read by both, and so written by neither.
        references, free = self._references, self._free
        wanted: list[tuple[_Owned, int, list[int]]] = []
        missing = 0
        for request, tokens in num_tokens.items():
            owned = self._requests[request]
            decodes = owned.state != FROM_ZERO and tokens <= 1 + self.num_speculative_tokens
            states = tokens if decodes else 1
            own = [slot for slot in owned.slots if references[slot] == 1 and slot != owned.state]
            if owned.state != FROM_ZERO and references[owned.state] == 1:
                own.append(owned.state)  # the last that is written over
            missing += max(0, states - len(own))
            wanted.append((owned, states, own))
        spare = len(free) - missing
        if spare < 0:
            raise OutOfSlotsError(
                f"the step needs {missing} slots more than its requests hold, and {len(free)} of {self.num_slots} "
                "are free",
                next(iter(num_tokens)),
                hint="free a request, or leave some out of the step",
            )
        planned = StateSlots(self, dict(num_tokens))
        for owned, states, own in wanted:
            # As long as slots are to spare, the request does not write over the state that it reads: then the step can
            # run again.
            if spare and 0 < len(own) <= states and own[-1] == owned.state:
                own.pop()
                spare -= 1
            owned.next, owned.taken, owned.keeps = planned, self._take(states - len(own)), own[states:]
            owned.writes = own[:states] + owned.taken
            planned.read.append(owned.state)
            planned.write.append(owned.writes)
            planned.before.append(owned.seen)
            planned.read_stamps.append(0 if owned.state == FROM_ZERO else self._stamps[owned.state])
        return planned

    def commit(self, slots: StateSlots, *, stamped: bool = False) -> None:
        """Make a planned step so: its requests have the states behind it. A second time it does nothing.

        For steps that no group builds: states that were received and copied into the slots to write, or kernels that
        the caller runs.

        Args:
            slots: what ``step`` returned.
            stamped: whether layers will write these states where checked mode sees it; ``StateGroup.build`` says so.

        Raises:
            PoolError: another pool planned them, they were taken back, a request of theirs was freed, or a later step
                of one was built.
        """
        step = self._own(slots)
        by_request = [(request, self._of(request)) for request in step.num_tokens]
        for request, owned in by_request:
            if step not in (owned.last, owned.next):
                raise PoolError(
                    f"the slots are of a step of request {request!r} that was taken back, or that a later one followed",
                    request,
                    hint="give group.build what the last pool.step returned",
                )
        fresh = [pair for pair in by_request if pair[1].last is not step]
        for request, owned in fresh:
            holds = owned.writes + owned.keeps
            if owned.slots != holds:
                self._release([slot for slot in owned.slots if slot not in holds])
            owned.slots, owned.written, owned.state = holds, owned.writes, owned.writes[-1]
            owned.seen += step.num_tokens[request]
            owned.last, owned.accepted, owned.next = step, False, None
        if fresh or not stamped:
            # A step that several groups build is stamped once: each layer's book has the same number.
            step.stamp = next(_STAMPS) if stamped else 0
            for _, owned in by_request:
                for slot in owned.written:
                    self._stamps[slot] = step.stamp

    def take_back(self, slots: StateSlots) -> None:
        """Drop a planned step that will not run: its requests have the states that they had.

        Raises:
            PoolError: another pool planned the slots, or the step was built or taken back before.
        """
        if not self._drop(self._own(slots)):
            raise PoolError("the slots are of a step that was built, or taken back before", None)

    def accept(self, request: RequestId, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens of a request's last step, which was a decode with drafts.

        Raises:
            PoolError: the last step did not write a state behind that token, its tokens were accepted already, or
                a step is planned.
        """
        owned = self._settled(request)
        if type(num_tokens) is not int or not 1 <= num_tokens <= len(owned.written):
            wrote = len(owned.written)
            text = f"request {request!r}: {show(num_tokens)} tokens accepted, of a step that wrote {wrote} states"
            raise PoolError(f"{text} (accepted: from 1 to {wrote})" if wrote else text, request)
        assert owned.last is not None
        if owned.accepted:
            raise PoolError(f"request {request!r}: tokens of its last step were accepted already", request)
        if (tokens := owned.last.num_tokens[request]) > len(owned.written):
            text = f"request {request!r}: its last step was no decode, and all of its {tokens} tokens stay"
            raise PoolError(text, request)
        owned.state, owned.accepted = owned.written[num_tokens - 1], True
        owned.seen += num_tokens - tokens

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

    def _of(self, request: RequestId) -> _Owned:
        owned = self._requests.get(request)
        if owned is None:
            raise PoolError(f"request {request!r} is not in the pool", request, hint="add it first")
        return owned

    def _settled(self, request: RequestId) -> _Owned:
        """Return what a request holds, no step of which is planned."""
        owned = self._of(request)
        if owned.next is not None:
            raise _unsettled(request)
        return owned

    def _own(self, slots: StateSlots) -> StateSlots:
        if not isinstance(slots, StateSlots) or slots.pool is not self:
            raise PoolError("the slots are none that a step of this pool returned", None)
        return slots

    def _drop(self, step: StateSlots) -> bool:
        """Give back what a planned step took; return whether any of its requests had it still before them."""
        waiting = [owned for request in step.num_tokens if (owned := self._requests.get(request)) is not None]
        waiting = [owned for owned in waiting if owned.next is step]
        for owned in waiting:
            self._release(owned.taken)
            owned.next = None
        return bool(waiting)


def _unsettled(request: RequestId) -> PoolError:
    """Return the error of a call about a request with a planned step."""
    return PoolError(
        f"request {request!r}: its last step was neither built nor taken back",
        request,
        hint="give the step's slots to group.build, or to pool.commit or pool.take_back where no group runs it",
    )
