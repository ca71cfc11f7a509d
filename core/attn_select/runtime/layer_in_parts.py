"""``LayerInParts``: what computes a layer of a group that runs each step in several parts and merges them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.terms import Outputs


class LayerInParts(ABC):
    """Computes one layer. ``Attention`` has one where its group's ``layer_in_parts`` makes it."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        metadata: Any,
        outputs: Outputs,
    ) -> None:
        """Compute the layer as ``Attention.forward`` documents it. Outputs are quantised after they are merged."""
        if outputs.scale is None:
            self.merged(query, key, value, kv_cache, metadata, outputs)
            return
        tokens, output = metadata.num_actual_tokens, outputs.output
        unscaled = output.new_empty(tokens, *output.shape[1:], dtype=query.dtype)
        self.merged(query, key, value, kv_cache, metadata, Outputs(unscaled, outputs.lse))
        stored = ops.quantize_fp8(unscaled, outputs.scale, output.dtype)
        output[:tokens].view(torch.uint8).copy_(stored.view(torch.uint8))

    @abstractmethod
    def merged(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        metadata: Any,
        outputs: Outputs,
    ) -> None:
        """Compute the parts and write what they give together, in the query's dtype."""
