"""What the choice costs on workloads that no fit and no rule was made from: the regret of three ways to choose.

    python measure/bench/held_out.py --measure --out $OUT --with vllm==0.26.0     # on the GPU, about 90 workloads
    python measure/bench/held_out.py --measure --set unseen --out $OUT --with vllm==0.26.0   # of 15 other kinds
    python measure/bench/held_out.py --from measure/bench/data/held_out_20270102_nvidia-h200.jsonl.xz   # without a GPU
    python measure/bench/held_out.py --from held_out.jsonl --rules tuned.toml

The workloads are drawn with ``SEED`` (``--seed``) from the ranges of ``draw``, both fixed before anything was measured.
The rounds of a batch are cut in two: the best backend is named by the medians of the first half, and times are those of
the second half. Regret is the chosen backend's time over the best one's. Ways to choose: the rules without a workload;
with the workload and what is known of times (``ATTN_SELECT_MEASUREMENTS`` adds files); and with ``--rules``, a tuned
file.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from collect_times import phase_kind
from drawn_batches import draw
from timed_layers import (
    MOST_SECONDS,
    PAIR,
    SLOW,
    Point,
    add_options,
    append,
    environment_of,
    layers_of,
    line,
    raw,
    rows,
)

from attn_select import AttentionConfig, select
from attn_select.decide.selector import environment_for
from attn_select.layer.config import Phase
from attn_select.machine.device import CPU, Device, lookup
from attn_select.machine.environment import canonical_distribution
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select_measure.benching import Bench, Candidate, TimedBatch

SEED = 20270108
"""Of the workloads that are measured next. Model and rules are made before: whoever changes them with the times of a
seed in sight needs another one. Those of 20261207, 20261222, 20261229, 20261231, 20270102, 20270104 and 20270106 were
seen."""
ROUNDS = 24
KINDS = ("decode", "decode", "decode", "decode", "prefill", "prefill", "mixed", "uneven", "uneven")
"""What is drawn for each layer, in turn; a layer with drafts has speculative decodes in place of all decodes."""
CHOICES = ("rules", "workload", "tuned")


def workloads(layers: Mapping[str, AttentionConfig], tiny: bool, seed: int) -> list[Point]:
    """Return the held-out workloads, one of each layer in turn, and the kinds in turn among the layers, so that a time
    limit cuts all kinds evenly. A layer's own draws depend neither on the others nor on the order."""
    found = []
    for turn in range(len(KINDS)):
        for place, (name, config) in enumerate(layers.items()):
            index = (turn + 2 * place) % len(KINDS)
            kind, drafts = KINDS[index], config.num_speculative_tokens
            rng = random.Random(f"{seed} {name} {index}")
            named = "speculative" if drafts and kind == "decode" else kind
            found.append(Point(name, draw(rng, kind, drafts, tiny), named))
    return found


