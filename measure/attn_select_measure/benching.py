"""Times every valid backend of a layer on one batch, side by side, through the layers that engines call.

The layers of a candidate run one behind the other in one CUDA graph, each with a cache of its own, as many as keep L2
cold. Before a replay L2 is overwritten, so that the first layer finds it cold and the host is ahead of the device.
Candidates take turns round by round; a time is the median of its rounds over the number of layers.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from attn_select.backends.spec import BackendSpec
from attn_select.decide.selection import Selection
from attn_select.decide.selector import RulesArgument, select
from attn_select.decide.text import byte_text
from attn_select.errors import AttnSelectError, BackendError, ConfigError, shorten
from attn_select.layer.config import Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.state import StateConfig
from attn_select.machine.detection import detect_device
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.reference.comparison import error_bound
from attn_select.reference.layer_step import CacheMemory, LayerStep
from attn_select.reference.state_serving import state_bound
from attn_select.reference.state_step import StateMemory, StateStep
from attn_select.rules.plugins import load_plugins
from attn_select.runtime import ContextParallel
from attn_select.runtime.timer import FLUSH_BYTES, WARM_UP_ROUNDS, Call, captured, medians, timed_rounds
from attn_select.times.batch_shape import BatchShape
from attn_select.times.measurement import Measurement, Method
from attn_select.times.roofline import roofline_us
from attn_select.times.timed_layer import timed_layer
from attn_select_cli.serving import unserved
from attn_select_measure import host_memory

Step = LayerStep | StateStep
LEAST_US = 1000.0
"""A graph runs at least this long by the roofline, so that its launch does not count."""
MOST_US = 20000.0
"""A graph of several layers runs at most this long: what one layer of a longer step touches is more than L2."""
MOST_LAYERS = 256
SPARE_BYTES = 4 << 30
"""Device memory that stays free for the kernels' workspaces and the oracle."""
SPARE_HOST_BYTES = 1 << 30
"""Of this machine's memory, where kernels run on the CPU."""
LONGEST_US = 15000.0
"""A round of a backend that is far slower than the roofline takes about this long: it runs fewer layers."""
LEAST_ROUNDS = 3
SETTLED_ROUNDS = 5
"""Rounds after which ``settled`` may end a batch."""
EAGER_LAYERS, EAGER_REPEATS = 16, 3
"""Layers of an eager step, and how often it is timed."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What this device reaches.

    Attributes:
        copy: bytes per second of a large copy, those read and those written.
        matmul: FLOP/s of a large matmul, in bfloat16 on a GPU and in float32 on a CPU.
    """

    copy: float
    matmul: float

    def of(self, device: Device) -> Device:
        """Return the device with these rates in place of the data sheet's, FP8's in proportion."""
        share = self.matmul / 1e12 / device.bf16_tflops if device.bf16_tflops else 0.0
        return replace(
            device,
            bandwidth_gbps=self.copy / 1e9,
            bf16_tflops=self.matmul / 1e12,
            fp8_tflops=device.fp8_tflops * share if device.fp8_tflops and share else None,
        )


@dataclass(slots=True)
class Candidate:
    """One backend for one batch.

    Attributes:
        name: the backend.
        selection: the decision with this backend chosen; None where ``failure`` says why not.
        phases: the phases whose backends run; None: all.
        failure: why it is not timed.
    """

    name: str
    selection: Selection[Any] | None = None
    phases: tuple[Phase, ...] | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class EagerCost:
    """What a step of several layers costs where the host launches every kernel.

    Attributes:
        build_us: host time of building the step's metadata, once a step, microseconds.
        host_us: host time of one layer's call, until it returns.
        wall_us: time of one layer, from the first call until the device is done, over the number of layers.
        reserved_bytes: scratch memory that the plans say their backends keep.
        peak_bytes: device memory that a call takes beside that, and gives back; None on a CPU.
    """

    build_us: float
    host_us: float
    wall_us: float
    reserved_bytes: int
    peak_bytes: int | None


