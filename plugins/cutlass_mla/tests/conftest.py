"""Fixtures of the CUTLASS MLA plugin's tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests are imported one by one, so what they share is put in `sys.modules` by hand.
for _name in ("emulated", "layers"):
    _spec = importlib.util.spec_from_file_location(f"cutlass_mla_{_name}", Path(__file__).with_name(f"{_name}.py"))
    assert _spec is not None
    assert _spec.loader is not None
    if importlib.util.find_spec("torch") is not None:
        sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_spec.name])


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Return a function that puts emulated functions in a distribution's place and returns the list of calls."""
    torch = pytest.importorskip("torch")
    import cutlass_mla_emulated

    from attn_select_cutlass_mla.adapters import adapter_for

    def make(distribution: str) -> list[dict[str, Any]]:
        for name, module in cutlass_mla_emulated.modules(distribution).items():
            monkeypatch.setitem(sys.modules, name, module)
        adapter_for.cache_clear()
        cutlass_mla_emulated.calls.clear()
        found: list[dict[str, Any]] = cutlass_mla_emulated.calls
        return found

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors as small as these more of them wait for each other
    yield make
    adapter_for.cache_clear()
    torch.set_num_threads(threads)
