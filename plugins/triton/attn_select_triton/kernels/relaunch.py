"""Launching a compiled kernel again without what Triton does at every call to find it."""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import triton
from torch import Tensor
from triton.runtime import jit
from triton.runtime.driver import driver

_add_function: Any = getattr(getattr(jit, "DependenciesFinder", None), "_update_hash", None)


def _add_hashed(self: Any, function: Any) -> None:
    """Add a function that a kernel calls to the kernel's key in the cache on the disk, after its own key is made."""
    # Triton 3.6 and 3.7 take over its globals before (triton/runtime/jit.py, ``_update_hash``; 3.9 after): whether
    # these are known then depends on what the process launched before, and one that launches in another order compiles
    # anew.
    _ = function.cache_key
    _add_function(self, function)


if _add_function is not None:
    jit.DependenciesFinder._update_hash = _add_hashed

_compiled_only: ContextVar[Callable[[Any, Any], None] | None] = ContextVar("compiled_only", default=None)


@contextmanager
def compile_only(note: Callable[[Any, Any], None]) -> Iterator[None]:
    """Let ``launch`` compile and not run, and tell ``note`` each function and what Triton returned for its kernel."""
    token = _compiled_only.set(note)
    try:
        yield
    finally:
        _compiled_only.reset(token)


