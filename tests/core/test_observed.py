"""Steps that an engine runs, as a workload file: shares, bounds, and what becomes of a process that ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.engines.observed import SHORT, ObservedSteps, observes, shape_of, workload_in_an_engine
from attn_select.engines.own_choice import SERVING
from attn_select.layer.config import AttentionConfig
from attn_select.machine.variables import WORKLOAD
from attn_select.testing.toolkit import GQA_FIELDS
from attn_select.times.workload import Workload, parse_workload


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "attn-select" / "workloads"


def written(folder: Path) -> Workload:
    (file,) = folder.glob("*.toml")
    return parse_workload(file)


def test_shares_are_those_of_the_steps(folder: Path) -> None:
    said: list[str] = []
    steps = ObservedSteps("vLLM 0.32.0", said.append)
    for _ in range(6):
        steps.count([1, 1], [100, 100])
    steps.count([200], [200])
    steps.count([1, 300], [50, 300])
    steps.count([], [])
    steps.write()
    shares = {str(shape.batch): shape.weight for shape in written(folder).shapes}
    assert shares == {"2q1s100": 0.75, "q200": 0.125, "q300_q1s50": 0.125}
    assert steps.file is not None
    assert steps.file.name.startswith("vllm-")
    assert "# Steps of vLLM 0.32.0, observed until " in steps.file.read_text()
    assert len(said) == 1
    assert f"ATTN_SELECT_WORKLOAD={steps.file} chooses for it" in said[0]


@pytest.mark.parametrize(
    ("query_lens", "kind"),
    [([16], "decode"), ([1, 16], "decode"), ([17], "prefill"), ([17, 500], "prefill"), ([16, 17], "mixed")],
)
def test_requests_of_few_new_tokens_count_as_decodes(folder: Path, query_lens: list[int], kind: str) -> None:
    steps = ObservedSteps("vLLM", lambda _: None)
    steps.count(query_lens, [1000] * len(query_lens))
    head, bound = steps.to_toml().splitlines()[:2]
    assert head.endswith(f": 1 {kind}.")
    assert bound == "# Of each kind at most 100 are held, drawn at random."


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 200_000)), min_size=1, max_size=300))
def test_a_shape_keeps_requests_and_tokens(requests: list[tuple[int, int]]) -> None:
    query_lens, seq_lens = [new for new, _ in requests], [new + cached for new, cached in requests]
    shape = shape_of(query_lens, seq_lens)
    assert shape.num_requests == len(requests)
    assert abs(shape.num_tokens - sum(query_lens)) <= len(requests) / 2
    assert abs(shape.num_kv_tokens - sum(seq_lens)) <= len(requests)
    assert len(shape.groups) <= 100
    assert {group.query_len for group in shape.groups if group.query_len <= SHORT} == {
        new for new in query_lens if new <= SHORT
    }


def test_it_is_written_at_the_first_step_and_at_growing_intervals(folder: Path) -> None:
    clock = Clock()
    steps = ObservedSteps("vLLM", lambda _: None, clock)
    seen = []
    for second in range(400):
        clock.now = 1000.0 + second
        steps.count([1], [100 + second])
        (file,) = folder.glob("*.toml")
        seen.append(file.read_text().partition(" decode")[0].rpartition(" ")[2])
    changes = [second for second in range(1, 400) if seen[second] != seen[second - 1]]
    assert seen[0] == "1"
    assert changes == [1, 2, 4, 8, 16, 32, 64, 124, 184, 244, 304, 364]


def test_an_engine_is_chosen_for_serving_unless_a_workload_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, serving = AttentionConfig(**GQA_FIELDS), parse_workload(SERVING)
    monkeypatch.delenv(WORKLOAD, raising=False)
    assert (workload_in_an_engine(layer), observes()) == (serving, False)
    monkeypatch.setenv(WORKLOAD, "")
    assert (workload_in_an_engine(layer), observes()) == (serving, False)
    monkeypatch.setenv(WORKLOAD, "chat")
    assert (workload_in_an_engine(layer), observes()) == ("chat", False)
    monkeypatch.setenv(WORKLOAD, "observe")
    assert (workload_in_an_engine(layer), observes()) == (serving, True)


def test_an_engine_that_drafts_is_chosen_for_decodes_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKLOAD, raising=False)
    workload = workload_in_an_engine(AttentionConfig(**GQA_FIELDS, num_speculative_tokens=3))
    assert isinstance(workload, Workload)
    assert workload.name == SERVING
    assert {group.query_len for shape in workload.shapes for group in shape.batch.groups if group.query_len < 16} == {4}
