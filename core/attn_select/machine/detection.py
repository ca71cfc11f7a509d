"""The GPU of this machine, found through NVML, the library behind ``nvidia-smi``.

Where NVML does not answer, torch is asked if this process has imported it already: a container may have CUDA and no
NVML. Neither torch nor CUDA is initialised here: an engine may select a backend first and fork its workers afterwards.
(NVML of driver 580 maps libcuda and leaves one helper thread behind; CUDA works in a child forked after that.) NVML
ignores ``CUDA_VISIBLE_DEVICES``, so this module reads it as CUDA does.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attn_select.errors import shorten
from attn_select.machine.device import CPU, Device, find_gpu

# nvmlReturn_t, of nvml.h. The others say too little to be worth a text.
_ERRORS = {
    4: "no permission",
    9: "the NVIDIA driver is not loaded",
    12: "a part of the NVIDIA driver is missing",
    15: "the GPU is lost",
    17: "the operating system blocks the GPU",
    18: "driver and library differ in version; reboot or reload the driver",
}
_MEMORY_CLOCK = 2  # NVML_CLOCK_MEM
_HALF_WIDTH = ((6, 0), (7, 0), (7, 2), (7, 5), (8, 0))  # 64 FP32 cores a multiprocessor; all others since 5.0 have 128
_VGPU_PROFILE = r"(-\d+)?-\d+[ABCQ](ME)?$"  # ends "NVIDIA L40S-48Q", "GRID A100-3-20C"


@dataclass(frozen=True, slots=True)
class Detection:
    """What was found here."""

    device: Device  # the first GPU that CUDA shows to this process, else the CPU; ``local`` either way
    driver_version: str | None = None  # of the NVIDIA driver (``580.159.04``), None without one
    cuda_driver_version: str | None = None  # the newest CUDA that the driver runs (``13.0``), None without one
    note: str | None = None  # one line on why the device is the CPU, None where it is a GPU
    warnings: tuple[str, ...] = ()  # one line each on what makes the choice of the GPU doubtful


@dataclass(frozen=True, slots=True, eq=False)
class Gpu:
    """A GPU or MIG instance as NVML lists it."""

    handle: Any
    name: str
    uuid: str
    parent: Any = None  # the handle of the GPU that an instance is part of


def detect_device() -> Detection:
    """Return the device of this machine. Never raises, and leaves neither NVML nor CUDA initialised.

    What NVML says is cached. Without NVML the answer changes when this process initialises CUDA through torch.
    """
    found = by_nvml()
    return found if not found.device.is_cpu or found.driver_version else _by_torch(found, sys.modules.get("torch"))


@functools.cache
def by_nvml() -> Detection:
    """Return what NVML says of this machine's device; cached."""
    return detect(load_nvml, os.environ)


def _by_torch(found: Detection, torch: Any) -> Detection:
    """Return what an imported torch says where NVML says nothing, ``torch`` being None where it is not imported."""
    version: Any = getattr(torch, "version", None)  # a torch that is still being imported has none
    hip = getattr(version, "hip", None)
    if not (hip or getattr(version, "cuda", None)) or not torch.cuda.is_initialized():
        note = "torch is built for ROCm and has not started a GPU: the device is the CPU; --gpu names another"
        return replace(found, note=note) if hip else found
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # ROCm's numbers are of the arch: 9.4 is gfx942, and no compute capability.
    capability = None if hip else (properties.major, properties.minor)
    arch = properties.gcnArchName.partition(":")[0] if hip else None  # "gfx942:sramecc+:xnack-"
    row = find_gpu(properties.name)
    device = Device(
        row.name if row else re.sub(r"[^a-z0-9]+", "-", properties.name.casefold()).strip("-"),
        capability,
        properties.name,
        properties.multi_processor_count,
        round(properties.total_memory / 2**30, 1),
        row.bandwidth_gbps if row else None,
        row.bf16_tflops if row else None,
        row.fp8_tflops if row else None,
        source="torch.cuda, as NVML does not answer",
        arch=arch,
        local=True,
    )
    return Detection(device, cuda_driver_version=version.cuda)


def detect(load: Callable[[], Any], variables: Mapping[str, str]) -> Detection:
    """Return the device that a process with these environment variables runs on; ``detect_device`` without its cache.

    ``load`` returns the NVML library, an object with NVML's C functions, or raises ``OSError`` where there is none.
    """
    try:
        nvml = Nvml(load())
    except (OSError, ImportError):  # Python can be built without ctypes
        return Detection(CPU, note=f"no NVIDIA driver found ({_library_names()[0]}): the device is the CPU")
    if code := nvml.call("nvmlInit_v2"):
        error = _ERRORS.get(code, f"NVML error {code}")
        return Detection(CPU, note=f"the NVIDIA driver does not answer ({error}): the device is the CPU")
    try:
        return _examine(nvml, variables)
    finally:
        nvml.call("nvmlShutdown")


def load_nvml() -> Any:
    """Load the NVML library."""
    import ctypes

    for name in _library_names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("NVML not found")


def _library_names() -> tuple[str, ...]:
    if os.name == "nt":
        return ("nvml.dll",)
    return ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")  # WSL does not always tell the loader


