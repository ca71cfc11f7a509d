"""Fixtures of the FlashInfer plugin's tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests are imported one by one, so what they share is put in `sys.modules` by hand.
_PARTS = ("fp4", "plan", "native", "ragged", "trtllm", "cascade", "mla_decode", "mla")
for _name in ("emulated", *(f"emulated_{part}" for part in _PARTS), "layers", "groups", "mla_layers"):
    _path = Path(__file__).with_name(f"{_name}.py")
    _spec = importlib.util.spec_from_file_location(f"flashinfer_{_name}", _path) if _path.exists() else None
    if _spec is not None and _spec.loader is not None and importlib.util.find_spec("torch") is not None:
        sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_spec.name])


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that puts the emulated entries in FlashInfer's place, and returns the emulated device.

    Its arguments: the compute capability, and entries to replace by name.
    """
    torch = pytest.importorskip("torch")
    emulated: Any = sys.modules["flashinfer_emulated"]

    def install(capability: tuple[int, int] = (9, 0), **others: Any) -> Any:
        from attn_select_flashinfer.runtime import library

        made = emulated.library(**others)
        monkeypatch.setattr(library, "flashinfer", lambda: made)
        return emulated.reset(capability)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors as small as these more of them wait for each other
    yield install
    emulated.reset()
    torch.set_num_threads(threads)
