"""How well times of one GPU say those of another with the same multiprocessors, on the published tables.

Each kernel of each layer that ``aiconfigurator-core`` has of both GPUs: measured times that are scaled, and times that
a model of 24 batches predicts and that are scaled, both against what the other GPU's table says. The tables' L2 is
warm: bytes count as the memory's where they do not fit into half of the L2 (25 MB). Margins are counted over batches
that read more than half of their bytes from memory, as all packaged times do.

    python research/bench_scaled_times.py h200 h100 --skip 120

The constants of ``attn_select.times.scaled`` were found on the first 120 layers of each phase (seed 6): ``--skip``
leaves those out.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator, Sequence

from bench_times_model import LEAST, Times, read

from attn_select.machine.device import Device, lookup
from attn_select.times.batch_shape import BatchShape
from attn_select.times.scaled import SCALED_MARGIN, can_scale, scaled_us
from attn_select.times.terms import phase_work
from attn_select.times.timed_layer import TimedLayer
from attn_select_measure.fitting.fit import fit
from attn_select_measure.fitting.points import farthest_first

L2_BYTES = 25e6
KNOWN = 24


def memory_bytes(layer: TimedLayer, decode: bool, device: Device, batch: BatchShape) -> tuple[float, bool]:
    """Return the bytes that a step moves to and from memory where as much as fits stays in the L2, and whether those
    are more than half of all."""
    assert device.sm_count is not None
    features = phase_work(layer.config, decode, device.sm_count).features(batch.groups, L2_BYTES)
    return features[-1], features[-1] > features[1] / 2


def both(one: dict[str, Times], other: dict[str, Times]) -> Iterator[tuple[str, list[BatchShape]]]:
    """Yield the kernels that both GPUs have enough times of, and the batches that both have."""
    for kernel in sorted(one.keys() & other.keys()):
        batches = sorted(one[kernel].keys() & other[kernel].keys(), key=str)
        if len(batches) >= LEAST:
            yield kernel, batches


def quantiles(errors: Sequence[float]) -> str:
    ordered = sorted(errors)
    return "  ".join(f"p{share:.0%} {ordered[int(share * (len(ordered) - 1))]:.1%}" for share in (0.5, 0.9, 0.95))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", help="GPU that is scaled from")
    parser.add_argument("other", help="GPU that is scaled to")
    parser.add_argument("--skip", type=int, default=0, help="layers of each phase that are left out")
    parser.add_argument("--layers", type=int, default=150, help="layers of each phase that are looked at")
    parser.add_argument("--seed", type=int, default=6)
    args = parser.parse_args()
    here, there = lookup(args.measured), lookup(args.other)
    if not can_scale(here, there):
        parser.error(f"{here.name} does not scale to {there.name}")
    measured, wanted = read(here), read(there)
    for phase in ("decode", "prefill"):
        layers = sorted((key for key in measured if key[1] == phase and key in wanted), key=str)
        random.Random(args.seed).shuffle(layers)
        drawn = random.Random(args.seed)
        scaled: list[float] = []
        predicted: list[float] = []
        inside: dict[str, list[bool]] = {"measured": [], "predicted": []}
        regrets: list[float] = []
        for key in layers[args.skip : args.skip + args.layers]:
            layer, decode = key[0], phase == "decode"
            guessed: dict[BatchShape, dict[str, float]] = {}
            for kernel, batches in both(measured[key], wanted[key]):
                times, truth = measured[key][kernel], wanted[key][kernel]
                model = fit([(batch, times[batch]) for batch in farthest_first(batches, KNOWN)], layer, here)
                for batch in drawn.sample(batches, 20):
                    moved, cold = memory_bytes(layer, decode, here, batch)
                    scaled.append(abs(scaled_us(times[batch], moved, here, there) / truth[batch] - 1))
                    one = model.predict(batch)
                    assert one is not None
                    predicted.append(abs(scaled_us(one.time_us, moved, here, there) / truth[batch] - 1))
                    if cold:
                        inside["measured"].append(scaled[-1] <= SCALED_MARGIN)
                        inside["predicted"].append(predicted[-1] <= math.hypot(one.margin, SCALED_MARGIN))
                for batch in batches:
                    moved, _ = memory_bytes(layer, decode, here, batch)
                    guessed.setdefault(batch, {})[kernel] = scaled_us(times[batch], moved, here, there)
            for batch, each in guessed.items():
                if len(each) > 1:
                    truths = {kernel: wanted[key][kernel][batch] for kernel in each}
                    regrets.append(truths[min(each, key=each.__getitem__)] / min(truths.values()))
        for name, errors in (("measured", scaled), ("predicted", predicted)):
            share = f"in the margin {statistics.fmean(inside[name]):.1%} of {len(inside[name])}"
            print(f"{phase:8} {name:9}, scaled  {quantiles(errors)} of {len(errors)}  {share}")
        mean = math.exp(statistics.fmean(map(math.log, regrets)))
        print(f"{phase:8} choice  {mean:.4f}, worst {max(regrets):.2f}, of {len(regrets)} batches", flush=True)


if __name__ == "__main__":
    main()
