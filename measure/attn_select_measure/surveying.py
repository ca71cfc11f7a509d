"""Times the workloads of a survey one after the other, and writes each as a line of its file."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from attn_select.backends.registry import load_plugins
from attn_select.decide.selector import RulesArgument
from attn_select.layer.layer_config import layer_of
from attn_select.machine.environment import Environment
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.fingerprint import fingerprint
from attn_select_measure.bench_machine import Machine
from attn_select_measure.benching import Bench
from attn_select_measure.first_calls import Ended, FirstCall, FirstCalls, Key
from attn_select_measure.survey_draw import FIRST_STATE, SPACE, TINY, Work, draw
from attn_select_measure.survey_records import PAIR, Record, append_record, merged, read_survey, write_survey
from attn_select_measure.timed import Candidate, Timed, TimedBatch, failure_text

ONLY_BY_NAME = ("FLEX_ATTENTION",)  # Timed where they are named alone: it compiles for half a minute at each new shape
ROUNDS_SECONDS = 1.0  # After which no further round of a workload begins
MOST_JOBS = 14
COMPILE_SECONDS = 120.0
WORKLOADS_PER_JOB = 4  # Workloads whose first calls run together, for each process
COMPILE_SHARE = 0.4  # Of the time that is left, for the first calls of the next workloads at most


class DeviceLost(Exception):
    """The device fails at whatever it is asked, until this process has ended."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a survey is asked for."""

    out: Path
    seconds: float | None  # that the whole run may take; None: no limit
    backends: tuple[str, ...]  # the only ones that are timed; empty: all valid ones
    jobs: int  # processes that run first calls side by side before workloads are timed; 0: none
    compile_seconds: float = COMPILE_SECONDS  # that they may take each time
    rules: RulesArgument = None  # as in ``select``


# Returns the workloads to be timed, of this machine and the records that are in the file already.
Plan = Callable[[Machine, Sequence[Record]], Iterable[Work]]


def default_jobs(on_gpu: bool) -> int:
    """Return how many processes run first calls, unless somebody says so."""
    return max(1, min(MOST_JOBS, (os.cpu_count() or 1) - 2)) if on_gpu else 0


def survey(settings: Settings, plan: Plan, environment: Environment, say: Callable[[str], None]) -> bool:
    """Time what is planned, and append it to the file; return whether all was timed."""
    run = _Run(settings, environment, say)
    try:
        return run.all(plan)
    finally:
        run.first_calls.close()


def drawn_or_again(seed: int, workloads: int, backends: tuple[str, ...], of_states: bool) -> Plan:
    """Plan so many workloads of a seed, ``of_states`` of layers that keep a state; with backends and a file that has
    some, those."""

    def plan(machine: Machine, known: Sequence[Record]) -> Iterator[Work]:
        if known and backends:
            for record in sorted(known, key=dated):
                yield Work(record, layer_of(record["config"]), parse_batch_shape(record["batch"]))
            return
        done = {(record["seed"], record["number"]) for record in known}
        first = FIRST_STATE if of_states else 0
        for number in range(first, first + workloads):
            if (seed, number) not in done:
                yield draw(seed, number, SPACE if machine.on_gpu else TINY)

    def dated(record: Record) -> str:
        """Return the date of the backends' oldest time; one that is missing comes first."""
        return min([timed["date"] for timed in record["timed"] if timed["backend"] in backends], default="")

    return plan


