"""What dispatch by step costs on a trace of changing batches, beside each backend alone and the best one of every step.

    python research/bench_dispatch.py --from held_out.jsonl --measurements measurements.jsonl    # anywhere
    python research/bench_dispatch.py --measure --out $OUT --with vllm==0.26.0                   # on a GPU
    python research/bench_dispatch.py --measure --device cpu --out $OUT                          # tiny, on a CPU
    python research/bench_dispatch.py --host                                                     # build's host time

A trace is a seeded simulation of a chat service; ``--steps`` of its steps are measured, each with all backends and a
group with ``dispatch`` in the same rounds. ``--from`` reads what this or ``held_out.py`` or ``collect_times.py`` wrote
(every round of every backend) and asks what dispatch would have taken. A batch that is among the measurements is left
out of the models that predict it. The first half of the rounds names the best backend of a step, times are the
second's.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "measure" / "bench"))

from collect_times import phase_kind
from held_out import candidates, device_of, halves
from timed_layers import (
    MOST_SECONDS,
    PAIR,
    Point,
    add_options,
    append,
    environment_of,
    layers_of,
    line,
    raw,
    rounds_of,
    rows,
)

from attn_select import AttentionConfig, ConfigError, select
from attn_select.decide.selector import environment_for
from attn_select.layer.config import Phase
from attn_select.machine.environment import canonical_distribution
from attn_select.times.batch_shape import BatchShape, RequestGroup, parse_batch_shape
from attn_select.times.measurement import Measurement
from attn_select.times.model import TimeModel
from attn_select.times.step_choice import Names, StepChoice, by_phase, lead_of
from attn_select.times.store import MeasurementFile, append_measurements, read_measurements
from attn_select.times.timed_layer import timed_layer
from attn_select_measure.fitting.fit import fit

SEED = 20270105
DISPATCH = "dispatch"
TRACED = 2000
"""Steps of a trace whose builds are timed on the host."""
CALLS = 200
"""Calls of ``build`` that are timed together."""
WORKLOAD = "chat"
GRID = ("q1s16", "q1s64", "2q1s32", "4q1s16", "4q1s64", "3q1s128", "q8", "q32", "q64", "2q16", "4q32", "q16s64")
"""Batches that a CPU is measured with first."""
Points = dict[str, list[tuple[BatchShape, float]]]


def trace(rng: random.Random, new: int, tiny: bool) -> Iterator[BatchShape]:
    """Yield the steps of a chat service without end: its load rises and falls, prompts are computed in chunks.

    Prompts are log-normal about 400 tokens, answers about 250; at most 200 requests run, and a step computes up to 2048
    tokens. The mean time between requests changes every 400 steps. ``tiny`` is a tenth of it all.
    """
    most, budget, scale = (6, 64, 0.1) if tiny else (200, 2048, 1.0)
    running: list[list[int]] = []
    waiting: deque[tuple[int, int]] = deque()
    for step in range(1 << 30):
        if step % 400 == 0:
            rate = rng.choice((0.02, 0.1, 0.3, 0.6))
        while rng.random() < rate:
            prompt = round(min(32000, rng.lognormvariate(6.0, 1.2)) * scale) + 1
            waiting.append((prompt, round(min(4000, rng.lognormvariate(5.5, 0.8)) * scale) + 1))
        while waiting and len(running) < most:
            prompt, answer = waiting.popleft()
            running.append([0, prompt, answer])
        left, groups = budget, []
        for request in running:
            cached, prompt, _ = request
            query = new if cached >= prompt else min(prompt - cached, left)
            if query < 1 or query > left:
                continue
            left -= query
            request[0] = cached + query
            groups.append(RequestGroup(1, query, cached + query))
            if cached >= prompt:
                request[2] -= new
        running = [request for request in running if request[2] > 0]
        if groups:
            yield BatchShape(tuple(groups))


def steps_of(layers: Mapping[str, AttentionConfig], count: int, tiny: bool) -> list[Point]:
    """Return ``count`` steps of each layer's trace, 100 steps between them."""
    found = []
    every = 20 if tiny else 100
    for name, config in layers.items():
        steps = trace(random.Random(f"{SEED} {name}"), config.max_decode_query_len, tiny)
        for number, batch in enumerate(steps, 1):
            if number % every == 0:
                found.append(Point(name, batch, "trace"))
            if number == count * every:
                break
    return sorted(found, key=lambda point: len(point.batch.groups) % 7)  # all kinds early, if time runs out


