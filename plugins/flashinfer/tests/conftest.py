"""Fixtures of the FlashInfer plugin's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # for what the tests share: flashinfer_emulated, flashinfer_groups, ...


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that puts the emulated entries in FlashInfer's place, and returns the emulated device.

    Its arguments: the compute capability, ``release`` of FlashInfer, and entries to replace by name.
    """
    torch = pytest.importorskip("torch")
    import flashinfer_emulated

    from attn_select_flashinfer.runtime import library

    def install(capability: tuple[int, int] = (9, 0), **others: Any) -> Any:
        made = flashinfer_emulated.library(**others)
        monkeypatch.setattr(library, "flashinfer", lambda: made)
        return flashinfer_emulated.reset(capability)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors as small as these more of them wait for each other
    yield install
    flashinfer_emulated.reset()
    torch.set_num_threads(threads)