class _Run:
    """One run of a survey."""

    def __init__(self, settings: Settings, environment: Environment, say: Callable[[str], None]) -> None:
        self._settings, self._say, self._began = settings, say, time.monotonic()
        self._known = read_survey(settings.out)
        self._bench = Bench(environment, settings.rules)
        self._left, self._done, self._longest_s = 0, 0, 0.0
        self.first_calls = FirstCalls(settings.jobs, environment)

    @property
    def _remaining(self) -> float:
        seconds = self._settings.seconds
        return math.inf if seconds is None else seconds - (time.monotonic() - self._began)

    def all(self, plan: Plan) -> bool:
        """Time the workloads until time is up; return whether all were timed."""
        settings, machine, rates = self._settings, self._bench.machine, self._bench.rates
        todo = [*plan(machine, self._known)]
        for record in self._known:
            merged(record, {"gpu": machine.gpu, "timed": []})
        settings.out.parent.mkdir(parents=True, exist_ok=True)
        if settings.out.exists():
            write_survey(settings.out, self._known)
        reached = f"copy {rates.copy / 1e9:.0f} GB/s, matmul {rates.matmul / 1e12:.3g} TFLOP/s"
        self._say(f"{machine.gpu}: {reached}; {len(todo)} workloads to time, {len(self._known)} in {settings.out}")
        self._left = len(todo)
        count = max(1, WORKLOADS_PER_JOB * self._settings.jobs)
        for start in range(0, len(todo), count):
            if self._remaining <= self._longest_s:
                return False
            some = [(work, self._candidates(work)) for work in todo[start : start + count]]
            ended = self._compile(some)
            for work, candidates in some:
                if not candidates and "timed" in work.row:
                    self._left -= 1
                    continue
                if self._remaining <= self._longest_s:
                    return False
                self._time(work, candidates, ended)
        return True

    def _compile(self, some: Sequence[tuple[Work, list[Candidate]]]) -> dict[Key, Ended]:
        """Run the first calls of backends that compile."""
        if self._settings.jobs == 0:
            return {}
        specs = load_plugins().specs
        tasks = [
            FirstCall(
                (work.row["seed"], work.row["number"], each.name),
                work.config,
                work.batch,
                {phase: each.selection.selected[phase] for phase in each.phases or work.config.phases},
            )
            for work, candidates in some
            for each in candidates
            if each.selection is not None
            and any(specs[name].compile_key(work.config) is not None for name in each.name.split(PAIR))
        ]
        if not tasks:
            return {}
        seconds = min(self._settings.compile_seconds, COMPILE_SHARE * self._remaining)
        self._say(f"{len(tasks)} first calls of the next {len(some)} workloads, which may take {seconds:.0f} s")
        found = self.first_calls.run(tasks, seconds)
        told = {key: each.failure or each.error for key, each in found.items()}
        for text, count in Counter(f"{key[2]}: {why}" for key, why in told.items() if why is not None).items():
            self._say(f"  {count} times {text}")
        return found

    def _candidates(self, work: Work) -> list[Candidate]:
        only = self._settings.backends
        found = self._bench.candidates(work.config, work.batch, only)
        return [each for each in found if each.selection is not None and (only or each.name not in ONLY_BY_NAME)]

    def _time(self, work: Work, candidates: list[Candidate], ended: Mapping[Key, Ended]) -> None:
        """Time one workload and write its line."""
        began, bench = time.monotonic(), self._bench
        key = work.row["seed"], work.row["number"]
        first = {each.name: ended.get((*key, each.name)) for each in candidates}
        ready = []
        for each in candidates:
            call = first[each.name]
            ready.append(each if call is None or call.failure is None else Candidate(each.name, failure=call.failure))
        lost = None
        try:
            found = bench.measure(work.config, work.batch, ready, ROUNDS_SECONDS)
            if bench.machine.on_gpu:
                torch.cuda.synchronize()
        except RuntimeError as error:
            lost = f"{failure_text(error)} (at {bench.doing})"
            timed = [Timed(each.name, failure=f"the device failed: {lost}") for each in candidates]
            found = TimedBatch(work.batch, None, timed)
        chosen = {each.name: each for each in candidates}
        record = {
            **work.row,
            "gpu": bench.machine.gpu,
            "gpu_name": bench.machine.device.name,
            "compute_capability": bench.machine.device.capability_text,
            "driver": bench.machine.detection.driver_version,
            "rates": {"copy_gbps": round(bench.rates.copy / 1e9, 1), "tflops": round(bench.rates.matmul / 1e12, 2)},
            "timed": [self._entry(each, chosen[each.backend], first[each.backend]) for each in found.timed],
        }
        append_record(self._settings.out, record if "timed" not in work.row else merged(work.row, record))
        spent = time.monotonic() - began
        self._done, self._left = self._done + 1, self._left - 1
        self._longest_s = max(spent, 0.9 * self._longest_s)
        self._say(self._line(work, found))
        if lost is not None:
            raise DeviceLost(lost)

    def _entry(self, timed: Timed, candidate: Candidate, first: Ended | None) -> dict[str, Any]:
        """Return one backend's part of a line; ``docs/times.md`` lists its keys."""
        return {
            **timed.to_dict(),
            "fingerprint": self._fingerprints(candidate, timed),
            "libraries": self._bench.libraries(timed.backend),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "compile_s": None if first is None else round(first.seconds, 2),
        }

    def _fingerprints(self, candidate: Candidate, timed: Timed) -> dict[str, dict[str, str]]:
        selection = candidate.selection
        if selection is None:
            return {}
        found: dict[str, dict[str, str]] = {}
        for phase, plan in selection.plans.items():
            if phase in timed.kernel and (spec := selection.backends[phase]) is not None:
                found.setdefault(spec.name, {}).update(fingerprint(spec, selection.environment, plan.provider))
        return found

    def _line(self, work: Work, found: TimedBatch) -> str:
        spent = time.monotonic() - self._began
        left = min(self._left * spent / self._done, self._remaining)
        times = [
            f"{each.backend} {each.time_us:.1f}" if each.failure is None else f"{each.backend} –"
            for each in found.timed
        ]
        number = f"{self._done}/{self._done + self._left}"
        return f"{number:>9} {spent:5.0f} s, {left:5.0f} s left  {work.row['kind']}  {work.batch}: {', '.join(times)}"
