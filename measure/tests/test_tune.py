"""``attn-select tune``: what it times and adds, when it writes, how it goes on. A GPU and its kernels are made up."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="timing a layer needs torch")

from attn_select import AttentionConfig, clear_cache, select
from attn_select.decide.selector import environment_for
from attn_select.machine.device import lookup
from attn_select.times import prediction
from attn_select.times.batch_shape import BatchShape
from attn_select.times.workload import parse_workload, phases_of
from attn_select_cli import explanation
from attn_select_measure import benching, surveying, tuning
from attn_select_measure.bench_machine import Rates
from attn_select_measure.survey_draw import draw
from attn_select_measure.survey_fit import fit_survey, save
from attn_select_measure.survey_records import Record, read_survey
from attn_select_measure.timed import Candidate, EagerCost, Timed, TimedBatch

LAYER = ("--num-heads", "32", "--num-kv-heads", "8", "--head-size", "128")
CONFIG = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
TUNE = ("tune", *LAYER, "--workloads", "24", *[word for name in BACKENDS for word in ("--backend", name)])
H100 = lookup("h100")
Times = Callable[[str, BatchShape], float]


def flash_first(backend: str, batch: BatchShape) -> float:
    return batch.num_tokens * (1.0 if backend == "FLASH_ATTN" else 1.3)


def triton_first(backend: str, batch: BatchShape) -> float:
    return batch.num_tokens * (1.0 if backend == "TRITON_ATTN" else 1.3)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an H100, on which nothing runs."""

    class Machine:
        device, gpu, on_gpu, ranks = H100, H100.full_name, False, None
        detection = SimpleNamespace(driver_version="580")

        def measure_rates(self) -> Rates:
            return Rates(2.6e12, 7e14)

        def free_memory(self) -> None: ...

    monkeypatch.setattr(benching, "Machine", lambda ranks: Machine())
    found = SimpleNamespace(device=H100, note=None, warnings=())
    monkeypatch.setattr(explanation, "detect_device", lambda: found)
    monkeypatch.setattr(surveying, "default_jobs", lambda on_gpu: 0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, gpu: None) -> dict[str, Times]:
    """What kernels take; ``times`` can be set."""
    known: dict[str, Times] = {"times": flash_first}

    def measure(_: Any, config: Any, batch: BatchShape, candidates: list[Candidate], *__: Any) -> TimedBatch:
        cost, timed = EagerCost(5.0, 5.0, 5.0, 0, 0), []
        for each in candidates:
            time_us = 10 + known["times"](each.name, batch)
            kernel = dict.fromkeys(phases_of(batch, config), "known")
            timed.append(Timed(each.name, kernel, 16, [time_us] * 3, cost, "graph", failure=each.failure))
        return TimedBatch(batch, 1.0, sorted(timed, key=lambda each: each.time_us))

    monkeypatch.setattr(benching.Bench, "measure", measure)
    return known


@pytest.fixture(autouse=True)
def survey_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: Any) -> Iterator[Path]:
    """Where a user's survey is written; the packaged one says that FLASH_ATTN is the faster one."""
    file = tmp_path / "cache" / "h100.json.gz"
    monkeypatch.setattr(prediction, "user_path", lambda device: file)
    monkeypatch.setattr(prediction, "PACKAGED_FOLDER", tmp_path / "packaged")
    settings = surveying.Settings(tmp_path / "survey.jsonl", None, BACKENDS, 0)

    def plan(*_: Any) -> Any:
        for number in range(0, 60, 2):
            if (work := draw(1, number)).config.sort == "attention":
                yield work

    surveying.survey(settings, plan, environment_for(H100), lambda text: None)
    save(fit_survey(read_survey(settings.out)), tmp_path / "packaged" / "h100.json.gz")
    clear_cache()
    yield file
    clear_cache()  # what was read of an H100 here is not of the packaged survey


def content(file: Path) -> Any:
    return json.loads(gzip.decompress(file.read_bytes()))


def records_of(file: Path) -> list[Record]:
    return read_survey(file.with_name(file.name.removesuffix(".json.gz") + ".records.jsonl"))


