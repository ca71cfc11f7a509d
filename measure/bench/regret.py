"""What choices cost on a survey's workloads: the chosen backend's time over the best one's, in the geometric mean.

Run ``python measure/bench/regret.py RECORDS... --known FILE... [--times SURVEY]``. RECORDS are files of workloads that
the survey's fit did not see, ``--known`` the files that it was made from: they give the best single order and say which
kinds are new. A choice that was not timed, such as a pair, counts by the next one that was.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from attn_select import select
from attn_select.layer.layer_config import layer_of
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.prediction import family_of
from attn_select.times.workload import WeightedShape, Workload, phases_of
from attn_select_measure.survey_records import PAIR, Record, read_survey, times_of

OURS = {"attention": "TRITON_ATTN", "mla": "TRITON_MLA", "sparse_mla": "TRITON_MLA_SPARSE"}
LIBRARIES = {
    "attention": ("FLASH_ATTN", "FLASHINFER", "CUDNN_ATTN"),
    "mla": ("FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA"),
    "sparse_mla": ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE"),
}
Times = Mapping[str, float]
Rule = Callable[[Record, str, Times], str | None]


def by_order(orders: Mapping[str, Sequence[str]]) -> Rule:
    """Return what takes the first backend of a family's order that was timed."""
    return lambda record, family, times: next((name for name in orders[family] if name in times), None)


def by_choice(gpu: str, given: bool, times: str | bool) -> Rule:
    """Return what takes the backends that ``select`` chooses, with the workload or without one."""

    def chosen(record: Record, family: str, measured: Times) -> str | None:
        config, batch = layer_of(record["config"]), parse_batch_shape(record["batch"])
        workload = Workload("", (WeightedShape(batch, 1.0),)) if given else None
        selection = select(config, gpu, workload=workload, times=times)
        phases = phases_of(batch, config)
        names = [PAIR.join(dict.fromkeys(str(selection.selected[phase]) for phase in phases))]
        names += [candidate.backend for candidate in selection.ranked(phases)]
        return next((name for name in names if name in measured), None)

    return chosen


def best_orders(records: Sequence[Record]) -> dict[str, Sequence[str]]:
    """Return for each family the order of backends that would cost least on these workloads."""
    found: dict[str, Sequence[str]] = {}
    for family in OURS:
        mine = [times_of(record) for record in records if family_of(layer_of(record["config"])) == family]
        names = sorted({name for times in mine for name in times if PAIR not in name})
        found[family] = min(permutations(names), key=lambda order: _cost(order, mine), default=())
    return found


def _cost(order: Sequence[str], workloads: Sequence[Times]) -> float:
    costs = [
        math.log(next(times[name] for name in order if name in times) / min(times.values()))
        for times in workloads
        if any(name in times for name in order)
    ]
    return sum(costs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--known", nargs="+", type=Path, required=True, help="files that the survey was fitted to")
    parser.add_argument("--times", help="a survey's file in place of the packaged one")
    arguments = parser.parse_args()
    records = [record for path in arguments.records for record in read_survey(path)]
    known = [record for path in arguments.known for record in read_survey(path)]
    kinds, gpu = {record["kind"] for record in known}, records[0]["gpu_name"]
    orders, times = best_orders(known), arguments.times or True
    print("best single order of the surveyed:", orders)
    rules: dict[str, Rule] = {
        "with the workload": by_choice(gpu, True, times),
        "without a workload": by_choice(gpu, False, times),
        "rules alone": by_choice(gpu, False, False),
        "always Triton": by_order({family: (name,) for family, name in OURS.items()}),
        "always the library's": by_order({f: (*names, OURS[f]) for f, names in LIBRARIES.items()}),
        "best single order": by_order(orders),
    }
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in rules}
    untimed: dict[str, int] = dict.fromkeys(rules, 0)
    for record in records:
        measured, family = times_of(record), family_of(layer_of(record["config"]))
        if not measured or family is None:
            continue
        groups = ["all", "known kinds" if record["kind"] in kinds else "new kinds", record["phase"], family]
        for name, rule in rules.items():
            taken = rule(record, family, measured)
            if taken is None:
                untimed[name] += 1
                continue
            for group in groups:
                rows[name].setdefault(group, []).append(measured[taken] / min(measured.values()))
    groups = ["all", "new kinds", "known kinds", *sorted({r["phase"] for r in records}), *OURS]
    print("| | " + " | ".join(groups) + " | worst | not timed |")
    print("| --- |" + " --- |" * (len(groups) + 2))
    for name, row in rows.items():
        means = [f"{_mean(row.get(group, [])):.3f}" for group in groups]
        print(f"| {name} | {' | '.join(means)} | {max(row['all']):.2f} | {untimed[name]} |")
    print("workloads:", {group: len(rows["always Triton"].get(group, [])) for group in groups})


def _mean(ratios: Sequence[float]) -> Any:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


if __name__ == "__main__":
    main()
