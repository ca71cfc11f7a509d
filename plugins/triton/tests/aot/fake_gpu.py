"""A GPU that is not there: launchers run as if on it, and what they would launch is compiled, or only noted.

So a test compiles what a user's call compiles: same launch table, same constants, same specialisation of arguments.
Wants a process in which Triton's interpreter is off.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from attn_select_triton.kernels import relaunch
from attn_select_triton.kernels.relaunch import Relaunch

SMS = {75: 72, 80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 188}
"""Multiprocessors of a large chip of each compute capability: Quadro RTX 8000, A100, RTX A6000, RTX 6000 Ada, H100,
B200 and RTX PRO 6000 Blackwell (NVIDIA data sheets)."""
INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
"""What products on tensor cores are called in PTX."""


class OnGPU(torch.Tensor):
    """A tensor in CPU memory, never read, that says it is on a GPU; so do its views."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the GPU that is not there."""
    return torch.empty(shape, dtype=dtype).as_subclass(OnGPU)


class _Driver:
    def __init__(self, target: int) -> None:
        self.target = GPUTarget("cuda", target, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select")
"""What waits for a GPU, called with a tensor there."""


class _OnCPU(TorchFunctionMode):
    """Makes in CPU memory what is asked for on a GPU, copies nothing from the host to it, and waits for nothing there.

    Raises:
        RuntimeError: the host would wait for the GPU.
    """

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        options.pop("pin_memory", None)
        if getattr(function, "__name__", "") in WAITS and isinstance(arguments[0], OnGPU):
            raise RuntimeError(f"{function.__name__}: the host waits for the GPU")
        if function is torch.device:
            return function(*arguments, **options)
        if function in (torch.Tensor.pin_memory, torch.Tensor.copy_):
            return arguments[0]
        asked = [_is_gpu(each) for each in (*arguments, options.get("device"))]
        if not any(asked):
            return function(*arguments, **options)
        cpu = torch.device("cpu")
        arguments = tuple(cpu if on_gpu else each for each, on_gpu in zip(arguments, asked, strict=False))
        options |= {"device": cpu} if asked[-1] else {}
        return function(*arguments, **options).as_subclass(OnGPU)


def _is_gpu(argument: Any) -> bool:
    return isinstance(argument, torch.device) and argument.type == "cuda"


class _Stream:
    """Nothing runs here."""


class _Event:
    def record(self, stream: _Stream) -> None:
        """Nothing runs here."""

    wait = record


class _Properties:
    def __init__(self, sms: int) -> None:
        self.multi_processor_count = sms


def pretend(target: int) -> None:
    """Make this process see a GPU of compute capability ``target / 10``. There is no way back."""
    driver.set_active(_Driver(target))
    _OnCPU().__enter__()
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: _Stream()  # type: ignore[assignment, return-value]
    torch.cuda.set_stream = lambda stream: None  # type: ignore[assignment]
    torch.cuda.Stream = lambda device=None, priority=0: _Stream()  # type: ignore[assignment, misc]
    torch.cuda.Event = _Event  # type: ignore[assignment, misc]
    torch.cuda.get_device_capability = lambda device=None: divmod(target, 10)  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda device=None: ""  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: _Properties(SMS[target])  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler and ptxas say of one kernel.

    Attributes:
        kernel: the function's name.
        launch: grid, constants and options.
        shared: bytes of shared memory; tensor_memory columns of it on compute capability 10.
        registers: per thread.
        spilled: bytes that a thread spills to local memory and loads from there, as ptxas counts its instructions.
        products: matrix products in the source, float32 ones, which run on FMA units, left out.
        instructions: tensor-core instructions in the PTX, by name.
        opcodes: of the PTX, each with how often it stands there.
        seconds: of the whole compilation; ``assembler`` of it in ptxas.
        size: bytes of the binary.
    """

    kernel: str
    launch: str
    shared: int
    tensor_memory: int
    registers: int
    spilled: int
    products: int
    instructions: dict[str, int]
    opcodes: dict[str, int]
    seconds: float
    assembler: float
    size: int


def _constants(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    named = {p.name: value for p, value in zip(function.params, arguments, strict=False) if p.is_constexpr}
    return ", ".join(f"{name}={value}" for name, value in {**named, **options}.items())


def _products(assembly: dict[str, str]) -> int:
    """Return how many matrix products the kernel has, float32 ones left out."""
    source = assembly.get("ttir") or assembly["ttgir"]
    lines = [line for line in source.splitlines() if re.search(r"= (tt\.dot|ttng\.warp_group_dot) ", line)]
    return sum(1 for line in lines if not re.search(r": tensor<[0-9x]+xf32", line))


def _opcodes(ptx: str) -> dict[str, int]:
    """Return the opcodes of a kernel and how often each stands there; names of registers and labels are left out."""
    code = ptx.partition(".section\t.debug")[0]
    return dict(Counter(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)[\s;]", code, re.MULTILINE)))


@contextlib.contextmanager
def compiling(wanted: Callable[[str], bool] = lambda kernel: True) -> Iterator[list[Compiled]]:
    """Compile what is launched, run nothing; give the list that the kernels go into, each once.

    Of the functions that are launched, those are left out whose name ``wanted`` does not want.
    """
    found: list[Compiled] = []
    seen: set[int] = set()
    times: list[Any] = []
    run, knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile = JITFunction.run, True, True

    def note(**told: Any) -> None:
        times.append(told["times"])

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not wanted(self.fn.__name__):
            return None
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            said = log.getvalue()
            stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
            (registers,) = re.findall(r"Used (\d+) registers", said)
            found.append(
                Compiled(
                    self.fn.__name__,
                    f"{grid} {_constants(self, arguments, options)}",
                    kernel.metadata.shared,
                    kernel.metadata.tmem_size or 0,
                    int(registers),
                    int(stores) + int(loads),
                    _products(kernel.asm),
                    {name: kernel.asm["ptx"].count(name) for name in INSTRUCTIONS if name in kernel.asm["ptx"]},
                    _opcodes(kernel.asm["ptx"]),
                    times[-1].total / 1e6,
                    dict(times[-1].lowering_stages)["cubin"] / 1e6,
                    len(kernel.asm["cubin"]),
                )
            )
        return kernel

    again, launcher_of = relaunch.relaunch, relaunch.launcher_of
    JITFunction.run, knobs.compilation.listener = compile_only, note
    relaunch.relaunch = lambda *arguments: None
    relaunch.launcher_of = lambda compiled, arguments: relaunch.Launcher(compiled, lambda: 0)
    try:
        yield found
    finally:
        JITFunction.run, relaunch.relaunch, relaunch.launcher_of = run, again, launcher_of
        knobs.compilation.listener = None


@contextlib.contextmanager
def noting() -> Iterator[dict[tuple[str, str], set[str]]]:
    """Note what is launched, compile and run nothing.

    Gives a dict from a kernel and its constants to the specialisations that its other arguments asked for: each is one
    compilation. ``Relaunch`` objects are in it too, each with what it was called for: anything but one is a mistake.
    """
    found: dict[tuple[str, str], set[str]] = {}
    relaunching: list[Relaunch] = []

    def note(**said: Any) -> bool:
        function, told = said["fn"].jit_function, said["compile"]
        constants, options = told["constants"], {name: told[name] for name in ("num_warps", "num_stages")}
        # What is not given is a constant too: an LSE, say, or the workspace of a decode in one piece.
        fixed = {p.name for p in function.params if p.is_constexpr or constants.get((p.num,), 0) is None}
        names = {p.name: constants.get((p.num,)) for p in function.params if p.name in fixed}
        others = [
            (p.name, told["signature"][p.name], told["configs"][0].get((p.num,)))
            for p in function.params
            if p.name not in fixed
        ]
        name, kind = function.fn.__name__, str({**names, **options})
        found.setdefault((name, kind), set()).add(str(others))
        for one in relaunching:
            found.setdefault((f"relaunch {id(one)}", name), set()).add(f"{kind} {others}")
        return True

    call = Relaunch.__call__

    def relaunch(self: Relaunch, *arguments: Any) -> None:
        relaunching.append(self)
        call(self, *arguments)
        relaunching.pop()

    knobs.runtime.jit_cache_hook, Relaunch.__call__ = note, relaunch  # type: ignore[method-assign]
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook, Relaunch.__call__ = None, call  # type: ignore[method-assign]


def kernels(noted: dict[tuple[str, str], set[str]]) -> set[tuple[str, str, str]]:
    """Return what ``noting`` gives, without ``Relaunch`` objects: kernel, constants and specialisation of each."""
    return {(*key, each) for key, asked in noted.items() if not key[0].startswith("relaunch") for each in asked}