def lens_of(batch: BatchShape) -> tuple[list[int], list[int]]:
    """Return the query lengths and the key lengths of a batch, its decodes first."""
    each = [group for group in reversed(batch.groups) for _ in range(group.count)]
    return [group.query_len for group in each], [group.seq_len for group in each]


def asked(choice: StepChoice, batch: BatchShape) -> Names:
    """Return what a group is told for a batch."""
    whole = batch.num_requests, batch.num_tokens, batch.max_query_len, batch.num_kv_tokens, batch.max_seq_len
    if batch.max_query_len <= choice.longest_decode:
        return choice(None, whole)
    return choice(*by_phase(whole, lead_of(*lens_of(batch)), choice.longest_decode))


def measure(arguments: argparse.Namespace) -> Path:
    """Measure the steps with all backends and with dispatch; return the file of results."""
    from attn_select_measure.benching import Bench, Candidate

    began, layers = time.monotonic(), layers_of(arguments)
    tiny = arguments.device == "cpu"
    # Every step is measured in a group of its own: what is worked out beforehand for others changes no choice.
    StepChoice.prepare = lambda *_: None  # type: ignore[method-assign]
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, evidence = arguments.out / "dispatch.jsonl", [*arguments.measurements]
    bench = Bench(environment_of(arguments), rounds=arguments.rounds)
    if tiny:
        evidence.append(arguments.out / "measurements.jsonl")
        for config in layers.values():
            for text in GRID:
                batch = parse_batch_shape(text)
                found = bench.measure(config, batch, bench.candidates(config, batch), 1.0)
                append_measurements(evidence[-1], bench.measurements(config, found))
    done = {(row["layer"], row["batch"]) for row in rows(path)} if path.exists() else set()
    for point in steps_of(layers, arguments.steps, tiny):
        spent, config = time.monotonic() - began, layers[point.layer]
        if spent > arguments.seconds:
            print(f"stopped after {spent:.0f} s")
            break
        if point.key in done:
            continue
        selection = select(
            config,
            bench.device,
            environment=bench.environment,
            workload=WORKLOAD,
            measurements=tuple(map(str, evidence)),
        )
        tried = [*candidates(bench, config, point.batch), Candidate(DISPATCH, selection, dispatch="measured")]
        found = bench.measure(config, point.batch, tried, MOST_SECONDS, compare=tiny)
        print(f"{spent:5.0f} s  {point.batch.num_requests} requests, {line(point, found)[-200:]}", flush=True)
        dispatched = [timed for timed in found.timed if timed.backend == DISPATCH]
        found.timed = [timed for timed in found.timed if timed.backend != DISPATCH]
        row = raw(bench, point, config, found)
        row["timed"] += map(rounds_of, dispatched)
        append(path, row)
        if not found.complete:
            break
    return path


def points_of(files: Sequence[Path]) -> dict[frozenset[tuple[str, Any]], Points]:
    """Return the measured batches and times of each layer and backend."""
    found: dict[frozenset[tuple[str, Any]], Points] = {}
    stored = read_measurements([MeasurementFile("named", path) for path in files])
    for row in stored.measurements:
        measurement: Measurement = row.measurement
        layer = found.setdefault(frozenset(measurement.config.items()), {})
        batch = parse_batch_shape(measurement.batch)
        layer.setdefault(measurement.backend, []).append((batch, measurement.time_us))
    return found


def predicted(row: Mapping[str, Any], points: Points, pins: Mapping[str, str]) -> Names:
    """Return what dispatch takes for a row's batch, by models that were not made from it."""
    config, device, batch = AttentionConfig(**row["config"]), device_of(row), parse_batch_shape(row["batch"])
    models: dict[Phase, dict[str, TimeModel]] = {"prefill": {}, "decode": {}}
    timed = {name for each in row["timed"] if each["failure"] is None for name in each["backend"].split(PAIR)}
    selected = select(config, device, environment=environment_for(device, pins), workload=WORKLOAD).selected
    chosen = {phase: name for phase, name in selected.items() if name is not None}
    for name in sorted(timed & set(points), key=lambda each: each not in chosen.values()):
        model = fit([each for each in points[name] if each[0] != batch], timed_layer(config), device)
        for phase, curve in (("prefill", model.prefill), ("decode", model.decode)):
            if curve is not None:
                models[phase][name] = model  # type: ignore[index]
    return asked(StepChoice(config, chosen, models, apart=config.mla), batch)


