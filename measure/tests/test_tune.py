"""``attn-select tune`` on a CPU with torch's backends: their kernels run, and a timer with known times counts."""

from __future__ import annotations

import json
import lzma
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="timing a layer needs torch")

from attn_select.times import store
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select_measure import benching, measured_lines, tuner, tuning

pytestmark = [
    pytest.mark.skipif(benching.torch.cuda.is_available(), reason="pinned to what a CPU selects"),
    pytest.mark.usefixtures("known_machine"),
]

LAYER = ("--num-heads", "4", "--num-kv-heads", "2", "--head-size", "32")
QUICK = ("--batch", "1-4", "--seq-len", "16-64", "--query-len", "8-16", "--rounds", "1", "--seconds", "1e9")
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
    assert "held-out regret, with a workload     1.0" in result.out
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
    named = 'name = "tuned-cpu-4x2x32-decode-9"\ntuned = "tuned-cpu-4x2x32-decode"'
    old = f'[[rules]]\n{named}\nprefer = ["FLEX_ATTENTION"]\nwhen = {{ batch = 3 }}\n'
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


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch, timer: list[str]) -> Callable[[str], None]:
    """A function that makes the measuring of a batch an interrupted one."""
    measure, stops = benching.Bench.measure, set[str]()

    def interrupted(self: Any, config: Any, batch: BatchShape, *arguments: Any) -> benching.TimedBatch:
        found = measure(self, config, batch, *arguments)
        found.complete = str(batch) not in stops
        return found

    monkeypatch.setattr(benching.Bench, "measure", interrupted)
    return stops.add


def test_an_interrupted_tune_keeps_its_times(
    run: Any, rules_file: Path, timer: list[str], folder: Path, interrupt: Callable[[str], None]
) -> None:
    command = ("tune", *LAYER, "--phase", "decode", *QUICK, "--yes")
    run(*command[:-1], "--json", "--output", str(folder / "other.jsonl"))
    asked = [*timer]
    interrupt(asked[2])
    timer.clear()
    result = run(*command)
    assert result.code == 130
    assert result.err.rstrip().endswith("the next tune goes on from there; no rules yet of full_attention decode")
    assert not rules_file.exists()
    assert timer == asked[:3]
    (path,) = set(folder.iterdir()) - {folder / "other.jsonl"}
    assert len(path.read_text().splitlines()) == 6


def test_an_interrupted_tune_writes_the_rules_of_what_was_measured_often_enough(
    run: Any, rules_file: Path, timer: list[str], interrupt: Callable[[str], None]
) -> None:
    """Decodes are known from before, prefills are not: the first of them is interrupted."""
    known = run("tune", *LAYER, "--phase", "decode", *QUICK, "--json")
    assert known.json["layers"][0]["rules"]
    assert not known.json["interrupted"]
    count = len(timer)
    run("tune", *LAYER, "--phase", "prefill", *QUICK, "--output", str(rules_file.parent / "other.jsonl"))
    interrupt(timer[count + 1])
    result = run("tune", *LAYER, *QUICK, "--yes", "--json")
    assert result.code == 130
    assert (result.json["interrupted"], result.json["written"]) == (True, True)
    assert [layer["rules"] != [] for layer in result.json["layers"]] == [False, True]
    assert "no rules yet of full_attention prefill" in result.err
    assert {rule["phase"] for rule in tomllib.loads(rules_file.read_text())["rules"]} == {"decode"}


