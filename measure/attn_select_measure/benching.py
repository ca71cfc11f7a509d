"""Times every valid backend of a layer on one batch, side by side, through the layers that engines call.

The layers of a candidate run one behind the other in one CUDA graph, each with a cache of its own, as many as keep L2
cold. Before a replay L2 is overwritten, so that the first layer finds it cold and the host is ahead of the device.
Candidates take turns round by round until all medians are sure; a time is the median over the number of layers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from attn_select.backends.registry import load_plugins
from attn_select.decide.lines import byte_text
from attn_select.decide.selector import RulesArgument, environment_for, select
from attn_select.errors import AttnSelectError, ConfigError, shorten
from attn_select.layer.config import Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.state import StateConfig
from attn_select.machine.environment import Environment
from attn_select.reference.timed_steps import CacheMemory, StateMemory, TimedStep
from attn_select.runtime import ContextParallel
from attn_select.runtime.timer import WARM_UP_ROUNDS, timed_rounds
from attn_select.times.batch_shape import BatchShape
from attn_select.times.roofline import roofline_us
from attn_select.times.workload import phases_of
from attn_select_cli.serving import unserved
from attn_select_measure.bench_machine import Machine
from attn_select_measure.prepared import Prepared
from attn_select_measure.survey_records import PAIR
from attn_select_measure.timed import Candidate, Timed, TimedBatch, failure_text

LEAST_US = 1000.0  # A graph runs at least this long by the roofline, so that its launch does not count
# A graph of several layers runs at most this long: what one layer of a longer step touches is more than L2.
MOST_US = 20000.0
MOST_LAYERS = 256
SPARE_BYTES = 4 << 30  # Device memory that stays free for the kernels' workspaces and the oracle
SPARE_HOST_BYTES = 1 << 30  # Of this machine's memory, where kernels run on the CPU
LEAST_ROUNDS, MOST_ROUNDS = 5, 12
SETTLED = 0.01  # How sure all medians are where no further round begins


class Bench:
    """Measures on this machine's device."""

    def __init__(
        self,
        environment: Environment | None = None,
        rules: RulesArgument = None,
        progress: Callable[[str], None] = lambda text: None,
        ranks: ContextParallel | None = None,
    ) -> None:
        self.environment, self.rules, self._progress = environment, rules, progress
        self.machine = Machine(ranks)
        self._say("measuring the device's copy and matmul rates")
        self.rates = self.machine.measure_rates()
        self.machine.free_memory()

    def _say(self, text: str) -> None:
        self.doing = text
        self._progress(text)

    def candidates(self, config: LayerConfig, batch: BatchShape, backends: Sequence[str] = ()) -> list[Candidate]:
        """Return what is valid for all phases of a batch, or why a backend that was asked for is not: backends, and for
        mixed batches of MLA pairs of the first one for prefills with each that decodes alone."""
        device, needed = self.machine.device, phases_of(batch, config)
        known: dict[str, Any] = {"environment": self.environment, "times": False}
        judged = select(config, device, self.rules, **known).candidates
        able: dict[Phase, list[str]] = {
            phase: [each.backend for each in judged if phase in each.phases and each.phases[phase].plan is not None]
            for phase in config.phases
        }
        found = []
        for each in judged:
            name, missing = each.backend, [phase for phase in needed if each.backend not in able[phase]]
            choice: Any = name if all(name in names for names in able.values()) else dict.fromkeys(needed, name)
            if len(needed) > 1 and missing == ["prefill"] and able["prefill"] and getattr(config, "mla", False):
                choice, missing = {"prefill": able["prefill"][0], "decode": name}, []
                name = PAIR.join(choice.values())
            if backends and not {*name.split(PAIR)} & {*backends}:
                continue
            if missing:
                if name in backends:
                    reasons = "; ".join(reason.message for reason in each.phases[missing[0]].reasons)
                    found.append(Candidate(name, failure=f"not valid for {missing[0]}: {reasons}"))
                continue
            try:
                selection = select(config, device, self.rules, choice, **known)
                selection.require()
            except AttnSelectError as error:
                found.append(Candidate(name, failure=shorten(error.message, 200)))
                continue
            alone = isinstance(choice, dict) and len(needed) < len(config.phases)
            found.append(Candidate(name, selection, needed if alone else None))
        return found

    def measure(
        self, config: LayerConfig, batch: BatchShape, candidates: Sequence[Candidate], seconds: float = 60.0
    ) -> TimedBatch:
        """Time the candidates on one batch, and compare each with the oracle."""
        floor = roofline_us(config, batch, self.rates.of(self.machine.device))
        # Each rank measured rates of its own. The number of layers follows from the floor, so all take the longest.
        if floor is not None:
            floor = max(self.machine.gathered(floor))
        result = TimedBatch(batch, floor, [Timed(each.name, failure=each.failure) for each in candidates])
        try:
            self._run(result, candidates, seconds)
        except (MemoryError, torch.OutOfMemoryError) as error:
            for timed in result.timed:
                if timed.failure is None and not timed.samples_us:
                    timed.failure = failure_text(error)
        finally:
            self.machine.free_memory()
        for timed in result.timed:
            if not timed.exact:
                timed.failure = f"wrong: a relative error of {timed.error:.2g}, above its bound of {timed.bound:.2g}"
        result.timed.sort(key=lambda timed: timed.time_us if timed.failure is None else float("inf"))
        return result

    def _run(self, found: TimedBatch, candidates: Sequence[Candidate], seconds: float) -> None:
        batch = found.batch
        ready: list[Prepared] = []

        def make(timed: Timed, candidate: Candidate) -> None:
            ready.append(Prepared(self.machine, timed, candidate, batch))

        for candidate, timed in zip(candidates, found.timed, strict=True):
            if candidate.selection is not None:
                self._say(f"{batch}: preparing {candidate.name}")
                self._attempt(timed, partial(make, timed, candidate))
        ready = [each for each in ready if each.timed.failure is None]
        if not ready:
            return
        memory, layers = self._memory([each.step for each in ready], found.roofline_us)
        for each in [*ready]:
            self._say(f"{batch}: first call of {each.timed.backend}")
            self._attempt(each.timed, partial(each.prepare, memory, layers))
            if each.timed.failure is not None:
                ready.remove(each)
        if not ready:
            return
        self._say(f"{batch}: timing {len(ready)} backends")
        with torch.inference_mode():
            try:
                self._rounds(ready, seconds)
            except Exception as error:
                for each in ready:
                    each.timed.failure = None if each.timed.samples_us else failure_text(error)
            for each in ready:
                self._say(f"{batch}: comparing {each.timed.backend} with the oracle")
                if each.timed.samples_us:
                    each.check(memory)

    def _attempt(self, timed: Timed, do: Callable[[], Any]) -> None:
        """Do what every rank does; note a failure, which of one rank is one of all: the other candidates go on."""
        try:
            do()
        except Exception as error:  # a kernel library's own, of any kind
            timed.failure = failure_text(error)
        every = self.machine.gathered(timed.failure)
        timed.failure = timed.failure or next((text for text in every if text is not None), None)

    def _rounds(self, ready: Sequence[Prepared], seconds: float) -> None:
        calls = {index: each.run for index, each in enumerate(ready)}
        machine, began = self.machine, time.monotonic()
        for number, own in enumerate(timed_rounds(calls, machine.torch_device, machine.clear), 1 - WARM_UP_ROUNDS):
            every = machine.gathered((own, time.monotonic() - began))
            # A step is done when its slowest rank is. Rounds up to number 0 warm up.
            for index in own if number > 0 else ():
                slowest = max(times[index] for times, _ in every)
                ready[index].timed.samples_us.append(slowest / len(ready[index].layers))
            if number < LEAST_ROUNDS:
                continue
            sure = max(each.timed.uncertainty for each in ready) <= SETTLED
            if sure or number >= MOST_ROUNDS or max(spent for _, spent in every) > seconds:
                return

    def _memory(self, steps: Sequence[TimedStep], floor: float | None) -> tuple[CacheMemory | StateMemory | None, int]:
        """Return the caches' memory and how many layers a round runs, a multiple of the number of caches."""
        machine = self.machine
        largest, weights = max(step.cache_bytes for step in steps), max(step.weight_bytes for step in steps)
        spare = SPARE_BYTES if machine.on_gpu else SPARE_HOST_BYTES
        free = min(machine.gathered(machine.free_bytes()))
        each = largest + weights * len(steps)
        # Kernels on a CPU gather a copy of the keys and values.
        needed = each if machine.on_gpu else each + largest
        if needed + spare > free:
            what = "the batch's cache and weights" if machine.on_gpu else "the batch's cache, a copy of it, and weights"
            raise MemoryError(
                f"{what} take {byte_text(needed)} for one layer; {byte_text(free)} of {machine.memory_name} are free, "
                f"and {byte_text(spare)} of it stay spare: take fewer or shorter requests"
            )
        count = layers = 1
        if machine.on_gpu:
            l2 = torch.cuda.get_device_properties(machine.torch_device).L2_cache_size
            # So many layers that three times what L2 holds is read before a cache comes up again.
            wanted = -(-3 * l2 // max(1, largest + weights)) + 1
            floor = floor or LEAST_US
            count = int(max(1, min(wanted, MOST_LAYERS, (free - SPARE_BYTES) // each, MOST_US // floor)))
            layers = min(MOST_LAYERS, max(count, round(LEAST_US / floor)))
        return steps[0].memory(largest, count), -(-layers // count) * count

    def libraries(self, name: str) -> dict[str, str]:
        """Return the versions of torch, and of all plugins and installed libraries that a candidate may run from."""
        registry, backends = load_plugins(), name.split(PAIR)
        environment = self.environment or environment_for(self.machine.device)
        groups = [group for backend in backends for group in registry.specs[backend].libraries]
        names = [library.distribution for group in groups for library in group if environment.has(library)]
        found = {name: version for name in names if (version := environment.version(name)) is not None}
        plugins = {each.distribution: each.version for each in registry.plugins if {*backends} & {*each.backends}}
        return {**found, "torch": torch.__version__, **plugins}


@contextmanager
def joined_ranks() -> Iterator[ContextParallel | None]:
    """Join the processes that torchrun started, NCCL's on GPUs and gloo's on CPUs; give None for a single one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield ContextParallel()
    finally:
        dist.destroy_process_group()


def untimed(config: LayerConfig, ranks: ContextParallel | None = None) -> str | None:
    """Return why the steps of a layer cannot be made up; None where they can."""
    if isinstance(config, StateConfig):
        return None if ranks is None else "no ranks share a state: leave --dcp out"
    size, here = config.decode_context_parallel_size, 1 if ranks is None else ranks.size
    if size != here:
        started = f"{here} process{'es were' if here > 1 else ' was'} started"
        return f"its cache lies on {size} rank{'s' if size > 1 else ''} (--dcp {size}), but {started}: see torchrun"
    return None if config.sparse else unserved(config)


def check_runnable(config: LayerConfig, batch: BatchShape) -> None:
    """Make sure that a batch can be made for a layer."""
    if not config.has_cache and any(group.query_len != group.seq_len for group in batch.groups):
        text = f"batch = {str(batch)!r}: a layer without a KV cache attends to the new tokens alone"
        raise ConfigError(text, fields=["batch"], hint="leave the sequence lengths out: 4q512")
