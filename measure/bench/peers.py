"""How fast our kernels are beside each other backend, in the geometric mean over a survey's workloads.

    python measure/bench/peers.py measure/bench/data/judge_nvidia-h200.jsonl.xz
    python measure/bench/peers.py NEW.jsonl.xz --before OLD.jsonl.xz
    python measure/bench/peers.py FILE --lines    # rows of docs/results/triton.jsonl

Prints a row for each family of layers and peer: the peer's time over that of our own backend of the layer, by phase.
``--before`` compares the times of our backends with those of another file instead, on the workloads that both have.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean

from attn_select.layer.layer_config import layer_of
from attn_select.times.prediction import family_of
from attn_select_measure.survey_records import PAIR, Record, read_survey, times_of

OWN = ("TRITON_ATTN", "TRITON_MLA", "TRITON_MLA_SPARSE")
OURS = (*OWN, "PAGED_ATTENTION")
PHASES = ("decode", "uneven", "spread", "prefill", "chunk", "mixed")
BEST = "best other"

Ratios = dict[str, dict[str, list[float]]]


def ratios(records: Iterable[Record], before: Mapping[tuple[int, int], Record] | None) -> Ratios:
    """Return ratios by row of the table and phase."""
    found: Ratios = defaultdict(lambda: defaultdict(list))
    for record in records:
        here = times_of(record)
        own = next((name for name in OWN if name in here), None)
        if own is None:
            continue
        if before is not None:
            there = times_of(before.get((record["seed"], record["number"]), {"timed": []}))
            if own in there:
                found[own][record["phase"]].append(here[own] / there[own])
            continue
        others = {name: us for name, us in here.items() if name not in OURS}
        alone = {name: us for name, us in others.items() if PAIR not in name}
        for name, us in {**alone, BEST: min(others.values())}.items() if others else ():
            found[f"{family_of(layer_of(record['config']))}: {name}"][record["phase"]].append(us / here[own])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--lines", action="store_true", help="print rows of a file of docs/results instead of a table")
    arguments = parser.parse_args()
    for path in filter(None, (arguments.file, arguments.before)):
        if not path.is_file():
            parser.error(f"{path}: expected a survey's file, found none")
    before = None
    if arguments.before:
        before = {(each["seed"], each["number"]): each for each in read_survey(arguments.before)}
    rows = {
        row: {phase: f"{geometric_mean(found):.2f} ({len(found)})" for phase in PHASES if (found := by_phase[phase])}
        for row, by_phase in sorted(ratios(read_survey(arguments.file), before).items())
    }
    if arguments.lines:
        for row, cells in rows.items():
            print(json.dumps({"case": row, **cells}))
        return
    print(f"| | {' | '.join(PHASES)} |\n|{' --- |' * (len(PHASES) + 1)}")
    for row, cells in rows.items():
        print(f"| {row} | {' | '.join(cells.get(phase, '–') for phase in PHASES)} |")


if __name__ == "__main__":
    main()