def test_an_interrupt_while_rules_are_made_leaves_the_later_ones_out(
    run: Any, rules_file: Path, timer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = tuner.find_regions

    def stopped(tuning: Any, *arguments: Any) -> Any:
        if tuning.phase == "decode":
            raise KeyboardInterrupt
        return find(tuning, *arguments)

    monkeypatch.setattr(tuner, "find_regions", stopped)
    result = run("tune", *LAYER, *QUICK, "--yes")
    assert result.code == 130
    assert "no rules: interrupted before they were made" in result.out
    assert "no rules yet of full_attention decode" in result.err
    assert {rule["phase"] for rule in tomllib.loads(rules_file.read_text())["rules"]} == {"prefill"}


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch, timer: list[str]) -> list[tuple[str, set[str]]]:
    """A third backend that is slower than the others. The list gets each batch with the backends that are measured."""
    measured: list[tuple[str, set[str]]] = []
    candidates, measure = benching.Bench.candidates, benching.Bench.measure

    def three(*arguments: Any) -> list[benching.Candidate]:
        found = candidates(*arguments)
        return [*found, benching.Candidate("TRITON_ATTN", found[0].selection)]

    def watched(self: Any, config: Any, batch: BatchShape, tried: Any, *rest: Any) -> benching.TimedBatch:
        measured.append((str(batch), {each.name for each in tried}))
        found = measure(self, config, batch, tried, *rest)
        for timed in found.timed:
            if timed.backend == "TRITON_ATTN":
                timed.kernel, timed.samples_us = {"decode": "unnamed"}, [1000.0]
        return found

    monkeypatch.setattr(benching.Bench, "candidates", three)
    monkeypatch.setattr(benching.Bench, "measure", watched)
    return measured


def lines_of(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    (path,) = folder.iterdir()
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def test_a_backend_that_is_new_is_measured_beside_the_fastest_known_one(
    run: Any, rules_file: Path, folder: Path, third: list[tuple[str, set[str]]]
) -> None:
    command = ("tune", *LAYER, "--phase", "decode", *QUICK, "--json")
    before = run(*command).json["layers"][0]["batches"]
    asked = {batch for batch, _ in third}
    path, rows = lines_of(folder)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows if row["backend"] != "TRITON_ATTN"))
    third.clear()
    (layer,) = run(*command).json["layers"]
    assert (layer["reused"], layer["batches"]) == (before, before)
    assert third
    assert {batch for batch, _ in third} <= asked
    for text, names in third:
        batch = parse_batch_shape(text)
        fastest = min(("TORCH_SDPA", "FLEX_ATTENTION"), key=lambda name: known_time(name, batch))
        assert names == {"TRITON_ATTN", fastest}
    assert layer["rules"]
    third.clear()
    run(*command)
    assert third == []


def test_where_the_device_runs_otherwise_than_before_all_are_measured(
    run: Any, rules_file: Path, folder: Path, third: list[tuple[str, set[str]]]
) -> None:
    command = ("tune", *LAYER, "--phase", "decode", *QUICK, "--json")
    run(*command)
    path, rows = lines_of(folder)
    kept = [row | {"time_us": 0.95 * row["time_us"]} for row in rows if row["backend"] != "TRITON_ATTN"]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    third.clear()
    run(*command)
    alone = [batch for batch, names in third if len(names) == 2]
    whole = [batch for batch, names in third if len(names) == 3]
    assert alone
    assert {*whole} & {*alone}
    assert len(third) == len(alone) + len(whole)