@dataclass(slots=True)
class Timed:
    """What was measured of one candidate on one batch.

    Attributes:
        backend: its name.
        kernel: kernel name for each phase of the batch.
        block_size: tokens per block of the cache.
        samples_us: time of one layer's step in each round, microseconds.
        eager: what a step costs that no graph replays; None where that was not asked for.
        method: ``graph``, or ``eager`` where nothing could be captured.
        why_eager: why it was not.
        first_call_s: seconds of the first call, compilation included.
        error: relative error against the oracle; None where it was not compared.
        unchecked: why it was not.
        bound: what the error may be.
        failure: why there is no time.
    """

    backend: str
    kernel: dict[str, str] = field(default_factory=dict)
    block_size: int | None = None
    samples_us: list[float] = field(default_factory=list)
    eager: EagerCost | None = None
    method: Method = "graph"
    why_eager: str | None = None
    first_call_s: float = 0.0
    error: float | None = None
    unchecked: str | None = None
    bound: float | None = None
    failure: str | None = None

    @property
    def time_us(self) -> float:
        """The median round."""
        return statistics.median(self.samples_us)

    @property
    def exact(self) -> bool:
        """Whether the error is within its bound, or was not compared."""
        return self.error is None or self.bound is None or self.error <= self.bound

    def share_of(self, roofline_us: float | None) -> float | None:
        """Return which share of the roofline's speed was reached."""
        return None if roofline_us is None or self.failure is not None else roofline_us / self.time_us

    @property
    def spread_us(self) -> tuple[float, float]:
        """The quartiles of the rounds."""
        if len(self.samples_us) < 2:
            return self.samples_us[0], self.samples_us[0]
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return low, high


@dataclass(slots=True)
class TimedBatch:
    """All candidates on one batch.

    Attributes:
        batch: its shape.
        roofline_us: the least time at the device's measured rates; None where they were not measured.
        timed: the candidates, the fastest first, those without a time last.
        complete: False where it was interrupted.
        seconds: spent on rounds.
    """

    batch: BatchShape
    roofline_us: float | None
    timed: list[Timed]
    complete: bool = True
    seconds: float = 0.0


class Ready:
    """A candidate whose step is made.

    Attributes:
        layers: the calls of a round, one for each layer. They own the metadata that a graph of them reads.
        run: runs them all, or replays their graph.
    """

    def __init__(self, timed: Timed, step: Step) -> None:
        self.timed, self.step = timed, step
        self.layers: list[Call] = []
        self.run: Call = self._eagerly

    def _eagerly(self) -> None:
        for call in self.layers:
            call()


