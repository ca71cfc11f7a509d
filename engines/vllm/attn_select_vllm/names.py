"""Which of vLLM's attention backends stand for one of attn-select's: vLLM's own of that name, or one that runs ours."""

from __future__ import annotations

from dataclasses import dataclass

from attn_select.engines.names import engine_table
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device

OWN_PREFIX = "ATTN_SELECT_"
"""Backends of vLLM that run attn-select's kernels are named so, followed by the backend's name in attn-select."""
OWN_KERNELS = {
    "TORCH_SDPA": "attn_select_vllm.kernels.attention.TorchSdpaBackend",
    "TRITON_ATTN": "attn_select_vllm.kernels.attention.TritonAttnBackend",
    "FLASHINFER": "attn_select_vllm.kernels.attention.FlashInferBackend",
    "FLASH_ATTN_TRITON_ATTN": "attn_select_vllm.kernels.attention.FlashAttnTritonAttnBackend",
    "FLASHINFER_TRITON_ATTN": "attn_select_vllm.kernels.attention.FlashInferTritonAttnBackend",
    "TRITON_MLA": "attn_select_vllm.kernels.mla.TritonMlaBackend",
    "FLASHINFER_MLA": "attn_select_vllm.kernels.mla.FlashInferMlaBackend",
}
"""Class path of the vLLM backend by attn-select's name of the kernels that it runs."""
PAIRS = {
    "FLASH_ATTN_TRITON_ATTN": ("FLASH_ATTN", "TRITON_ATTN"),
    "FLASHINFER_TRITON_ATTN": ("FLASHINFER", "TRITON_ATTN"),
}
"""Backends of ``OWN_KERNELS`` that run prefills by one of attn-select's and decodes by the other, on one cache."""
TABLE = engine_table("vllm")
CPU_NAMES = {"TORCH_SDPA": ("CPU_ATTN",)}
"""vLLM's names on a CPU, where it runs nothing else (vllm/platforms/cpu.py)."""


@dataclass(frozen=True, slots=True)
class EngineBackend:
    """One of vLLM's backends, a member of its ``AttentionBackendEnum``; ``own``: it runs attn-select's kernels."""

    name: str
    own: bool


def kernels_of(backend: str) -> tuple[str, ...]:
    """Return attn-select's names of the kernels behind one of ``OWN_KERNELS``: one, or prefill's and decode's."""
    return PAIRS.get(backend, (backend,))


def engine_backends(
    backend: str, config: AttentionConfig, device: Device, argument: str = "attention"
) -> tuple[EngineBackend, ...]:
    """Return the backends of vLLM that stand for one of attn-select's, in the order in which they are tried.

    ``backend`` may be one of ``PAIRS``; ``argument`` is which choice of vLLM's it is for, as in ``choose``.
    """
    if argument != "attention":
        return tuple(EngineBackend(name, False) for name in TABLE.names_of(backend, argument))
    runs = backend in PAIRS or TABLE.adapter_runs(backend, config, device)
    own = (EngineBackend(OWN_PREFIX + backend, True),) if runs else ()
    names = CPU_NAMES.get(backend, ()) if device.is_cpu else TABLE.names_of(backend)
    return (*own, *(EngineBackend(name, False) for name in names))


def attn_select_name(engine: EngineBackend, argument: str = "attention") -> str | None:
    """Return attn-select's name of one of vLLM's own backends for GPUs; None where it has none."""
    rows = (row for row in TABLE.names if (row.argument, row.name) == (argument, engine.name))
    return next((row.backend for row in rows if row.backend), None)


def is_measured(backend: str | None, engine: EngineBackend) -> bool:
    """Whether attn-select's times of a backend are of what runs as one of vLLM's."""
    return engine.own or backend is None or not TABLE.has_own_kernel(backend)
