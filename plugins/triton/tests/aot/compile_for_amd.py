"""Compile every kernel of the launchers for one of AMD's architectures without a GPU, for the layers accepted there.

    python plugins/triton/tests/aot/compile_for_amd.py gfx942

Prints one line of JSON per kernel: its name, its launcher, and the bytes of LDS that it takes. Launchers see what
torch's build for ROCm says for the compute capability. Each kernel of a launcher is compiled for its first layer alone.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from fake_gpu import SMS, pretend
from shape_classes import Tensors, shape_classes
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from attn_select.decide.amd import on_amd
from attn_select.machine.device import lookup
from attn_select_triton.kernels import relaunch


def main() -> None:
    """Compile, and print what came out."""
    arch = sys.argv[1]
    torch.set_num_threads(1)
    target = int(arch[3:5])  # what torch's build for ROCm says for the compute capability, times 10
    SMS[target] = 304
    pretend(target)
    driver.active.target = GPUTarget("hip", arch, 64)
    knobs.compilation.always_compile = True
    run, compiled, launching = JITFunction.run, set[tuple[str, str]](), ""

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        name = self.fn.__name__
        if (launching, name) in compiled:
            return None
        compiled.add((launching, name))
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        print(json.dumps({"kernel": name, "launcher": launching, "shared": kernel.metadata.shared}), flush=True)
        return kernel

    JITFunction.run = compile_only
    relaunch.relaunch = lambda *arguments: None
    relaunch.launcher_of = lambda compiled, arguments: relaunch.Launcher(compiled, None)
    for shape in shape_classes(80):
        against, _ = on_amd(shape.backend.name, shape.config, lookup(arch))
        for launch in () if against else shape.launches:
            launching = launch.__name__
            launch(Tensors(shape, target))


if __name__ == "__main__":
    main()