class Bench:
    """Measures on this machine's device.

    Args:
        environment: libraries and variables; None probes this machine.
        rules: as in ``select``.
        rounds: most rounds per batch.
        settled: end a batch's rounds once the 95 % intervals of all medians are within this share of them; None: run
            ``rounds``.
        eager: time eager steps too.
        progress: called with a text whenever something new begins.
        ranks: all that share the layers' caches. Each rank measures the same, and the slowest rank's time counts.

    Attributes:
        device: this machine's.
        gpu: its full name.
        rates: what it reaches, measured when this is made.
    """

    def __init__(
        self,
        environment: Environment | None = None,
        rules: RulesArgument = None,
        rounds: int = 20,
        progress: Callable[[str], None] | None = None,
        ranks: ContextParallel | None = None,
        *,
        settled: float | None = None,
        eager: bool = False,
    ) -> None:
        self._settled, self._eager = settled, eager
        found = detect_device()
        self.detection, self.device = found, found.device
        self.environment, self.rules, self.rounds, self.ranks = environment, rules, rounds, ranks
        self._say = progress or (lambda text: None)
        self.on_gpu = not self.device.is_cpu
        self.torch_device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        self._flush: torch.Tensor | None = None
        if self.on_gpu:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.torch_device)
        self.gpu = self.device.full_name or self.device.name
        self.rates = self._measure_rates()
        self._free_memory()

    def _measure_rates(self) -> Rates:
        """Measure a copy and a matmul, both well beyond the caches."""
        self._say("measuring the device's copy and matmul rates")
        num_bytes, size = (1 << 30, 8192) if self.on_gpu else (1 << 26, 1024)
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        source = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        target = torch.empty_like(source)
        left = torch.randn(size, size, device=self.torch_device, dtype=dtype)
        right = torch.randn_like(left)
        calls: dict[str, Call] = {
            "copy": lambda: target.copy_(source),
            "matmul": lambda: torch.mm(left, right),
        }
        found = medians(timed_rounds(calls, self.torch_device), 10 if self.on_gpu else 3)
        return Rates(2 * num_bytes / found["copy"] * 1e6, 2 * size**3 / found["matmul"] * 1e6)

    def candidates(self, config: LayerConfig, batch: BatchShape, backends: Sequence[str] = ()) -> list[Candidate]:
        """Return every backend that is valid for all phases of a batch, or why one that was asked for is not."""
        longest = config.max_decode_query_len
        kinds = {"decode" if g.query_len <= longest and config.has_cache else "prefill" for g in batch.groups}
        needed: tuple[Phase, ...] = tuple(phase for phase in config.phases if phase in kinds)
        ranked = select(config, self.device, self.rules, environment=self.environment)
        found = []
        for judged in ranked.candidates:
            if backends and judged.backend not in backends:
                continue
            valid = [phase for phase, verdict in judged.phases.items() if verdict.verdict != "rejected"]
            if missing := [phase for phase in needed if phase not in valid]:
                if judged.backend in backends or (valid and len(needed) > 1):
                    reasons = judged.phases[missing[0]].reasons
                    why = f"not valid for {missing[0]}: {'; '.join(reason.message for reason in reasons)}"
                    found.append(Candidate(judged.backend, failure=why))
                continue
            whole = len(valid) == len(config.phases)
            asked: Any = judged.backend if whole else {phase: judged.backend for phase in needed}
            try:
                selection = select(config, self.device, self.rules, asked, environment=self.environment)
                selection.require()
            except AttnSelectError as error:
                found.append(Candidate(judged.backend, failure=shorten(error.message, 200)))
                continue
            found.append(Candidate(judged.backend, selection, None if whole else needed))
        return found

    def measure(
        self,
        config: LayerConfig,
        batch: BatchShape,
        candidates: Sequence[Candidate],
        seconds: float = 60.0,
        compare: bool = True,
    ) -> TimedBatch:
        """Time the candidates on one batch.

        Args:
            seconds: begin no further round after this long, behind the third; compilation does not count.
            compare: compare each result with the oracle, which takes longer than the rounds where contexts are long.

        Returns:
            The candidates with their times, or with why there is none: whatever goes wrong is said there.

        Raises:
            ConfigError: as ``check_runnable``.
        """
        check_runnable(config, batch, self.ranks)
        floor = roofline_us(config, batch, self.rates.of(self.device))
        result = TimedBatch(batch, floor, [Timed(each.name, failure=each.failure) for each in candidates])
        why = "interrupted before its first round"
        try:
            self._run(result, [*zip(candidates, result.timed, strict=True)], seconds, compare)
        except KeyboardInterrupt:
            result.complete = False
        except (MemoryError, torch.OutOfMemoryError) as error:
            why = failure_text(error)
        finally:
            self._free_memory()
        for timed in result.timed:
            if timed.failure is None and not timed.samples_us:
                timed.failure = why
        result.timed.sort(key=lambda timed: timed.time_us if timed.failure is None else float("inf"))
        return result

    def _step(self, candidate: Candidate, selection: Selection[Any], batch: BatchShape, timed: Timed) -> Step:
        requests = [(g.query_len, g.seq_len) for g in batch.groups for _ in range(g.count)]
        if isinstance(selection.config, StateConfig):
            step: Step = StateStep(selection, requests, candidate.phases, self.torch_device)
        else:
            step = LayerStep(selection, requests, candidate.phases, self.torch_device, self.ranks)
        longest = step.config.max_decode_query_len
        decodes = {query <= longest and step.config.has_cache for query, _ in requests}
        served = step.group.served
        plans = {phase: each.context.plans[phase] for phase, each in served.items() if (phase == "decode") in decodes}
        timed.kernel = {phase: plan.kernel_name or "unnamed" for phase, plan in plans.items()}
        if isinstance(step, StateStep):
            timed.bound = state_bound(step.config).norm
        else:
            timed.block_size, timed.bound = step.group.block_size, error_bound(step.config, plans).norm
        return step

    def _run(
        self, found: TimedBatch, candidates: Sequence[tuple[Candidate, Timed]], seconds: float, compare: bool
    ) -> None:
        batch = found.batch
        ready: list[Ready] = []
        for candidate, timed in candidates:
            if candidate.selection is None:
                continue
            self._say(f"{batch}: preparing {candidate.name}")
            self._attempt(timed, partial(self._make, ready, timed, candidate, batch))
        ready = [each for each in ready if each.timed.failure is None]
        if not ready:
            return
        memory, layers = self._memory([each.step for each in ready], found.roofline_us)
        for each in [*ready]:
            self._say(f"{batch}: first call of {each.timed.backend}")
            self._attempt(each.timed, partial(self._prepare, each, memory, layers))
            if each.timed.failure is not None:
                ready.remove(each)
        if not ready:
            return
        self._say(f"{batch}: timing {len(ready)} backends")
        with torch.inference_mode():
            try:
                self._rounds(found, ready, seconds)
            except Exception as error:
                for each in ready:
                    each.timed.failure = None if each.timed.samples_us else failure_text(error)
            for each in ready if compare else ():
                self._say(f"{batch}: comparing {each.timed.backend} with the oracle")
                if each.timed.samples_us:
                    self._check(each, memory)

    def _make(self, ready: list[Ready], timed: Timed, candidate: Candidate, batch: BatchShape) -> None:
        assert candidate.selection is not None
        ready.append(Ready(timed, self._step(candidate, candidate.selection, batch, timed)))

    def _attempt(self, timed: Timed, do: Callable[[], Any]) -> None:
        """Do what every rank does; note a failure, which of one rank is one of all: the other candidates go on."""
        try:
            do()
        except Exception as error:  # a kernel library's own, of any kind
            timed.failure = failure_text(error)
        if self.ranks is not None:
            every = self.ranks.collectives.gather_objects(timed.failure)
            timed.failure = timed.failure or next((text for text in every if text is not None), None)

    def _clear(self) -> None:
        """Make L2 cold, and let ranks begin together."""
        if self._flush is not None:
            self._flush.zero_()
        if self.ranks is not None:
            self.ranks.collectives.all_reduce(torch.zeros(1, device=self.torch_device))

    def _rounds(self, found: TimedBatch, ready: Sequence[Ready], seconds: float) -> None:
        calls = {index: each.run for index, each in enumerate(ready)}
        began = time.monotonic()
        for number, times in enumerate(timed_rounds(calls, self.torch_device, self._clear), 1 - WARM_UP_ROUNDS):
            seconds_now = time.monotonic() - began
            if self.ranks is not None:
                every = self.ranks.collectives.gather_objects((times, seconds_now))
                times = {index: max(own[index] for own, _ in every) for index in times}
                seconds_now = max(spent for _, spent in every)
            for index, spent in times.items() if number > 0 else ():
                ready[index].timed.samples_us.append(spent / len(ready[index].layers))
            found.seconds = seconds_now
            if number >= self.rounds or (number >= LEAST_ROUNDS and found.seconds > seconds):
                return
            if self._settled is None or number < SETTLED_ROUNDS:
                continue
            if max(uncertainty(each.timed.samples_us) for each in ready) <= self._settled:
                return

    def _memory(self, steps: Sequence[Step], floor: float | None) -> tuple[CacheMemory | StateMemory | None, int]:
        """Return the caches' memory and how many layers a round runs, a multiple of the number of caches.

        Raises:
            MemoryError: one cache does not fit.
        """
        largest, weights = max(step.cache_bytes for step in steps), max(step.weight_bytes for step in steps)
        free, spare = self._free_bytes(), SPARE_BYTES if self.on_gpu else SPARE_HOST_BYTES
        if self.ranks is not None:
            free = min(self.ranks.collectives.gather_objects(free))
        each = largest + weights * len(steps)
        # Kernels on a CPU gather a copy of the keys and values.
        needed = each if self.on_gpu else each + largest
        if needed + spare > free:
            what = "the batch's cache and weights" if self.on_gpu else "the batch's cache, a copy of it, and weights"
            raise MemoryError(
                f"{what} take {byte_text(needed)} for one layer; {byte_text(free)} of {self._memory_name} are free, "
                f"and {byte_text(spare)} of it stay spare: take fewer or shorter requests"
            )
        if not self.on_gpu:
            return self._caches(steps, 1), 1
        l2 = torch.cuda.get_device_properties(self.torch_device).L2_cache_size
        wanted = -(-3 * l2 // max(1, largest + weights)) + 1
        floor = floor or LEAST_US
        count = int(max(1, min(wanted, MOST_LAYERS, (free - SPARE_BYTES) // each, MOST_US // floor)))
        layers = min(MOST_LAYERS, max(count, round(LEAST_US / floor)))
        return self._caches(steps, count), -(-layers // count) * count

    def _caches(self, steps: Sequence[Step], count: int) -> CacheMemory | StateMemory | None:
        """Return memory for ``count`` caches of any of the steps; None for layers without a cache."""
        first = steps[0]
        if isinstance(first, StateStep):
            return first.memory(count)
        largest = max(step.cache_bytes for step in steps)
        return CacheMemory(first.config, largest, count, self.torch_device) if first.config.has_cache else None

    def _prepare(self, each: Ready, memory: Any, layers: int) -> None:
        """Make the layers, run each once, and capture them."""
        step, timed = each.step, each.timed
        with torch.inference_mode():
            caches: list[Any] = [None] if memory is None else memory.caches(step)
            step.make_layers(caches)
            step.output.fill_(torch.nan)
            began = time.perf_counter()
            calls = step.calls()
            calls[0]()
            self._synchronize()
            again = time.perf_counter()
            timed.first_call_s = again - began
            calls[-1]()
            self._synchronize()
            once_us = (time.perf_counter() - again) * 1e6
            for call in calls[1:-1]:
                call()
            if self._eager:
                timed.eager = self._eager_cost(step, calls, once_us)
            calls = step.calls()  # anew: what the first calls have filled in would stay out of the graph
            layers = min(layers, max(1, int(LONGEST_US / once_us)))
            each.layers = (calls * -(-layers // len(calls)))[-layers:]  # the last one's result is compared
            if not self.on_gpu:
                timed.method = "eager"
                return
            decode: Any = step.group.served.get("decode")
            if "decode" in timed.kernel and decode.context.plans["decode"].cuda_graph == "NEVER":
                timed.method, timed.why_eager = "eager", "its plan supports no CUDA graphs"
                return
            try:
                each.run = captured(each.layers).replay
            except Exception as error:
                timed.method, timed.why_eager = "eager", failure_text(error)
                self._synchronize()

    def _eager_cost(self, step: Step, calls: Sequence[Call], once_us: float) -> EagerCost:
        """Time a step's build and its layers without a graph, the host ahead of the device wherever it can be."""
        count = max(1, min(EAGER_LAYERS, int(LONGEST_US / once_us)))
        layers = ([*calls] * -(-count // len(calls)))[:count]
        peak = None
        self._synchronize()
        if self.on_gpu:
            before = torch.cuda.memory_allocated(self.torch_device)
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            layers[0]()
            self._synchronize()
            peak = torch.cuda.max_memory_allocated(self.torch_device) - before
        found: list[tuple[float, float, float]] = []
        for _ in range(EAGER_REPEATS):
            self._clear()
            self._synchronize()
            began = time.perf_counter()
            step.build()
            built = time.perf_counter()
            self._synchronize()
            first = time.perf_counter()
            for call in layers:
                call()
            issued = time.perf_counter()
            self._synchronize()
            found.append((built - began, (issued - first) / count, (time.perf_counter() - first) / count))
        build, host, wall = (statistics.median(times) * 1e6 for times in zip(*found, strict=True))
        plans = [plan for each in step.group.served.values() for plan in each.context.plans.values()]
        reserved = {plan.kernel: plan.workspace_bytes for plan in plans}
        return EagerCost(build, host, wall, sum(reserved.values()), peak)

    def _check(self, each: Ready, memory: Any) -> None:
        """Run once more, and compare what is left in the output with the oracle."""
        if self.ranks is not None:
            each.timed.unchecked = "its cache lies on several ranks"
            return
        needed, free = each.step.oracle_bytes, self._free_bytes()
        if needed > free:
            each.timed.unchecked = (
                f"the oracle takes {byte_text(needed)}, and {byte_text(free)} of {self._memory_name} are free"
            )
            return
        each.step.output.fill_(torch.nan)
        if isinstance(memory, CacheMemory):
            memory.mend()
        try:
            each.run()
            self._synchronize()
            each.timed.error = each.step.error()
        except Exception as error:  # such as of memory: float64 takes four times as much as a 16-bit cache
            each.timed.unchecked = failure_text(error)

    @property
    def _memory_name(self) -> str:
        return "device memory" if self.on_gpu else "this machine's memory"

    def _free_bytes(self) -> int:
        """Return the bytes that are free where the layers run; very many where nobody knows."""
        if self.on_gpu:
            free: int = torch.cuda.mem_get_info(self.torch_device)[0]
            return free
        known = host_memory.free_bytes()
        return sys.maxsize if known is None else known

    def _free_memory(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()  # the command line switches the collector off, and graphs hold device memory
        if self.on_gpu:
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.torch_device)

    def measurements(self, config: LayerConfig, found: TimedBatch) -> list[Measurement]:
        """Return what was timed as lines of a measurements file."""
        made = []
        for timed in (each for each in found.timed if each.failure is None):
            made.append(
                Measurement(
                    gpu=self.gpu,
                    compute_capability=self.device.capability_text,
                    driver=self.detection.driver_version,
                    libraries=self.libraries(timed.backend, config),
                    backend=timed.backend,
                    kernel=dict(timed.kernel),
                    config=timed_layer(config).to_dict(),
                    block_size=timed.block_size,
                    batch=str(found.batch),
                    time_us=round(timed.time_us, 3),
                    spread_us=(round(timed.spread_us[0], 3), round(timed.spread_us[1], 3)),
                    rounds=len(timed.samples_us),
                    method=timed.method,
                    error=None if timed.error is None else float(f"{timed.error:.3g}"),
                    date=datetime.now(UTC).isoformat(timespec="seconds"),
                )
            )
        return made

    def libraries(self, backend: str, config: LayerConfig) -> dict[str, str]:
        """Return the versions of torch, the plugin, and every installed library that the backend may run from."""
        registry = load_plugins()
        environment = select(config, self.device, self.rules, environment=self.environment).environment
        spec: BackendSpec = registry.specs[backend]
        names = [library.distribution for group in spec.libraries for library in group if environment.has(library)]
        versions = {name: environment.version(name) for name in ("torch", *names)}
        found = {name: version for name, version in versions.items() if version is not None}
        found["torch"] = torch.__version__
        return found | {
            plugin.distribution: plugin.version for plugin in registry.plugins if backend in plugin.backends
        }


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


def check_runnable(config: LayerConfig, batch: BatchShape, ranks: ContextParallel | None = None) -> None:
    """Make sure that a batch can be made for a layer.

    Raises:
        ConfigError: it cannot; says why.
    """
    if (reason := untimed(config, ranks)) is not None:
        fields = ["sparse_top_k", "attn_type", "decode_context_parallel_size"]
        raise ConfigError(f"this layer cannot be timed alone: {reason}", fields=fields)
    if not config.has_cache and any(group.query_len != group.seq_len for group in batch.groups):
        text = f"batch = {str(batch)!r}: a layer without a KV cache attends to the new tokens alone"
        raise ConfigError(text, fields=["batch"], hint="leave the sequence lengths out: 4q512")


def uncertainty(samples: Sequence[float]) -> float:
    """Return half the width of a median's 95 % interval as a share of it, by the quartiles of at least two samples."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    # A normal distribution's quartiles lie 1.349 deviations apart; its median's standard error is 1.2533 of the mean's.
    return float(1.96 * 1.2533 * (high - low) / 1.349 / len(samples) ** 0.5 / middle)


def failure_text(error: BaseException) -> str:
    """Return an exception as one line, that of a backend without its name, which stands beside it."""
    if isinstance(error, BackendError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, MemoryError):
        return str(error) or "not enough memory"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return shorten(f"{type(error).__name__}: {lines[0] if lines else ''}", 200)
