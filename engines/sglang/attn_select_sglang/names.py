"""Which of SGLang's attention backends stand for one of attn-select's, and for which kernels.

Imports nothing of SGLang. Sources are files of SGLang 0.5.23 below ``python/sglang/srt``.
"""

from __future__ import annotations

from collections.abc import Sequence

from attn_select.layer.config import AttentionConfig
from attn_select.layer.dtypes import is_quantized
from attn_select.machine.device import Device

ENGINE_NAMES = {
    "FLASH_ATTN": ("fa3",),
    "FLASHINFER": ("trtllm_mha", "flashinfer"),
    "TRITON_ATTN": ("triton",),
    "FLEX_ATTENTION": ("flex_attention",),
    "TORCH_SDPA": ("torch_native",),
    "FLASH_ATTN_MLA": ("fa3",),
    "FLASHMLA": ("flashmla",),
    "FLASHINFER_MLA": ("trtllm_mla", "flashinfer"),
    "TRITON_MLA": ("triton",),
}
"""SGLang's names (``arg_groups/choices.py``) by attn-select's name. Sparse MLA is SGLang's own ``dsa``, which its model
overrides choose."""
OWN_KERNELS = ("triton",)
"""Under these names SGLang has kernels of its own and attn-select others; the rest come from the same libraries."""
BACKENDS = {
    (name, backend.endswith("MLA")): backend for backend, names in reversed(ENGINE_NAMES.items()) for name in names
}
"""attn-select's name by SGLang's and whether the model has MLA."""
_TRTLLM = ("trtllm-gen", "xqa")


def engine_name(
    backend: str, config: AttentionConfig, device: Device, kernels: Sequence[str | None], has_flashinfer: bool
) -> str | None:
    """Return SGLang's backend that runs these kernels of one of attn-select's for a layer; None where it has none.

    Args:
        kernels: stable names of the kernels that attn-select would run, one per phase.
        has_flashinfer: whether FlashInfer is installed, which brings the kernels of four backends.
    """
    for name in ENGINE_NAMES.get(backend, ()):
        if name in ("fa3", "flashmla"):
            suits = _hopper(name, config, device, kernels)
        elif name in ("trtllm_mha", "trtllm_mla"):
            suits = has_flashinfer and _trtllm(name, config, device, kernels)
        elif name == "flashinfer":  # no sinks: arg_groups/model_override_base.py get_default_attn_backend
            suits = has_flashinfer and not config.sinks and "trtllm-gen" not in kernels and not device.is_cpu
        elif name == "triton":
            suits = not device.is_cpu
        else:  # flex_attention, torch_native
            suits = not config.sinks and not is_quantized(config.cache_dtype)
        if suits:
            return name
    return None


def _hopper(name: str, config: AttentionConfig, device: Device, kernels: Sequence[str | None]) -> bool:
    """Whether FA3 (``layers/attention/attention_registry.py``) or FlashMLA stands for the kernels."""
    if device.compute_capability is None or device.compute_capability[0] != 9:
        return False
    if name == "flashmla":
        return True
    return config.cache_dtype != "fp8_e5m2" and all((kernel or "").startswith("fa3") for kernel in kernels)


def _trtllm(name: str, config: AttentionConfig, device: Device, kernels: Sequence[str | None]) -> bool:
    """Whether TRT-LLM's kernels are asked for and SGLang has them there (``arg_groups/overrides.py``)."""
    if device.compute_capability is None or not all(kernel in _TRTLLM for kernel in kernels):
        return False
    major = device.compute_capability[0]
    if name == "trtllm_mha":
        return major in (9, 10, 12)
    return major in (10, 12) and config.cache_dtype in ("bfloat16", "fp8_e4m3")