def measure(arguments: argparse.Namespace) -> Path:
    """Measure every workload; return the file of results."""
    began, layers = time.monotonic(), layers_of(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "held_out.jsonl"
    path.touch()
    files = [*arguments.done, path]
    done = {(row["layer"], row["batch"]) for file in files for row in rows(file)}
    todo = [point for point in workloads(layers, arguments.device == "cpu", arguments.seed) if point.key not in done]
    bench = Bench(environment_of(arguments), rounds=arguments.rounds)
    for number, point in enumerate(todo):
        spent = time.monotonic() - began
        if spent > arguments.seconds:
            print(f"{number} of {len(todo)} workloads in {spent:.0f} s; {len(todo) - number} are left")
            break
        found = timed(bench, layers[point.layer], point.batch, not arguments.unchecked)
        append(path, raw(bench, point, layers[point.layer], found))
        print(f"{spent:5.0f} s  {point.kind:11s} {line(point, found)}", flush=True)
        if not found.complete:
            break
    return path


def timed(bench: Bench, config: AttentionConfig, batch: BatchShape, compare: bool = True) -> TimedBatch:
    """Measure all backends but the slow ones; MLA's prefills and decodes of one batch also by two of them."""
    return bench.measure(config, batch, candidates(bench, config, batch), MOST_SECONDS, compare)


def candidates(bench: Bench, config: AttentionConfig, batch: BatchShape) -> list[Candidate]:
    """Return all backends but the slow ones, and for a mixed batch of MLA the pairs of them."""
    found = [each for each in bench.candidates(config, batch) if not bench.on_gpu or each.name not in SLOW]
    if config.mla and phase_kind(config, batch) == "mixed":
        ranked = select(config, bench.device, environment=bench.environment).candidates
        able = {
            phase: [each.backend for each in ranked if each.phases[phase].verdict != "rejected"]
            for phase in config.phases
        }
        for first, second in product(able["prefill"], able["decode"]):
            if first != second and not {first, second} & {*SLOW}:
                asked: dict[Phase, str] = {"prefill": first, "decode": second}
                both = select(config, bench.device, backend=asked, environment=bench.environment)
                if both.selected == asked:
                    found.append(Candidate(f"{first}{PAIR}{second}", both))
    return found


def halves(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return each backend's median in the first and in the second half of the rounds."""
    found = {}
    for timed in row["timed"]:
        samples = timed["samples_us"]
        if timed["failure"] is None and len(samples) >= 2:
            middle = len(samples) // 2
            found[timed["backend"]] = statistics.median(samples[:middle]), statistics.median(samples[middle:])
    return found


def device_of(row: Mapping[str, Any]) -> Device:
    """Return the device that a row was measured on, as one that is asked about."""
    return CPU if row["gpu_name"] == "cpu" else replace(lookup(row["gpu_name"]), full_name=row["gpu"])


def chosen(row: Mapping[str, Any], pins: Mapping[str, str], rules: str | None, with_workload: bool) -> str | None:
    """Return the backend that ``select`` takes for the row's batch; two for a mixed batch of MLA, if it takes two."""
    config, batch = AttentionConfig(**row["config"]), parse_batch_shape(row["batch"])
    device = device_of(row)
    decode = config.has_cache and batch.is_decode(config.max_decode_query_len)
    phase: Phase = "decode" if decode else "prefill"
    environment = environment_for(device, pins)
    workload = row["batch"] if with_workload else None
    selected = select(config, device, rules, environment=environment, workload=workload).selected
    names = dict.fromkeys(selected[each] for each in config.phases)
    if config.mla and phase_kind(config, batch) == "mixed" and len(names) > 1 and None not in names:
        return PAIR.join(map(str, names))
    return selected[phase]


def regrets(found: Sequence[Mapping[str, Any]], rules: str | None) -> list[dict[str, Any]]:
    """Return for each workload the best backend, and per way to choose the backend and its regret."""
    pins: dict[str, str] = {}
    for row in found:
        pins |= {canonical_distribution(name): version for name, version in row["libraries"].items()}
    judged = []
    for row in found:
        times = halves(row)
        if len(times) < 2:
            continue  # nothing to choose from
        best = min(times, key=lambda name: times[name][0])
        result: dict[str, Any] = {"layer": row["layer"], "batch": row["batch"], "kind": row["kind"], "best": best}
        for choice in CHOICES if rules else CHOICES[:2]:
            name = chosen(row, pins, rules if choice == "tuned" else None, choice != "rules")
            result[choice] = name, times[name][1] / times[best][1] if name in times else None
        judged.append(result)
    return judged


def geomean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the geometric mean by drawing workloads anew, seeded."""
    rng = random.Random(SEED)
    means = sorted(geomean(rng.choices(values, k=len(values))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws) - 1]


def report(judged: Sequence[Mapping[str, Any]]) -> None:
    """Print every workload, and the regret per layer, per kind and in all."""
    choices = [choice for choice in CHOICES if judged and choice in judged[0]]
    print(f"{'layer':12s} {'kind':11s} {'batch':28s} {'best':16s} " + " ".join(f"{choice:24s}" for choice in choices))
    for row in judged:
        cells = []
        for choice in choices:
            name, regret = row[choice]
            cells.append(f"{name} {'not measured' if regret is None else f'{regret:.3f}'}".ljust(24))
        print(f"{row['layer']:12s} {row['kind']:11s} {row['batch']:28s} {row['best']:16s} {' '.join(cells)}".rstrip())
    print()
    groups = [("all", list(judged))]
    for field in ("layer", "kind"):
        for value in dict.fromkeys(row[field] for row in judged):
            groups.append((f"{field} {value}", [row for row in judged if row[field] == value]))
    for name, group in groups:
        for choice in choices:
            values = [row[choice][1] for row in group if row[choice][1] is not None]
            if not values:
                continue
            low, high = interval(values)
            print(
                f"{name:20s} {choice:9s} n {len(values):3d}  geometric mean {geomean(values):.4f} "
                f"(95 % {low:.4f} to {high:.4f})  worst {max(values):.3f}  best chosen "
                f"{sum(row[choice][0] == row['best'] for row in group) / len(group):.0%}"
            )


def best_order(found: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the regrets of the one backend per layer and phase that is best over all its workloads, known afterwards:
    the least that rules can cost which know no workload and choose between whole backends."""
    groups: dict[tuple[str, bool], list[dict[str, float]]] = {}
    for row in found:
        config, times = AttentionConfig(**row["config"]), halves(row)
        if len(times) > 1:
            best = times[min(times, key=lambda name: times[name][0])][1]
            decode = phase_kind(config, parse_batch_shape(row["batch"])) == "decode"
            groups.setdefault((row["layer"], decode), []).append({name: t / best for name, (_, t) in times.items()})
    regrets = []
    for each in groups.values():
        everywhere = set.intersection(*(set(row) for row in each)) or set(each[0])
        name = min(everywhere, key=lambda name: geomean([row.get(name, 10.0) for row in each]))
        regrets += [row[name] for row in each if name in row]
    return regrets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(rounds=ROUNDS)
    parser.add_argument("--measure", action="store_true", help="measure here; else --from")
    parser.add_argument("--from", dest="saved", action="append", default=[], type=Path, metavar="FILE")
    parser.add_argument(
        "--done", action="append", default=[], type=Path, metavar="FILE", help="a held_out.jsonl to go on from"
    )
    parser.add_argument("--unchecked", action="store_true", help="do not compare results with the oracle, to save time")
    parser.add_argument("--rules", metavar="FILE", help="a tuned rules file")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the workloads (default: {SEED})")
    parser.add_argument("--list", action="store_true", help="print the workloads and stop")
    arguments = parser.parse_args()
    if arguments.list:
        for point in workloads(layers_of(arguments), arguments.device == "cpu", arguments.seed):
            print(f"{point.layer:12s} {point.kind:11s} {point.batch}")
        return
    files = [*arguments.saved, *([*arguments.done, measure(arguments)] if arguments.measure else [])]
    if not files:
        parser.error("give --measure or --from FILE")
    found = [row for file in files for row in rows(file)]
    report(regrets(found, arguments.rules))
    afterwards = best_order(found)
    print(f"the best order of each layer and phase, known afterwards: {geomean(afterwards):.4f}, {max(afterwards):.3f}")


if __name__ == "__main__":
    main()
