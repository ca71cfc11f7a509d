"""``attn-select tune`` on a CPU with torch's backends: their kernels run, and a timer with known times counts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="timing a layer needs torch")

from attn_select.times import store, tuning
from attn_select.times.batch_shape import BatchShape
from attn_select_cli import benching

pytestmark = [
    pytest.mark.skipif(benching.torch.cuda.is_available(), reason="pinned to what a CPU selects"),
    pytest.mark.usefixtures("known_machine"),
]

LAYER = ("--num-heads", "4", "--num-kv-heads", "2", "--head-size", "32")
QUICK = ("--batch", "1-4", "--seq-len", "16-64", "--query-len", "8-16", "--rounds", "1", "--seconds", "300")
SLOW_BELOW = 48
"""Tokens of a batch below which the first backend is the faster one, by the timer of these tests."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's folder of measurements."""
    monkeypatch.setattr(store, "user_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "cache"


@pytest.fixture
def rules_file(tmp_path: Path) -> Path:
    """The user's rules file, not there yet."""
    return tmp_path / "config" / "attn-select" / "selector_rules.toml"


def known_time(backend: str, batch: BatchShape) -> float:
    """A time that depends on the batch alone: FLEX_ATTENTION is the faster one for batches of many tokens."""
    tokens = batch.num_kv_tokens
    return 100.0 + tokens if backend == "TORCH_SDPA" else 100.0 + SLOW_BELOW / 2 + tokens / 2


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every kernel runs, and its time is the known one. The list gets every batch that is measured."""
    batches: list[str] = []
    rounds = benching.Bench._rounds

    def known(self: Any, found: Any, ready: Any, seconds: float) -> None:
        def times(calls: dict[int, Any], *_: Any) -> Iterator[dict[int, float]]:
            batches.append(str(found.batch))
            while True:
                for call in calls.values():
                    call()
                yield {index: known_time(ready[index].timed.backend, found.batch) for index in calls}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(benching, "timed_rounds", times)
            rounds(self, found, ready, seconds)

    monkeypatch.setattr(benching.Bench, "_rounds", known)
    return batches


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No kernel runs, and times are the known ones. The list gets every batch that is measured."""
    batches: list[str] = []

    def measure(self: Any, config: Any, batch: BatchShape, candidates: Any, *_: Any) -> benching.TimedBatch:
        batches.append(str(batch))
        timed = []
        for each in candidates:
            kernel = {phase: plan.kernel_name for phase, plan in each.selection.plans.items()}
            timed.append(benching.Timed(each.name, kernel, 16, [known_time(each.name, batch)], "eager"))
        return benching.TimedBatch(batch, None, timed)

    monkeypatch.setattr(benching.Bench, "measure", measure)
    return batches


def test_tune_measures_writes_and_decides(
    run: Any, rules_file: Path, kernels: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tuning, "HELD_OUT", 2)
    command = ("tune", *LAYER, "--phase", "decode", "--batch", "2", "--seq-len", "16-32", *QUICK[6:], "--yes")
    result = run(*command)
    assert result.code == 0, result.err
    assert "held-out regret, these rules    1.0" in result.out
    rules = tomllib.loads(rules_file.read_text())["rules"]
    assert {rule["phase"] for rule in rules} == {"decode"}
    assert all(rule["when"]["gpu"] == "cpu" for rule in rules)
    assert all(rule["when"]["library"]["torch"] in benching.torch.__version__ for rule in rules)
    assert len(rules) == 2
    for batch, backend in (("2q1s32", "FLEX_ATTENTION"), ("2q1s16", "TORCH_SDPA")):
        chosen = run("explain", *LAYER, "--gpu", "auto", "--workload", batch, "--json").json["layers"][0]["selected"]
        assert chosen["decode"] == backend
    assert run("rules", "check").code == 0
    (times,) = (tmp_path / "cache").iterdir()
    assert len(times.read_text().splitlines()) == 2 * len(kernels)

    count = len(kernels)
    again = run(*command)
    assert again.code == 0
    assert len(kernels) == count
    assert "nothing to write" in again.out


def test_a_tune_out_of_time_goes_on_later(run: Any, rules_file: Path, timer: list[str], folder: Path) -> None:
    first = run("tune", *LAYER, "--phase", "decode", *QUICK[:-1], "0.001", "--yes")
    assert first.code == 1
    assert "too few batches were measured; give more --seconds" in first.out
    assert not rules_file.exists()
    count = len(timer)
    second = run("tune", *LAYER, "--phase", "decode", *QUICK, "--json")
    assert second.code == 1  # not written without --yes
    assert {"4q1s64", "q1s64_3q1s4"} <= {*timer}  # requests of one length, and unequal ones
    (layer,) = second.json["layers"]
    assert layer["finished"]
    assert layer["reused"] == count
    assert not second.json["written"]
    assert len(layer["held_out"]["regret"]) == layer["held_out"]["batches"] > 0
    assert len(timer) == len(set(timer))


def test_rules_of_hands_stay_and_those_of_an_earlier_tune_go(run: Any, rules_file: Path, timer: list[str]) -> None:
    rules_file.parent.mkdir(parents=True)
    mine = 'version = 1\n\n# mine\n[[rules]]\nname = "mine"\nwhen = { sinks = true }\nprefer = ["TORCH_SDPA"]\n'
    old = '[[rules]]\nname = "tuned-cpu-4x2x32-decode-9"\nprefer = ["FLEX_ATTENTION"]\nwhen = { batch = 3 }\n'
    rules_file.write_text(f"{mine}\n{old}")
    assert run("tune", *LAYER, "--phase", "decode", *QUICK, "--yes").code == 0
    text = rules_file.read_text()
    assert text.startswith(mine)
    assert "tuned-cpu-4x2x32-decode-9" not in text
    assert run("rules", "undo", "--yes").code == 0
    assert rules_file.read_text() == f"{mine}\n{old}"


def test_newer_measurements_contradict_tuned_rules(run: Any, rules_file: Path, timer: list[str], folder: Path) -> None:
    assert run("tune", *LAYER, "--phase", "decode", *QUICK, "--yes").code == 0
    (path,) = folder.iterdir()
    newer = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["batch"] == "4q1s64":
            row["time_us"] = {"TORCH_SDPA": 90.0, "FLEX_ATTENTION": 400.0}[row["backend"]]
            newer.append(json.dumps(row | {"spread_us": [row["time_us"]] * 2, "date": "2100-01-01T00:00:00+00:00"}))
    path.write_text("\n".join([path.read_text().rstrip(), *newer, ""]))
    result = run("rules", "check")
    assert result.code == 0
    assert "newer measurements contradict FLEX_ATTENTION first: TORCH_SDPA 90 us against 400 us at 4q1s64" in result.out


def test_an_interrupted_tune_keeps_its_times(
    run: Any, rules_file: Path, timer: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = benching.Bench.measure

    def interrupted(self: Any, *arguments: Any) -> benching.TimedBatch:
        found = measure(self, *arguments)
        found.complete = len(timer) < 3
        return found

    monkeypatch.setattr(benching.Bench, "measure", interrupted)
    result = run("tune", *LAYER, "--phase", "decode", *QUICK, "--yes")
    assert result.code == 130
    assert "the next tune goes on from there" in result.err
    assert not rules_file.exists()
    (path,) = folder.iterdir()
    assert len(path.read_text().splitlines()) == 6


def test_a_backend_with_wrong_results_takes_no_part(
    run: Any, rules_file: Path, timer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = benching.Bench.measure

    def wrong(self: Any, *arguments: Any) -> benching.TimedBatch:
        found = measure(self, *arguments)
        for timed in found.timed:
            if timed.backend == "FLEX_ATTENTION" and len(timer) == 2:
                timed.error, timed.bound = 0.5, 0.01
        return found

    monkeypatch.setattr(benching.Bench, "measure", wrong)
    result = run("tune", *LAYER, "--phase", "decode", *QUICK, "--yes")
    assert "FLEX_ATTENTION takes no part: error 5.0e-01" in result.out
    assert "above its bound 1.0e-02" in result.out
    assert [rule["prefer"] for rule in tomllib.loads(rules_file.read_text())["rules"]] == [["TORCH_SDPA"]]


def test_rules_that_lose_to_the_order_in_force_are_not_written(
    run: Any, rules_file: Path, timer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = benching.Bench.measure

    def noisy(self: Any, *arguments: Any) -> benching.TimedBatch:
        found = measure(self, *arguments)
        held_out = len(timer) > 9  # the first ones of the domain mislead
        for timed in found.timed:
            fast = timed.backend == ("TORCH_SDPA" if held_out else "FLEX_ATTENTION")
            timed.samples_us = [100.0 if fast else 150.0]
        return found

    monkeypatch.setattr(benching.Bench, "measure", noisy)
    result = run("tune", *LAYER, "--phase", "decode", *QUICK, "--yes")
    assert result.code == 1
    assert "no rules: the present order does better on held-out batches, 1.000 against 1." in result.out
    assert not rules_file.exists()


def test_prefill_and_workloads(run: Any, rules_file: Path, timer: list[str]) -> None:
    result = run("tune", *LAYER, *QUICK[6:], "--workload", "2q8s16*0.5,4q16s64*0.5", "--yes")
    assert result.code == 0, result.err
    rules = tomllib.loads(rules_file.read_text())["rules"]
    assert {rule["phase"] for rule in rules} == {"prefill"}
    assert rules[0]["prefer"][0] == "FLEX_ATTENTION"  # it is the faster one for the two shapes together


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--batch", "4-1"), "the smaller first"),
        (("--seq-len", "many"), "LOW-HIGH"),
        (("--backend", "FLEX"), "FLEX"),
        (("--layer", "odd"), "odd"),
        (("--workload", "rush"), "rush"),
        (("--phase", "prefill", "--query-len", "128", "--seq-len", "64"), "query_len is at most seq_len"),
        (("--output", "notes.txt"), "--output = 'notes.txt': no line of it is a measurement"),
        (("--output", "."), "is a directory"),
    ],
)
def test_wrong_input(run: Any, arguments: tuple[str, ...], told: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("to do\n")
    result = run("tune", *LAYER, *arguments)
    assert result.code == 2
    assert told in result.err
    assert not folder.exists()


def test_layers_that_cannot_be_timed_alone_are_named(run: Any, rules_file: Path, timer: list[str]) -> None:
    result = run("tune", "--model", "deepseek-v3.2", "--tensor-parallel", "8", *QUICK, "--yes")
    assert result.code == 1
    assert "not timed: sparse MLA needs an indexer's choice of tokens" in result.out
    assert timer == []


def test_layers_without_the_phase_are_named(run: Any, rules_file: Path, timer: list[str]) -> None:
    encoder = ("--num-heads", "4", "--head-size", "64", "--attn-type", "encoder")
    result = run("tune", *encoder, *QUICK, "--phase", "decode", "--yes")
    assert result.code == 1
    assert "not timed: its layers have no decode" in result.out
    assert timer == []


def test_one_backend_is_nothing_to_tune(run: Any, rules_file: Path) -> None:
    result = run("tune", *LAYER, *QUICK, "--backend", "TORCH_SDPA", "--yes")
    assert result.code == 1
    assert "only TORCH_SDPA is valid" in result.out
    assert not rules_file.exists()
