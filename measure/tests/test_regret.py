"""What the choice costs on workloads that were measured side by side, file by file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from collect_times import points
from held_out import SEED, geomean, regrets, rows, workloads
from timed_layers import FURTHER, LAYERS, unseen

from attn_select.times.timed_layer import timed_layer

DATA = Path(__file__).parents[1] / "bench" / "data"


@dataclass(frozen=True)
class HeldOut:
    """The workloads of one seed. None of their times is packaged.

    Attributes:
        rules, workload: geometric means of regret that were reached: a change that makes one worse has to say why. The
            older files have times of older kernels of ``TRITON_MLA``, which the packaged times do not know any more.
    """

    seed: int
    count: int
    rules: float
    workload: float

    @property
    def path(self) -> Path:
        return DATA / f"held_out_{self.seed}_nvidia-h200.jsonl.xz"


FILES = (
    HeldOut(20261229, 90, rules=1.0335, workload=1.0075),
    HeldOut(20261231, 90, rules=1.037, workload=1.0035),
    HeldOut(20270102, 90, rules=1.0295, workload=1.005),
    HeldOut(20270104, 90, rules=1.0405, workload=1.0095),
    HeldOut(20270106, 90, rules=1.0305, workload=1.006),
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.seed))
def test_the_regret_on_held_out_workloads_does_not_grow(file: HeldOut) -> None:
    found = [*rows(file.path)]
    assert len(found) == file.count
    judged = regrets(found, None)
    for choice, most in (("rules", file.rules), ("workload", file.workload)):
        measured = [row[choice][1] for row in judged if row[choice][1] is not None]
        assert len(measured) > 0.9 * file.count
        assert geomean(measured) <= most, choice


@pytest.mark.parametrize("seed", [*(file.seed for file in FILES), SEED])
def test_no_held_out_workload_was_collected(seed: int) -> None:
    drawn = {point.key for point in workloads(LAYERS, False, seed)}
    assert len(drawn) == 90
    assert not drawn & {point.key for point in points(LAYERS, False)}


def test_unseen_kinds_of_layers_are_none_that_are_fitted() -> None:
    fitted = {timed_layer(config) for config in (*LAYERS.values(), *FURTHER.values())}
    assert len(fitted) == len(LAYERS) + len(FURTHER)
    judged = {timed_layer(config) for config in unseen().values()}
    assert len(judged) == 15
    assert not judged & fitted
