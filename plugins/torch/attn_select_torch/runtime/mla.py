"""``TORCH_MLA`` at run time: decodes on gathered latents, prefills on decompressed keys and values.

Where no log-sum-exp, sinks, soft cap or ALiBi are wanted, ``scaled_dot_product_attention`` computes. Else
``attn_select_torch.runtime.dense_attention`` does. Nothing is split over keys. So a request's result depends on its own
shapes and, without ``batch_invariant``, on the decodes that it is gathered with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attn_select.runtime.backend import (
    AttentionBackend,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.terms import Outputs, Terms
from attn_select_torch.runtime.dense_attention import FLASH_CPU, MAX_SCORES, attend, visible_intervals, visible_keys
from attn_select_torch.runtime.mla_builder import Gather, Prefill, PrefillMetadata, TorchMLAMetadataBuilder

ROWS = 256
"""Query rows of a prefill that are masked at a time; keys that none of them sees are left out."""


class TorchMLAImpl(MLAAttentionImpl):
    """Runs one layer."""

    def __init__(self, context: BackendContext, terms: Terms) -> None:
        super().__init__(context, terms)
        config = context.config
        # Whether a log-sum-exp is wanted depends on the batch: another request's context asks for it too.
        self._fused = not (config.sinks or config.alibi or config.logits_soft_cap or config.batch_invariant)
        self._rank = config.kv_lora_rank or 0

    def forward_mqa(
        self,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: tuple[Gather, ...],
        outputs: Outputs,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mqa``."""
        output, output_lse, terms = outputs.output, outputs.lse, self.terms
        by_slot = kv_cache.flatten(0, 1)
        for gather in attn_metadata:
            requests, query_len, num_keys = gather.shape
            latents = latents_at(by_slot, gather.slots, terms.scales.k, query.dtype)
            latents = latents.view(requests, 1, num_keys, by_slot.shape[1])
            rows = query.index_select(0, gather.tokens).view(requests, query_len, *query.shape[1:])
            if self._fused and output_lse is None and num_keys:
                result = self._one_head(rows, latents, gather.visible)
            else:
                result, lse = attend(
                    rows.transpose(1, 2),
                    latents,
                    latents[..., : self._rank],
                    terms,
                    visible=None if gather.visible is None else gather.visible.unsqueeze(1),
                    distance=None if gather.distance is None else gather.distance.unsqueeze(1),
                )
                result = result.transpose(1, 2)
                if output_lse is not None:
                    output_lse.index_copy_(0, gather.tokens, lse.transpose(1, 2).flatten(0, 1))
            output.index_copy_(0, gather.tokens, result.flatten(0, 1))
        return output

    def _one_head(self, rows: Tensor, latents: Tensor, visible: Tensor | None) -> Tensor:
        """Attend with ``rows (n, q, H, D)``, heads taken as rows of one head, so that latents are read once for all."""
        requests, query_len, heads, _ = rows.shape
        if visible is not None:
            visible = visible.unsqueeze(2)
            if query_len > 1:
                visible = visible.expand(-1, query_len, heads, -1).reshape(requests, query_len * heads, -1).unsqueeze(1)
        result = functional.scaled_dot_product_attention(
            rows.flatten(1, 2).unsqueeze(1),
            latents,
            latents[..., : self._rank],
            attn_mask=visible,
            scale=self.terms.scale,
        )
        return result.view(requests, query_len, heads, -1)

    def forward_mha(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: PrefillMetadata, outputs: Outputs
    ) -> Tensor:
        """As ``MLAAttentionImpl.forward_mha``."""
        for request in attn_metadata.requests:
            rows, keys = request.rows, request.keys
            if rows.start == rows.stop:
                continue
            tensors = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query[rows], key[keys], value[keys])]
            part = outputs.rows(rows)
            own = rows.stop - rows.start == keys.stop - keys.start and request.offset == 0
            window, causal = self.context.config.sliding_window, attn_metadata.causal
            plain = window is None and not (causal and request.ranges)
            fused = self._fused and (outputs.lse is None or query.device.type == "cpu")
            if fused and plain and (own or not causal) and keys.start < keys.stop:
                _sdpa(tensors, self.terms.scale, None, causal, part)
            else:  # among keys before its own a row may see none, and fused kernels differ in what they return then
                self._masked(request, attn_metadata, tensors, fused and own, part)
        return outputs.output

    def _masked(
        self,
        request: Prefill,
        metadata: PrefillMetadata,
        tensors: Sequence[Tensor],
        fused: bool,
        outputs: Outputs,
    ) -> None:
        """Compute one request in parts of rows, each with the keys that it can see."""
        query, key, value = tensors
        mask: dict[str, Any] = {
            "causal": metadata.causal,
            "sliding_window": self.context.config.sliding_window,
            "mm_prefix_ranges": request.ranges,
        }
        num_rows, num_keys = query.shape[2], key.shape[2]
        for start in range(0, num_rows, ROWS):
            end = min(start + ROWS, num_rows)
            seen = visible_intervals(request.offset + start, end - start, num_keys, **mask)
            keys = slice(seen[0][0], seen[-1][1]) if seen else slice(0, 0)
            i, j = (
                torch.arange(first, last, dtype=torch.int32, device=query.device)
                for first, last in ((request.offset + start, request.offset + end), (keys.start, keys.stop))
            )
            visible = visible_keys(i, j, **mask)
            part = (query[:, :, start:end], key[:, :, keys], value[:, :, keys])
            if fused:
                _sdpa(part, self.terms.scale, visible, False, outputs.rows(slice(start, end)))
                continue
            distance = None if self.terms.alibi_slopes is None else (i[:, None] - j).abs_()
            # A few heads at a time, not a few rows: keys are converted once for all rows.
            step = max(1, MAX_SCORES // (ROWS * max(1, num_keys)))
            terms = self.terms if metadata.counts_sinks else self.terms.without_sinks()
            for head in range(0, query.shape[1], step):
                heads = slice(head, head + step)
                few = [tensor[:, heads] for tensor in part]
                result, lse = attend(few[0], few[1], few[2], terms.of_heads(heads), visible=visible, distance=distance)
                outputs.output[start:end, heads] = result[0].transpose(0, 1)
                if outputs.lse is not None:
                    outputs.lse[start:end, heads] = lse[0].T


def latents_at(by_slot: Tensor, slots: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the latents ``(N, R + Pr)`` at ``slots`` in the compute dtype."""
    if by_slot.element_size() > 1:
        return by_slot.index_select(0, slots).to(dtype)
    stored = by_slot.view(torch.uint8).index_select(0, slots).view(by_slot.dtype)  # torch indexes no FP8
    return (stored.float() * scale).to(dtype)


def _sdpa(
    tensors: Sequence[Tensor],
    scale: float,
    visible: Tensor | None,
    causal: bool,
    outputs: Outputs,
) -> None:
    """Write fused attention of one request's query, key and value ``(1, H, ...)``."""
    # Values get the keys' width, or the other way round: the kernels that keep no matrix of scores want one width for
    # all (pytorch/pytorch aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, check_head_dim_size_cpp).
    size, width = tensors[2].shape[-1], max(tensor.shape[-1] for tensor in tensors)
    query, key, value = (functional.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in tensors)
    if outputs.lse is None:
        found = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=causal, scale=scale
        )
    else:
        bias = None
        if visible is not None:
            bias = query.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        found, lse = FLASH_CPU(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
        outputs.lse.copy_(lse[0].T)
    outputs.output.copy_(found[0, :, :, :size].transpose(0, 1))


class TorchMLABackend(AttentionBackend):
    """``TORCH_MLA``."""

    impl_cls = TorchMLAImpl
    builder_cls = TorchMLAMetadataBuilder