@pytest.fixture
def packaged(run: Any, folder: Path, timer: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of packaged times of this machine: what a tune measured; the user has none."""
    run("tune", *LAYER, "--phase", "decode", *QUICK)
    (path,) = folder.iterdir()
    (tmp_path / "packaged").mkdir()
    timer.clear()
    monkeypatch.setattr(measured_lines, "FOLDER", tmp_path / "packaged")
    packaged = tmp_path / "packaged" / f"{path.name}.xz"
    packaged.write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    return packaged


def test_packaged_times_count_once_some_of_them_are_measured_again(
    run: Any, rules_file: Path, packaged: Path, timer: list[str], folder: Path
) -> None:
    lines = lzma.decompress(packaged.read_bytes()).decode()
    command = ("tune", *LAYER, "--phase", "decode", *QUICK)
    (layer,) = run(*command, "--json").json["layers"]
    assert len(timer) == 3
    assert (layer["batches"], layer["reused"], layer["packaged"]) == (
        len(lines.splitlines()) // 2,
        0,
        layer["batches"] - 3,
    )
    assert layer["rules"]
    assert lzma.decompress(packaged.read_bytes()).decode() == lines
    assert len(lines_of(folder)[1]) == 2 * 3
    (again,) = run(*command, "--json").json["layers"]
    assert len(timer) == 3
    assert again["rules"] == layer["rules"]
    text = f"{layer['batches']} batches measured, 3 of them before, {layer['packaged']} packaged; "
    assert text in " ".join(run(*command).out.split())


def test_packaged_times_of_a_device_that_runs_otherwise_do_not_count(
    run: Any, rules_file: Path, packaged: Path, timer: list[str]
) -> None:
    rows = [json.loads(line) for line in lzma.decompress(packaged.read_bytes()).splitlines()]
    other = [row | {"time_us": row["time_us"] / (1.05 if row["backend"] == "TORCH_SDPA" else 1)} for row in rows]
    packaged.write_bytes(lzma.compress("".join(f"{json.dumps(row)}\n" for row in other).encode()))
    result = run("tune", *LAYER, "--phase", "decode", *QUICK)
    assert "packaged times do not count: TORCH_SDPA takes 1.05 times its packaged time here (3 batches)" in result.out
    assert len(timer) == len(set(timer)) >= tuning.FIRST
    assert " packaged; " not in result.out


@pytest.mark.parametrize(("kept", "compared"), [(2, 0), (3, 2)])
def test_packaged_times_that_cannot_be_compared_do_not_count(
    run: Any,
    rules_file: Path,
    packaged: Path,
    timer: list[str],
    monkeypatch: pytest.MonkeyPatch,
    kept: int,
    compared: int,
) -> None:
    batches = sorted({json.loads(line)["batch"] for line in lzma.decompress(packaged.read_bytes()).splitlines()})[:kept]
    known = lzma.decompress(packaged.read_bytes()).decode().splitlines()
    lines = [line for line in known if json.loads(line)["batch"] in batches]
    packaged.write_bytes(lzma.compress("\n".join([*lines, ""]).encode()))
    measure = benching.Bench.measure

    def failing(self: Any, config: Any, batch: BatchShape, *rest: Any) -> benching.TimedBatch:
        found = measure(self, config, batch, *rest)
        for timed in found.timed if str(batch) in batches[:1] else ():
            timed.failure = "RuntimeError: no"
        return found

    monkeypatch.setattr(benching.Bench, "measure", failing)
    result = run("tune", *LAYER, "--phase", "decode", *QUICK)
    told = f"packaged times do not count: they could be compared at {compared} batches only"
    assert told in result.out
    assert " packaged; " not in result.out


def test_the_first_batches_of_a_phase_are_compared_with_the_oracle(
    run: Any, rules_file: Path, timer: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, compared = benching.Bench.measure, list[bool]()

    def watched(self: Any, config: Any, batch: Any, tried: Any, seconds: float, compare: bool) -> benching.TimedBatch:
        compared.append(compare)
        return measure(self, config, batch, tried, seconds, compare)

    monkeypatch.setattr(benching.Bench, "measure", watched)
    command = ("tune", *LAYER, "--phase", "decode", *QUICK, "--json")
    run(*command)
    assert compared == [True, True, *[False] * (len(timer) - 2)]
    path, rows = lines_of(folder)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows if row["backend"] == "TORCH_SDPA"))
    compared.clear()
    run(*command)
    assert compared[:4] == [True, True, False, False]  # of the backend that is new, though the batches are known


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


def test_a_backend_that_always_fails_is_not_tried_for_ever(
    run: Any, rules_file: Path, timer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, tried = benching.Bench.measure, list[set[str]]()

    def failing(self: Any, config: Any, batch: Any, candidates: Any, *rest: Any) -> benching.TimedBatch:
        tried.append({each.name for each in candidates})
        found = measure(self, config, batch, candidates, *rest)
        for timed in found.timed:
            if timed.backend == "FLEX_ATTENTION":
                timed.failure, timed.samples_us = "its library is broken", []
        return found

    monkeypatch.setattr(benching.Bench, "measure", failing)
    result = run("tune", *LAYER, "--phase", "decode", *QUICK, "--yes")
    assert "FLEX_ATTENTION takes no part: it failed at each of 3 batches: its library is broken" in result.out
    assert [len(names) for names in tried[:4]] == [2, 2, 2, 1]
    assert [rule["prefer"] for rule in tomllib.loads(rules_file.read_text())["rules"]] == [["TORCH_SDPA"]]


def test_what_every_phase_needs_is_measured_before_what_one_is_unsure_of(
    run: Any, rules_file: Path, timer: list[str], folder: Path
) -> None:
    run("tune", *LAYER, "--phase", "decode", *QUICK, "--json")  # decodes are known, prefills are not
    timer.clear()
    result = run("tune", *LAYER, *QUICK, "--json")
    needed = result.json["layers"][0]["held_out"]["batches"] + tuning.FIRST
    first = [parse_batch_shape(text) for text in timer[: needed - 2]]
    assert all(batch.max_query_len > 1 for batch in first)


def test_a_few_batches_of_prefills_and_decodes_are_measured_too(
    run: Any, rules_file: Path, timer: list[str], folder: Path
) -> None:
    def mixed() -> list[str]:
        return [text for text in timer if len({group.query_len == 1 for group in parse_batch_shape(text).groups}) == 2]

    run("tune", *LAYER, "--phase", "prefill", *QUICK, "--json")
    assert len(mixed()) == tuning.MIXED
    path, rows = lines_of(folder)
    assert {row["batch"] for row in rows} >= {*mixed()}
    timer.clear()
    run("tune", *LAYER, *QUICK, "--json")
    assert mixed() == []
    path.unlink()
    run("tune", *LAYER, *QUICK[6:], "--workload", "q16_2q1s32,2q1s64,q8", "--json")
    assert mixed() == ["q16_2q1s32"]


def test_batches_without_an_end_are_left_out_unless_they_are_asked_for(
    run: Any, rules_file: Path, timer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "_LONGEST_US", 1e9)
    clock = SimpleNamespace(monotonic=lambda: 0.02 * len(timer))  # as if each batch took that long
    monkeypatch.setattr(tuner, "time", clock)

    def most(*options: str) -> tuple[int, int]:
        timer.clear()
        assert run("tune", *LAYER, "--rounds", "1", "--seconds", "2", "--json", *options).code == 1
        batches = [parse_batch_shape(text) for text in timer]
        return max(batch.num_tokens for batch in batches), max(batch.num_kv_tokens for batch in batches)

    new, every = most()
    assert new <= 32768
    assert every <= 1 << 20
    new, every = most("--batch", "200-256", "--seq-len", "256-16k")
    assert new > 32768
    assert every > 1 << 20


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
        (("--file", "notes.txt/rules.toml"), "notes.txt takes no files"),
    ],
)
def test_wrong_input(run: Any, arguments: tuple[str, ...], told: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("to do\n")
    result = run("tune", *LAYER, *arguments)
    assert result.code == 2
    assert told in result.err
    assert not folder.exists()


def test_layers_that_cannot_be_timed_alone_are_named(run: Any, rules_file: Path, timer: list[str]) -> None:
    across = ("--num-heads", "4", "--head-size", "64", "--attn-type", "encoder_decoder")
    result = run("tune", *across, *QUICK, "--yes")
    assert result.code == 1
    assert "not timed: cross-attention needs an encoder's tokens" in result.out
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


def test_layers_that_keep_a_state_are_tuned_by_requests_and_new_tokens(
    run: Any, rules_file: Path, timer: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = benching.Bench.candidates

    def candidates(self: Any, config: Any, batch: BatchShape, backends: Any = ()) -> list[benching.Candidate]:
        (found,) = [each for each in one(self, config, batch) if each.failure is None]
        return [found, benching.Candidate("FLA", found.selection)]

    monkeypatch.setattr(benching.Bench, "candidates", candidates)
    monkeypatch.setattr(sys.modules[__name__], "known_time", lambda name, batch: 100.0 if name == "FLA" else 200.0)
    layer = ("--recurrence", "mamba2", "--num-heads", "2", "--head-size", "16")
    result = run("tune", *layer, "--seconds", "1e9", "--batch", "1-8", "--query-len", "64-128", "--yes")
    assert result.code == 0, result.err
    lengths = {group.seq_len for text in timer for group in parse_batch_shape(text).groups if group.query_len == 1}
    assert lengths == {1024}
    assert all(len(parse_batch_shape(text).groups) == 1 for text in timer)
    rules = tomllib.loads(rules_file.read_text())["rules"]
    assert {rule["phase"] for rule in rules} == {"prefill", "decode"}
    assert all(rule["when"]["recurrence"] == "mamba2" and rule["prefer"][0] == "FLA" for rule in rules)
