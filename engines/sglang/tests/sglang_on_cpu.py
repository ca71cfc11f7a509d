"""What SGLang asks of libraries that it has on a GPU only, so that it can be imported and its engine run on a CPU."""

from __future__ import annotations

import sys
import types

import torch
from torch import Tensor

_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")


def define_operations() -> None:
    """Define two operations of torchvision, without which SGLang cannot be imported."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _TORCHVISION.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")


def emulate_vllm() -> None:
    """Put a module in place of vLLM, of which SGLang takes the rotary embedding on this CPU."""
    vllm, operations = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    operations.rotary_embedding = rotary_embedding  # type: ignore[attr-defined]
    vllm._custom_ops = operations  # type: ignore[attr-defined]
    sys.modules |= {"vllm": vllm, "vllm._custom_ops": operations}


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotate queries and keys in place, as vLLM's operation of that name does with halves of a head (neox)."""
    assert is_neox
    cos, sin = (half.unsqueeze(1) for half in cos_sin_cache[positions.flatten()].chunk(2, dim=-1))
    for rows in (query, key):
        part = rows.view(len(cos), -1, head_size)[..., : 2 * cos.shape[-1]]
        first, second = part.chunk(2, dim=-1)
        part.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
