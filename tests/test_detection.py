"""Detection of this machine's GPU, on an NVML that is not there: one object with NVML's C functions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from attn_select import AttentionConfig, clear_cache, select
from attn_select.machine.detection import Detection, detect, detect_device
from attn_select.machine.device import known_gpus, lookup

NOT_SUPPORTED, NOT_FOUND, GPU_IS_LOST = 3, 6, 15


@dataclass
class Slice:
    """A MIG instance."""

    name: str
    uuid: str
    multiprocessors: int = 16
    memory_mib: int = 9984
    ids: tuple[int, int] = (9, 0)


@dataclass
class Gpu:
    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    capability: tuple[int, int] = (9, 0)
    cores: int = 16896
    memory_mib: int = 81559
    bus_width: int = 5120
    memory_clock: int = 2619
    slices: list[Slice] | None = None  # None: MIG is off
    lost: bool = False


H100 = Gpu()
H20 = Gpu("NVIDIA H20", "GPU-11111111-0000-0000-0000-000000000001", (9, 0), 9984, 97871, 6144, 2619)
L4 = Gpu("NVIDIA L4", "GPU-11111111-0000-0000-0000-000000000002", (8, 9), 7424, 23034, 192, 6251)
ODD = Gpu("NVIDIA Q7 (Eval)", "GPU-7777", (8, 9), 7680, 24576, 256, 8001)
MIG = Gpu(
    slices=[
        Slice("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-aaaa1111-0000-0000-0000-000000000000"),
        Slice("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "MIG-bbbb2222-0000-0000-0000-000000000000", 60, 40448, (1, 0)),
    ]
)


@dataclass
class FakeNvml:
    """NVML as ctypes would call it. ``fails`` gives the code that a function returns instead of doing its work."""

    gpus: list[Gpu]
    fails: dict[str, int] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, function: str) -> Callable[..., int]:
        work = type(self).__dict__.get("_" + function)
        if work is None or function in self.absent:
            raise AttributeError(function)  # as ctypes: the library has no such symbol

        def call(*arguments: Any) -> int:
            self.calls.append(function)
            if code := self.fails.get(function):
                return code
            return work(self, *arguments) or 0

        return call

    def _nvmlInit_v2(self) -> None: ...

    def _nvmlShutdown(self) -> None: ...

    def _nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> None:
        buffer.value = b"580.159.04"

    def _nvmlSystemGetCudaDriverVersion_v2(self, out: Any) -> None:
        out._obj.value = 13010

    def _nvmlDeviceGetCount_v2(self, out: Any) -> None:
        out._obj.value = len(self.gpus)

    def _nvmlDeviceGetHandleByIndex_v2(self, index: int, out: Any) -> int:
        if self.gpus[index].lost:
            return GPU_IS_LOST
        out._obj.value = 100 * (index + 1)
        return 0

    def _gpu(self, handle: Any) -> Gpu:
        index: int = handle.value // 100 - 1
        return self.gpus[index]

    def _any(self, handle: Any) -> Gpu | Slice:
        gpu, position = self._gpu(handle), handle.value % 100
        return (gpu.slices or [])[position - 1] if position else gpu

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> None:
        buffer.value = self._any(handle).name.encode()

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> None:
        buffer.value = self._any(handle).uuid.encode()

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> None:
        out._obj[0] = self._any(handle).memory_mib * 2**20

    def _nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        if handle.value % 100:
            return NOT_SUPPORTED
        major._obj.value, minor._obj.value = self._gpu(handle).capability
        return 0

    def _nvmlDeviceGetNumGpuCores(self, handle: Any, out: Any) -> int:
        gpu = self._gpu(handle)
        out._obj.value = gpu.cores
        return NOT_SUPPORTED if gpu.slices is not None else 0

    def _nvmlDeviceGetMemoryBusWidth(self, handle: Any, out: Any) -> None:
        out._obj.value = self._gpu(handle).bus_width

    def _nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, out: Any) -> int:
        out._obj.value = self._gpu(handle).memory_clock
        return 0 if kind == 2 else NOT_SUPPORTED

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        gpu = self._gpu(handle)
        current._obj.value = pending._obj.value = int(gpu.slices is not None)
        return 0 if gpu.capability in ((8, 0), (9, 0)) else NOT_SUPPORTED

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> None:
        out._obj.value = 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int, out: Any) -> int:
        # As on real GPUs, instances need not lie in the first slots.
        if not 2 <= index < 2 + len(self._gpu(handle).slices or ()):
            return NOT_FOUND
        out._obj.value = handle.value + index - 1
        return 0

    def _nvmlDeviceGetAttributes_v2(self, handle: Any, out: Any) -> int:
        found = self._any(handle)
        if isinstance(found, Gpu):
            return NOT_SUPPORTED
        out._obj[0] = found.multiprocessors
        return 0

    def _nvmlDeviceGetGpuInstanceId(self, handle: Any, out: Any) -> None:
        out._obj.value = self._any(handle).ids[0]  # type: ignore[union-attr]

    def _nvmlDeviceGetComputeInstanceId(self, handle: Any, out: Any) -> None:
        out._obj.value = self._any(handle).ids[1]  # type: ignore[union-attr]


def find(*gpus: Gpu, variables: Mapping[str, str] | None = None, **options: Any) -> Detection:
    nvml = FakeNvml(list(gpus), **options)
    found = detect(lambda: nvml, variables or {})
    assert nvml.calls.count("nvmlInit_v2") == 1
    assert nvml.calls[-1] == "nvmlShutdown" or "nvmlInit_v2" in nvml.fails
    return found


def visible(value: str, *gpus: Gpu) -> str:
    """The name of the device that a value of CUDA_VISIBLE_DEVICES leads to."""
    variables = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return find(*gpus, variables=variables).device.full_name.removeprefix("NVIDIA ")


def test_one_h100() -> None:
    found = find(H100)
    device = found.device
    assert (device.name, device.full_name, device.compute_capability) == ("h100", "NVIDIA H100 80GB HBM3", (9, 0))
    assert (device.sm_count, device.memory_gib, device.bandwidth_gbps) == (132, 79.6, 3350)
    assert device.local
    assert device.source.startswith("NVML of driver 580.159.04; bandwidth: NVIDIA H100 data sheet")
    assert (found.driver_version, found.cuda_driver_version) == ("580.159.04", "13.1")
    assert (found.note, found.warnings) == (None, ())


@pytest.mark.parametrize("row", [row for row in known_gpus().values() if not row.arch], ids=lambda row: row.name)
def test_every_gpu_of_the_table_is_found_again(row: Any) -> None:
    cores = row.sm_count * (64 if row.compute_capability in ((7, 0), (7, 5), (8, 0)) else 128)
    gpu = Gpu(name=row.full_name, capability=row.compute_capability, cores=cores, memory_mib=row.memory_gib * 1024)
    gpu.memory_mib = int(gpu.memory_mib)
    device = find(gpu).device
    assert (device.name, device.compute_capability) == (row.name, row.compute_capability)
    assert (device.sm_count, device.bandwidth_gbps) == (row.sm_count, row.bandwidth_gbps)
    assert (device.bf16_tflops, device.fp8_tflops) == (row.bf16_tflops, row.fp8_tflops)


def test_a_gpu_that_the_table_does_not_have() -> None:
    device = find(ODD).device
    assert (device.name, device.full_name, device.compute_capability) == ("nvidia-q7-eval", ODD.name, (8, 9))
    assert (device.sm_count, device.memory_gib, device.bandwidth_gbps) == (60, 24, 512.1)
    assert device.source == "NVML of driver 580.159.04"


@pytest.mark.parametrize("name", ["NVIDIA L40S-48Q", "GRID L40S-12C", "NVIDIA L40S-1-48C"])
def test_a_virtual_gpu_is_the_model_that_it_is_cut_from(name: str) -> None:
    device = find(Gpu(name=name, capability=(8, 9))).device
    assert (device.name, device.full_name) == ("l40s", name)


def test_no_driver() -> None:
    def load() -> Any:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    found = detect(load, {})
    assert found.device == lookup("cpu")
    assert found.note is not None
    assert found.note.startswith("no NVIDIA driver found (")
    assert (found.driver_version, found.cuda_driver_version, found.warnings) == (None, None, ())


@pytest.mark.parametrize(
    ("code", "text"),
    [(9, "driver is not loaded"), (18, "differ in version"), (4, "no permission"), (999, "NVML error 999")],
)
def test_a_driver_that_does_not_answer(code: int, text: str) -> None:
    found = find(H100, fails={"nvmlInit_v2": code})
    assert found.device.is_cpu
    assert text in str(found.note)


@pytest.mark.parametrize("how", ["fails", "absent"])
@pytest.mark.parametrize(
    ("function", "missing"),
    [
        ("nvmlSystemGetCudaDriverVersion_v2", {"cuda"}),
        ("nvmlDeviceGetName", {"name"}),
        ("nvmlDeviceGetUUID", set()),
        ("nvmlDeviceGetMemoryInfo", {"memory"}),
        ("nvmlDeviceGetNumGpuCores", {"sm_count"}),
        ("nvmlDeviceGetMemoryBusWidth", {"bandwidth"}),
    ],
)
def test_what_nvml_does_not_say_is_none(function: str, missing: set[str], how: str) -> None:
    unsaid: dict[str, Any] = {"fails": {function: NOT_SUPPORTED}, "absent": frozenset({function})}
    found = find(ODD, **{how: unsaid[how]})
    values = {
        "name": None if found.device.full_name == "NVIDIA GPU" else found.device.full_name,
        "driver": found.driver_version,
        "cuda": found.cuda_driver_version,
        "memory": found.device.memory_gib,
        "sm_count": found.device.sm_count,
        "bandwidth": found.device.bandwidth_gbps,
    }
    assert {name for name, value in values.items() if value is None} == missing
    assert found.device.compute_capability == (8, 9)


def test_the_table_fills_in_what_nvml_does_not_say() -> None:
    """Jetson and DGX Spark: memory is shared with the CPU and NVML gives no figure."""
    silent = dict.fromkeys(("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetNumGpuCores"), NOT_SUPPORTED)
    device = find(Gpu(name="NVIDIA GB10", capability=(12, 1)), fails=silent).device
    assert (device.sm_count, device.memory_gib, device.bandwidth_gbps) == (48, 128, 273)


def test_without_a_compute_capability() -> None:
    unsaid = {"nvmlDeviceGetCudaComputeCapability": NOT_SUPPORTED}
    assert find(H100, fails=unsaid).device.compute_capability == (9, 0)  # the table knows
    found = find(ODD, fails=unsaid)
    assert found.device.is_cpu
    assert ODD.name in str(found.note)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", "H100 80GB HBM3"),
        ("1", "H20"),
        ("2,1", "L4"),
        ("1st", "H20"),  # as C reads numbers
        ("0,-1,1", "H100 80GB HBM3"),
        ("9,1", "CPU of this machine"),  # the first invalid entry ends the list
        ("-1,0", "CPU of this machine"),
        ("", "CPU of this machine"),
        ("1,1", "CPU of this machine"),  # given twice
        (f"{L4.uuid},{H20.uuid}", "L4"),
        ("GPU-8932f937", "H100 80GB HBM3"),  # a unique beginning
        ("GPU-11111111", "CPU of this machine"),  # not unique
        ("GPU-8932f937,1", "H100 80GB HBM3"),  # an index after a UUID ends the list
        ("MIG-aaaa1111", "CPU of this machine"),  # MIG is off
    ],
)
def test_cuda_visible_devices(value: str, expected: str) -> None:
    assert visible(value, H100, H20, L4) == expected


def test_mig_without_a_choice_is_the_first_instance() -> None:
    device = find(MIG).device
    assert (device.name, device.full_name) == ("h100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert (device.sm_count, device.memory_gib, device.bandwidth_gbps) == (16, 9.8, None)
    assert device.compute_capability == (9, 0)
    assert find(MIG).warnings == ()  # CUDA shows one instance at most


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", "H100 80GB HBM3 MIG 1g.10gb"),
        ("MIG-bbbb2222-0000-0000-0000-000000000000", "H100 80GB HBM3 MIG 3g.40gb"),
        ("MIG-bbbb2222,MIG-aaaa1111", "H100 80GB HBM3 MIG 3g.40gb"),
        (MIG.uuid, "H100 80GB HBM3 MIG 1g.10gb"),
    ],
)
def test_mig_instances_by_uuid(value: str, expected: str) -> None:
    assert visible(value, MIG) == expected


def test_a_lost_gpu_is_left_out() -> None:
    lost = Gpu(lost=True)
    found = find(lost, L4)
    assert found.device.name == "l4"
    assert found.warnings == ("1 of 2 GPUs cannot be opened; nvidia-smi may say why",)
    assert visible("0,1", lost, lost, L4) == "CPU of this machine"
    assert visible("0,1,2", lost, lost, L4) == "L4"
    assert visible("MIG-aaaa1111", lost, MIG) == "H100 80GB HBM3 MIG 1g.10gb"


def test_detection_initialises_neither_torch_nor_cuda() -> None:
    """NVML itself maps libcuda, so that it is loaded says nothing: CUDA must not have been initialised."""
    script = """
