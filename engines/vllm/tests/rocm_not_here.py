"""vLLM made to believe in one of AMD's GPUs that is not here, with its driver's library, aiter and flash-attn.

vLLM's module for ROCm reads the architecture while it is imported, so a process is of one architecture.
"""

from __future__ import annotations

import re
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

import torch
from gpu_not_here import COMPILED, Gpu, Stub, import_torchvision, stand_in_for_operators


class Package(Stub):
    """A package that is not here: anything may be imported of it, and what is called gives another such thing."""

    __path__: ClassVar[list[str]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)


class Finder:
    """Finds every module of aiter and flash-attn, which are not here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return ModuleSpec(name, self, is_package=True) if re.match(r"(aiter|flash_attn)\b", name) else None

    def create_module(self, spec: Any) -> Any:
        return Package(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing is in it."""


def driver_library(gpu: Gpu) -> Package:
    """Return what stands in for ``amdsmi``."""
    found = Package("amdsmi")
    found.AmdSmiException = RuntimeError
    found.amdsmi_get_processor_handles = lambda: [0] * 1024
    found.amdsmi_get_gpu_memory_total = lambda handle, kind: int(gpu.memory_gib * (1 << 30))
    said = {"target_graphics_version": gpu.arch, "device_id": "", "market_name": gpu.name}
    found.amdsmi_get_gpu_asic_info = lambda handle: said
    return found


def rocm_that_is_not_here(gpu: Gpu) -> None:
    """Make vLLM believe in this GPU, in this process."""
    sys.modules["amdsmi"] = driver_library(gpu)
    for module in (*COMPILED, "_rocm_C"):
        sys.modules[f"vllm.{module}"] = Stub(f"vllm.{module}")
    sys.modules["vllm.vllm_flash_attn"] = None  # built for CUDA alone
    sys.meta_path.insert(0, Finder())
    import_torchvision()
    torch.version.hip = "7.0"
    wave = 64 if gpu.arch.startswith("gfx9") else 32
    properties = types.SimpleNamespace(
        gcnArchName=gpu.arch, name=gpu.name, multi_processor_count=gpu.sm_count, warp_size=wave,
        total_memory=int(gpu.memory_gib * (1 << 30)), is_integrated=False, major=9, minor=4,
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_name = lambda device=None: gpu.name
    from vllm import platforms
    from vllm.platforms.rocm import RocmPlatform

    RocmPlatform.num_compute_units = classmethod(lambda cls, device_id=0: gpu.sm_count)
    RocmPlatform.device_count = classmethod(lambda cls: 1024)
    platforms._current_platform = RocmPlatform()
    empty = torch.empty
    torch.empty = lambda *args, **kw: empty(*args, **kw | ({"device": "meta"} if kw.get("device") == "cuda" else {}))
    capability = RocmPlatform.get_device_capability()
    torch.cuda.get_device_capability = lambda device=None: (capability.major, capability.minor)
    import vllm._custom_ops  # noqa: F401 - it asks which operators there are

    stand_in_for_operators()
