"""What the choice costs on workloads that were measured side by side, file by file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from collect_times import points
from held_out import SEED, geomean, regrets, rows, workloads
from timed_layers import LAYERS

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class HeldOut:
    """One file's workloads. The geometric means of regret are those that were reached: a change that makes one worse
    has to say why. The times of 20261229 are among the packaged ones."""

    seed: int
    count: int
    rules: float
    workload: float

    @property
    def path(self) -> Path:
        return DATA / f"held_out_{self.seed}_nvidia-h200.jsonl.xz"


FILES = (
    HeldOut(20261207, 45, rules=1.053, workload=1.0092),
    HeldOut(20261229, 90, rules=1.057, workload=1.003),
    HeldOut(20261231, 67, rules=1.040, workload=1.0185),
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.seed))
def test_the_regret_on_held_out_workloads_does_not_grow(file: HeldOut) -> None:
    found = [*rows(file.path)]
    assert len(found) == file.count
    judged = regrets(found, None)
    for choice in ("rules", "workload"):
        measured = [row[choice][1] for row in judged if row[choice][1] is not None]
        assert len(measured) > 0.9 * file.count
        assert geomean(measured) <= getattr(file, choice), choice


@pytest.mark.parametrize("seed", [20261229, 20261231, SEED])
def test_no_held_out_workload_was_collected(seed: int) -> None:
    drawn = {point.key for point in workloads(LAYERS, False, seed)}
    assert len(drawn) == 90
    assert not drawn & {point.key for point in points(LAYERS, False)}
