"""A survey's file: which is read, what it predicts, and what is said where it cannot be read."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_select import AttentionConfig, clear_cache, select
from attn_select.errors import MeasurementError
from attn_select.machine.device import lookup
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.prediction import load_survey, read_survey_file, user_path

GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
DECODE = parse_batch_shape("64q1s4k")


def data(**times_us: float) -> dict[str, Any]:
    """Return a survey of one workload, 64q1s4k of ``GQA``, that was timed once by each backend."""
    backends = {
        name: {
            "level": math.log(time_us / 262.0),
            "weights": [0.0],
            "times_us": [time_us],
            "first_call_s": [None],
            "workspace_bytes": [4096],
            "host_us": [50],
        }
        for name, time_us in times_us.items()
    }
    family = {
        "amplitude": 0.1,
        "noise": 0.001,
        "floors_us": [262.0],
        "features": {"requests": {"scale": 0.5, "values": [6]}},
        "backends": backends,
    }
    known = {name: {"fingerprint": {"acme": "1.0"}, "date": "2026-11-28", "times": 1} for name in times_us}
    return {
        "v": 1,
        "gpu": "NVIDIA H200",
        "date": "2026-11-28T00:00:00+00:00",
        "workloads": 1,
        "rates": {"bytes_per_us": 4.19e6, "flops_per_us": 7.81e8, "sm_count": 132},
        "margin": 1.5,
        "backends": known,
        "families": {"attention": family},
    }


def written(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home directory of its own; what was read there is forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    clear_cache()
    yield tmp_path
    clear_cache()


def test_a_predicted_time_is_the_floor_times_what_was_learned(home: Path) -> None:
    survey = read_survey_file(written(home / "s.json.gz", data(TRITON_ATTN=250.0, FLASH_ATTN=300.0)), "s.json.gz")
    found = survey.predict(GQA, DECODE)
    assert found["FLASH_ATTN"] / found["TRITON_ATTN"] == pytest.approx(300 / 250)
    assert found["TRITON_ATTN"] == pytest.approx(250, rel=0.03)
    (near,) = survey.nearest(GQA, DECODE)
    assert near.times_us == {"TRITON_ATTN": 250.0, "FLASH_ATTN": 300.0}
    assert near.first_call_s == {}


def test_the_favourite_was_the_fastest_most_often(home: Path) -> None:
    content = data(A=100.0, B=90.0, C=80.0)
    family = content["families"]["attention"]
    family["features"]["requests"]["values"] = [6, 7, 8, 9]
    rows = {"A": [100, 50, 70, None], "B": [90, 60, 71, None], "C": [80, None, 90, None]}
    for name, times in rows.items():
        family["backends"][name] |= {"times_us": times, "weights": [0.0] * 4}
    survey = read_survey_file(written(home / "mine.json.gz", content), "mine")
    assert survey.favourite(GQA) == "A"
    assert survey.favourite(AttentionConfig(num_heads=8, head_size=64, attn_type="encoder")) is None


def test_the_users_survey_stands_before_the_packaged_one() -> None:
    device = lookup("h200")
    packaged = load_survey(device)
    assert packaged is not None
    assert packaged.source == "packaged"
    assert set(packaged.predict(GQA, DECODE)) >= {"TRITON_ATTN", "FLASH_ATTN", "FLASHINFER"}
    path = user_path(device)
    assert path is not None
    written(path, data(TRITON_ATTN=1.0))
    own = load_survey(device)
    assert own is not None
    assert (own.source, own.workloads) == ("measured here", 1)


def test_a_gpu_that_differs_in_its_memory_alone_takes_the_others_survey() -> None:
    h200, h100, a100 = (load_survey(lookup(name)) for name in ("h200", "h100", "a100"))
    assert a100 is None
    assert h200 is not None
    assert h100 is not None
    assert h100.source == "of h200"
    decode = h100.predict(GQA, DECODE)["FLASH_ATTN"] / h200.predict(GQA, DECODE)["FLASH_ATTN"]
    prefill = parse_batch_shape("q8k")
    assert 1.2 < decode < 4800 / 3350 * 1.05  # by the memory
    assert 0.9 < h100.predict(GQA, prefill)["FLASH_ATTN"] / h200.predict(GQA, prefill)["FLASH_ATTN"] < 1.1


def test_a_named_survey_decides_and_none_does(home: Path) -> None:
    path = written(home / "mine.json.gz", data(TRITON_ATTN=250.0, FLASH_ATTN=100.0, FLASHINFER=300.0))
    assert select(GQA, "h200", times=path).selected["decode"] == "FLASH_ATTN"
    evidence = select(GQA, "h200", times=path).evidence
    assert evidence is not None
    assert evidence.source == "mine.json.gz"
    assert select(GQA, "h200", times=False).evidence is None
    assert select(GQA, "a100").evidence is None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no survey that can be read"),
        (b"{}", "no survey that can be read"),
        (gzip.compress(b"{}", mtime=0), "no survey that can be read: 'v'"),
        (gzip.compress(b'{"v": 9}', mtime=0), "v = 9: accepted is 1"),
        (gzip.compress(b'{"v": 1}', mtime=0), "no survey that can be read: 'gpu'"),
        (gzip.compress(b'{"v": 1}', mtime=0)[:-4], "no survey that can be read"),
    ],
)
def test_a_file_that_is_no_survey_is_named(home: Path, content: bytes, told: str) -> None:
    path = home / "broken.json.gz"
    path.write_bytes(content)
    with pytest.raises(MeasurementError, match=told) as caught:
        select(GQA, "h200", times=path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(home: Path) -> None:
    path = home / "nope.json.gz"
    with pytest.raises(MeasurementError) as caught:
        select(GQA, "h200", times=path)
    assert str(caught.value) == f"{path}: no survey that can be read: No such file or directory"


def test_a_file_that_was_written_anew_is_read_again(home: Path) -> None:
    path = written(home / "mine.json.gz", data(TRITON_ATTN=250.0, FLASH_ATTN=100.0))
    assert select(GQA, "h200", times=path).selected["decode"] == "FLASH_ATTN"
    written(path, data(TRITON_ATTN=50.0, FLASH_ATTN=100.0))
    clear_cache()
    assert select(GQA, "h200", times=path).selected["decode"] == "TRITON_ATTN"
