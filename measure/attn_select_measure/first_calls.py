"""Runs the first call of many steps in processes of their own, side by side, so that their kernels are compiled then.

Kernels are found again in the compilers' caches on the disk. A step runs as it will be timed, on a cache of one block.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.state import StateConfig
from attn_select.machine.environment import Environment
from attn_select.times.batch_shape import BatchShape

MEMORY_SHARE = 0.9  # Of the device's memory, for all processes together
END_SECONDS = 5.0


Key = tuple[int, int, str]  # Seed and number of a workload, and what runs it


@dataclass(frozen=True, slots=True)
class FirstCall:
    """What a process runs."""

    key: Key  # names it in the results
    config: LayerConfig
    batch: BatchShape
    choice: dict[Any, Any]  # the backend of each phase that runs

    @property
    def backend(self) -> str:
        """What runs it."""
        return self.key[2]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a first call ended."""

    seconds: float  # that it took, imports that nobody else had needed before included
    failure: str | None = None  # why it did not end; None where it did
    error: str | None = None  # that it raised, in words, and will raise again when it is timed; None: none


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    task: FirstCall | None = None
    began: float = 0.0


class FirstCalls:
    """Processes that run first calls until ``close``."""

    def __init__(self, jobs: int, environment: Environment) -> None:
        self._context = get_context("spawn")
        self._share, self._environment = MEMORY_SHARE / max(1, jobs), environment
        self._jobs, self._workers = jobs, list[_Worker]()
        self._slowest: dict[str, float] = {}

    def _start(self) -> _Worker:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._environment, self._share), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, mine)

    def run(self, tasks: Sequence[FirstCall], seconds: float) -> dict[Key, Ended]:
        """Run first calls in their order, but those of backends that took longest so far at the end; stop what runs
        after ``seconds``."""
        todo = deque(sorted(tasks, key=lambda task: self._slowest.get(task.backend, 0.0)))
        found: dict[Key, Ended] = {}
        self._workers = self._workers or [self._start() for _ in range(self._jobs)]
        ends = time.monotonic() + seconds
        while (now := time.monotonic()) < ends:
            for worker in self._workers:
                if worker.task is None and todo:
                    worker.task, worker.began = todo.popleft(), time.monotonic()
                    with suppress(OSError):  # it has died: reading says so
                        worker.connection.send(worker.task)
            busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
            if not busy:
                return found
            for ready in wait([*busy], ends - now):
                self._take(busy[ready], found)  # type: ignore[index]
        for index, worker in enumerate(self._workers):
            if worker.task is not None:
                found[worker.task.key] = Ended(seconds, f"its first call did not end within {seconds:.0f} s")
                self._slowest[worker.task.backend] = seconds
                _kill(worker)
                self._workers[index] = self._start()
        for task in todo:
            found[task.key] = Ended(0.0, f"the {seconds:.0f} s for first calls were over before its own began")
        return found

    def _take(self, worker: _Worker, found: dict[Key, Ended]) -> None:
        task = worker.task
        assert task is not None
        try:
            ended: Ended = worker.connection.recv()
        except (EOFError, OSError):
            _kill(worker)
            ended = Ended(time.monotonic() - worker.began, "the process of its first call died")
            self._workers[self._workers.index(worker)] = self._start()
        worker.task = None
        found[task.key] = ended
        self._slowest[task.backend] = max(ended.seconds, self._slowest.get(task.backend, 0.0))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.connection.close()  # which ends an idle one
        for worker in self._workers:
            if worker.task is None:
                worker.process.join(END_SECONDS)
            _kill(worker)


def _kill(worker: _Worker) -> None:
    """End a process and the compilers that it started."""
    worker.connection.close()
    if worker.process.is_alive() and worker.process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)  # once it has a group of its own
        worker.process.kill()
    worker.process.join()


def _work(connection: Connection, environment: Environment, share: float) -> None:
    """Run first calls until the other end is closed, or the device fails."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other end decides
    import torch

    from attn_select_measure.timed import failure_text

    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(share)
    while True:
        try:
            task: FirstCall = connection.recv()
        except EOFError:
            return
        began, text = time.monotonic(), None
        try:
            _run(task, environment)
        except Exception as error:  # of a kernel library, of any kind; or its share of the memory is too little
            text = failure_text(error)
        seconds = time.monotonic() - began
        gc.collect()
        if on_gpu:
            torch.cuda.synchronize()  # ends the process where the device has failed
            torch.cuda.empty_cache()
        connection.send(Ended(seconds, error=text))


def _run(task: FirstCall, environment: Environment) -> None:
    import torch

    from attn_select.decide.selector import select
    from attn_select.machine.detection import detect_device
    from attn_select.reference.timed_steps import StateStep
    from attn_select.runtime import Capacity
    from attn_select.runtime.compile_ahead import stand_in
    from attn_select.runtime.warm_up import GroupSteps, Step

    device, requests = detect_device().device, sorted(task.batch.requests)
    selection: Any = select(task.config, device, None, task.choice, environment=environment)
    with torch.inference_mode():
        if isinstance(task.config, StateConfig):
            states = StateStep(selection, requests, tuple(task.choice))
            states.make_layers(states.memory(0, 1).caches(states))
            states.calls()[0]()
        else:
            capacity = Capacity(task.batch.num_requests, task.batch.num_tokens, task.batch.max_seq_len)
            layer = stand_in(selection, None, capacity, phases=tuple(task.choice))
            GroupSteps(layer.group).run(Step(tuple(requests)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
