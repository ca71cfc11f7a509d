"""What the model of time is worth on the packaged measurements: batches are left out of it, predicted, and chosen for.

    python research/left_out_choice.py

An eighth of a layer's batches is left out at a time, three times over in another order. Printed are the error of
predicted times and the regret (the chosen backend's time over the best one's) of three ways to choose: the shortest
predicted time; the first by rules of those within its margin, or within 2 %; the first by rules. Batches were drawn as
the held-out ones are (``collect_times.py``); the hand-picked ones teach the models and are not counted.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "measure" / "bench"))

from collect_times import phase_kind, points
from held_out import geomean
from timed_layers import LAYERS

import attn_select
from attn_select import select
from attn_select.machine.device import Device, lookup
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.model import Prediction
from attn_select.times.store import MeasurementFile, read_measurements
from attn_select.times.timed_layer import timed_layer
from attn_select_measure.fitting.fit import fit
from attn_select_measure.tuning import TIE

PACKAGED = Path(attn_select.__file__).parent / "times" / "measurements" / "nvidia-h200.jsonl"
FOLDS, SEEDS = 8, 3
WAYS = ("shortest time", "first of ties", "rules alone")
Times = Mapping[BatchShape, Mapping[str, float]]
"""Microseconds by backend of each batch."""


def measured(path: Path) -> dict[str, dict[BatchShape, dict[str, float]]]:
    """Return the median times of each layer's batches by backend."""
    found: dict[str, dict[BatchShape, dict[str, list[float]]]] = {name: {} for name in LAYERS}
    names = {timed_layer(config): name for name, config in LAYERS.items()}
    fields = {tuple(sorted(layer.to_dict().items())): name for layer, name in names.items()}
    for row in read_measurements([MeasurementFile("packaged", path)]).measurements:
        one = row.measurement
        name = fields.get(tuple(sorted(one.config.items())))
        if name is not None:
            times = found[name].setdefault(parse_batch_shape(one.batch), {})
            times.setdefault(one.backend, []).append(one.time_us)
    return {
        name: {b: {n: statistics.median(t) for n, t in times.items()} for b, times in each.items()}
        for name, each in found.items()
    }


def left_out(
    name: str, known: Mapping[str, Times], device: Device, seed: int
) -> dict[BatchShape, dict[str, Prediction]]:
    """Return what is predicted of each batch by models that were made without it."""
    config, times = LAYERS[name], known[name]
    batches = sorted(times, key=str)
    random.Random(f"{seed} {name}").shuffle(batches)
    longest = config.max_decode_query_len
    more = known["gqa"] if config.num_speculative_tokens else {}  # prefills without drafts are the same
    found: dict[BatchShape, dict[str, Prediction]] = {batch: {} for batch in batches}
    for backend in sorted({each for of_batch in times.values() for each in of_batch}):
        shared = [(b, t[backend]) for b, t in more.items() if backend in t and b.groups[-1].query_len > longest]
        for fold in range(FOLDS):
            out = set(batches[fold::FOLDS])
            own = [(b, t[backend]) for b, t in times.items() if backend in t and b not in out]
            model = fit([*own, *shared], timed_layer(config), device)
            for batch in out:
                if backend in times[batch] and (predicted := model.predict(batch)) is not None:
                    found[batch][backend] = predicted
    return found


def choices(order: Sequence[str], predicted: Mapping[str, Prediction]) -> dict[str, str]:
    """Return what each of ``WAYS`` chooses; ``order`` is that of the rules."""
    shortest = min(predicted, key=lambda name: predicted[name].time_us)
    best = predicted[shortest]

    def ties(name: str) -> bool:
        other = predicted[name]
        apart = math.hypot(best.time_us * best.margin, other.time_us * other.margin)
        return name == shortest or other.time_us - best.time_us <= max(apart, TIE * best.time_us)

    able = [name for name in order if name in predicted]
    return dict(zip(WAYS, (shortest, next(filter(ties, able)), able[0]), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--measurements", type=Path, default=PACKAGED, metavar="FILE", help="default: the packaged ones"
    )
    known, device = measured(parser.parse_args().measurements), lookup("h200")
    drawn = {point.key: point.kind for point in points(LAYERS, False) if not point.kind.startswith("tier")}
    errors: dict[str, list[float]] = {}
    regrets: dict[str, dict[str, list[float]]] = {}
    for name, config in LAYERS.items():
        ranked = select(config, device).candidates
        order = {
            phase: [each.backend for each in sorted(ranked, key=lambda each: each.phases[phase].rank or 1 << 30)]
            for phase in config.phases
        }
        for seed in range(SEEDS):
            for batch, predicted in left_out(name, known, device, seed).items():
                kind = drawn.get((name, str(batch)))
                if kind is None:
                    continue
                times = known[name][batch]
                off = [abs(math.log(each.time_us / times[backend])) for backend, each in predicted.items()]
                errors.setdefault(kind, []).extend(off)
                if len(times) < 2 or set(predicted) != set(times):
                    continue
                phase = "decode" if phase_kind(config, batch) == "decode" else "prefill"
                for way, backend in choices(order[phase], predicted).items():
                    of_kind = regrets.setdefault(kind, {way: [] for way in WAYS})
                    of_kind[way].append(times[backend] / min(times.values()))
    for kind in (*errors, "all"):
        off = errors.get(kind) or [each for of_kind in errors.values() for each in of_kind]
        each = regrets.get(kind) or {way: [r for of in regrets.values() for r in of[way]] for way in WAYS}
        low, high = (f"{statistics.quantiles(off, n=10)[i]:.1%}" for i in (4, 8))
        told = ", ".join(f"{way} {geomean(values):.4f}" for way, values in each.items())
        count = len(each[WAYS[0]]) // SEEDS
        print(f"{kind:8s} {len(off) // SEEDS:4d} times, error {low} median, {high} p90; {count:3d} batches: {told}")


if __name__ == "__main__":
    main()
