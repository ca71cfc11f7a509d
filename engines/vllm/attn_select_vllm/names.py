"""Which of vLLM's attention backends stand for one of attn-select's: vLLM's own of that name, or one that runs ours."""

from __future__ import annotations

from dataclasses import dataclass

from attn_select.layer.config import AttentionConfig
from attn_select.layer.dtypes import is_quantized
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
ENGINE_NAMES = {
    name: (name,)
    for name in (
        "FLASH_ATTN",
        "FLASHINFER",
        "TRITON_ATTN",
        "FLEX_ATTENTION",
        "FLASH_ATTN_MLA",
        "FLASHMLA",
        "FLASHINFER_MLA",
        "CUTLASS_MLA",
        "TRITON_MLA",
        "FLASH_ATTN_MLA_SPARSE",
        "FLASHMLA_SPARSE",
    )
} | {"FLASHINFER_MLA_SPARSE": ("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_SM90")}
"""vLLM's names (``AttentionBackendEnum``) by attn-select's name; the first that vLLM accepts is meant. TORCH_SDPA is a
tag of vision towers there, not a backend."""
CPU_NAMES = {"TORCH_SDPA": ("CPU_ATTN",)}
"""The same on a CPU, where vLLM runs nothing else (vllm/platforms/cpu.py): its kernels of these layers are its own."""
NOT_OURS = ("TRITON_ATTN", "TRITON_MLA")
"""Under these names vLLM has kernels of its own and attn-select others; the rest come from the same libraries."""
PREFILL_NAMES = {"FLASH_ATTN_MLA": "FLASH_ATTN", "FLASHINFER_MLA": "FLASHINFER"}
"""vLLM's names of MLA prefill (``MLAPrefillBackendEnum``) by attn-select's name."""


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
    own = (EngineBackend(OWN_PREFIX + backend, True),) if _runs_own(backend, config, device) else ()
    names = CPU_NAMES if device.is_cpu else ENGINE_NAMES
    return (*own, *(EngineBackend(name, False) for name in names.get(backend, ())))


def _runs_own(backend: str, config: AttentionConfig, device: Device) -> bool:
    """Whether attn-select's kernels are used: where vLLM has none of that name, or slower ones."""
    if backend == "TORCH_SDPA":
        return device.is_cpu
    hopper = device.compute_capability is not None and device.compute_capability[0] == 9
    if backend == "FLASHINFER_MLA":  # vLLM offers it on 10.x alone
        return hopper
    if backend == "FLASHINFER":  # XQA reads FP8 caches with a bfloat16 query; vLLM has it from 10.x on
        return hopper and is_quantized(config.cache_dtype)
    return backend in OWN_KERNELS
