"""Layers, MLA aside, whose contexts ranks share: vLLM's decode context parallelism.

attn-select's group of such layers is the builder, and one of its layers the impl. Its ranks are vLLM's process group,
and its share of positions is vLLM's (``cp_kv_cache_interleave_size``). vLLM writes the cache, with this rank's slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_dcp_group

from attn_select.decide.selection import Selection
from attn_select.layer.config import Phase
from attn_select.runtime import Attention, Capacity, CommonAttentionMetadata, ContextParallel, Outputs, attention_group


class RankBuilder:
    """Builds steps for the layers of one config; every rank makes the same builders in the same order."""

    def __init__(
        self,
        selection: Selection,
        layout: str,
        device: torch.device,
        capacity: Capacity,
        vllm_config: VllmConfig,
        *,
        cuda_graphs: bool,
    ) -> None:
        ranks = ContextParallel(
            get_dcp_group().device_group,
            interleave=vllm_config.parallel_config.cp_kv_cache_interleave_size,
            merge="a2a",
        )
        self.group: Any = attention_group(
            replace(selection, kv_layout=layout), device, capacity, context_parallel=ranks, cuda_graphs=cuda_graphs
        )
        self.reorder_batch_threshold: int | None = self.group.reorder_batch_threshold
        # The group writes nothing: vLLM did, with the slots of this rank.
        self._no_slots = torch.full((capacity.max_num_batched_tokens,), -1, dtype=torch.int64, device=device)

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> Any:
        """Return the metadata of a step."""
        return self.group.build(self._of_all_ranks(common), 0, fast_build)

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """Return what a graph is captured with."""
        return self.group.build_for_cudagraph_capture(self._of_all_ranks(common))

    def _of_all_ranks(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        slots = self._no_slots[: common.num_actual_tokens]
        return replace(common, slot_mapping=slots, block_size=self.group.block_size)


class RankImpl:
    """Runs one layer; ``terms`` are the layer's, as ``Attention`` takes them."""

    def __init__(self, builder: RankBuilder, **terms: Any) -> None:
        self._attention = Attention(builder.group, **terms)
        backends: Mapping[Phase, Any] = builder.group.shared.backends
        served = backends.get("decode") or backends["prefill"]
        self.do_kv_cache_update = served.impl(self._attention.terms.under(served.context.config)).do_kv_cache_update

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any, outputs: Outputs
    ) -> None:
        """Attend to what all ranks keep, as ``AttentionImpl.forward`` documents it."""
        tokens = slice(0, metadata.num_actual_tokens)
        self._attention(query[tokens], key[tokens], value[tokens], cache, metadata, outputs.output[tokens])
