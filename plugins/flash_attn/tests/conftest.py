"""Fixtures of the FlashAttention plugin's tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_select.environment import Environment
from attn_select_flash_attn.facts.builds import LIBRARIES

# Tests are imported one by one, so what they share is put in `sys.modules` by hand.
for _name in ("emulated", "layers"):
    _spec = importlib.util.spec_from_file_location(f"flash_attn_{_name}", Path(__file__).with_name(f"{_name}.py"))
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
def emulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Return a function that replaces a provider's module with an emulated one, and returns the list of its calls."""
    torch = pytest.importorskip("torch")
    from attn_select_flash_attn.runtime.adapters import adapter_for

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors as small as these more of them wait for each other
    adapter_for.cache_clear()
    yield lambda provider: sys.modules["flash_attn_emulated"].install(monkeypatch, provider)
    adapter_for.cache_clear()
    torch.set_num_threads(threads)
