"""The fixture that puts an emulated frontend in the place of an installed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType

import pytest


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Return a function that installs an emulated frontend with a cuDNN of some version, and returns its module."""
    torch = pytest.importorskip("torch")
    import cudnn_emulated

    from attn_select.testing import emulated_modules
    from attn_select_cudnn.runtime import library

    modules = []

    def install(version: int = 91900, capability: tuple[int, int] = (9, 0)) -> ModuleType:
        module = cudnn_emulated.module(version)
        context = emulated_modules({"cudnn": module})
        context.__enter__()
        modules.append(context)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        return module

    for known in (library.frontend, library.graphs_of):
        known.cache_clear()
    yield install
    for context in reversed(modules):
        context.__exit__(None, None, None)
    for known in (library.frontend, library.graphs_of):
        known.cache_clear()
