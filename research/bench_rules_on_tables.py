"""What the packaged rules cost on the published tables of an installed aiconfigurator-core.

For each GPU and phase, over layers for which the tables have two or more kernels of backends here, the chosen one
among them: its time over the best kernel's, batch by batch. First within one table, where times compare. Then across
tables of several engines, which were timed by different scripts. How much that alone does is seen where one kernel is
in the tables of two engines: its times in one over those in the other come last.

    python research/bench_rules_on_tables.py a100 l40s h100 h200 b200 rtx-pro-6000-server
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from attn_select import select
from attn_select.layer.config import Phase
from attn_select.machine.device import Device, lookup
from attn_select.times.measurement import Measurement
from attn_select.times.timed_layer import TimedLayer, layer_from_dict
from attn_select_measure import published_tables as tables

Kernel = tuple[str, str]
ACROSS = "across engines"


def read(device: Device) -> Iterable[Measurement]:
    folder, version = tables.installed()
    for framework, engine_version, path in tables.table_files(folder):
        gpu = tables.gpu_of(path)
        if gpu is not None and gpu.name == device.name:
            yield from tables.read_table(path, framework, engine_version, version).measurements


def chosen(layer: TimedLayer, device: Device, phase: Phase) -> Kernel | None:
    """The backend and kernel that the packaged rules choose, every library counted as installed."""
    selection = select(layer.config, device)
    plan, spec = selection.plans.get(phase), selection.backends.get(phase)
    return None if plan is None or spec is None else (spec.name, plan.kernel.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="+", metavar="GPU")
    args = parser.parse_args()
    for name in args.gpus:
        device = lookup(name)
        within: dict[tuple[TimedLayer, str, str], dict[str, dict[Kernel, float]]] = {}
        twice: dict[tuple[str, Kernel, str], dict[tuple[TimedLayer, str], dict[str, float]]] = {}
        layers: dict[str, TimedLayer] = {}
        for one in read(device):
            layer = layers.setdefault(str(one.config), layer_from_dict(one.config))
            ((phase, kernel),) = one.kernel.items()
            engine, key = one.source.split(" ", 2)[2], (one.backend, kernel)
            for source in (engine, ACROSS):
                times = within.setdefault((layer, phase, source), {}).setdefault(one.batch, {})
                times[key] = min(times.get(key, math.inf), one.time_us)
            same = twice.setdefault((phase, key, kind_of(layer)), {})
            same.setdefault((layer, one.batch), {})[engine] = one.time_us
        ratios: dict[tuple[str, str, str, Kernel, Kernel], list[float]] = defaultdict(list)
        regrets: dict[tuple[str, str, str, Kernel], list[float]] = defaultdict(list)
        for (layer, phase, source), batches in within.items():
            pick = None
            for times in batches.values():
                if len(times) < 2:
                    continue
                pick = pick or chosen(layer, device, phase)  # type: ignore[arg-type]
                if pick not in times:
                    continue
                regrets[phase, source, kind_of(layer), pick].append(times[pick] / min(times.values()))
                for other in set(times) - {pick}:
                    ratios[phase, source, kind_of(layer), pick, other].append(times[pick] / times[other])
        if not regrets:
            print(f"{name}: no layer with two kernels of backends here")
        for (phase, source, kind, pick), found in sorted(regrets.items()):
            mean = math.exp(statistics.fmean(map(math.log, found)))
            print(
                f"{name} {phase}, {kind}, {source}: {' '.join(pick)} chosen, regret {mean:.3f} of {len(found)} batches"
            )
            for (*same_as, other), each in sorted(ratios.items()):
                if tuple(same_as) == (phase, source, kind, pick):
                    print(f"    over {' '.join(other)}: {spread(each)}")
        for (phase, key, kind), by_batch in sorted(twice.items()):
            both = [times for times in by_batch.values() if len(times) == 2]
            if both:
                engines = sorted(both[0])
                found = [times[engines[0]] / times[engines[1]] for times in both if sorted(times) == engines]
                said = f"{' '.join(key)} in {engines[0]} over {engines[1]}"
                print(
                    f"{name} {phase}, {kind}, one kernel: {said}: {spread(found)} of {len(found)} batches", flush=True
                )


def kind_of(layer: TimedLayer) -> str:
    """What kind of layer it is in the summary: by the dtype of its cache and whether it has a window."""
    fields = layer.to_dict()
    return f"{fields.get('kv_cache_dtype', '16 bit')}{', window' if 'sliding_window' in fields else ''}"


def spread(ratios: Sequence[float]) -> str:
    ordered = sorted(ratios)
    tenth, median, ninth = (ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    return f"median {median:.2f} (p10 {tenth:.2f}, p90 {ninth:.2f})"


if __name__ == "__main__":
    main()
