"""How a compiled kernel is launched again."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

triton = pytest.importorskip("triton", minversion="3.6")
nvidia = pytest.importorskip("triton.backends.nvidia.driver")
import torch  # noqa: E402

from attn_select_triton.kernels.descriptors import Descriptors  # noqa: E402  # Triton first
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
def compiled() -> Iterator[Compiled]:
    """Return a compiled kernel on a driver that knows one stream."""
    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: f"stream of {device}")
    driver = triton.runtime.driver
    before = driver._active
    driver.set_active(active)
    yield Compiled()
    driver._active = before


def launcher_on(compiled: Compiled, described: bool) -> Any:
    """Return the installed Triton's launcher of a kernel whose second and fourth arguments are descriptors, or of none.

    C's function below it, which needs a driver, is one that records what it is given.
    """
    launcher = object.__new__(nvidia.CudaLauncher)
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = launcher.num_ctas = 1
    launcher.launch_cooperative_grid, launcher.launch_pdl, launcher.gsan_enabled = False, True, False
    launcher.arg_annotations, launcher.kernel_signature = "annotations", b"signature"
    launcher.launch = Recorded(compiled)
    if described:
        signature = dict(enumerate(["*fp16", "tensordesc<fp16[8, 64]>", "i32", "tensordesc<fp16[8, 64]>"]))
        launcher.launch = nvidia.wrap_handle_tensordesc(launcher.launch, signature, ["first meta", "second meta"])
    return launcher


class Recorded:
    """C's function below a launcher."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled

    def __call__(self, *given: Any) -> None:
        *others, last = given
        # Either a list or a tuple does: C reads a sequence.
        self._compiled.ran.append((*others, tuple(last) if isinstance(last, list) else last))


@dataclasses.dataclass
class Descriptor:
    """As Triton has it; ``base`` is an address here."""

    base: Any
    shape: list[int]
    strides: list[int]
    block_shape: list[int]


def again(compiled: Compiled, *arguments: Any) -> Relaunch:
    relaunch = Relaunch(None)
    relaunch._launcher = launcher_of(compiled, arguments)
    return relaunch


def test_it_runs_on_the_current_stream_without_hooks(compiled: Compiled) -> None:
    again(compiled)((2, 3, 4), "a", 5)
    hooks = (None, None, None)
    assert compiled.ran == [("run", 2, 3, 4, "stream of 3", "function", "metadata", *hooks, "a", 5)]


@pytest.mark.parametrize("described", [False, True])
def test_the_c_function_gets_what_triton_gives_it(
    described: bool, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a descriptor is encoded once, whatever memory it leads to."""
    encoded: list[tuple[int, int]] = []

    def encode(descriptor: Any, meta: str, *unread: Any) -> list[Any]:
        encoded.append((descriptor.base.data_ptr(), descriptor.shape[0]))
        return [f"map by {meta}", *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", wraps(nvidia.make_tensordesc_arg)(encode))
    launcher = launcher_on(compiled, described)
    monkeypatch.setattr(compiled, "run", launcher)
    relaunch = None
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    boxes = Descriptors(Descriptor(torch.zeros(0, 64), [9, 64], [64, 1], [8, 64]))
    tensor = torch.zeros(20, 64)
    for rows in (9, 9, 20):
        arguments = ("a", boxes.over(tensor, rows), 5, boxes.over(tensor[4:], rows)) if described else ("a", 5)
        compiled.ran.clear()
        launcher(2, 3, 4, "stream of 3", "function", "metadata", None, None, None, *arguments)
        wanted = list(compiled.ran)
        encoded[:] = encoded[:-2]
        compiled.ran.clear()
        relaunch = relaunch or again(compiled, *arguments)
        assert relaunch._launcher is not None
        assert relaunch._launcher.function is not None
        assert not compiled.ran
        relaunch((2, 3, 4), *arguments)
        assert compiled.ran == wanted
    places = [(tensor.data_ptr(), 9), (tensor[4:].data_ptr(), 9), (tensor.data_ptr(), 20), (tensor[4:].data_ptr(), 20)]
    assert sorted(encoded) == sorted(places if described else [])


def test_descriptors_keep_no_memory_and_are_those_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory becomes another tensor of more rows: its descriptor says so."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    tensor = torch.zeros(40, 64)
    boxes = Descriptors(Descriptor(tensor, [40, 64], [64, 1], [8, 64]))
    made = boxes.over(tensor, 40)
    assert boxes.over(tensor, 40) is made
    place, gone = tensor.data_ptr(), weakref.ref(tensor)
    other = tensor[:30]
    assert (boxes.over(other, 30).shape, made.shape) == ([30, 64], [40, 64])
    assert boxes.over(other, 30).base.data_ptr() == place
    del tensor, other
    gc.collect()
    assert gone() is None


def test_no_more_descriptors_are_kept_than_layers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr("attn_select_triton.kernels.descriptors.MOST", 3)
    tensor = torch.zeros(9, 64)
    boxes = Descriptors(Descriptor(tensor, [9, 64], [64, 1], [8, 64]))
    assert [boxes.over(tensor, rows).shape[0] for rows in (1, 2, 3, 4, 1)] == [1, 2, 3, 4, 1]
    assert len(boxes._made) <= 3


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


@pytest.mark.parametrize("change", ["arguments are changed", "arguments come first", "none are handed on"])
def test_a_launcher_of_another_shape_is_called_itself(
    change: str, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No release is known by its name: what hands C's function anything else launches by itself."""

    def call(self: Any, *given: Any) -> None:
        handed = {"arguments are changed": [*given[:-1], "another"], "arguments come first": [*given[9:], *given[:9]]}
        self.launch(*handed.get(change, given[:9]))

    monkeypatch.setattr(nvidia.CudaLauncher, "__call__", call)
    launcher = launcher_on(compiled, described=False)
    monkeypatch.setattr(compiled, "run", launcher)
    assert launcher_of(compiled, ("a", "b")).function is None
    again(compiled, "a", "b")((2, 3, 4), "a", "b")
    launched = list(compiled.ran)
    compiled.ran.clear()
    launcher(2, 3, 4, "stream of 3", "function", "metadata", None, None, None, "a", "b")
    assert launched == compiled.ran


def test_it_is_called_as_triton_calls_it() -> None:
    """``CompiledKernel.__getitem__`` of the installed release passes the same arguments."""
    import inspect

    from triton.compiler.compiler import CompiledKernel

    source = "".join(inspect.getsource(CompiledKernel.__getitem__).split())
    assert "self.run(grid[0],grid[1],grid[2],stream,self.function,self.packed_metadata,launch_metadata," in source
    assert "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*args)" in source
