"""Models of the user's own times: fitted by this distribution, kept in the cache folder, read by decisions."""

from __future__ import annotations

import json
import logging
import random
import re
from pathlib import Path

import pytest

from attn_select import clear_cache, select
from attn_select.decide.selection import Selection
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import lookup
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.fitted import kept_model
from attn_select.times.measurement import Measurement
from attn_select.times.model import LEAST_POINTS
from attn_select.times.store import append_measurements
from attn_select.times.timed_layer import timed_layer
from attn_select.times.timing import Timing
from attn_select_measure.fitting import keeping
from attn_select_measure.fitting.keeping import fit_and_keep, fit_file

CONFIG = AttentionConfig(num_heads=40, num_kv_heads=8, head_size=128)
LAYER = timed_layer(CONFIG)
OTHER = timed_layer(AttentionConfig(num_heads=40, num_kv_heads=8, head_size=128, sliding_window=128))
POINTS = [
    (parse_batch_shape(f"{batch}q1s{context}"), 10 + batch * context / 700)
    for batch in (1, 8, 64)
    for context in (256, 1024, 4096)
]
ASKED = parse_batch_shape("20q1s700")
H100 = lookup("h100")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ATTN_SELECT_MEASUREMENTS", raising=False)
    clear_cache()
    return tmp_path / "attn-select" / "fits"


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the fits that were made."""
    made: list[int] = []
    original = keeping.fit

    def counted(points: object, *rest: object) -> object:
        made.append(len(points))  # type: ignore[arg-type]
        return original(points, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(keeping, "fit", counted)
    return made


def test_a_model_is_fitted_once_and_core_reads_it(fits: list[int], cache: Path) -> None:
    assert kept_model(POINTS, LAYER, H100) is None
    first, again = (fit_and_keep(points, LAYER, H100) for points in (POINTS, POINTS[::-1]))
    assert fits == [9]
    assert again == first == kept_model(POINTS, LAYER, H100)
    assert first is not None
    assert first.predict(ASKED) is not None
    assert len(list(cache.iterdir())) == 1  # and nothing unfinished


def test_nothing_else_is_taken_for_it(fits: list[int]) -> None:
    fit_and_keep(POINTS, LAYER, H100)
    for points, layer, gpu in (
        ([*POINTS[:-1], (POINTS[-1][0], 1.0)], LAYER, "h100"),
        (POINTS[:-1], LAYER, "h100"),
        (POINTS, OTHER, "h100"),
        (POINTS, LAYER, "a100"),
    ):
        assert kept_model(points, layer, lookup(gpu)) is None
        fit_and_keep(points, layer, lookup(gpu))
    assert len(fits) == 5


def test_too_few_batches_have_no_model(fits: list[int], cache: Path) -> None:
    assert fit_and_keep(POINTS[: LEAST_POINTS - 1] * 2, LAYER, H100) is None
    assert not fits
    assert not cache.exists()


def test_a_changed_value_is_never_used(fits: list[int], cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One number of the file is changed at a time: it counts as no model, and that is said where who asks hears it."""
    first = fit_and_keep(POINTS, LAYER, H100)
    (file,) = cache.iterdir()
    whole = file.read_text()
    numbers = [*re.finditer(r"(?<![\w.])\d+(\.\d+)?", whole.partition("\n")[2])]
    chosen = random.Random(0).sample(numbers, min(40, len(numbers)))
    caplog.set_level(logging.INFO, "attn_select")
    head = len(whole.partition("\n")[0]) + 1
    for count, found in enumerate(chosen, 1):
        file.write_text(f"{whole[: head + found.start()]}7{found[0]}{whole[head + found.end() :]}")
        assert kept_model(POINTS, LAYER, H100) is None
        assert str(file) in caplog.messages[-1]
        assert "is damaged" in caplog.messages[-1]
        assert fit_and_keep(POINTS, LAYER, H100) == first
        assert len(fits) == 1 + count
        assert file.read_text() == whole


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"layer": {"num_heads": -1}}', "null"])
def test_a_damaged_file_is_replaced(fits: list[int], cache: Path, text: str) -> None:
    first = fit_and_keep(POINTS, LAYER, H100)
    (file,) = cache.iterdir()
    file.write_text(text)
    assert kept_model(POINTS, LAYER, H100) is None
    assert fit_and_keep(POINTS, LAYER, H100) == first == kept_model(POINTS, LAYER, H100)
    assert len(fits) == 2


def test_a_folder_that_cannot_be_written_costs_time_alone(fits: list[int], tmp_path: Path) -> None:
    (tmp_path / "attn-select").write_text("a file where the folder belongs")
    first = fit_and_keep(POINTS, LAYER, H100)
    assert fit_and_keep(POINTS, LAYER, H100) == first
    assert len(fits) == 2


