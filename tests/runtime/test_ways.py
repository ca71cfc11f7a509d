"""``Ways.to_capture``: which backends a captured step may run on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from attn_select.layer.config import AttentionConfig
from attn_select.runtime.ways import Ways
from attn_select.times.workload import parse_workload

CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
LEVELS = {"ALL": "ALWAYS", "BATCHES": "UNIFORM_BATCH", "SINGLE": "UNIFORM_SINGLE_TOKEN_DECODE", "NONE": "NEVER"}


class Choice:
    """Takes the last backend that it is offered, and remembers what these were."""

    longest_decode = 1

    def __init__(self) -> None:
        self.offered: list[list[str]] = []

    def captured(self, num_reqs: int, query_len: int, shapes: Any, able: list[str]) -> tuple[str, str]:
        self.offered.append(able)
        return "ALL", able[-1]


@pytest.fixture
def choice() -> Choice:
    return Choice()


@pytest.fixture
def backends() -> dict[str, Any]:
    """A backend of each level."""
    return {name: SimpleNamespace(builder=SimpleNamespace(cudagraph_support=level)) for name, level in LEVELS.items()}


@pytest.fixture
def ways(choice: Choice, backends: dict[str, Any]) -> Ways:
    """The selection's backend is NONE in both phases; the others take turns with it."""
    dispatch: Any = SimpleNamespace(choice=choice)
    names: Any = dict.fromkeys(("prefill", "decode"), "NONE")
    return Ways(CONFIG, backends, names, dispatch, parse_workload("2q1s64"))


@pytest.mark.parametrize(
    ("level", "able"),
    [
        ("ALWAYS", ["ALL"]),
        ("UNIFORM_BATCH", ["ALL", "BATCHES"]),
        ("UNIFORM_SINGLE_TOKEN_DECODE", ["ALL", "BATCHES", "SINGLE"]),
        ("NEVER", ["ALL", "BATCHES", "SINGLE", "NONE"]),
    ],
)
def test_a_decode_is_captured_by_what_reaches_the_groups_level(
    ways: Ways,
    choice: Choice,
    backends: dict[str, Any],
    make_batch: Callable[..., Any],
    level: Any,
    able: list[str],
) -> None:
    way = ways.to_capture(make_batch([(1, 9), (1, 7)]), level)
    assert choice.offered == [able]
    assert way.served["decode"] is backends[able[-1]]
    assert ways.to_capture(make_batch([(1, 30), (1, 7)]), level) is way  # of the same size


def test_a_mixed_batch_is_captured_as_the_selection_says(ways: Ways, make_batch: Callable[..., Any]) -> None:
    assert ways.to_capture(make_batch([(1, 9), (5, 7)]), "UNIFORM_BATCH") is ways.usual
    assert ways.usual.unified
