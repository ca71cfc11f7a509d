"""Kept models of time: read where they were kept, and never for anything else."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path

import pytest

from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import lookup
from attn_select.times import model
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.kept_fits import kept_or_fitted
from attn_select.times.timed_layer import timed_layer

LAYER = timed_layer(AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128))
OTHER = timed_layer(AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, sliding_window=128))
POINTS = [
    (parse_batch_shape(f"{batch}q1s{context}"), 10 + batch * context / 700)
    for batch in (1, 8, 64)
    for context in (256, 1024, 4096)
]
ASKED = parse_batch_shape("20q1s700")


@pytest.fixture
def fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the fits that were made; models are kept below a folder of the test's own."""
    made: list[int] = []
    original = model.fit

    def counted(points: list[tuple[BatchShape, float]], *rest: object) -> model.TimeModel:
        made.append(len(points))
        return original(points, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "fit", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def test_a_model_is_fitted_once(fits: list[int], tmp_path: Path) -> None:
    first, again = (kept_or_fitted(points, LAYER, lookup("h100")) for points in (POINTS, POINTS[::-1]))
    assert fits == [9]
    assert again == first
    assert again.predict(ASKED) == first.predict(ASKED)
    assert len(list((tmp_path / "attn-select" / "fits").iterdir())) == 1  # and nothing unfinished


def test_anything_else_is_fitted_anew(fits: list[int]) -> None:
    kept_or_fitted(POINTS, LAYER, lookup("h100"))
    kept_or_fitted([*POINTS[:-1], (POINTS[-1][0], 1.0)], LAYER, lookup("h100"))
    kept_or_fitted(POINTS[:-1], LAYER, lookup("h100"))
    kept_or_fitted(POINTS, OTHER, lookup("h100"))
    kept_or_fitted(POINTS, LAYER, lookup("a100"))
    assert len(fits) == 5


def test_a_changed_value_is_never_used(fits: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One number of the file is changed at a time: it is fitted anew, and said where who asks hears it."""
    first = kept_or_fitted(POINTS, LAYER, lookup("h100"))
    (file,) = (tmp_path / "attn-select" / "fits").iterdir()
    whole = file.read_text()
    numbers = [*re.finditer(r"(?<![\w.])\d+(\.\d+)?", whole.partition("\n")[2])]
    chosen = random.Random(0).sample(numbers, min(40, len(numbers)))
    caplog.set_level(logging.INFO, "attn_select")
    head = len(whole.partition("\n")[0]) + 1
    for count, found in enumerate(chosen, 1):
        file.write_text(f"{whole[: head + found.start()]}7{found[0]}{whole[head + found.end() :]}")
        assert kept_or_fitted(POINTS, LAYER, lookup("h100")) == first
        assert len(fits) == 1 + count
        assert file.read_text() == whole
        assert str(file) in caplog.messages[-1]
        assert "damaged" in caplog.messages[-1]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"layer": {"num_heads": -1}}', "null"])
def test_a_damaged_file_is_fitted_anew_and_replaced(fits: list[int], tmp_path: Path, text: str) -> None:
    first = kept_or_fitted(POINTS, LAYER, lookup("h100"))
    (file,) = (tmp_path / "attn-select" / "fits").iterdir()
    file.write_text(text)
    assert kept_or_fitted(POINTS, LAYER, lookup("h100")) == first
    assert kept_or_fitted(POINTS, LAYER, lookup("h100")) == first
    assert len(fits) == 2


def test_a_folder_that_cannot_be_written_costs_time_alone(fits: list[int], tmp_path: Path) -> None:
    (tmp_path / "attn-select").write_text("a file where the folder belongs")
    first = kept_or_fitted(POINTS, LAYER, lookup("h100"))
    assert kept_or_fitted(POINTS, LAYER, lookup("h100")) == first
    assert len(fits) == 2