import json, sys
import attn_select.machine.detection
seen = ["ctypes" in sys.modules]
attn_select.machine.detection.detect_device()
import ctypes
seen.append("torch" in sys.modules)
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    seen.append(3)
else:
    seen.append(cuda.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())))  # 3 is CUDA_ERROR_NOT_INITIALIZED
print(json.dumps(seen))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [False, False, 3]


@pytest.fixture
def without_nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Detection]:
    """A machine where NVML does not load; the function detects with a torch imported that is as given."""

    def missing() -> Any:
        raise OSError("no NVML")

    monkeypatch.setattr("attn_select.machine.detection.load_nvml", missing)
    clear_cache()

    def found(torch: Any) -> Detection:
        monkeypatch.setitem(sys.modules, "torch", torch)
        return detect_device()

    return found


def fake_torch(cuda: str | None, hip: str | None = None, initialised: bool = False) -> Any:
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=85_000_000_000
    )
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(
            is_initialized=lambda: initialised,
            current_device=lambda: 0,
            get_device_properties=lambda index: properties,
        ),
    )


def test_torch_of_rocm_says_the_arch_once_it_has_started_a_gpu(without_nvml: Callable[[Any], Detection]) -> None:
    torch = fake_torch(None, hip="7.0")
    properties = torch.cuda.get_device_properties(0)
    properties.name, properties.gcnArchName = "AMD Instinct MI300X", "gfx942:sramecc+:xnack-"
    found = without_nvml(torch)
    assert found.device.is_cpu
    assert "ROCm" in str(found.note)
    torch.cuda.is_initialized = lambda: True
    device = without_nvml(torch).device
    assert (device.name, device.arch, device.compute_capability) == ("mi300x", "gfx942", None)
    assert (device.is_cpu, device.local, device.bandwidth_gbps) == (False, True, 5300)


def test_without_nvml_torch_is_asked_once_it_has_started_cuda(without_nvml: Callable[[Any], Detection]) -> None:
    """A container with CUDA and without NVML: nothing starts CUDA here, before an engine forks."""
    assert without_nvml(fake_torch("12.8")).device.is_cpu
    found = without_nvml(fake_torch("12.8", initialised=True))
    assert (found.device.name, found.device.sm_count, found.device.local) == ("h100", 132, True)
    assert found.note is None
    assert found.device.bandwidth_gbps == lookup("h100").bandwidth_gbps
    config = AttentionConfig(num_heads=8, head_size=128)
    assert select(config).device.name == "h100"
    assert without_nvml(fake_torch("12.8")).device.is_cpu
