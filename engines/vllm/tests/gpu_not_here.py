"""vLLM made to believe in a GPU that is not here, in the process that calls it. Its compiled parts are stood in for."""

from __future__ import annotations

import functools
import gc
import importlib.machinery
import importlib.util
import sys
import types
from dataclasses import dataclass
from typing import Any

COMPILED = (
    "_C",
    "_C_stable_libtorch",
    "_moe_C",
    "_moe_C_stable_libtorch",
    "_flashmla_C",
    "_flashmla_extension_C",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)


class Stub(types.ModuleType):
    """A compiled module of which anything may be imported and nothing is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")


class Operator:
    """An operator of a compiled part: asked whether it is supported, it says yes."""

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        overload = Operator()
        setattr(self, name, overload)
        return overload


def stand_in_for_operators() -> None:
    from torch._ops import _OpNamespace

    found = _OpNamespace.__getattr__

    def operator(namespace: Any, name: str) -> Any:
        try:
            return found(namespace, name)
        except AttributeError:
            if name.startswith("__") or not namespace.name.startswith(
                ("_C", "_moe_C", "_rocm_C", "_vllm_fa", "_flashmla")
            ):
                raise
            made = Operator()
            setattr(namespace, name, made)
            return made

    _OpNamespace.__getattr__ = operator


@dataclass
class Gpu:
    """What vLLM is told about the GPU that is not here; ``become`` changes it."""

    capability: tuple[int, int] | None = (9, 0)
    name: str = "a GPU that is not here"
    sm_count: int = 132
    memory_gib: float = 80
    arch: str | None = None  # of AMD's GPUs, which have no capability

    def __post_init__(self) -> None:
        self.capability = None if self.capability is None else tuple(self.capability)  # JSON has lists

    def become(self, other: Gpu) -> None:
        """Be another GPU from now on: what vLLM remembers of the one before is forgotten."""
        self.__dict__.update(other.__dict__)
        for each in gc.get_objects():
            if isinstance(each, functools._lru_cache_wrapper) and each.__module__.startswith(("vllm", "flashinfer")):
                each.cache_clear()

    def properties(self) -> Any:
        """Return the properties that ``torch.cuda`` gives."""
        return types.SimpleNamespace(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=self.sm_count,
            total_memory=int(self.memory_gib * (1 << 30)),
            is_integrated=False,
            warp_size=32,
            shared_memory_per_block_optin=232448,
        )


def import_torchvision() -> None:
    """Import torchvision where it is, of which the index's build has compiled operators for CUDA alone."""
    import torch

    if importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    import torchvision  # noqa: F401


def gpu_that_is_not_here(gpu: Gpu) -> Any:
    """Make vLLM believe in this GPU, in this process, and return its platform."""
    for module in COMPILED:
        sys.modules[f"vllm.{module}"] = Stub(f"vllm.{module}")
    import_torchvision()
    import torch
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Platform(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*gpu.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return gpu.name

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return gpu.sm_count

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return int(gpu.memory_gib * (1 << 30))

        @classmethod
        def device_count(cls) -> int:
            return 1024

    empty = torch.empty
    torch.empty = lambda *args, **kw: empty(*args, **kw | ({"device": "meta"} if kw.get("device") == "cuda" else {}))
    platforms._current_platform = Platform()
    torch.cuda.get_device_capability = lambda device=None: gpu.capability
    torch.cuda.get_device_name = lambda device=None: gpu.name
    torch.cuda.get_device_properties = lambda device=None: gpu.properties()
    import vllm._custom_ops  # noqa: F401 - it asks which operators there are
    from vllm.utils import import_utils

    import_utils.has_deep_gemm = lambda: True  # it comes with vLLM, compiled
    stand_in_for_operators()
    from vllm.v1.attention.backends.mla import flashattn_mla_sparse

    flashattn_mla_sparse._fa4_cute_mla_available = lambda: None  # its kernel is a part that is compiled
    return Platform


def driver_that_is_not_here(gpu: Gpu) -> None:
    """Give Triton a driver of this GPU, which vLLM's modules ask while they are imported."""
    import triton
    from triton.backends.compiler import GPUTarget

    properties = {"max_shared_mem": 232448, "multiprocessor_count": gpu.sm_count, "warpSize": 32}

    def target() -> GPUTarget:
        if gpu.arch is not None:
            return GPUTarget("hip", gpu.arch, 64 if gpu.arch.startswith("gfx9") else 32)
        return GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)

    driver = types.SimpleNamespace(
        get_current_target=target,
        get_current_device=lambda: 0,
        utils=types.SimpleNamespace(get_device_properties=lambda device: properties),
    )
    triton.runtime.driver.set_active(driver)