class Nvml:
    """The few calls of NVML that detection needs. What the driver does not answer is None, never an exception."""

    def __init__(self, library: Any) -> None:
        import ctypes

        self._library = library
        self._c = ctypes

    def call(self, function: str, *arguments: Any) -> int:
        """Return the code of a call; 13, NVML_ERROR_FUNCTION_NOT_FOUND, where the driver is too old to have it."""
        found = getattr(self._library, function, None)
        return 13 if found is None else int(found(*arguments))

    def handle(self, function: str, *arguments: Any) -> Any:
        """Return the device handle that a call gives."""
        handle = self._c.c_void_p()
        return None if self.call(function, *arguments, self._c.byref(handle)) else handle

    def numbers(self, function: str, *arguments: Any, count: int = 1) -> list[int] | None:
        """Return the ``count`` integers that a call gives, each through a pointer of its own."""
        values = [self._c.c_uint() for _ in range(count)]
        failed = self.call(function, *arguments, *map(self._c.byref, values))
        return None if failed else [value.value for value in values]

    def number(self, function: str, *arguments: Any) -> int | None:
        """Return the integer that a call gives."""
        values = self.numbers(function, *arguments)
        return values[0] if values else None

    def text(self, function: str, *arguments: Any) -> str | None:
        """Return the string that a call gives."""
        buffer = self._c.create_string_buffer(96)  # NVML_DEVICE_NAME_V2_BUFFER_SIZE and _UUID_V2_BUFFER_SIZE
        failed = self.call(function, *arguments, buffer, self._c.c_uint(len(buffer)))
        return None if failed else buffer.value.decode("utf-8", "replace").strip()

    def memory_bytes(self, handle: Any) -> int | None:
        """Return the total memory of a GPU or MIG instance."""
        memory = (self._c.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        return None if self.call("nvmlDeviceGetMemoryInfo", handle, self._c.byref(memory)) else int(memory[0])

    def mig_multiprocessors(self, handle: Any) -> int | None:
        """Return the multiprocessors of a MIG instance."""
        attributes = (self._c.c_uint * 10)()  # nvmlDeviceAttributes_t; the first member is multiprocessorCount
        failed = self.call("nvmlDeviceGetAttributes_v2", handle, self._c.byref(attributes))
        return None if failed else int(attributes[0])

    def gpus(self) -> list[Gpu]:
        """Return the GPUs in NVML's order, by PCI address. A GPU that cannot be opened has no handle."""
        count = self.number("nvmlDeviceGetCount_v2") or 0
        handles = [self.handle("nvmlDeviceGetHandleByIndex_v2", index) for index in range(count)]
        return [Gpu(None, "", "") if handle is None else self._gpu(handle) for handle in handles]

    def instances(self, gpu: Gpu) -> list[Gpu] | None:
        """Return the MIG instances of a GPU; None where it is not in MIG mode."""
        mode = self.numbers("nvmlDeviceGetMigMode", gpu.handle, count=2)  # current, pending
        if not mode or mode[0] != 1:
            return None
        slots = self.number("nvmlDeviceGetMaxMigDeviceCount", gpu.handle) or 0
        handles = [self.handle("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, i) for i in range(slots)]
        return [self._gpu(handle, gpu.handle) for handle in handles if handle is not None]

    def _gpu(self, handle: Any, parent: Any = None) -> Gpu:
        name = self.text("nvmlDeviceGetName", handle) or "NVIDIA GPU"
        return Gpu(handle, name, self.text("nvmlDeviceGetUUID", handle) or "", parent)


def _examine(nvml: Nvml, variables: Mapping[str, str]) -> Detection:
    driver = nvml.text("nvmlSystemGetDriverVersion")
    cuda = nvml.number("nvmlSystemGetCudaDriverVersion_v2")  # 13000 is 13.0
    found = Detection(CPU, driver, f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None)
    gpus = nvml.gpus()
    if not gpus:
        return replace(found, note="the NVIDIA driver shows no GPU: the device is the CPU")
    variable = variables.get("CUDA_VISIBLE_DEVICES")
    selected = gpus if variable is None else _selected(nvml, gpus, variable)
    visible = [shown for gpu in selected for shown in _as_cuda_shows(nvml, gpu)]
    if not visible:
        shown = "no usable GPU" if variable is None else f"no GPU (CUDA_VISIBLE_DEVICES={shorten(variable)!r})"
        return replace(found, note=f"CUDA shows {shown}: the device is the CPU")
    device = _device(nvml, visible[0], driver)
    if device is None:
        return replace(found, note=f"compute capability of {visible[0].name} unknown: the device is the CPU")
    ordered = variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or (variable or "").startswith(("GPU-", "MIG-"))
    return replace(found, device=device, warnings=_warnings(gpus, visible, ordered))


def _as_cuda_shows(nvml: Nvml, gpu: Gpu) -> list[Gpu]:
    """Return the GPU itself, or in MIG mode its first instance, the only one that CUDA shows."""
    if gpu.handle is None:
        return []
    instances = None if gpu.parent is not None else nvml.instances(gpu)
    return [gpu] if instances is None else instances[:1]


def _selected(nvml: Nvml, gpus: Sequence[Gpu], variable: str) -> list[Gpu]:
    """Return what a value of ``CUDA_VISIBLE_DEVICES`` names, in its order.

    As in CUDA (CUDA Programming Guide, "CUDA Environment Variables"): indices, or GPU or MIG UUIDs of which the unique
    beginning will do; the first entry that names nothing ends the list. An entry given twice leaves no GPU at all, as
    ``torch.cuda`` reports of the driver.
    """
    selected: list[Gpu] = []
    kind = variable[:4] if variable.startswith(("GPU-", "MIG-")) else ""
    listed = gpus
    if kind == "MIG-":
        listed = [each for gpu in gpus if gpu.handle is not None for each in nvml.instances(gpu) or ()]
    for entry in (part.strip() for part in variable.split(",")):
        if kind:
            named = [each for each in listed if _is_prefix(entry, kind, each.uuid)]
        else:
            index = re.match(r"\+?(\d{1,9})", entry, re.ASCII)  # as strtoul: "1st" is 1
            named = [gpus[int(index[1])]] if index and int(index[1]) < len(gpus) else []
        if len(named) != 1:
            break
        if named[0] in selected:
            return []
        selected.append(named[0])
    return selected


def _is_prefix(entry: str, kind: str, uuid: str) -> bool:
    return len(entry) > len(kind) and entry.startswith(kind) and uuid.casefold().startswith(entry.casefold())


def _device(nvml: Nvml, gpu: Gpu, driver: str | None) -> Device | None:
    """Return the device that a GPU is: its row of the data file with what NVML says of this one, or NVML alone."""
    whole = gpu.handle if gpu.parent is None else gpu.parent
    model = gpu.name if gpu.parent is None else nvml.text("nvmlDeviceGetName", whole) or gpu.name
    row = find_gpu(model) or find_gpu(re.sub(_VGPU_PROFILE, "", model))
    numbers = nvml.numbers("nvmlDeviceGetCudaComputeCapability", whole, count=2)
    capability = (numbers[0], numbers[1]) if numbers else row.compute_capability if row else None
    if capability is None:
        return None
    bandwidth = row.bandwidth_gbps if row else _bandwidth(nvml, whole)
    memory = nvml.memory_bytes(gpu.handle)
    sm_count, full_name = _multiprocessors(nvml, whole, capability), gpu.name
    rates = (row.bf16_tflops, row.fp8_tflops) if row and gpu.parent is None else (None, None)
    if gpu.parent is not None:  # a slice of the GPU: nothing of the whole one holds for it
        sm_count, bandwidth = nvml.mig_multiprocessors(gpu.handle), None
        full_name = gpu.name if "MIG" in gpu.name else f"{gpu.name} MIG"
    elif row:
        sm_count = sm_count or row.sm_count
    memory_gib = round(memory / 2**30, 1) if memory else row.memory_gib if row and gpu.parent is None else None
    source = f"NVML of driver {driver or 'unknown'}"
    if bandwidth and row:
        source += f"; bandwidth: {row.source}"
    name = row.name if row else re.sub(r"[^a-z0-9]+", "-", model.casefold()).strip("-")
    return Device(name, capability, full_name, sm_count, memory_gib, bandwidth, *rates, local=True, source=source)


def _multiprocessors(nvml: Nvml, handle: Any, capability: tuple[int, int]) -> int | None:
    cores = nvml.number("nvmlDeviceGetNumGpuCores", handle)
    if not cores or capability[0] > 12:  # later ones may have another width
        return None
    count, rest = divmod(cores, 64 if capability in _HALF_WIDTH else 128)
    return None if rest else count


def _bandwidth(nvml: Nvml, handle: Any) -> float | None:
    """Return the peak in GB/s: bits a clock times clock, twice since all these memories transfer on both edges."""
    width = nvml.number("nvmlDeviceGetMemoryBusWidth", handle)
    clock = nvml.number("nvmlDeviceGetMaxClockInfo", handle, _MEMORY_CLOCK)  # MHz
    return round(2 * clock * width / 8 / 1000, 1) if width and clock else None


def _warnings(gpus: Sequence[Gpu], visible: Sequence[Gpu], ordered: bool) -> tuple[str, ...]:
    """Return what makes the first visible GPU a doubtful choice, where the GPUs of this machine differ."""
    warnings = []
    models = list(dict.fromkeys(gpu.name for gpu in visible))
    if len(models) > 1:
        warnings.append(f"GPUs differ ({', '.join(models)}): deciding for {models[0]}; name another with --gpu")
    present = list(dict.fromkeys(gpu.name for gpu in gpus if gpu.handle is not None))
    if not ordered and len(present) > 1:
        warnings.append(
            f"this machine's GPUs differ ({', '.join(present)}) and CUDA may number them by speed: set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, or CUDA_VISIBLE_DEVICES to a UUID"
        )
    if lost := sum(gpu.handle is None for gpu in gpus):
        warnings.append(f"{lost} of {len(gpus)} GPUs cannot be opened; nvidia-smi may say why")
    return tuple(warnings)
