"""The models of packaged times are packaged too: no first use fits one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from attn_select import clear_cache, select
from attn_select.times import model

ROOT = Path(__file__).resolve().parents[2]


def test_no_first_decision_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("package_fits", ROOT / "measure" / "bench" / "package_fits.py")
    assert spec is not None
    assert spec.loader is not None
    package_fits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package_fits)
    fitted: list[Any] = []

    def fit(points: Any, *rest: Any) -> Any:
        fitted.append(rest)
        return original(points, *rest)

    original = model.fit
    monkeypatch.setattr(model, "fit", fit)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clear_cache()
    layers = package_fits.layers()
    assert layers
    for gpu, config in layers:
        select(config, gpu, workload="chat")
    assert not fitted, "run python measure/bench/package_fits.py"
    assert not list(tmp_path.rglob("*.json"))
