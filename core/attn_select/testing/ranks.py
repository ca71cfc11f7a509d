"""Ranks of a context-parallel group in one process, taking turns: ``run_ranks``.

Each rank is a thread, and one of them runs at a time, until its next collective operation. So a backend's part under
context parallelism can be tested anywhere, on one GPU or none. That processes exchange the same is another test's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from attn_select.runtime.context_parallel.collectives import RankError
from attn_select.runtime.rank_memory import RankLayout, RankMemory

T = TypeVar("T")


class _LeftAlone(RankError):
    """A rank waits for one that failed."""


class _Shared:
    """What the ranks share: who runs, and what they brought to the present operation."""

    def __init__(self, size: int) -> None:
        self.running, self.meeting = threading.Lock(), threading.Barrier(size)
        self.brought: list[Any] = [None] * size


class ThreadCollectives:
    """``Collectives`` of one of the ranks that ``run_ranks`` starts."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self._shared, self.rank, self.size = shared, rank, len(shared.brought)

    def _exchange(self, own: Any) -> list[Any]:
        """Bring something and return what every rank brought; a tensor is copied, since its owner goes on."""
        shared = self._shared
        shared.brought[self.rank] = own.clone() if isinstance(own, Tensor) else own
        shared.running.release()
        try:
            shared.meeting.wait()  # by now every rank has brought its own
            found = list(shared.brought)
            shared.meeting.wait()  # nobody brings anything new before all have read
        except threading.BrokenBarrierError:
            raise _LeftAlone(f"rank {self.rank}: another rank failed") from None
        finally:
            shared.running.acquire()
        return found

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        output.copy_(torch.stack(self._exchange(own)))

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        output.copy_(torch.stack([other[self.rank] for other in self._exchange(parts)]))

    def gather_objects(self, own: Any) -> list[Any]:
        return self._exchange(own)

    def share_memory(self, layout: RankLayout, device: torch.device) -> RankMemory:
        own = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        buffers = [each for (each,) in self._exchange((own,))]
        return RankMemory(layout, self.rank, buffers, partial(self._exchange, None))


def run_ranks(size: int, function: Callable[[ThreadCollectives], T]) -> list[T]:
    """Run ``function`` once for each rank of a group and return what the ranks returned."""
    # Raises the first error that is a rank's own; a rank that was only left alone raises RankError.
    shared = _Shared(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size
    grad, device = torch.is_grad_enabled(), torch.cuda.current_device() if torch.cuda.is_available() else None

    def run(rank: int) -> None:
        with shared.running:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                with torch.set_grad_enabled(grad):
                    results[rank] = function(ThreadCollectives(shared, rank))
            except BaseException as error:
                errors[rank] = error
                shared.meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised := [error for error in errors if error is not None]:
        raise min(raised, key=lambda error: isinstance(error, _LeftAlone))
    return results