def test_times_that_choose_better_are_written(run: Any, kernels: dict[str, Times], survey_file: Path) -> None:
    assert select(CONFIG, "h100", workload="64q1s4k").selected["decode"] == "FLASH_ATTN"
    kernels["times"] = triton_first
    result = run(*TUNE)
    assert result.code == 0, result.err
    assert "24/24" in result.err
    records = records_of(survey_file)
    assert {record["config"]["num_heads"] for record in records} == {32}
    held = [record for record in records if layer().is_held_out(record["number"])]
    assert 6 <= len(held) <= 10
    assert f"24 workloads, {len(held)} of them held out" in result.out
    assert "as it stands, 1.000 (worst 1.00) with the times of these layers" in result.out
    assert f"written: {survey_file}, which decisions on this GPU rest on from now on" in result.out
    written = content(survey_file)
    packaged = content(prediction.PACKAGED_FOLDER / "h100.json.gz")
    assert written["workloads"] == packaged["workloads"] + 24  # those held out, too
    clear_cache()
    assert select(CONFIG, "h100", workload="64q1s4k").selected["decode"] == "TRITON_ATTN"


def layer(workload: str | None = None) -> tuning.TunedLayer:
    given = None if workload is None else parse_workload(workload)
    return tuning.tuned_layer("layer", CONFIG, given)


def test_times_that_choose_worse_are_not_written(run: Any, kernels: dict[str, Times], survey_file: Path) -> None:
    held = {str(layer().work(number).batch) for number in range(24) if layer().is_held_out(number)}

    def misleading(backend: str, batch: BatchShape) -> float:
        return (flash_first if str(batch) in held else triton_first)(backend, batch)

    kernels["times"] = misleading
    result = run(*TUNE)
    assert result.code == 1
    assert "not written: choices would be worse" in result.out
    assert not survey_file.exists()


def test_a_tune_goes_on(run: Any, kernels: dict[str, Times], survey_file: Path, tmp_path: Path) -> None:
    kernels["times"] = triton_first
    result = run(*TUNE, "--seconds", "0.0001")
    assert result.code == 1
    assert "time is up: the same command goes on" in result.err
    assert "not written: no held-out workload has times" in result.out
    run(*TUNE)
    first = records_of(survey_file)
    other = run(*TUNE, "--seconds", "100", "--workloads", "30")
    assert "6 workloads to time, 24 in" in other.err
    assert records_of(survey_file)[:24] == first
    named = run(*TUNE, "--out", str(tmp_path / "mine.json.gz"))
    assert named.code == 0
    assert (tmp_path / "mine.json.gz").exists()
    assert (tmp_path / "mine.records.jsonl").exists()
    assert "rest on from now on" not in named.out


@pytest.mark.parametrize(
    ("workload", "phases"),
    [
        (None, {"decode", "uneven", "spread", "prefill", "chunk", "mixed"}),
        ("2q20", {"prefill", "chunk"}),
        ("q9s40_2q1s40", {"mixed"}),
        ("9q1s4,q20", {"decode", "uneven", "spread", "prefill", "chunk"}),
    ],
)
def test_every_phase_of_a_workload_is_drawn_and_held_out(workload: str | None, phases: set[str]) -> None:
    works = {number: layer(workload).work(number).row["phase"] for number in range(90)}
    assert {*works.values()} - {"asked"} == phases
    assert {phase for number, phase in works.items() if layer(workload).is_held_out(number)} >= phases
    assert 0.3 < sum(map(layer(workload).is_held_out, works)) / len(works) < 0.37


def test_a_gpu_without_a_survey_is_surveyed_first(run: Any, survey_file: Path) -> None:
    (prediction.PACKAGED_FOLDER / "h100.json.gz").unlink()
    result = run(*TUNE)
    assert result.code == 2
    assert "there is no survey of NVIDIA H100" in result.err
    assert f"attn-select survey --out {survey_file.with_name('h100.records.jsonl')}" in result.err
    assert not survey_file.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--backend", "TRITON_ATTEN"), "did you mean TRITON_ATTN"),
        (("--workload", "chatt"), "unknown workload"),
        (("--workloads", "2"), "2 is not in the range x>=3"),
        (("--layer", "mla"), "layer kind"),
    ],
)
def test_wrong_input(run: Any, arguments: tuple[str, ...], told: str, survey_file: Path) -> None:
    result = run("tune", *LAYER, *arguments)
    assert result.code == 2
    assert told in result.err
    assert not survey_file.parent.exists()
