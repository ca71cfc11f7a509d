"""How a compiled kernel is launched again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

triton = pytest.importorskip("triton", minversion="3.6")

from attn_select_triton.kernels import relaunch as module  # noqa: E402  # Triton first
from attn_select_triton.kernels.relaunch import Relaunch, launcher_of  # noqa: E402


class Compiled:
    """What Triton returns for a kernel, as far as launching it needs it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.ran: list[tuple[Any, ...]] = []

    def run(self, *given: Any) -> None:
        self.ran.append(("run", *given))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *given: self.ran.append(("item", grid, *given))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Return a compiled kernel on a driver that knows one stream."""
    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    return Compiled()


def again(compiled: Compiled) -> Relaunch:
    relaunch = Relaunch(None)
    relaunch._launcher = launcher_of(compiled)
    return relaunch


def test_it_runs_on_the_current_stream_without_hooks(compiled: Compiled) -> None:
    again(compiled)((2, 3, 4), "a", 5)
    hooks = (None, None, None)
    assert compiled.ran == [("run", 2, 3, 4, "stream of 3", "function", "metadata", *hooks, "a", 5)]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hooks_are_called_by_triton(hook: str, compiled: Compiled) -> None:
    chain = getattr(triton.knobs.runtime, hook)
    seen: list[Any] = []
    chain.add(seen.append)
    try:
        again(compiled)((2, 3, 4), "a", 5)
    finally:
        chain.remove(seen.append)
    assert compiled.ran == [("item", (2, 3, 4), "a", 5)]


def test_it_is_called_as_triton_calls_it() -> None:
    """``CompiledKernel.__getitem__`` of the installed release passes the same arguments."""
    import inspect

    from triton.compiler.compiler import CompiledKernel

    source = "".join(inspect.getsource(CompiledKernel.__getitem__).split())
    assert "self.run(grid[0],grid[1],grid[2],stream,self.function,self.packed_metadata,launch_metadata," in source
    assert "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*args)" in source
