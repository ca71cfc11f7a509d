"""What the choice costs for synthetic kernels of known times, measured with noise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from timed_kernels import LAYER, known, measured

from attn_select.decide.explicit import Choice
from attn_select.times.store import StoredMeasurement
from attn_select.times.workload import parse_workload


def truth(name: str, batch: int, context: int) -> float:
    """Return the time in us of a synthetic decode: a start, bytes over a bandwidth, and blocks in waves."""
    start, gigabytes, per_block = {"A": (12.0, 2600.0, 0.05), "B": (6.0, 1900.0, 0.09), "C": (20.0, 2950.0, 0.02)}[name]
    read = batch * context * 8 * 128 * 2 * 2 / gigabytes / 1e3
    return start + read + per_block * batch * 8


def noisy(seed: int, batches: Sequence[tuple[int, int]], noise: float = 0.01) -> list[StoredMeasurement]:
    draw = random.Random(seed)
    return [
        measured(name, f"{batch}q1s{context}", truth(name, batch, context) * draw.gauss(1, noise))
        for name in "ABC"
        for batch, context in batches
    ]


MEASURED = [(batch, context) for batch in (1, 4, 16, 64, 256) for context in (256, 1024, 4096, 16384)]
ASKED = [(2, 700), (3, 9000), (8, 300), (12, 2500), (32, 600), (48, 12000), (100, 500), (128, 3000), (200, 1024)]


@pytest.fixture(scope="module")
def two_files() -> tuple[list[StoredMeasurement], list[StoredMeasurement]]:
    return noisy(1, MEASURED), noisy(2, MEASURED)


def test_the_choice_costs_little_where_batches_were_not_measured(decider: Any, two_files: Any) -> None:
    made, costs = decider(), []
    evidence = known(two_files[0], made.environment)
    for batch, context in ASKED:
        workload = parse_workload(f"{batch}q1s{context}")
        selection = made.decide(LAYER, Choice(), workload=workload, evidence=evidence)
        times = {name: truth(name, batch, context) for name in "ABC"}
        costs.append(times[selection.selected["decode"] or ""] / min(times.values()))
        timing = next(c for c in selection.candidates if c.backend == "A").phases["decode"].timing
        assert timing is not None
        assert timing.measured_shapes == 0
        assert timing.time_us == pytest.approx(times["A"], rel=0.3)
    by_rule = [truth("A", *each) / min(truth(name, *each) for name in "ABC") for each in ASKED]
    assert sum(costs) / len(costs) < 1.05 < sum(by_rule) / len(by_rule)
    assert max(costs) < 1.2


def test_two_noisy_files_decide_alike_outside_ties(decider: Any, two_files: Any) -> None:
    made, chosen = decider(), []
    for rows in two_files:
        evidence = known(rows, made.environment)
        found = [
            made.decide(LAYER, Choice(), workload=parse_workload(f"{b}q1s{c}"), evidence=evidence) for b, c in MEASURED
        ]
        chosen.append([selection.selected["decode"] for selection in found])
    for (batch, context), *names in zip(MEASURED, *chosen, strict=True):
        times = [truth(name, batch, context) for name in names]
        assert names[0] == names[1] or max(times) / min(times) < 1.06, (batch, context, names)
