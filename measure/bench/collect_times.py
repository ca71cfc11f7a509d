"""Collects the measurements that the package brings: about 110 batches of each of ten layers, the most telling first.

    python measure/bench/collect_times.py --out $OUT --with vllm==0.26.0
    python measure/bench/collect_times.py --set further --out $OUT     # 30 kinds, as far as time goes
    python measure/bench/collect_times.py --out $OUT --done before/rounds.jsonl     # goes on where that stopped
    python measure/bench/collect_times.py --out $OUT --only FLASHINFER --kinds prefill,mixed   # one backend's alone
    python measure/bench/collect_times.py --out $OUT --close 30   # batches where the choice is close so far
    python measure/bench/collect_times.py --close 30 --list h200 > points.txt     # the same, chosen without the GPU
    python measure/bench/collect_times.py --out $OUT --points points.txt

``OUT/measurements.jsonl`` is a file of measurements, ``OUT/rounds.jsonl`` has every round. With ``--compile`` every
layer first runs small batches in a process of its own, so that kernels that compile at their first call do so side by
side.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist

from drawn_batches import draw
from timed_layers import Point, add_options, append, environment_of, layers_of, line, measured, raw, rows

from attn_select import AttentionConfig, Environment, select
from attn_select.decide.selector import environment_for
from attn_select.layer.config import Phase
from attn_select.machine.device import Device, lookup
from attn_select.machine.environment import parse_pins
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.roofline import is_decode
from attn_select.times.store import append_measurements
from attn_select.times.terms import coordinates
from attn_select.times.timing import Timing
from attn_select_measure.benching import Bench

TIERS = (
    ("64q1s4k", "8q1s16k", "256q1s1k", "q1s1k", "q1s32k", "16q1s512", "q2k", "q512s2k_32q1s2k", "128q1s128"),
    ("q1s128k", "4q1s4k", "32q1s1k", "256q1s256", "128q1s2k", "2q1s8k", "4q512", "q8k", "q1ks16k", "16q1s512_4q1s16k"),
    ("q1s128", "16q1s32k", "256q1s4k", "8q1s2k", "64q1s512", "q128", "16q256", "q16k", "q128s8k", "2q2ks8k_16q1s8k"),
)
"""Batches, the most telling first: decode by batch and context, prefill by length with and without context, mixed."""
DRAFTS = 3
SPECULATIVE = (
    ("64q4s4k", "8q4s16k", "256q4s1k", "q4s1k", "q4s32k", "16q4s512"),
    ("128q4s2k", "32q4s1k", "4q4s4k", "q4s128k"),
    (),
)
TINY = (("2q1s40", "q32", "q16_2q1s30"), ("2q4s40",), ())
DRAWN = {"decode": 10, "uneven": 4, "prefill": 6, "mixed": 4}
"""How many batches of each kind are drawn for a layer, after those above. Their requests are seldom a power of two:
only there do kernels show what a nearly empty last wave costs. The held-out workloads are other draws."""
DRAWN_AGAIN = {"spread": 7, "decode": 8, "mixed spread": 3, "prefill": 4, "uneven": 3, "mixed": 2}
"""More, after the models of the batches so far had been looked at: with decodes of many lengths, as a service has."""
DRAWN_THIRD = {"decode": 12, "uneven": 6, "prefill": 6, "mixed": 5, "spread": 3, "mixed spread": 1}
"""As many kinds as the held-out workloads have, for all kernels as they were on 2026-11-23."""
TINY_DRAWN, TINY_AGAIN = {"mixed": 1}, {"spread": 1, "mixed spread": 1}
APART = 0.5
"""Least distance between batches where a choice is close."""
MOST_US = 4000.0
"""Longer batches say less for the seconds that they take."""
CLOSE_KINDS = (
    "decode",
    "prefill",
    "uneven",
    "decode",
    "mixed",
    "decode",
    "prefill",
    "uneven",
    "decode",
    "spread",
    "mixed",
)
COMPILING = ("2q1s64", "q64", "q64_2q1s64", "2q4s64")
"""Small batches that run every kernel of a layer once."""
COMPILE_SECONDS = 240


def drawn(seed: str, config: AttentionConfig, counts: Mapping[str, int], tiny: bool) -> list[tuple[str, BatchShape]]:
    """Return batches drawn for a layer with their kinds, the kinds in turn."""
    rng = random.Random(seed)
    kinds = [kind for turn in range(max(counts.values())) for kind, count in counts.items() if turn < count]
    return [(kind, draw(rng, kind, config.num_speculative_tokens, tiny)) for kind in kinds]


def _speculative(config: AttentionConfig) -> tuple[tuple[str, ...], ...]:
    """Return ``SPECULATIVE`` for a layer with another number of drafts."""
    own, given = f"q{config.max_decode_query_len}s", f"q{1 + DRAFTS}s"
    return tuple([tuple([text.replace(given, own) for text in tier]) for tier in SPECULATIVE])


def points(layers: Mapping[str, AttentionConfig], tiny: bool) -> list[Point]:
    """Return every point, tier by tier, within one batch by batch for all layers."""
    found = []
    for tier in range(len(TIERS)):
        shapes = {
            name: (TINY if tiny else _speculative(config) if config.num_speculative_tokens else TIERS)[tier]
            for name, config in layers.items()
        }
        for index in range(max(map(len, shapes.values()))):
            found += [
                Point(name, parse_batch_shape(own[index]), f"tier {tier + 1}")
                for name, own in shapes.items()
                if index < len(own)
            ]
    for seed, counts in (
        ("collected", TINY_DRAWN if tiny else DRAWN),
        ("collected again", TINY_AGAIN if tiny else DRAWN_AGAIN),
        ("collected a third time", {} if tiny else DRAWN_THIRD),
    ):
        batches = {name: drawn(f"{seed} {name}", config, counts, tiny) for name, config in layers.items() if counts}
        for index in range(sum(counts.values())):
            found += [Point(name, own[index][1], own[index][0]) for name, own in batches.items()]
    return found


def close(
    layers: Mapping[str, AttentionConfig], count: int, seed: str, device: Device, environment: Environment
) -> list[Point]:
    """Return up to ``count`` more batches for each layer, none near another.

    Eight times as many are drawn. Of each kind, the batches stay in which the choice may cost most, by the margins of
    the times known so far."""
    found: dict[str, list[Point]] = {}
    for name, config in layers.items():
        rng, own = random.Random(f"{seed} {name}"), found.setdefault(name, [])
        drawn = []
        for turn in range(8 * count):
            kind = CLOSE_KINDS[turn % len(CLOSE_KINDS)]
            batch = draw(rng, kind, config.num_speculative_tokens, False)
            phase: Phase = "decode" if phase_kind(config, batch) == "decode" else "prefill"
            ranked = select(config, device, environment=environment, workload=str(batch)).candidates
            timings = [each.phases[phase].timing for each in ranked]
            known = [each for each in timings if each is not None and each.kind == "packaged"]
            if known and not any(each.measured_shapes for each in known) and known[0].time_us < MOST_US:
                drawn.append((doubt(known), Point(name, batch, f"close {kind}")))
        drawn.sort(key=lambda each: each[0], reverse=True)
        for turn in range(count):
            kind = f"close {CLOSE_KINDS[turn % len(CLOSE_KINDS)]}"
            places = [coordinates(each.batch.groups, 0.0) for each in own if each.kind == kind]
            for _, point in drawn:
                place = coordinates(point.batch.groups, 0.0)
                if point.kind == kind and all(math.dist(place, each) > APART for each in places):
                    own.append(point)
                    break
    return [own[index] for index in range(count) for own in found.values() if index < len(own)]


def doubt(timings: Sequence[Timing]) -> float:
    """Return what the fastest candidate is expected to lose to the others, as a logarithm, each alone."""
    fastest, *others = sorted(timings, key=lambda each: each.time_us)
    total = 0.0
    for other in others:
        ahead = math.log(other.time_us / fastest.time_us)
        spread = math.hypot(math.log1p(fastest.margin), math.log1p(other.margin)) / 1.96
        normal = NormalDist(0.0, spread)
        total += spread**2 * normal.pdf(ahead) - ahead * (1 - normal.cdf(ahead))
    return total


def phase_kind(config: AttentionConfig, batch: BatchShape) -> str:
    """Return ``decode``, ``prefill``, or ``mixed`` for a batch with both."""
    decodes = {is_decode(config, group.query_len) for group in batch.groups}
    return "mixed" if len(decodes) > 1 else "decode" if decodes == {True} else "prefill"


def compile_all(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Run the small batches of every layer, one process each, and wait for them."""
    own = [word for pin in arguments.pins for word in ("--with", pin)] + ["--device", arguments.device]
    environment = {**os.environ, "MAX_JOBS": "3"}
    command = [sys.executable, __file__, *own, "--out", str(arguments.out), "--compile-only"]
    began = time.monotonic()
    running = {
        name: subprocess.Popen([*command, "--layers", name], env=environment, start_new_session=True) for name in names
    }
    for name, process in running.items():
        try:
            process.wait(max(1.0, COMPILE_SECONDS - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its compilers too
            print(f"{name}: still compiling after {COMPILE_SECONDS} s", flush=True)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--done", action="append", default=[], type=Path, metavar="FILE", help="a rounds.jsonl to go on from"
    )
    parser.add_argument("--only", default="", help="measure these backends alone, separated by commas")
    parser.add_argument("--kinds", default="", help="only decode, prefill or mixed batches, separated by commas")
    parser.add_argument(
        "--close", type=int, default=0, metavar="N", help="more batches of each layer, by the packaged times"
    )
    parser.add_argument("--seed", default="close", help="of the batches that --close draws (default: close)")
    parser.add_argument(
        "--list", metavar="GPU", help="print what --close takes on a GPU that need not be here, and stop"
    )
    parser.add_argument("--points", type=Path, metavar="FILE", help="measure what --list printed, and nothing else")
    parser.add_argument("--unchecked", action="store_true", help="do not compare results with the oracle, to save time")
    parser.add_argument("--compile", action="store_true", help="compile first, in parallel")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    began = time.monotonic()
    layers = layers_of(arguments)
    if arguments.list:
        device = lookup(arguments.list)
        environment = environment_for(device, parse_pins(arguments.pins))
        for point in close(layers, arguments.close, arguments.seed, device, environment):
            print(point.layer, point.batch, point.kind)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.compile_only:
        bench = Bench(environment_of(arguments), rounds=1)
        for name, config in layers.items():
            for text in COMPILING:
                batch = parse_batch_shape(text)
                found = measured(bench, config, batch)
                first = ", ".join(f"{timed.backend} {timed.first_call_s:.1f} s" for timed in found.timed)
                print(f"{name:12s} {text}: {first}", flush=True)
        return
    if arguments.compile:
        compile_all(arguments, [*layers])
    kept, rounds_file = arguments.out / "measurements.jsonl", arguments.out / "rounds.jsonl"
    files = [*arguments.done, *([rounds_file] if rounds_file.exists() else [])]
    done = {(row["layer"], row["batch"]) for file in files for row in rows(file)}
    kinds, only = (tuple(filter(None, text.split(","))) for text in (arguments.kinds, arguments.only))
    bench = Bench(environment_of(arguments), rounds=arguments.rounds)
    if arguments.points:
        lines = [text.split() for text in arguments.points.read_text().splitlines()]
        asked = [
            Point(name, parse_batch_shape(batch), " ".join(kind)) for name, batch, *kind in lines if name in layers
        ]
    else:
        asked = points(layers, arguments.device == "cpu")
    if arguments.close:
        asked += close(layers, arguments.close, arguments.seed, bench.device, bench.environment)
    todo = [
        point
        for point in asked
        if point.key not in done and (not kinds or phase_kind(layers[point.layer], point.batch) in kinds)
    ]
    print(
        f"{bench.gpu}: copy {bench.rates.copy / 1e9:.0f} GB/s, matmul {bench.rates.matmul / 1e12:.1f} TFLOP/s",
        flush=True,
    )
    for number, point in enumerate(todo):
        spent = time.monotonic() - began
        if spent > arguments.seconds:
            print(f"{number} of {len(todo)} points in {spent:.0f} s; {len(todo) - number} are left")
            return
        config = layers[point.layer]
        found = measured(bench, config, point.batch, only, not arguments.unchecked)
        append_measurements(kept, bench.measurements(config, found))
        append(rounds_file, raw(bench, point, config, found))
        print(f"{spent:5.0f} s  {line(point, found)}", flush=True)
        if not found.complete:
            return
    print(f"all {len(todo)} points in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
