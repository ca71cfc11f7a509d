"""docs/gpu-results.md is what docs/results_page.py writes of docs/results, and every run says what it is of."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("results_page", ROOT / "docs" / "results_page.py")
assert _spec is not None
assert _spec.loader is not None
results_page = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(results_page)


def test_the_page_is_what_the_runs_say() -> None:
    assert results_page.PAGE.read_text("utf-8") == results_page.page(), "run python docs/results_page.py"


@pytest.mark.parametrize(("run", "lines"), [pytest.param(*each, id=each[0]["title"]) for each in results_page.runs()])
def test_a_run_says_what_its_values_are_of(run: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    assert set(run) - {"text"} == set(results_page.RUN)
    assert run["versions"].get("torch")
    for line in lines:
        assert set(line) == {"note"} or set(line) > {"case"}
