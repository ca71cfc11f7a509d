"""``TORCH_MLA_SPARSE`` at run time: every token attends to the slots that its indexer chose.

Nothing else of a batch matters, so tokens are rows, whichever request they belong to. All shapes follow from the
number of tokens and ``sparse_top_k``, so that a batch can be captured in a CUDA graph.
"""

from __future__ import annotations

from torch import Tensor

from attn_select.layer.layouts import FP8_DS_MLA
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_ops import unpacked_ds_mla
from attn_select_torch.runtime.dense_attention import attend
from attn_select_torch.runtime.mla import latents_at
from attn_select_torch.runtime.mla_builder import GATHERED_TOKENS


class TorchMLASparseMetadataBuilder(AttentionMetadataBuilder[int]):
    """The metadata is the number of tokens."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> int:
        """As ``AttentionMetadataBuilder.build``."""
        return common_attn_metadata.num_actual_tokens


class TorchMLASparseImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        config = context.config
        self._rank = config.kv_lora_rank or 0
        self._packed = context.kv_layout == FP8_DS_MLA
        self._step = 1 if config.batch_invariant else max(1, GATHERED_TOKENS // (config.sparse_top_k or 1))

    def forward_mqa(
        self,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: int,
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``."""
        assert topk_indices is not None
        by_slot = kv_cache.flatten(0, 1)
        for start in range(0, attn_metadata, self._step):
            rows = slice(start, min(start + self._step, attn_metadata))
            chosen = _without_void_columns(topk_indices[rows])
            void = chosen < 0
            slots = chosen.clamp_min(0).flatten()
            if self._packed:
                latents = unpacked_ds_mla(by_slot.index_select(0, slots)).to(query.dtype)
            else:
                latents = latents_at(by_slot, slots, self.terms.scales.k, query.dtype)
            # Slot 0 stands in for void slots, and may hold a NaN: zero times NaN is NaN.
            latents = latents.view(*chosen.shape, query.shape[2]).masked_fill_(void.unsqueeze(-1), 0)
            result, lse = attend(
                query[rows].unsqueeze(2),
                latents.unsqueeze(1),
                latents[..., : self._rank].unsqueeze(1),
                self.terms,
                visible=~void[:, None, None],
            )
            outputs.output[rows] = result.squeeze(2)
            if outputs.lse is not None:
                outputs.lse[rows] = lse.squeeze(2)
        return outputs.output


def _without_void_columns(chosen: Tensor) -> Tensor:
    """Return the columns ``(T, K)`` up to the last that is not void for all; on a GPU, whose host would wait, all."""
    if chosen.device.type != "cpu":
        return chosen
    used = (chosen >= 0).any(0).nonzero()
    return chosen[:, : int(used[-1]) + 1 if len(used) else 0]


class TorchMLASparseBackend(AttentionBackend):
    """``TORCH_MLA_SPARSE``."""

    impl_cls = TorchMLASparseImpl
    builder_cls = TorchMLASparseMetadataBuilder
