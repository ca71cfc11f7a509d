"""Times FlashAttention 3 and 4, cuDNN and Triton side by side, through the layers that engines call.

    python research/bench_libraries.py --with vllm==0.26.0

A library that is not installed, or does not take a batch, has a dash, and its reason stands below the table.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from attn_select import AttentionConfig
from attn_select.decide.selector import environment_for
from attn_select.machine.detection import detect_device
from attn_select.machine.environment import parse_pins
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select_measure.benching import Bench
from attn_select_measure.timed import Candidate, Timed

PLAIN = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
HEAD_64 = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=64)
ROWS: tuple[tuple[str, AttentionConfig, str], ...] = (
    ("prefill", PLAIN, "4q4k"),
    ("prefill, short", PLAIN, "16q512"),
    ("prefill, long", PLAIN, "q16k"),
    ("extend", PLAIN, "q512s17k"),
    ("prefill, head size 64", HEAD_64, "4q4k"),
    ("decode", PLAIN, "64q1s4k"),
    ("decode, long", PLAIN, "8q1s16k"),
    ("decode, many", PLAIN, "256q1s1k"),
)
LIBRARIES: Mapping[str, tuple[str, str]] = {
    "FA3": ("FLASH_ATTN", "version = 3"),
    "FA4": ("FLASH_ATTN", "version = 4"),
    "cuDNN": ("CUDNN_ATTN", ""),
    "Triton": ("TRITON_ATTN", ""),
}
"""The columns: each a backend and its options."""


def candidate(label: str, config: AttentionConfig, batch: BatchShape, bench: Bench, folder: Path) -> Candidate:
    """Return the decision for one column, or why there is none."""
    backend, options = LIBRARIES[label]
    rules = folder / f"{label}.toml"
    rules.write_text(f"version = 1\n[backends.{backend}]\n{options}\n", encoding="utf-8")
    bench.rules = str(rules)
    found = bench.candidates(config, batch, [backend])
    return replace(found[0], name=label) if found else Candidate(label, failure=f"no {backend} for this layer")


def text(timed: Timed, base: Timed) -> str:
    """Return one cell: the median, and the first column's time over it, paired by rounds."""
    if timed.failure is not None:
        return "-"
    how = "" if timed.method == "graph" else " eager"
    if base.failure is not None or timed is base:
        return f"{timed.time_us:.1f}{how}"
    share = statistics.median(one / own for one, own in zip(base.samples_us, timed.samples_us, strict=False))
    return f"{timed.time_us:.1f} ({share:.2f}){how}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="pins", action="append", default=[], metavar="NAME==VERSION")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each row (default: 12)")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no new row after this long (default: 120)")
    arguments = parser.parse_args()
    began = time.monotonic()
    bench = Bench(environment_for(detect_device().device, parse_pins(arguments.pins)), rounds=arguments.rounds)
    failures: dict[str, None] = {}
    print(f"{bench.machine.gpu}: us of one layer's step, and the speed as a share of {next(iter(LIBRARIES))}'s\n")
    print("| step | batch |", " | ".join(LIBRARIES), "|\n|", " | ".join(["---"] * (len(LIBRARIES) + 2)), "|")
    with tempfile.TemporaryDirectory() as folder:
        for name, config, batch in ROWS:
            if time.monotonic() - began > arguments.seconds:
                break
            shape = parse_batch_shape(batch)
            candidates = [candidate(label, config, shape, bench, Path(folder)) for label in LIBRARIES]
            found = bench.measure(config, shape, candidates, seconds=3.0, compare=False)
            timed = {each.backend: each for each in found.timed}
            base = timed[next(iter(LIBRARIES))]
            print(f"| {name} | {batch} |", " | ".join(text(timed[label], base) for label in LIBRARIES), "|", flush=True)
            failures |= {f"{name}, {label}: {timed[label].failure}": None for label in timed if timed[label].failure}
    print("", *failures, sep="\n")


if __name__ == "__main__":
    main()
