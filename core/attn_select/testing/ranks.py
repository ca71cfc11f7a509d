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


class _Turns:
    """What the ranks share: whose turn it is, and what they brought to the present operation."""

    def __init__(self, size: int) -> None:
        self.size, self.turn = size, 0
        self.brought: list[Any] = [None] * size
        self.failed = False
        self.changed = threading.Condition()

    def wait_for(self, rank: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == rank or self.failed)
            if self.failed:
                raise RankError(f"rank {rank}: another rank failed")

    def pass_on(self, rank: int) -> None:
        with self.changed:
            self.turn = (rank + 1) % self.size
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


class ThreadCollectives:
    """``Collectives`` of one of the ranks that ``run_ranks`` starts."""

    def __init__(self, turns: _Turns, rank: int) -> None:
        self._turns, self.rank, self.size = turns, rank, turns.size

    def _exchange(self, own: Any) -> list[Any]:
        """Bring something and return what every rank brought; a tensor is copied, since its owner goes on."""
        turns = self._turns
        turns.brought[self.rank] = own.clone() if isinstance(own, Tensor) else own
        turns.pass_on(self.rank)
        turns.wait_for(self.rank)  # by now every rank has brought its own
        found = list(turns.brought)
        # Once round again, so that nobody brings anything new before all have read.
        turns.pass_on(self.rank)
        turns.wait_for(self.rank)
        return found

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        output.copy_(torch.stack(self._exchange(own)))

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        output.copy_(torch.stack([other[self.rank] for other in self._exchange(parts)]))

    def reduce_scatter(self, output: Tensor, parts: Tensor) -> None:
        output.copy_(torch.stack([other[self.rank] for other in self._exchange(parts)]).sum(0))

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def gather_objects(self, own: Any) -> list[Any]:
        return self._exchange(own)

    def share_memory(self, layout: RankLayout, device: torch.device) -> RankMemory:
        own = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        buffers = [each for (each,) in self._exchange((own,))]
        return RankMemory(layout, self.rank, buffers, partial(self._exchange, None))


def run_ranks(size: int, function: Callable[[ThreadCollectives], T]) -> list[T]:
    """Run ``function`` once for each rank of a group and return what the ranks returned."""
    # Raises the first error that is a rank's own; a rank that was only left alone raises RankError.
    turns = _Turns(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size
    grad, device = torch.is_grad_enabled(), torch.cuda.current_device() if torch.cuda.is_available() else None

    def run(rank: int) -> None:
        try:
            turns.wait_for(rank)
            if device is not None:
                torch.cuda.set_device(device)
            with torch.set_grad_enabled(grad):
                results[rank] = function(ThreadCollectives(turns, rank))
        except BaseException as error:
            errors[rank] = error
            turns.stop()
        else:
            turns.pass_on(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [error for error in errors if error is not None]
    for error in own:
        if not (isinstance(error, RankError) and "another rank failed" in str(error)):
            raise error
    if own:
        raise own[0]
    return results
