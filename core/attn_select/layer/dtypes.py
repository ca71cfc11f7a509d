"""dtypes by name. Core has no torch, so a dtype is the string that torch prints after the dot.

Wherever such a string is accepted, so is the ``torch.dtype`` itself: ``spelled``.

``kv_cache_dtype`` follows vLLM's vocabulary (vllm/config/cache.py, 0.33): ``auto`` stores what the layer
computes in, ``fp8`` means ``fp8_e4m3``, ``fp8_ds_mla`` is DeepSeek's 656-byte token format for sparse MLA.
"""

from __future__ import annotations

from typing import Literal, get_args

DTypeName = Literal["bfloat16", "float16", "float32"]
KVCacheDTypeName = Literal["auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4"]
OutputQuantization = Literal["none", "fp8", "fp4"]
DTYPES: tuple[DTypeName, ...] = get_args(DTypeName)
KV_CACHE_DTYPES: tuple[KVCacheDTypeName, ...] = get_args(KVCacheDTypeName)
OUTPUT_QUANTIZATIONS: tuple[OutputQuantization, ...] = get_args(OutputQuantization)

ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
}

BITS = {
    "bfloat16": 16,
    "float16": 16,
    "float32": 32,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "nvfp4": 4,
}


def spelled(value: object) -> object:
    """Return a ``torch.dtype`` as text (``torch.bfloat16``), anything else as it is. torch is not imported."""
    kind = type(value)
    return str(value) if (kind.__module__, kind.__name__) == ("torch", "dtype") else value


def canonical(name: str) -> str:
    """Return the canonical spelling of a dtype name (``fp8`` → ``fp8_e4m3``, ``torch.half`` → ``float16``)."""
    name = name.strip().lower().removeprefix("torch.")
    return ALIASES.get(name, name)


def is_quantized(kv_cache_dtype: str) -> bool:
    """Whether a KV-cache dtype stores fewer bits than any compute dtype and so needs scales."""
    return kv_cache_dtype.startswith(("fp8", "nvfp4"))
