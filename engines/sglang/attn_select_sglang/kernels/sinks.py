"""Attention sinks in SGLang: parameters of its models, which they pass with every call."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

_NAMES = ("sinks", "attention_sink_bias")
"""Of the parameter, in the module that holds the ``RadixAttention`` (models/granite.py and gpt_oss.py; mimo_v2.py)."""


def sinks_of(model: Any) -> dict[Any, Tensor]:
    """Return the sinks ``(num_heads,)`` of every ``RadixAttention`` that has some; kernels read the model's own."""
    found: dict[Any, Tensor] = {}
    for module in model.modules():
        sinks = [value for name in _NAMES if isinstance(value := getattr(module, name, None), Tensor)]
        found |= {child: sinks[0] for child in module.children() if sinks and isinstance(child, RadixAttention)}
    return found
