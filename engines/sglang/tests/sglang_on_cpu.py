"""What SGLang asks of libraries that it has on a GPU only, so that it can be imported and its engine run on a CPU.

And the prompts that its engines are given.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PROMPTS = [[(7 * i + 3 * j) % 500 + 3 for j in range(length)] for i, length in enumerate((5, 40, 1, 23, 64))]
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


def absorb_everything() -> None:
    """Let SGLang's ``torch_native`` run MLA: it has the kernel for latents alone, and prompts would go to another."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", lambda *_: handler.AttnForwardMethod.MLA)


def plan_for_a_gpu() -> None:
    """Under Triton's interpreter, let attn-select's kernels run as planned for a GPU that is not here."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    sys.path.append(str(Path(__file__).parents[3] / "plugins" / "triton" / "tests"))
    importlib.import_module("triton_interpreter")
    from attn_select_sglang.kernels import backend

    backend.select = _selected_for_a_gpu


def _selected_for_a_gpu(config: Any, device: Any, rules: Any, backend: str) -> Any:
    from attn_select.rules.plugins import load_plugins
    from attn_select.testing import selection_of

    return selection_of(load_plugins().specs[backend], config, "a100")


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
