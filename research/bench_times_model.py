"""How well the model of times does on the published tables of an installed aiconfigurator-core.

For each GPU: the error of a time that was left out of the fit, for all kernels of the tables and for those that are
kernels of a backend here; the error of all other times when a fit has 24 or 48 batches per kernel, chosen farthest
first; and the regret of choosing by predictions among all kernels that the tables have for a layer. Kernels of several
engines are compared with each other for that: as a test of the model, not as a statement about the kernels.

    python research/bench_times_model.py h100 h200 b200 l40s a100 rtx-pro-6000-server
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

from attn_select.machine.device import Device, lookup
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.timed_layer import TimedLayer, layer_from_dict
from attn_select_measure import published_tables as tables
from attn_select_measure.fitting.fit import fit, left_out_errors
from attn_select_measure.fitting.points import farthest_first

Times = dict[BatchShape, float]
SIZES = (24, 48)
LEAST = 60
"""Batches that a kernel's table of one layer and phase must have to be counted."""


def everything(framework: str, names: Sequence[str]) -> list[tables.Label]:
    """Every label of a framework, as a backend of its own."""
    return [tables.Label(framework, name, "", framework, name) for name in names]


def read(device: Device) -> dict[tuple[TimedLayer, str], dict[str, Times]]:
    """Every kernel's times on a GPU, by layer and phase."""
    folder, version = tables.installed()
    names = {label.label for label in tables.labels()}
    found: dict[tuple[TimedLayer, str], dict[str, Times]] = defaultdict(lambda: defaultdict(dict))
    layers: dict[str, TimedLayer] = {}
    for framework, engine_version, path in tables.table_files(folder):
        gpu = tables.gpu_of(path)
        if gpu is None or gpu.name != device.name:
            continue
        table = tables.read_table(path, framework, engine_version, version, everything(framework, sorted(names)))
        for one in table.measurements:
            layer = layers.setdefault(str(one.config), layer_from_dict(one.config))
            ((phase, kernel),) = one.kernel.items()
            found[layer, phase][f"{framework} {engine_version} {kernel}"][parse_batch_shape(one.batch)] = one.time_us
    return found


def is_ours(kernel: str, device: Device) -> bool:
    """Whether a kernel of the tables is one of a backend here."""
    framework, _, label = kernel.split()
    meaning = tables.meaning_of(tables.labels(), framework, label, device)
    return meaning is not None and bool(meaning.backend)


def quantiles(errors: Sequence[float]) -> str:
    ordered = sorted(errors)
    median, ninth = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.9))
    return f"median {median:6.2%}  p90 {ninth:6.2%}"


def error(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="+", metavar="GPU")
    parser.add_argument("--layers", type=int, default=12, help="layers per GPU and phase, drawn by the seed")
    parser.add_argument("--left-out", type=int, default=8, help="batches left out of each kernel's table, one by one")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in args.gpus:
        device = lookup(name)
        by_layer = read(device)
        drawn = random.Random(args.seed)
        for phase in ("decode", "prefill"):
            layers = [layer for layer, its_phase in by_layer if its_phase == phase]
            layers.sort(key=str)
            drawn.shuffle(layers)
            left_out: dict[bool, list[float]] = {False: [], True: []}
            held_out: dict[int, list[float]] = {size: [] for size in SIZES}
            regrets: dict[int, list[float]] = {size: [] for size in SIZES}
            inside: dict[int, list[bool]] = {size: [] for size in SIZES}
            fit_ms: dict[int, list[float]] = {size: [] for size in SIZES}
            predict_us: dict[int, list[float]] = {size: [] for size in SIZES}
            count = 0
            for layer in layers:
                kernels = {k: t for k, t in by_layer[layer, phase].items() if len(t) >= LEAST}
                if not kernels or count == args.layers:
                    continue
                count += 1
                for kernel, times in kernels.items():
                    without = drawn.sample(sorted(times, key=str), args.left_out)
                    left_out[is_ours(kernel, device)] += left_out_errors(times.items(), layer, device, without).values()
                for size in SIZES:
                    models = {}
                    for kernel, times in kernels.items():
                        chosen = farthest_first(list(times), size)
                        began = time.process_time()
                        models[kernel] = fit([(b, times[b]) for b in chosen], layer, device)
                        fit_ms[size].append(1e3 * (time.process_time() - began))
                        for batch in set(times) - set(chosen):
                            began = time.process_time()
                            predicted = models[kernel].predict(batch)
                            predict_us[size].append(1e6 * (time.process_time() - began))
                            assert predicted is not None
                            held_out[size].append(error(predicted.time_us, times[batch]))
                            inside[size].append(held_out[size][-1] <= predicted.margin)
                    common = set.intersection(*(set(times) for times in kernels.values()))
                    for batch in common if len(kernels) > 1 else ():
                        best = min(times[batch] for times in kernels.values())
                        taken = min(kernels, key=lambda k: models[k].predict(batch).time_us)  # type: ignore[union-attr]
                        regrets[size].append(kernels[taken][batch] / best)
            every = left_out[True] + left_out[False]
            print(f"{name:20} {phase:8} left out         {quantiles(every)}  of {len(every)} times, {count} layers")
            if left_out[True] and left_out[False]:
                print(
                    f"{name:20} {phase:8}   backends' own  {quantiles(left_out[True])}  of {len(left_out[True])} times"
                )
            for size in SIZES:
                line = f"{name:20} {phase:8} {size} batches known {quantiles(held_out[size])}"
                if regrets[size]:
                    line += f"  regret {math.exp(statistics.fmean(map(math.log, regrets[size]))):.4f}"
                print(f"{line}  in the margin {statistics.fmean(inside[size]):.1%}")
                fitted, predicted_in = statistics.median(fit_ms[size]), statistics.median(predict_us[size])
                took = f"fit {fitted:.0f} ms, predict {predicted_in:.0f} us of processor time"
                print(f"{name:20} {phase:8} {size} batches known {took}", flush=True)


if __name__ == "__main__":
    main()