def judge(
    row: Mapping[str, Any], points: Mapping[frozenset[tuple[str, Any]], Points], again: bool = False
) -> dict[str, float] | None:
    """Return per backend, for dispatch and for the best one the time of a step; None where one cannot be said."""
    config, batch = AttentionConfig(**row["config"]), parse_batch_shape(row["batch"])
    found = halves(row)
    dispatched = found.pop(DISPATCH, None)
    if len(found) < 2:
        return None
    best = min(found, key=lambda name: found[name][0])
    times = {name: second for name, (_, second) in found.items()} | {"best of each step": found[best][1]}
    if dispatched is not None and not again:
        return times | {DISPATCH: dispatched[1]}
    pins = {canonical_distribution(name): version for name, version in row["libraries"].items()}
    of_layer = points.get(frozenset(timed_layer(config).to_dict().items()), {})
    prefill, decode = predicted(row, of_layer, pins)
    kind = phase_kind(config, batch)
    name = decode if kind == "decode" else prefill
    if kind == "mixed" and prefill != decode:
        name = f"{prefill}{PAIR}{decode}"
    return times | {DISPATCH: times[name]} if name in times else None  # nobody has measured that


def report(
    found: Sequence[Mapping[str, Any]], points: Mapping[frozenset[tuple[str, Any]], Points], again: bool = False
) -> None:
    """Print total times per layer and phase: the best backend alone, dispatch, and the best one of each step."""
    print(
        f"{'layer':12s} {'phase':8s} {'steps':>5s} {'dispatch':>9s} {'alone':>7s} {'worst':>7s}  best alone, the others"
    )
    print(f"{'':28s}{'to best of each step':>26s}")
    ratios: list[tuple[float, float]] = []
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    left_out = 0
    for row in found:
        config, batch = AttentionConfig(**row["config"]), parse_batch_shape(row["batch"])
        times = judge(row, points, again)
        if times is None:
            left_out += 1
            continue
        decode = config.has_cache and batch.is_decode(config.max_decode_query_len)
        groups.setdefault((row["layer"], "decode" if decode else "prefill"), []).append(times)
    for (layer, phase), steps in groups.items():
        everywhere = set.intersection(*(set(each) for each in steps))
        total = {name: math.fsum(each[name] for each in steps) for name in everywhere}
        best, own = total.pop("best of each step"), total.pop(DISPATCH)
        ranked = sorted(total, key=total.__getitem__)
        if not ranked:
            continue
        ratios.append((own / best, total[ranked[0]] / best))
        worst = max(each[DISPATCH] / each["best of each step"] for each in steps)
        others = ", ".join(f"{name} {total[name] / best:.3f}" for name in ranked)
        print(
            f"{layer:12s} {phase:8s} {len(steps):5d} {own / best:9.4f} {total[ranked[0]] / best:7.4f} {worst:7.3f}  "
            f"{others}"
        )
    if ratios:
        means = [math.exp(statistics.fmean(math.log(each[side]) for each in ratios)) for side in (0, 1)]
        behind = sum(own > alone * 1.0005 for own, alone in ratios)
        print(
            f"\ngeometric mean: dispatch {means[0]:.4f}, the best backend alone {means[1]:.4f} times the best of each "
            f"step; dispatch behind the best alone in {behind} of {len(ratios)}"
        )
    if left_out:
        print(f"{left_out} steps left out: one backend alone, or two that share a batch, which nobody has measured")


