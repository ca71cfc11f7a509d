"""Fixtures of the FlashMLA plugin's tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_select.environment import Environment
from attn_select_flashmla.providers import LIBRARIES

# Tests are imported one by one, so what they share is put in `sys.modules` by hand.
for _name in ("emulated", "layers"):
    _spec = importlib.util.spec_from_file_location(f"flashmla_{_name}", Path(__file__).with_name(f"{_name}.py"))
    assert _spec is not None
    assert _spec.loader is not None
    if importlib.util.find_spec("torch") is not None:
        sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_spec.name])

MODULES = {library.distribution: library.module for group in LIBRARIES for library in group}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes an environment in which only these distributions (with versions) are installed."""

    def make(**versions: str) -> Environment:
        there = {"torch": "2.11.0", **{name.replace("_", "-"): version for name, version in versions.items()}}
        monkeypatch.setattr("attn_select.environment.installed_version", there.get)
        monkeypatch.setattr("attn_select.environment.has_module", {MODULES[name] for name in there}.__contains__)
        return Environment()

    return make


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[str]]]:
    """Return a function that puts an emulated build in a distribution's place and returns the list of calls."""
    pytest.importorskip("torch")
    import flashmla_emulated

    from attn_select_flashmla.adapters import adapter_for

    def make(distribution: str) -> list[str]:
        for name, module in flashmla_emulated.modules(distribution).items():
            monkeypatch.setitem(sys.modules, name, module)
        adapter_for.cache_clear()
        flashmla_emulated.calls.clear()
        found: list[str] = flashmla_emulated.calls
        return found

    yield make
    adapter_for.cache_clear()
