"""What the ranks of a group exchange: ``Collectives``, and its form on a ``torch.distributed`` process group."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from attn_select.errors import AttnSelectError
from attn_select.runtime.rank_memory import PROGRAMS, RankLayout, RankMemory
from attn_select.times.ranks import MOST_SHARING

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
"""Set while memory is shared: multicast over NVLink is not needed, and some hosts cannot do it."""


class RankError(AttnSelectError, RuntimeError):
    """The ranks of a group do not agree, or one of them is gone: names the ranks and what differs."""

    code = "ranks-disagree"


class Collectives(Protocol):
    """Collective operations of one group of ranks. Every rank calls the same ones in the same order.

    Tensors are contiguous; ``N`` is the number of ranks.

    Attributes:
        rank: this process's, from 0.
        size: N.
    """

    rank: int
    size: int

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        """Write every rank's ``own`` into ``output (N, *own.shape)``."""

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        """Write part ``rank`` of every rank's ``parts (N, …)`` into ``output``, of the same shape."""

    def gather_objects(self, own: Any) -> list[Any]:
        """Return every rank's object; they are pickled. Synchronises."""

    def share_memory(self, layout: RankLayout, device: torch.device) -> RankMemory | None:
        """Return memory that all ranks read and write; None on every rank where they cannot. Synchronises."""


# torch 2.13 renamed it.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupCollectives:
    """``Collectives`` of a process group: NCCL's for CUDA tensors, gloo's for CPUs; None: the default group."""

    def __init__(self, group: Any = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RankError(
                "torch.distributed is not initialised, so there is no process group",
                hint="call torch.distributed.init_process_group first, and start the program with torchrun",
            )
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise RankError("this process is not in the process group", hint="give each process its own group")

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        """See ``Collectives``; the errors of all of these are ``RankError``."""
        self._run("all_gather", _all_gather, output.view(-1), own.view(-1))

    def all_to_all(self, output: Tensor, parts: Tensor) -> None:
        self._run("all_to_all", dist.all_to_all_single, output.view(-1), parts.view(-1))

    def gather_objects(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        self._run("gather_objects", dist.all_gather_object, found, own)
        return found

    def share_memory(self, layout: RankLayout, device: torch.device) -> RankMemory | None:
        """Share memory by torch's symmetric memory, between up to ``MOST_SHARING`` GPUs of one host."""
        # Without multicast (``NO_MULTICAST``). Warns where they should be able to and cannot.
        if device.type != "cuda" or self.size > MOST_SHARING:
            return None
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        places = self.gather_objects((platform.node(), device.index))
        others = [index for rank, (_, index) in enumerate(places) if rank != self.rank]
        alike = len({host for host, _ in places}) == 1 and len(set(places)) == self.size
        reached = alike and all(torch.cuda.can_device_access_peer(device, other) for other in others)
        # Each decision is exchanged before it is acted on: a rank that went on alone would wait for the others in
        # rendezvous.
        if not all(self.gather_objects(reached)):
            return None
        memory, problem = None, None
        try:
            memory = self._symmetric(layout, device)
        except (ImportError, RuntimeError, TypeError) as error:
            problem = f"rank {self.rank}: {type(error).__name__}: {str(error).splitlines()[0]}"
        problems = [each for each in self.gather_objects(problem) if each is not None]
        if problems:
            text = f"the ranks of a group cannot share memory, and use collectives ({'; '.join(problems)})"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return None
        return memory

    def _symmetric(self, layout: RankLayout, device: torch.device) -> RankMemory:
        from torch.distributed import _symmetric_memory as symmetric

        before = os.environ.get(NO_MULTICAST)
        os.environ[NO_MULTICAST] = "1"  # torch reads it here
        try:
            own = symmetric.empty(layout.num_bytes, dtype=torch.uint8, device=device)
            own.zero_()
            # The counts must be zero before another rank can reach this memory.
            torch.cuda.synchronize(device)
            handle = symmetric.rendezvous(own, self.group)
        finally:
            if before is None:
                del os.environ[NO_MULTICAST]
            else:
                os.environ[NO_MULTICAST] = before
        buffers = [handle.get_buffer(rank, (layout.num_bytes,), torch.uint8) for rank in range(self.size)]
        options = getattr(self.group._get_backend(device), "options", None)
        seconds = max(1, int(getattr(options, "_timeout", dist.default_pg_timeout).total_seconds()))
        met = torch.zeros(2 * PROGRAMS, dtype=torch.int32, device=device)
        addresses = tuple(int(address) for address in handle.buffer_ptrs)
        meet = partial(handle.barrier, 0, 1000 * seconds)
        return RankMemory(layout, self.rank, buffers, meet, addresses, met, seconds)

    def _run(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments, group=self.group)
        except RuntimeError as error:
            # gloo raises when a rank is gone or the group's timeout has passed; NCCL's watchdog ends the process.
            first = str(error).splitlines()[0]
            raise RankError(
                f"{name} failed on rank {self.rank} of {self.size}: {first}",
                hint="another rank has ended, or did not come to the same step within the group's timeout: its own "
                "error is in its log",
            ) from error
