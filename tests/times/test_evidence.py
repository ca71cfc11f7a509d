"""Which times of a survey count, and for how much, where kernels here are others than the surveyed ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from attn_select import AttentionConfig
from attn_select.backends.registry import load_plugins
from attn_select.machine.device import lookup
from attn_select.machine.environment import Environment
from attn_select.times import evidence as module
from attn_select.times import fingerprint
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.evidence import STALE, Evidence, load_evidence
from attn_select.times.fingerprint import SOURCES, sources_hash
from attn_select.times.prediction import PACKAGED_FOLDER

GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
DECODE = parse_batch_shape("64q1s4k")
H200 = lookup("h200")
HERE = Environment(assume_installed=True, pins={"flashinfer-python": "0.6.18"})
SPECS = load_plugins().specs


def loaded(folder: Path, backend: str, recorded: dict[str, str], here: Environment = HERE) -> Evidence:
    """Return the packaged survey's evidence, as if its times of a backend were of other kernels."""
    survey: dict[str, Any] = json.loads(gzip.decompress((PACKAGED_FOLDER / "h200.json.gz").read_bytes()))
    survey["backends"][backend]["fingerprint"] = recorded
    path = folder / f"{len([*folder.iterdir()])}.json.gz"  # files that were read are kept
    path.write_bytes(gzip.compress(json.dumps(survey).encode()))
    found = load_evidence(H200, here, SPECS, path)
    assert found is not None
    return found


def own_code(backend: str) -> dict[str, str]:
    return {SOURCES: sources_hash(SPECS[backend].load.partition(":")[0])}


def test_times_of_the_code_that_is_here_count(tmp_path: Path) -> None:
    found = loaded(tmp_path, "TRITON_ATTN", own_code("TRITON_ATTN"))
    assert "TRITON_ATTN" not in found.stale
    assert found.predict(GQA, DECODE)["TRITON_ATTN"] == found.survey.predict(GQA, DECODE)["TRITON_ATTN"]


def test_times_of_other_code_say_nothing(tmp_path: Path) -> None:
    found = loaded(tmp_path, "TRITON_ATTN", {SOURCES: "0" * 16})
    assert found.stale["TRITON_ATTN"] == "its own kernels or schedules changed"
    assert "TRITON_ATTN" not in found.predict(GQA, DECODE)
    assert "TRITON_ATTN" in found.survey.predict(GQA, DECODE)


def test_times_with_another_release_of_a_library_count_longer(tmp_path: Path) -> None:
    found = loaded(tmp_path, "FLASHINFER", {"flashinfer-python": "0.0.1"})
    assert found.stale["FLASHINFER"] == "flashinfer-python 0.0.1, now 0.6.18"
    predicted = found.survey.predict(GQA, DECODE)["FLASHINFER"]
    assert found.predict(GQA, DECODE)["FLASHINFER"] == pytest.approx(predicted * STALE)


def test_code_that_is_alike_counts_longer_with_another_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {SOURCES: [{"releases": ["0" * 16, *own_code("TRITON_ATTN").values()]}]}
    monkeypatch.setattr(fingerprint, "_alike_rows", lambda: rows)
    here = Environment(assume_installed=True, pins={"triton": "3.8.0"})
    found = loaded(tmp_path, "TRITON_ATTN", {SOURCES: "0" * 16, "triton": "3.5"}, here)
    assert found.stale["TRITON_ATTN"] == "triton 3.5, now 3.8"
    predicted = found.survey.predict(GQA, DECODE)["TRITON_ATTN"]
    assert found.predict(GQA, DECODE)["TRITON_ATTN"] == pytest.approx(predicted * STALE)


def test_what_is_known_to_be_of_older_kernels_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = {"FLASHINFER": {"reason": "new kernels", "date": "2026-11-28"}}
    monkeypatch.setattr(module, "known_stale", lambda: why)
    assert "FLASHINFER" not in loaded(tmp_path, "FLASHINFER", {"flashinfer-python": "0.0.1"}).predict(GQA, DECODE)
    here = {"flashinfer-python": "0.6.18"}  # it was measured again
    assert "FLASHINFER" in loaded(tmp_path, "FLASHINFER", here).predict(GQA, DECODE)