def written(path: Path, batches: int = 9) -> Path:
    """Return a file with times of an H100, of two backends."""
    append_measurements(
        path,
        [
            Measurement(
                gpu="NVIDIA H100 80GB HBM3",
                compute_capability="9.0",
                backend=backend,
                kernel={"decode": kernel},
                config=LAYER.to_dict(),
                batch=str(batch),
                time_us=time_us * factor,
                spread_us=(time_us * factor * 0.999, time_us * factor * 1.001),
                rounds=20,
                method="graph",
                date="2026-11-24",
            )
            for backend, kernel, factor in (("FLASH_ATTN", "fa3", 1.2), ("FLASHINFER", "xqa", 1.0))
            for batch, time_us in POINTS[:batches]
        ],
    )
    return path


def decode_times(selection: Selection) -> dict[str, Timing]:
    timings = {c.backend: c.phases["decode"].timing for c in selection.candidates}
    return {name: timing for name, timing in timings.items() if timing is not None and timing.compares}


def test_without_a_model_only_measured_batches_count_and_that_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "own.jsonl")
    known = select(CONFIG, "h100", workload="64q1s1k", measurements=path)
    assert {*decode_times(known)} == {"FLASH_ATTN", "FLASHINFER"}
    assert not known.warnings
    asked = select(CONFIG, "h100", workload="20q1s700", measurements=path)
    assert not decode_times(asked)
    (warning,) = asked.warnings
    assert warning == (
        f"{path}: no model is fitted to these times, so other batches are not predicted from them "
        f"(`attn-select measurements fit {path}`)"
    )


def test_few_measured_batches_are_no_reason_to_warn(tmp_path: Path) -> None:
    path = written(tmp_path / "own.jsonl", LEAST_POINTS - 1)
    assert not select(CONFIG, "h100", workload="20q1s700", measurements=path).warnings


def test_fitting_a_file_lets_decisions_predict(tmp_path: Path) -> None:
    path = written(tmp_path / "own.jsonl")
    fit_file(path)
    found = select(CONFIG, "h100", workload="20q1s700", measurements=path)
    assert found.selected["decode"] == "FLASHINFER"
    times = decode_times(found)
    assert {(timing.kind, timing.measured_shapes) for timing in times.values()} == {("named file", 0)}
    assert times["FLASHINFER"].time_us == pytest.approx(10 + 700 * 20 / 700, rel=0.25)
    assert not found.warnings


def test_two_spellings_of_one_gpu_are_fitted_together(tmp_path: Path) -> None:
    path = written(tmp_path / "own.jsonl")
    lines = path.read_text().splitlines()
    other = [line.replace("NVIDIA H100 80GB HBM3", "NVIDIA H100") for line in lines[::2]]
    path.write_text("\n".join([*other, *lines[1::2]]) + "\n")
    fit_file(path)
    found = select(CONFIG, "h100", workload="20q1s700", measurements=path)
    assert {*decode_times(found)} == {"FLASH_ATTN", "FLASHINFER"}
    assert not found.warnings


def test_the_files_of_the_users_folder_are_fitted_together(tmp_path: Path) -> None:
    folder = tmp_path / "attn-select" / "measurements"
    lines = written(tmp_path / "all.jsonl").read_text().splitlines()
    folder.mkdir(parents=True)
    (folder / "one.jsonl").write_text("\n".join(lines[::2]) + "\n")
    (folder / "two.jsonl").write_text("\n".join(lines[1::2]) + "\n")
    fit_file(folder / "one.jsonl")
    found = select(CONFIG, "h100", workload="20q1s700")
    assert {timing.kind for timing in decode_times(found).values()} == {"measured here"}


def test_packaged_models_are_those_of_the_times_and_the_code() -> None:
    """A packaged file that is stale says with which command it is made again."""
    from attn_select.times import fitted
    from attn_select_measure.measured_lines import measured_files, measured_lines

    again = "run python measure/bench/package_fits.py"
    names = {path.name.removesuffix(".xz") for path in measured_files()}
    assert {path.name for path in fitted.PACKAGED_FOLDER.iterdir()} == names
    for path in measured_files():
        lines = (fitted.PACKAGED_FOLDER / path.name.removesuffix(".xz")).read_text().splitlines()
        packaged = [json.loads(line) for line in lines]
        assert {row["code"] for row in packaged} == {fitted.code()}, again
        known = keeping.known_times(measured_lines(path).measurements)
        digests = {each.digest for each in known if len(each.measured) >= LEAST_POINTS}
        assert {row["digest"] for row in packaged} <= digests, again
        assert len(packaged) > 30
