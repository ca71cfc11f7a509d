"""One backend's step, ready to be timed: its layers are made, run once and captured, and its result is compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from attn_select.decide.lines import byte_text
from attn_select.reference.timed_steps import CacheMemory, TimedStep, timed_step
from attn_select.runtime.timer import Call, captured
from attn_select.times.batch_shape import BatchShape
from attn_select.times.workload import phases_of
from attn_select_measure.bench_machine import Machine
from attn_select_measure.timed import Candidate, EagerCost, Timed, failure_text

# A round of a backend that is far slower than the roofline takes about this long: it runs fewer layers.
LONGEST_US = 15000.0
EAGER_LAYERS, EAGER_REPEATS = 16, 3  # Layers of an eager step, and how often it is timed


class Prepared:
    """A candidate whose step is made."""

    def __init__(self, machine: Machine, timed: Timed, candidate: Candidate, batch: BatchShape) -> None:
        selection = candidate.selection
        assert selection is not None
        self._machine, self.timed = machine, timed
        self.layers: list[Call] = []
        self.run: Call = self._eagerly
        here = phases_of(batch, selection.config)
        options = candidate.phases, machine.torch_device, machine.ranks
        self.step: TimedStep = timed_step(selection, batch.requests, *options)
        served = self.step.group.backends
        plans = {phase: each.context.plans[phase] for phase, each in served.items() if phase in here}
        timed.kernel = {phase: plan.kernel_name or "unnamed" for phase, plan in plans.items()}
        timed.block_size = getattr(self.step.group, "block_size", None)  # of layers that keep a state none
        timed.bound = self.step.bound(plans)

    def _eagerly(self) -> None:
        for call in self.layers:
            call()

    def prepare(self, memory: Any, layers: int) -> None:
        """Make the layers, run each once, and capture them."""
        step, timed, machine = self.step, self.timed, self._machine
        with torch.inference_mode():
            caches: list[Any] = [None] if memory is None else memory.caches(step)
            step.make_layers(caches)
            step.output.fill_(torch.nan)
            began = time.perf_counter()
            calls = step.calls()
            calls[0]()
            machine.synchronize()
            again = time.perf_counter()
            timed.first_call_s = again - began
            calls[-1]()
            machine.synchronize()
            once_us = (time.perf_counter() - again) * 1e6
            for call in calls[1:-1]:
                call()
            # Ranks wait for each other in each layer, so all of them must make the same number of calls.
            if machine.ranks is None:
                timed.eager = self._eager_cost(calls, once_us)
                layers = min(layers, max(1, int(LONGEST_US / once_us)))
            calls = step.calls()  # anew: what the first calls have filled in would stay out of the graph
            self.layers = (calls * -(-layers // len(calls)))[-layers:]  # the last one's result is compared
            if not machine.on_gpu:
                timed.method = "eager"
                return
            decode: Any = step.group.backends.get("decode")
            if "decode" in timed.kernel and decode.context.plans["decode"].cuda_graph == "NEVER":
                timed.method, timed.why_eager = "eager", "its plan supports no CUDA graphs"
                return
            try:
                self.run = captured(self.layers).replay
            except Exception as error:
                timed.method, timed.why_eager = "eager", failure_text(error)
                machine.synchronize()

    def _eager_cost(self, calls: Sequence[Call], once_us: float) -> EagerCost:
        """Time a step's build and its layers without a graph, the host ahead of the device wherever it can be."""
        machine, step = self._machine, self.step
        count = max(1, min(EAGER_LAYERS, int(LONGEST_US / once_us)))
        layers = ([*calls] * -(-count // len(calls)))[:count]
        peak = None
        machine.synchronize()
        if machine.on_gpu:
            before = torch.cuda.memory_allocated(machine.torch_device)
            torch.cuda.reset_peak_memory_stats(machine.torch_device)
            layers[0]()
            machine.synchronize()
            peak = torch.cuda.max_memory_allocated(machine.torch_device) - before
        found: list[tuple[float, float, float]] = []
        for _ in range(EAGER_REPEATS):
            machine.clear()
            machine.synchronize()
            began = time.perf_counter()
            step.build()
            built = time.perf_counter()
            machine.synchronize()
            first = time.perf_counter()
            for call in layers:
                call()
            issued = time.perf_counter()
            machine.synchronize()
            found.append((built - began, (issued - first) / count, (time.perf_counter() - first) / count))
        build, host, wall = (statistics.median(times) * 1e6 for times in zip(*found, strict=True))
        plans = [plan for each in step.group.backends.values() for plan in each.context.plans.values()]
        reserved = {plan.kernel: plan.workspace_bytes for plan in plans}
        return EagerCost(build, host, wall, sum(reserved.values()), peak)

    def check(self, memory: Any) -> None:
        """Run once more, and compare what is left in the output with the oracle."""
        machine, step, timed = self._machine, self.step, self.timed
        if machine.ranks is not None:
            timed.unchecked = "its cache lies on several ranks"
            return
        needed, free = step.oracle_bytes, machine.free_bytes()
        if needed > free:
            told = f"the oracle takes {byte_text(needed)}"
            timed.unchecked = f"{told}, and {byte_text(free)} of {machine.memory_name} are free"
            return
        step.output.fill_(torch.nan)
        if isinstance(memory, CacheMemory):
            memory.mend()
        try:
            self.run()
            machine.synchronize()
            timed.error = step.error()
        except Exception as error:  # such as of memory: float64 takes four times as much as a 16-bit cache
            timed.unchecked = failure_text(error)
