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


def emulate_sgl_kernel() -> None:
    """Put torch in place of what SGLang takes of sgl-kernel to check drafts, and of Triton where no CPU runs it."""
    made, speculative = types.ModuleType("sgl_kernel"), types.ModuleType("sgl_kernel.speculative")
    speculative.reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask  # type: ignore[attr-defined]
    sys.modules |= {"sgl_kernel": made, "sgl_kernel.speculative": speculative}
    os.environ["SGLANG_NATIVE_MOVE_KV_CACHE"] = "1"  # accepted tokens are moved in the pool by torch
    for module, name, function in (
        ("srt.mem_cache.memory_pool", "copy_all_layer_kv_cache_func", lambda *_, **__: None),  # the other way's warm-up
        ("srt.speculative.ngram_worker", "assign_extend_cache_locs_func", assign_extend_cache_locs),
        ("srt.speculative.eagle_utils", "verify_tree_greedy_func", verify_tree_greedy),
    ):
        setattr(importlib.import_module(f"sglang.{module}"), name, function)


def assign_extend_cache_locs(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, **_: Any
) -> Tensor:
    """Return the token slots from a start to an end of each request, one request behind the other."""
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in bounds]).long()


def verify_tree_greedy(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each request's tree from its root: a child whose token the model has predicted is accepted."""
    predicted = target_predict.flatten()
    for request in range(len(candidates)):
        node, accepted = 0, [int(retrieve_index[request, 0])]
        while (child := int(retrieve_next_token[request, node])) != -1 and len(accepted) < accept_index.shape[1]:
            wanted = int(predicted[accepted[-1]])
            while child != -1 and int(candidates[request, child]) != wanted:
                child = int(retrieve_next_sibling[request, child])
            if child == -1:
                break
            node = child
            accepted.append(int(retrieve_index[request, node]))
        for place, index in enumerate(accepted):
            accept_index[request, place] = index
            predicts[index] = predicted[index]
        accept_token_num[request] = len(accepted) - 1
    return predicts, accept_index, accept_token_num


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    lens: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    requests: int,
    drafts: int,
) -> None:
    """Write where each token of each request's tree stands, and its first child and next sibling, -1 for none."""
    ancestors = tree_mask.view(requests, drafts, drafts).tril(-1)
    positions.copy_((ancestors.sum(-1) + lens[:, None]).flatten())
    retrieve_index.copy_(torch.arange(requests * drafts).view(requests, drafts))
    for request in range(requests):
        parents = [max(row.nonzero().flatten().tolist(), default=-1) for row in ancestors[request]]
        for node, parent in enumerate(parents):
            children = [each for each in range(drafts) if parents[each] == node]
            later = [each for each in range(node + 1, drafts) if parents[each] == parent >= 0]
            retrieve_next_token[request, node] = min(children, default=-1)
            retrieve_next_sibling[request, node] = min(later, default=-1)


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
    from attn_select.backends.registry import load_plugins
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
