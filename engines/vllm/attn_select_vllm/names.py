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
    "TRITON_MLA": "attn_select_vllm.kernels.mla.TritonMlaBackend",
    "FLASHINFER_MLA": "attn_select_vllm.kernels.mla.FlashInferMlaBackend",
}
"""Class path of the vLLM backend by attn-select's name of the kernels that it runs."""
TABLE = engine_table("vllm")
CPU_NAMES = {"TORCH_SDPA": ("CPU_ATTN",)}
"""vLLM's names on a CPU, where it runs nothing else (vllm/platforms/cpu.py)."""


@dataclass(frozen=True, slots=True)
class EngineBackend:
    """One of vLLM's backends.

    Attributes:
        name: member of vLLM's ``AttentionBackendEnum``.
        own: whether it runs attn-select's kernels.
    """

    name: str
    own: bool


def engine_backends(backend: str, config: AttentionConfig, device: Device) -> tuple[EngineBackend, ...]:
    """Return the backends of vLLM that stand for one of attn-select's, in the order in which they are tried."""
    own = (EngineBackend(OWN_PREFIX + backend, True),) if TABLE.adapter_runs(backend, config, device) else ()
    names = CPU_NAMES.get(backend, ()) if device.is_cpu else TABLE.names_of(backend)
    return (*own, *(EngineBackend(name, False) for name in names))
