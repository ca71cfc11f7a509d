"""Times the Triton backends beside every other backend of a layer, and prints each row's share of the best.

    python research/peer_table.py --compile --with vllm==0.26.0 --out $OUT
    python research/peer_table.py --rows 'FP8|MLA' --rounds 40

The rows are ``peer_table.toml``'s. A share is the best other backend's time over ours, as medians of the same rounds;
behind it stand the quartiles of the share of each round. ``OUT/peer_table.jsonl`` has every round. FLEX_ATTENTION,
which compiles for each shape, and torch's backends are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from attn_select import AttentionConfig
from attn_select.decide.selector import environment_for
from attn_select.machine.detection import detect_device
from attn_select.machine.environment import parse_pins
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select_measure.benching import Bench
from attn_select_measure.timed import Timed, TimedBatch

OURS = ("TRITON_ATTN", "TRITON_MLA")
SLOW = ("FLEX_ATTENTION", "PAGED_ATTENTION", "TORCH_SDPA", "TORCH_MLA")
COMPILE_SECONDS = 120
PROCESSES = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: what it is an example of, the layer and its name, the batch, and the share aimed at."""

    work: str
    layer: str
    config: AttentionConfig
    batch: BatchShape
    goal: float


def table() -> list[Row]:
    """Return the rows of ``peer_table.toml``."""
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    layers = {name: AttentionConfig(**given) for name, given in data["layers"].items()}
    return [
        Row(each["work"], each["layer"], layers[each["layer"]], parse_batch_shape(each["batch"]), each["goal"])
        for each in data["rows"]
    ]


def sides(found: TimedBatch) -> tuple[Timed | None, Timed | None]:
    """Return our backend and the fastest other one. Both have a time; None where there is none."""
    timed = [each for each in found.timed if each.failure is None]
    ours = next((each for each in timed if each.backend in OURS), None)
    return ours, next((each for each in timed if each.backend not in OURS), None)


def share_text(row: Row, found: TimedBatch) -> str:
    """Return one row of the printed table."""
    ours, best = sides(found)
    start = f"{row.work:38s} {row.batch!s:16s}"
    if ours is None or best is None:
        failures = "; ".join(f"{each.backend}: {each.failure}" for each in found.timed if each.failure is not None)
        times = ", ".join(f"{each.backend} {each.time_us:.1f}" for each in (ours, best) if each is not None)
        return f"{start} {times or 'no time'} ({failures or 'nothing to compare with'})"
    shares = [other / own for other, own in zip(best.samples_us, ours.samples_us, strict=False)]
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive") if len(shares) > 1 else shares * 3
    share = best.time_us / ours.time_us
    mark = " " if share >= row.goal else "<"
    wrong = "" if ours.exact else f" ERROR {ours.error:.1e}"
    return (
        f"{start} {best.time_us:8.1f} {ours.time_us:8.1f}  {share:.2f} {mark} {row.goal:.2f}  "
        f"[{low:.2f}, {high:.2f}]  {best.backend}{wrong}"
    )


def raw(bench: Bench, row: Row, found: TimedBatch) -> str:
    """Return everything about one row as a line of JSON: the samples of every round, and what failed."""
    timed = [
        {**dataclasses.asdict(each), "samples_us": [round(us, 3) for us in each.samples_us]} for each in found.timed
    ]
    data = {"work": row.work, "layer": row.layer, "batch": str(row.batch), "gpu": bench.machine.gpu, "timed": timed}
    return json.dumps({**data, "config": row.config.model_dump(exclude_defaults=True)}) + "\n"


def compile_all(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Run every row once, in a few processes side by side, so that kernels are compiled before anything is timed."""
    own = [word for pin in arguments.pins for word in ("--with", pin)]
    began, running = time.monotonic(), []
    for index in range(PROCESSES):
        names = "|".join(f"^{re.escape(row.work)}$" for row in rows[index::PROCESSES])
        if names:
            command = [sys.executable, __file__, *own, "--rounds", "1", "--seconds", "60", "--rows", names]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=dict(os.environ)))
    for process in running:
        try:
            process.wait(max(1.0, COMPILE_SECONDS - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="pins", action="append", default=[], metavar="NAME==VERSION")
    parser.add_argument("--rows", default=".", metavar="REGEX", help="only rows whose work matches")
    parser.add_argument("--rounds", type=int, default=15, help="most rounds of a row (default: 15)")
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no new row after this long (default: 90)")
    parser.add_argument("--compile", action="store_true", help="compile first, in parallel")
    parser.add_argument("--compile-only", action="store_true", help="compile in parallel, and measure nothing")
    parser.add_argument("--compare", action="store_true", help="compare with the oracle too, which takes longer")
    parser.add_argument("--out", type=Path, help="folder for peer_table.jsonl (default: none is written)")
    arguments = parser.parse_args()
    rows = [row for row in table() if re.search(arguments.rows, row.work)]
    if arguments.compile or arguments.compile_only:
        compile_all(arguments, rows)
        if arguments.compile_only:
            return
    began = time.monotonic()
    bench = Bench(environment_for(detect_device().device, parse_pins(arguments.pins)), rounds=arguments.rounds)
    printed = []
    for row in rows:
        if time.monotonic() - began > arguments.seconds:
            printed.append(f"{row.work:38s} {row.batch!s:16s} not run: out of time")
            continue
        candidates = [each for each in bench.candidates(row.config, row.batch) if each.name not in SLOW]
        found = bench.measure(row.config, row.batch, candidates, seconds=3.0, compare=arguments.compare)
        printed.append(share_text(row, found))
        print(printed[-1], flush=True)
        if arguments.out is not None:
            with (arguments.out / "peer_table.jsonl").open("a", encoding="utf-8") as file:
                file.write(raw(bench, row, found))
    print(f"\n{bench.machine.gpu}, us of one layer's step; share of the best other backend, goal, quartiles")
    print("\n".join(printed))


if __name__ == "__main__":
    main()
