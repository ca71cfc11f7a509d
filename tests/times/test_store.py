"""Files of measurements: which are read, what happens to corrupt lines, and writers that meet."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_select.errors import MeasurementError
from attn_select.times import store
from attn_select.times.measurement import Measurement
from attn_select.times.store import MeasurementFile, append_measurements, measurement_files, read_measurements

ONE = Measurement(
    gpu="NVIDIA H200",
    compute_capability="9.0",
    backend="FLASH_ATTN",
    kernel={"decode": "fa3"},
    config={"num_heads": 32},
    batch="64q1s4k",
    time_us=263.25,
    method="graph",
)
OTHER = dataclasses.replace(ONE, gpu="NVIDIA H100 80GB HBM3", time_us=372.0)


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user's folder under ``tmp_path``."""
    monkeypatch.setattr(store, "user_folder", lambda: tmp_path / "user")
    monkeypatch.delenv("ATTN_SELECT_MEASUREMENTS", raising=False)
    return tmp_path


def named(path: Path) -> list[MeasurementFile]:
    return [MeasurementFile("named", path)]


def test_what_was_appended_is_read_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.jsonl"
    append_measurements(path, [ONE])
    append_measurements(path, [OTHER, ONE])
    found = read_measurements(named(path))
    assert [(s.measurement, s.line) for s in found.measurements] == [(ONE, 1), (OTHER, 2), (ONE, 3)]
    assert found.measurements[0].file == MeasurementFile("named", path)
    assert found.files == tuple(named(path))
    assert not found.problems
    assert [s.line for s in read_measurements(named(path), "NVIDIA H200").measurements] == [1, 3]


def test_a_gpu_is_found_by_its_whole_name_however_it_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    strange = dataclasses.replace(ONE, gpu="Grafikkärt")
    append_measurements(path, [strange, ONE])
    with path.open("ab") as file:
        file.write(strange.to_line().replace("ä", "\\u00e4").encode() + b"\n")
        file.write(dataclasses.replace(OTHER, source="copied from NVIDIA H200").to_line().encode() + b"\n")
    assert [s.line for s in read_measurements(named(path), "Grafikkärt").measurements] == [1, 3]
    assert [s.line for s in read_measurements(named(path), "NVIDIA H200").measurements] == [2]


def test_corrupt_lines_are_named_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    good = ONE.to_line().encode()
    path.write_bytes(b"\n".join([good, b"{oops", b"", b"\xff\xfe", good[:40], good.replace(b'"v":1', b'"v":7'), good]))
    found = read_measurements(named(path))
    assert [s.line for s in found.measurements] == [1, 7]
    assert [problem.line for problem in found.problems] == [2, 4, 5, 6]
    assert str(found.problems[0]) == f"{path}:2: not a line of JSON: '{{oops'"
    assert "not a line of UTF-8" in str(found.problems[1])


def test_corrupt_lines_that_do_not_name_the_gpu_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{oops\n{"gpu": "NVIDIA H200"\n')
    assert [problem.line for problem in read_measurements(named(path), "NVIDIA H200").problems] == [2]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    append_measurements(tmp_path / "good.jsonl", [ONE])
    found = read_measurements([*named(tmp_path / "none.jsonl"), *named(tmp_path / "good.jsonl")])
    assert [str(problem) for problem in found.problems] == [
        f"{tmp_path / 'none.jsonl'}: cannot be read: No such file or directory"
    ]
    assert len(found.measurements) == 1


def test_files_are_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in ("user/b.jsonl", "c.jsonl", "d.jsonl", "e.jsonl")]
    for path in paths:
        append_measurements(path, [ONE])
    (tmp_path / "user" / "notes.txt").write_text("not a file of measurements")
    monkeypatch.setenv("ATTN_SELECT_MEASUREMENTS", os.pathsep.join([str(paths[1]), "", str(paths[2])]))
    found = measurement_files([paths[3]])
    kinds = ["user", "named", "named", "named"]
    assert [(file.kind, file.path) for file in found] == list(zip(kinds, paths, strict=True))


def test_without_any_file_there_is_nothing_to_read() -> None:
    assert measurement_files() == []
    assert read_measurements([]).measurements == ()


@pytest.mark.parametrize(("name", "seen"), [("none.jsonl", "there is no such file"), ("user", "it is a folder")])
def test_a_named_file_must_be_one(tmp_path: Path, name: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user").mkdir()
    with pytest.raises(MeasurementError, match=f"--measurements = .*: {seen}"):
        measurement_files([str(tmp_path / name)])
    monkeypatch.setenv("ATTN_SELECT_MEASUREMENTS", str(tmp_path / name))
    with pytest.raises(MeasurementError, match=f"ATTN_SELECT_MEASUREMENTS = .*: {seen}"):
        measurement_files()


def test_a_gpu_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.default_file("NVIDIA H100 80GB HBM3") == tmp_path / "user" / "nvidia-h100-80gb-hbm3.jsonl"
    assert store.default_file("...") == tmp_path / "user" / "unknown.jsonl"
    monkeypatch.setattr(store, "user_folder", lambda: None)
    assert store.default_file("NVIDIA H200") is None
    assert measurement_files() == []


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    append_measurements(path, [ONE])
    path.write_bytes(path.read_bytes()[:-9])
    append_measurements(path, [OTHER])
    found = read_measurements(named(path))
    assert [s.measurement for s in found.measurements] == [OTHER]
    assert [problem.line for problem in found.problems] == [1]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=f"{tmp_path} cannot be written"):
        append_measurements(tmp_path, [ONE])


def test_appending_nothing_makes_no_file(tmp_path: Path) -> None:
    append_measurements(tmp_path / "file.jsonl", [])
    assert not (tmp_path / "file.jsonl").exists()


WRITER = """
import sys
from pathlib import Path
from attn_select.times.measurement import Measurement
from attn_select.times.store import append_measurements
line, path, batch = sys.argv[1:]
measurement = Measurement.from_line(line.replace("64q1s4k", batch))
sys.stdin.readline()
for _ in range(50):
    append_measurements(Path(path), [measurement] * 20)
"""


def test_writers_that_meet_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, ONE.to_line(), str(path), batch], stdin=subprocess.PIPE)
        for batch in ("1q1s1k", "2q1s2k")
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0, 0]
    found = read_measurements(named(path))
    assert not found.problems
    batches = [s.measurement.batch for s in found.measurements]
    assert (batches.count("1q1s1k"), batches.count("2q1s2k")) == (1000, 1000)
