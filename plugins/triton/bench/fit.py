"""Fit the costs and splits of ``tuning.toml`` to measured times, and say how well they choose.

    python plugins/triton/bench/fit.py [--gpu a100] [--check | --write]

``measured/times.jsonl`` has a line per batch: the times of the ways to run a prefill (``bench_triton_layer.py --what
paths``), of the splits of an MLA decode (``bench_triton_mla.py``), or of a decode by the keys of its pieces. Regret is
the time of what would be chosen over that of the fastest. A number is changed only where that makes the worst regret
less by a hundredth: of numbers that choose alike, those stay that were used before. ``--check`` changes nothing and
exits with 1 where the fit would; ``--gpu`` prints what is chosen for some batches on a GPU, and whether that was
measured.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attn_select.machine.device import lookup
from attn_select_triton import tuning
from attn_select_triton.kernels.launch import decode_launch, num_splits_for
from attn_select_triton.runtime.schedule import decode_times, prefill_way, prefill_work, warp_splits
from attn_select_triton.tuning import Cost, DecodeSplits, Gpu, LatentSplits, Tile, prefill_cost, way_cost

TIMES = Path(__file__).with_name("measured") / "times.jsonl"
TUNING = Path(tuning.__file__).with_suffix(".toml")
REFERENCE = Gpu((9, 0), 132, 3350)
STEPS = (0.8, 0.9, 0.95, 1.05, 1.1, 1.25)
WORTH = 0.01
"""A number is changed where the worst regret falls by so much."""
Costs = dict[str, Cost]


def read() -> list[dict[str, Any]]:
    """Return the measured batches."""
    return [json.loads(line) for line in TIMES.read_text(encoding="utf-8").splitlines()]


def predicted(line: dict[str, Any], costs: Costs) -> dict[str, float]:
    """Return the predicted time of each way of a batch, in us."""
    heads = (line["heads"][0], line["heads"][1])
    lens = [[line[name]] * line["requests"] for name in ("query_len", "seq_len")]
    work = prefill_work(*lens, heads=heads, causal=True, window=0)
    splits = {"warps_split": warp_splits(*lens, heads=heads, gpu=REFERENCE, room=line.get("room", 0))}
    return {
        way: prefill_cost(costs[way], work, heads=heads, gpu=REFERENCE, splits=splits.get(way, 1)) / 1e3
        for way in line["us"]
    }


def regrets(lines: Sequence[dict[str, Any]], costs: Costs) -> list[float]:
    """Return the regret of each batch that has ways."""
    found = []
    for line in lines:
        if line["kind"] == "ways":
            times = predicted(line, costs)
            found.append(line["us"][min(times, key=lambda way: times[way])] / min(line["us"].values()))
    return found


def split_regrets(lines: Sequence[dict[str, Any]], by: LatentSplits) -> list[float]:
    """Return the regret of each MLA decode; a choice that was not measured counts as twice the best."""
    found = []
    for line in lines:
        if line["kind"] == "latents":
            chosen = str(by.of_equal(line["programs"], line["keys"], REFERENCE.sms))
            best = min(line["us"].values())
            found.append(line["us"].get(chosen, 2 * best) / best)
    return found


def decode_regrets(lines: Sequence[dict[str, Any]], by: DecodeSplits) -> list[float]:
    """Return the regret of each decode, among the sizes of pieces that were measured."""
    found = []
    for line in lines:
        if line["kind"] == "decodes":
            lens = np.array([keys for count, keys in line["lens"] for _ in range(count)])
            sizes = np.array([int(keys) for keys in line["us"]])
            gpu, tile = lookup(line["gpu"].split()[-1]), Tile(*line["tile"])
            times, _ = decode_times(
                lens, sizes, by, units=line["units"], gpu=Gpu((9, 0), gpu.sm_count or 1, gpu.bandwidth_gbps),
                launch=tile, key_bytes=line["key_bytes"],
            )  # fmt: skip
            found.append(line["us"][str(sizes[int(times.argmin())])] / min(line["us"].values()))
    return found


def judged(found: Sequence[float]) -> float:
    """Return what a fit makes less: the worst regret, and a little of all of them."""
    return max(found) + 0.01 * statistics.mean(found)


def descended(value: Any, names: Sequence[str], judge: Callable[[Any], float], whole: bool) -> Any:
    """Return ``value`` with those of its numbers changed that lower the judgement, one after the other."""
    best = judge(value)
    for name in names:
        number = getattr(value, name)
        tried = [number - 1, number + 1] if whole else [float(f"{number * step:.3g}") for step in STEPS]
        for other in tried:
            changed = replace(value, **{name: other})
            found = judge(changed)
            if found < best - WORTH:
                best, value = found, changed
    return value


def fitted(
    lines: Sequence[dict[str, Any]], costs: Costs, by: LatentSplits, decodes: DecodeSplits
) -> tuple[Costs, LatentSplits, DecodeSplits]:
    """Return the costs and splits with what the times change about them."""
    for way in costs:
        names = [
            name for name in ("tile", "border", "alone", "two", "key", "row", "fixed") if getattr(costs[way], name)
        ]
        kept = costs
        found = descended(
            costs[way], names, lambda cost, way=way, kept=kept: judged(regrets(lines, {**kept, way: cost})), False
        )
        costs = {**costs, way: found}
    by = descended(by, ("program", "merge"), lambda by: judged(split_regrets(lines, by)), True)
    of_decodes = ("bandwidth", "idle", "tile_us", "key_us", "start_us", "merge_us", "beside")
    return costs, by, descended(decodes, of_decodes, lambda decodes: judged(decode_regrets(lines, decodes)), False)


def report(lines: Sequence[dict[str, Any]], costs: Costs, by: LatentSplits, decodes: DecodeSplits) -> None:
    """Print how well numbers predict and choose."""
    print(f"{'way':10s} {'batches':>7s} {'typical error of the time':>26s}")
    for way in costs:
        errors = [
            math.log(predicted(line, costs)[way] / line["us"][way])
            for line in lines
            if line["kind"] == "ways" and way in line["us"]
        ]
        text = f"{math.exp(statistics.median(map(abs, errors))) - 1:.0%}" if errors else "no times"
        print(f"{way:10s} {len(errors):7d} {text:>26s}")
    for name, found in (
        ("ways", regrets(lines, costs)),
        ("splits of latents", split_regrets(lines, by)),
        ("pieces of decodes", decode_regrets(lines, decodes)),
    ):
        mean, worst = statistics.mean(found), max(found)
        print(f"{name}: {len(found)} batches, the chosen over the fastest {mean:.3f}, at worst {worst:.3f}")
    print(f"measured on {', '.join(sorted({line['gpu'] for line in lines}))}")


def chosen_for(name: str) -> None:
    """Print what is chosen for some batches on a GPU.

    Raises:
        UnknownNameError: there is no such GPU.
        ValueError: its multiprocessors are not known.
    """
    import torch

    device = lookup(name)
    if device.compute_capability is None or device.sm_count is None:
        raise ValueError(f"{name!r} names no GPU whose multiprocessors are known; name a product, such as a100")
    gpu = Gpu(device.compute_capability, device.sm_count, device.bandwidth_gbps)
    where = "measured there" if tuning.measured(gpu.capability) else "never measured there"
    print(
        f"{device.full_name}: {gpu.sms} SMs, {gpu.shared_kib} KiB of shared memory, {gpu.bandwidth_gbps} GB/s: {where}"
    )
    for requests, keys in ((1, 1024), (1, 131072), (8, 16384), (64, 4096), (256, 1024)):
        programs = requests * 8
        tile = decode_launch(gpu.capability, 4, 128, torch.bfloat16, torch.bfloat16, programs / gpu.sms)
        text = f"{tile.block_m} x {tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"
        print(f"decode B{requests} S{keys}: {num_splits_for(programs, keys, gpu, tile, 512)} splits, tiles {text}")
    ways: dict[tuning.Way, Cost] = {way: way_cost(way) for way in ("pages", "gathered", "split")}
    if gpu.capability == REFERENCE.capability:
        ways |= {"warps": way_cost("warps"), "warps_split": way_cost("warps_split")}
    for requests, query_len, keys in ((1, 64, 16384), (1, 512, 16384), (16, 512, 512), (4, 4096, 4096)):
        lens = [query_len] * requests, [keys] * requests
        way = prefill_way(ways, *lens, heads=(32, 8), gpu=gpu, causal=True, window=0, room=4096)
        print(f"prefill B{requests} q{query_len} S{keys}: {way}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Report, check or write the fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", metavar="NAME", help="print what is chosen on a GPU of attn-select's list, and end")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the fit would change a number")
    parser.add_argument("--write", action="store_true", help="write the changed numbers into tuning.toml")
    asked = parser.parse_args(arguments)
    if asked.gpu:
        chosen_for(asked.gpu)
        return
    lines = read()
    before = {
        name: way_cost(name)
        for name in ("pages", "gathered", "split", "split_fp8", "warps", "warps_split", "gathered_warps")
    }
    by, decodes = tuning.latent_splits(), tuning.decode_splits()
    costs, splits, pieces = fitted(lines, before, by, decodes)
    report(lines, costs, splits, pieces)
    fits: list[tuple[str, Any, Any]] = [(way, before[way], costs[way]) for way in costs]
    fits += [("", by, splits), ("", decodes, pieces)]
    changes = [
        (f"{section}.{name}" if section else name, getattr(old, name), getattr(new, name))
        for section, old, new in [
            *((way, before[way], costs[way]) for way in costs),
            ("", by, splits),
            ("", decodes, pieces),
        ]
        for name in old.__slots__
        if getattr(old, name) != getattr(new, name)
    ]
    for name, old, new in changes:
        print(f"{name}: {old} -> {new}")
    if not changes:
        print("nothing to change")
    elif asked.check:
        sys.exit(1)
    elif asked.write:
        write(changes)


def write(changes: Sequence[tuple[str, Any, Any]]) -> None:
    """Replace numbers of ``tuning.toml``."""
    text = TUNING.read_text(encoding="utf-8")
    for name, old, new in changes:
        way, _, number = name.rpartition(".")
        pattern = rf"(?m)^({re.escape(way)} = \{{.*\b{number} = ){old}\b" if way else rf"(?m)^({number} = ){old}\b"
        text, count = re.subn(pattern, rf"\g<1>{new}", text)
        assert count == 1, name
    TUNING.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