def host() -> None:
    """Print the host time of ``build`` with and without dispatch, by synthetic times; backends' builders do nothing."""
    import torch
    from bench_runtime import BATCHES, CONFIG, SEQ_LEN, filled_table

    from attn_select.runtime import Capacity, attention_group, prepare_batch
    from attn_select.runtime.timer import WARM_UP_ROUNDS, timed_rounds

    torch.set_num_threads(1)
    plain = select(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.jsonl"
        for judged in plain.candidates:
            plans = {phase: verdict.plan for phase, verdict in judged.phases.items() if verdict.plan is not None}
            favoured = judged.backend == plain.selected["decode"]
            for text in (*GRID, "256q1s1k", "64q1s4k") if len(plans) == 2 else ():
                batch = parse_batch_shape(text)
                phase: Phase = "decode" if batch.is_decode() else "prefill"
                made = Measurement(
                    gpu=plain.device.full_name,
                    compute_capability=plain.device.capability_text,
                    backend=judged.backend,
                    kernel={phase: plans[phase].kernel_name or ""},
                    config=timed_layer(CONFIG).to_dict(),
                    batch=text,
                    time_us=(1 if favoured else 2) * (5 + batch.num_kv_tokens / 1000),
                    method="graph",
                )
                append_measurements(path, [made])
        selection = select(CONFIG, workload=WORKLOAD, measurements=path)
        capacity = Capacity(max(BATCHES), 8192, 1 << 17)
        groups = {
            "static": attention_group(plain, capacity=capacity),
            "dispatch": attention_group(selection, capacity=capacity, dispatch="measured"),
        }
    for served in (served for group in groups.values() for served in group.backends):
        served.builder.build = lambda *_: None  # type: ignore[method-assign]
    print(groups["dispatch"].explain())
    print(f"{'batch':>6s} {'static':>8s} {'dispatch':>9s} {'more':>6s}  us of host time for group.build, medians")
    for batch_size in BATCHES:
        common = prepare_batch(
            [1] * batch_size, [SEQ_LEN] * batch_size, filled_table(batch_size, groups["static"].device)
        )

        def loop(group: Any, common: Any = common) -> Any:
            return lambda: [group.build(common) for _ in range(CALLS)]

        samples: dict[str, list[float]] = {name: [] for name in groups}
        until = time.monotonic() + 2
        rounds = timed_rounds({name: loop(group) for name, group in groups.items()}, "cpu")
        for number, found in enumerate(rounds):
            for name, spent in found.items() if number >= WARM_UP_ROUNDS else ():
                samples[name].append(spent / CALLS)
            if number > 10 and time.monotonic() > until:
                break
        static, dispatch = (statistics.median(samples[name]) for name in ("static", "dispatch"))
        print(f"{batch_size:6d} {static:8.2f} {dispatch:9.2f} {dispatch - static:6.2f}")
    steps = commons_of_trace()
    passes: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(9):
        for name in groups:
            began = time.thread_time()  # the processor's time: other processes' is none of it
            for common in steps:
                groups[name].build(common)
            passes[name].append((time.thread_time() - began) / len(steps) * 1e6)
    first = {name: each[0] for name, each in passes.items()}
    again = {name: min(each[1:]) for name, each in passes.items()}
    print(f"{len(steps)} steps of a trace, half of them mixed: us of the processor's time per build, means")
    for told, each in (("for the first time", first), ("again", again)):
        static, dispatch = each["static"], each["dispatch"]
        print(f"{told:20s} static {static:6.2f}, dispatch {dispatch:6.2f}, {dispatch - static:6.2f} more")


def commons_of_trace() -> list[Any]:
    """Return the steps of a trace as a group takes them; their tables hold nothing."""
    import torch

    from attn_select.runtime import prepare_batch

    found = []
    for batch in itertools.islice(trace(random.Random(f"{SEED} gqa"), 1, False), TRACED):
        common = prepare_batch(*lens_of(batch))
        table = torch.zeros(batch.num_requests, 1, dtype=torch.int32)
        slots = torch.zeros(batch.num_tokens, dtype=torch.int64)
        found.append(dataclasses.replace(common, block_table_tensor=table, slot_mapping=slots))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--measure", action="store_true", help="measure on this machine, then report")
    parser.add_argument("--host", action="store_true", help="time group.build on the host, with and without dispatch")
    parser.add_argument("--steps", type=int, default=16, help="measured steps of each layer's trace (default: 16)")
    parser.add_argument(
        "--from", dest="given", action="append", default=[], type=Path, metavar="FILE", help="report on saved rounds"
    )
    parser.add_argument(
        "--measurements", action="append", default=[], type=Path, metavar="FILE", help="times that dispatch goes by"
    )
    parser.add_argument("--again", action="store_true", help="ask dispatch anew, whatever it took when --from was made")
    arguments = parser.parse_args()
    if arguments.host:
        host()
        return
    files = [*arguments.given, *([measure(arguments)] if arguments.measure else [])]
    if not files:
        parser.error("one of --measure, --from FILE and --host is needed")
    report([row for file in files for row in rows(file)], points_of(arguments.measurements), arguments.again)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(str(error)) from None
