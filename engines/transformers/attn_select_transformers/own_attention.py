"""What ``attn_implementation="attn_select"`` means where attn-select takes no part: transformers' own attention."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from attn_select_transformers.names import DENSE


def leave_to_transformers() -> None:
    """Let the name stand for transformers' own choice without a name, so that no model is ever set to it."""
    # Where transformers chooses in another place, the name is kept and attends as ``own_attention``.
    from transformers import AttentionInterface, PreTrainedModel

    AttentionInterface.register(DENSE, own_attention)
    original = getattr(PreTrainedModel, "get_correct_attn_implementation", None)
    if original is None:
        return

    @functools.wraps(original)
    def chosen(model: Any, requested_attention: str | None, *arguments: Any, **options: Any) -> Any:
        requested = None if requested_attention == DENSE else requested_attention
        return original(model, requested, *arguments, **options)

    PreTrainedModel.get_correct_attn_implementation = chosen


def own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend by transformers' sdpa; by the model's eager function where a soft cap or sinks keep sdpa from it."""
    found: tuple[Tensor, Tensor | None]
    if options.get("softcap") is None and options.get("s_aux") is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    eager = sys.modules[type(module).__module__].eager_attention_forward
    rows, keys = query.shape[2], key.shape[2]
    seen = attention_mask
    if seen is None and rows > 1:  # as sdpa reads a mask that is not there
        seen = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril()
    if seen is not None and seen.dtype == torch.bool:
        seen = query.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(query.dtype).min)
    found = eager(module, query, key, value, seen, **options)
    return found
