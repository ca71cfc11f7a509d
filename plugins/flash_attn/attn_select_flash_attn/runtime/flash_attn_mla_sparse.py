"""``FLASH_ATTN_MLA_SPARSE`` at run time: every token is a request of one query, whose keys are its chosen slots.

FA3 reads pages of any size, so the slots of ``topk_indices``, in front of what is -1, are a block table of pages of one
token. It packs the query heads of a token into the rows of one tile: 8 heads cost what 8 heads are, where FlashMLA's
sparse kernel computes 64 (vLLM pull request 46189). FA4 takes the slots as a list of rows of the flat cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.kv_cache import CacheView
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select_flash_attn.facts.builds import FlashAttnKernel
from attn_select_flash_attn.runtime.adapters import GatherAdapter, Step, adapter_for
from attn_select_flash_attn.runtime.latent import cache_parts, query_parts
from attn_select_flash_attn.runtime.schedule import MOST_SPLIT_REQUESTS


@dataclass(slots=True)
class SparseStep:
    """One batch."""

    num_tokens: int  # T
    query_start_loc: Tensor  # int32 ``(T + 1,)``, 0 to T
    num_splits: int  # most parts of a token's keys; 0: the kernel chooses
    no_keys: Tensor  # int32 ``(T + 1,)``, zeros: where FA4 wants bounds of keys, which its list of rows gives


class FlashAttnMLASparseMetadataBuilder(AttentionMetadataBuilder[SparseStep]):
    """Builds without a kernel launch."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        adapter_for(context.kernel(FlashAttnKernel))  # its library is looked for here
        most = context.max_num_batched_tokens + 1
        self._bounds = torch.arange(most, dtype=torch.int32, device=context.device)
        self._no_keys = torch.zeros_like(self._bounds)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseStep:
        """As ``AttentionMetadataBuilder.build``."""
        tokens = common_attn_metadata.num_actual_tokens
        whole = self.context.config.batch_invariant or tokens > MOST_SPLIT_REQUESTS
        return SparseStep(tokens, self._bounds[: tokens + 1], int(whole), self._no_keys[: tokens + 1])


class FlashAttnMLASparseImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        config = context.config
        # (slots, page of one token, one head, width)
        self._parts = CacheView(lambda kv_cache: cache_parts(kv_cache.view(-1, 1, 1, kv_cache.shape[2]), config))
        self._adapter = adapter_for(context.kernel(FlashAttnKernel))
        self._layer = self._adapter.layer_arguments(terms)
        self._most = context.max_num_batched_tokens
        self._rows: dict[int, Tensor] = {}  # by the rows of a cache: that number for each token; CUDA graphs read them

    def forward_mqa(
        self,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: SparseStep,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``."""
        assert topk_indices is not None
        tokens = attn_metadata.num_tokens
        if not tokens:
            return outputs.output
        part = outputs.first(tokens)
        (pages, counts), adapter = ops.slots_in_front(topk_indices[:tokens]), self._adapter
        latent_query, rope_query = query_parts(query[:tokens], self.context.config)
        latent, rope = self._parts(kv_cache)
        arguments = {**self._layer, adapter.latent_query: latent_query}
        if isinstance(adapter, GatherAdapter):
            arguments |= self._gather(rope, pages, counts, attn_metadata)
            # The flat cache: (rows, one head, width).
            keys, values = rope.squeeze(1), latent.squeeze(1)
            found, lse = adapter.run(rope_query, keys, values, None, part.lse is not None, arguments)
            part.output.copy_(found)
            if part.lse is not None and lse is not None:
                part.lse.copy_(lse)  # (T, H) with a latent query
            return outputs.output
        step = Step(
            query_start_loc=attn_metadata.query_start_loc,
            num_tokens=tokens,
            max_query_len=1,
            max_key_len=pages.shape[1],
            causal=False,
            window=(-1, -1),
            num_splits=attn_metadata.num_splits,
            seq_lens=counts,
            block_table=pages,
        )
        adapter.write(rope_query, rope, latent, part, arguments | adapter.step_arguments(step), None)
        return outputs.output

    def _gather(self, rope: Tensor, slots: Tensor, counts: Tensor, step: SparseStep) -> dict[str, Any]:
        """Return FA4's arguments of a step: the rows of each token, -1 behind the last, and how many there are."""
        rows = self._rows.get(len(rope))
        if rows is None:
            rows = self._rows[len(rope)] = slots.new_full((self._most,), len(rope))
        return {
            "max_seqlen_q": 1,
            "cu_seqlens_q": step.query_start_loc,
            "max_seqlen_k": len(rope),
            "cu_seqlens_k": step.no_keys,
            "seqused_k": rows[: step.num_tokens],
            "gather_kv_indices": slots,
            "gather_kv_valid_length": counts,
            "causal": False,
        }


class FlashAttnMLASparseBackend(AttentionBackend):
    """``FLASH_ATTN_MLA_SPARSE``."""

    impl_cls = FlashAttnMLASparseImpl
    builder_cls = FlashAttnMLASparseMetadataBuilder
