"""The machine that times are measured on: its device and what that reaches, its memory, the ranks that take part."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_select.machine.detection import detect_device
from attn_select.machine.device import Device
from attn_select.runtime import ContextParallel
from attn_select.runtime.timer import FLUSH_BYTES, Call, medians, timed_rounds
from attn_select_measure import host_memory


@dataclass(frozen=True, slots=True)
class Rates:
    """What this device reaches."""

    copy: float  # bytes per second of a large copy, those read and those written
    matmul: float  # FLOP/s of a large matmul, in bfloat16 on a GPU and in float32 on a CPU

    def of(self, device: Device) -> Device:
        """Return the device with these rates in place of the data sheet's, FP8's in proportion."""
        share = self.matmul / 1e12 / device.bf16_tflops if device.bf16_tflops else 0.0
        return replace(
            device,
            bandwidth_gbps=self.copy / 1e9,
            bf16_tflops=self.matmul / 1e12,
            fp8_tflops=device.fp8_tflops * share if device.fp8_tflops and share else None,
        )


class Machine:
    """This machine."""

    def __init__(self, ranks: ContextParallel | None = None) -> None:
        self.detection, self.ranks = detect_device(), ranks
        self.device = self.detection.device
        self.gpu = self.device.full_name or self.device.name
        self.on_gpu = not self.device.is_cpu
        self.torch_device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        self._flush: torch.Tensor | None = None
        if self.on_gpu:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.torch_device)

    def measure_rates(self) -> Rates:
        """Measure a copy and a matmul, both well beyond the caches."""
        num_bytes, size = (1 << 30, 8192) if self.on_gpu else (1 << 26, 1024)
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        source = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        target = torch.empty_like(source)
        left = torch.randn(size, size, device=self.torch_device, dtype=dtype)
        right = torch.randn_like(left)
        calls: dict[str, Call] = {"copy": lambda: target.copy_(source), "matmul": lambda: torch.mm(left, right)}
        found = medians(timed_rounds(calls, self.torch_device), 10 if self.on_gpu else 3)
        return Rates(2 * num_bytes / found["copy"] * 1e6, 2 * size**3 / found["matmul"] * 1e6)

    def gathered(self, mine: Any) -> list[Any]:
        """Return what every rank has; of one rank its own alone."""
        return [mine] if self.ranks is None else [*self.ranks.collectives.gather_objects(mine)]

    def clear(self) -> None:
        """Make L2 cold, and let ranks begin together."""
        if self._flush is not None:
            self._flush.zero_()
        if self.ranks is not None:
            met = torch.zeros(self.ranks.size + 1, 1, device=self.torch_device)
            self.ranks.collectives.all_gather(met[1:], met[0])

    @property
    def memory_name(self) -> str:
        """What memory the layers' tensors take."""
        return "device memory" if self.on_gpu else "this machine's memory"

    def free_bytes(self) -> int:
        """Return the bytes that are free where the layers run; very many where nobody knows."""
        if self.on_gpu:
            free: int = torch.cuda.mem_get_info(self.torch_device)[0]
            return free
        known = host_memory.free_bytes()
        return sys.maxsize if known is None else known

    def free_memory(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()  # captured graphs hold device memory until their cycles are collected
        if self.on_gpu:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the device is done."""
        if self.on_gpu:
            torch.cuda.synchronize(self.torch_device)
