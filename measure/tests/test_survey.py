"""``attn-select survey`` on a CPU: its lines, going on, timing a backend anew, what fails, and stale times."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="timing a layer needs torch")

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layer_config import layer_of
from attn_select.machine.environment import Environment
from attn_select.reference import timed_steps
from attn_select.times import evidence
from attn_select.times.batch_shape import parse_batch_shape
from attn_select_measure import benching, survey_records
from attn_select_measure.first_calls import FirstCall, FirstCalls
from attn_select_measure.survey_draw import TINY, draw
from attn_select_measure.survey_records import append_record, read_survey

pytestmark = [
    pytest.mark.skipif(benching.torch.cuda.is_available(), reason="pinned to what a CPU selects"),
    pytest.mark.usefixtures("known_machine"),
]

Line = dict[str, Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(benching, "MOST_ROUNDS", 2)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """In a folder that the command makes."""
    return tmp_path / "surveys" / "survey.jsonl"


def lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timed(line: Line, backend: str) -> Line:
    (found,) = [each for each in line["timed"] if each["backend"] == backend]
    assert isinstance(found, dict)
    return found


def test_a_line_has_what_its_times_are_judged_by(run: Any, out: Path) -> None:
    result = run("survey", "--out", str(out), "--workloads", "3", "--seed", "5")
    assert result.code == 0
    assert len(result.err.splitlines()) == 4  # the device, and each workload
    for number, line in enumerate(lines(out)):
        drawn = draw(5, number, TINY)
        assert line["v"] == 1
        assert {key: line[key] for key in drawn.row} == drawn.row
        assert layer_of(line["config"]) == drawn.config
        assert parse_batch_shape(line["batch"]) == drawn.batch
        assert line["gpu"] == "CPU of this machine"
        assert line["rates"] == {"copy_gbps": 10.0, "tflops": 0.1}
        (one,) = line["timed"]
        assert one["backend"] in ("TORCH_SDPA", "TORCH_MLA")
        assert one["failure"] is None
        assert one["spread_us"][0] <= one["time_us"] <= one["spread_us"][1]
        assert one["rounds"] == 2
        assert one["method"] == "eager"
        assert set(one["fingerprint"][one["backend"]]) == {"sources", "torch"}
        assert one["libraries"]["torch"] == benching.torch.__version__
        assert 0 < one["error"] <= one["bound"]
        assert one["first_call_s"] > 0
        eager = one["eager"]
        assert 0 < eager["host_us"] <= eager["wall_us"]
        assert eager["build_us"] > 0
        assert (eager["reserved_bytes"], eager["peak_bytes"]) == (0, None)


def test_a_file_is_gone_on_with(run: Any, out: Path) -> None:
    run("survey", "--out", str(out), "--workloads", "2")
    before = out.read_text()
    with out.open("a") as file:
        file.write('{"v":1,"seed":0,"num')  # a run that was cut off
    result = run("survey", "--out", str(out), "--workloads", "3")
    assert result.code == 0
    assert out.read_text().startswith(before)
    assert [line["number"] for line in lines(out)] == [0, 1, 2]
    assert "1 workloads to time, 2 in" in result.err


def test_a_run_ends_in_time(run: Any, out: Path) -> None:
    result = run("survey", "--out", str(out), "--seconds", "0.01")
    assert result.code == 1
    assert "the same command goes on" in result.err
    assert not out.exists()


def test_one_backend_is_timed_anew_on_the_workloads_there_are(run: Any, out: Path) -> None:
    run("survey", "--out", str(out), "--workloads", "3")
    mla = draw(0, 1, TINY)
    assert mla.config.sort == "mla"
    records = read_survey(out)
    for record in records:
        record["timed"].append(
            {**record["timed"][0], "backend": "FLEX_ATTENTION", "date": "2026-01-01", "time_us": 1.0}
        )
        record["timed"][0] |= {"date": "2026-01-01", "time_us": 2.0}
        append_record(out, record)
    result = run("survey", "--out", str(out), "--backend", "TORCH_SDPA", "--workloads", "1")
    assert result.code == 0
    found = read_survey(out)
    assert [line["number"] for line in found] == [0, 1, 2]
    for number in (0, 2):
        assert timed(found[number], "TORCH_SDPA")["date"] > "2026-01-01"
        assert timed(found[number], "FLEX_ATTENTION")["time_us"] == 1.0
    assert timed(found[1], "TORCH_MLA")["time_us"] == 2.0  # the other layer has no place for the backend
    assert {name: value for name, value in found[0].items() if name != "timed"} == {
        name: value for name, value in records[0].items() if name != "timed"
    }


def test_times_of_two_gpus_do_not_share_a_file(run: Any, out: Path) -> None:
    run("survey", "--out", str(out), "--workloads", "1")
    text = out.read_text().replace("CPU of this machine", "NVIDIA H200")
    out.write_text(text)
    for options in (("--backend", "TORCH_SDPA"), ("--workloads", "2")):
        result = run("survey", "--out", str(out), *options)
        assert result.code == 2
        assert "workload 0 was timed on NVIDIA H200, and this is CPU of this machine" in result.err
        assert out.read_text() == text


def test_a_wrong_result_is_a_failure(run: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_steps.AttentionStep, "error", lambda self: 0.5)
    assert run("survey", "--out", str(out), "--workloads", "1").code == 0
    assert lines(out)[0]["timed"][0]["failure"].startswith("wrong: a relative error of 0.5, above its bound of")


def test_a_broken_device_costs_one_workload(run: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def started(program: str, arguments: list[str]) -> None:
        assert program == sys.executable
        again.extend(arguments)
        raise SystemExit(0)

    again: list[str] = []
    monkeypatch.setattr(benching.Bench, "measure", broken)
    monkeypatch.setattr(os, "execv", started)
    run("survey", "--out", str(out), "--workloads", "2", "--seconds", "1000")
    (line,) = lines(out)
    assert line["timed"][0]["failure"].startswith("the device failed: RuntimeError: CUDA error: an illegal memory")
    assert again[-2] == "--seconds"
    assert 0 < float(again[-1]) < 1000


def test_check_says_what_is_stale(run: Any, out: Path) -> None:
    run("survey", "--out", str(out), "--workloads", "3")
    result = run("survey", "--check", str(out))
    assert result.code == 0
    assert "TORCH_SDPA: 2 times are of the kernels that are here" in result.out
    records = read_survey(out)
    records[0]["timed"][0]["fingerprint"]["TORCH_SDPA"]["sources"] = "0123456789abcdef"
    records[1]["timed"][0]["fingerprint"]["TORCH_MLA"]["torch"] = "1.0"
    library = {**records[2]["timed"][0], "backend": "FLASH_ATTN", "fingerprint": {"FLASH_ATTN": {"vllm": "0.26.0"}}}
    gone = {**library, "backend": "ACME", "fingerprint": {"ACME": {"sources": "0"}}}
    failed = {**library, "backend": "FLASHINFER", "failure": "not enough memory", "fingerprint": {}}
    records[2]["timed"] += [library, gone, failed]
    for record in records:
        append_record(out, record)
    result = run("survey", "--check", str(out))
    assert result.code == 1
    assert result.out.splitlines() == [
        "ACME: 1 of 1 times cannot be judged: no plugin here has ACME",
        "FLASH_ATTN: 1 of 1 times cannot be judged: vllm is not installed here",
        f"TORCH_MLA: 1 of 1 times are stale: torch 1.0, now {'.'.join(benching.torch.__version__.split('.')[:2])}",
        "TORCH_SDPA: 1 of 2 times are stale: its own kernels or schedules changed",
        f"to measure them again: attn-select survey --out {out} --backend TORCH_MLA --backend TORCH_SDPA",
    ]
    pinned = run("survey", "--check", str(out), "--with", "vllm==0.27.0")
    assert "FLASH_ATTN: 1 of 1 times are stale: vllm 0.26.0, now 0.27.0" in pinned.out


def test_a_known_stale_backend_is_told_with_its_reason(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    why = {"TRITON_ATTN": {"reason": "a new kernel", "date": "2026-11-28"}}
    monkeypatch.setattr(evidence, "known_stale", lambda: why)
    monkeypatch.setattr(survey_records, "stale_parts", lambda *_: ["other kernels"])
    result = run("survey", "--check")
    assert result.code == 1
    told = {line.partition(":")[0]: line for line in result.out.splitlines()}
    assert told["TRITON_ATTN"].endswith("times are stale, as known: a new kernel (2026-11-28)")
    assert told["TRITON_MLA"].endswith("times are stale: other kernels")
    assert "--backend TRITON_ATTN" not in result.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give either --out FILE or --check [FILE]"),
        (("--out", "new.jsonl", "--backend", "TORCH_SDPAA"), "TORCH_SDPA"),
        (("--out", "notes.txt"), "notes.txt:1: no line of a survey: to do"),
        (("--check", "notes.txt"), "notes.txt:1: no line of a survey: to do"),
        (("--check", "later.jsonl"), "later.jsonl:1: v = 2: accepted is 1"),
        (("--out", "new.jsonl", "--with", "vllm"), "expected NAME==VERSION"),
        (("--check", "no.jsonl"), "no.jsonl: there is no such file"),
    ],
)
def test_wrong_input(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("to do\n")
    (tmp_path / "later.jsonl").write_text('{"v":2,"seed":0,"number":0}\n')
    result = run("survey", *arguments)
    assert result.code == 2
    assert told in result.err
    assert not (tmp_path / "new.jsonl").exists()


@pytest.fixture
def first_calls() -> Any:
    started = FirstCalls(1, Environment())
    yield started
    started.close()


def first_call(number: int, backend: str = "TORCH_SDPA") -> FirstCall:
    config = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32)
    batch = parse_batch_shape("q9_q1s40")
    return FirstCall((0, number, backend), config, batch, {"decode": backend, "prefill": backend})


def test_first_calls_run_in_other_processes(first_calls: FirstCalls) -> None:
    found = first_calls.run([first_call(0), first_call(1, "TORCH_MLA"), first_call(2)], 300)
    assert set(found) == {(0, 0, "TORCH_SDPA"), (0, 1, "TORCH_MLA"), (0, 2, "TORCH_SDPA")}  # one serves no such layers
    for ended in found.values():
        assert ended.failure is None
        assert ended.seconds > 0