def launch(function: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    """Launch a kernel by Triton's own lookup; within ``compile_only`` compile it. Returns the compiled kernel."""
    # Triton's interpreter returns None, and so does ``compile_only``: its kernel may not be there yet.
    note = _compiled_only.get()
    if note is None:
        return function[grid](*arguments, **options)
    note(function, function.warmup(*arguments, grid=grid, **options))
    return None


@dataclass(frozen=True, slots=True)
class Launcher:
    """How Triton launches one compiled kernel, as far as no call changes it."""

    compiled: Any  # the kernel
    stream: Callable[[], int]  # gives the current one of the kernel's device
    function: Any = None  # C's, which takes descriptors as TMA has them; None: only Triton's own launcher knows how
    kernel: tuple[Any, ...] = ()  # arguments of the function between the stream and the kernel's
    together: bool = False  # whether the function takes the kernel's arguments as one tuple (from Triton 3.7 on)
    # places of the kernel's arguments, the last first, and what Triton encodes each with
    descriptors: tuple[tuple[int, Any], ...] = ()


def launcher_of(compiled: Any, arguments: tuple[Any, ...]) -> Launcher:
    """Return how a compiled kernel is launched, as Triton's launcher shows when it is called with these arguments."""
    # The launcher is ``CudaLauncher`` of triton/backends/nvidia/driver.py, read in 3.6.0, 3.7.1 and 3.9.0. Where it
    # hands C's function other arguments than those releases do, the kernel is launched through the launcher.
    current = driver.active
    stream = partial(current.get_current_stream, current.get_current_device())
    unknown = Launcher(compiled, stream)
    launcher = compiled.run
    if type(launcher).__name__ != "CudaLauncher" or launcher.global_scratch_size or launcher.profile_scratch_size:
        return unknown
    # A copy of the launcher whose C function only notes what it is given: nothing is launched, and no release's list
    # of arguments is written down here.
    given: list[Any] = []
    shown = copy(launcher)
    shown.launch = lambda *each: given.extend(each)
    start = 1, 1, 1, 0
    shown(*start, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    # By identity: what stands between stream and arguments is the kernel's, whatever its number.
    together = isinstance(given[-1], tuple) and _same(given[-1], arguments)
    behind = 1 if together else len(arguments)
    if not together and not _same(given[-behind:], arguments):
        return unknown
    kernel = tuple(given[len(start) : -behind])
    places = [place for place, argument in enumerate(arguments) if hasattr(argument, "block_shape")]
    if not places:
        return Launcher(compiled, stream, launcher.launch, kernel, together)
    # With descriptors Triton wraps C's function in one that encodes them: what it wraps is in its closure.
    wrapped = inspect.getclosurevars(launcher.launch).nonlocals
    function, metas = wrapped.get("launcher"), wrapped.get("tensordesc_meta") or ()
    if function is None or len(metas) != len(places):
        return unknown
    return Launcher(compiled, stream, function, kernel, together, tuple(zip(places, metas, strict=True))[::-1])


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def relaunch(launcher: Launcher, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
    """Launch a compiled kernel on its device's current stream, as ``compiled[grid](*arguments)`` does."""
    # Without hooks, which profilers set, nothing is made for them (triton/compiler/compiler.py, ``__getitem__``). TMA's
    # form of a descriptor stays with it: Triton makes it in every launch.
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        launcher.compiled[grid](*arguments)
        return
    compiled, stream = launcher.compiled, launcher.stream()
    if launcher.function is None:
        compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
        return
    flat: Sequence[Any] = arguments
    if launcher.descriptors:
        # One descriptor becomes several arguments. The last comes first, so that places before it stay true.
        flat = list(arguments)
        for place, meta in launcher.descriptors:
            flat[place : place + 1] = encoded(flat[place], meta)
    if launcher.together:
        launcher.function(*grid, stream, *launcher.kernel, flat)
        return
    launcher.function(*grid, stream, *launcher.kernel, *flat)


@cache
def _encode() -> Callable[[Any, Any], list[Any]]:
    """Return Triton's function from a descriptor and its kernel's metadata to the launcher's arguments."""
    # 3.9 hands it the launch's other arguments too, of which it reads none.
    from triton.backends.nvidia import driver as nvidia

    unread = (None,) * (len(inspect.signature(nvidia.make_tensordesc_arg).parameters) - 2)
    return lambda descriptor, meta: nvidia.make_tensordesc_arg(descriptor, meta, *unread)


def encoded(descriptor: Any, meta: Any) -> list[Any]:
    """Return a descriptor as the launcher takes it: made in its first launch and kept."""
    found: list[Any] | None = descriptor.__dict__.get("encoded")
    if found is None:
        found = descriptor.encoded = _encode()(descriptor, meta)
    return found


class Relaunch:
    """One specialisation of a kernel.

    ``function[grid](...)`` binds, specialises and hashes all arguments at every call. The compiled kernel that it
    returns is launched by itself from the second call on (as in Triton's tutorial on fused softmax).

    Args:
        function: what ``triton.jit`` or ``gluon.jit`` returned.
        options: ``num_warps`` and the like.

    The owner keeps one of these per specialisation and device: the calls of one differ neither in dtypes, constants and
    Nones, nor in what Triton specialises on, integers being 1 or multiples of 16 and addresses multiples of 16.
    """

    __slots__ = ("_function", "_launcher", "_options")

    def __init__(self, function: Any, **options: Any) -> None:
        self._function, self._options = function, options
        self._launcher: Launcher | None = None

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch with all of the kernel's arguments in order."""
        if self._launcher is not None:
            relaunch(self._launcher, grid, arguments)
            return
        compiled = launch(self._function, grid, *arguments, **self._options)
        if compiled is not None:
            self._launcher = launcher_of(compiled, arguments)


class Relaunches:
    """The specialisations of a kernel, each under a key that says all that ``Relaunch`` asks of one.

    Args:
        function, options: as ``Relaunch`` has them.
    """

    __slots__ = ("_function", "_made", "_options")

    def __init__(self, function: Any, **options: Any) -> None:
        self._function, self._options = function, options
        self._made: dict[Any, Relaunch] = {}

    def __call__(self, key: Any, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch with all of the kernel's arguments in order."""
        relaunch = self._made.get(key)
        if relaunch is None:
            relaunch = self._made[key] = Relaunch(self._function, **self._options)
        relaunch(grid, *arguments)


def specialised(*tensors: Tensor) -> tuple[Any, ...]:
    """Return a key's part for tensors: dtypes and alignments, and the device of the first."""
    return tensors[0].get_device(), *[(tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors]


def dtypes(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return a key's part for tensors on whose alignment the kernel is not specialised."""
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])
