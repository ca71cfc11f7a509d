"""The metadata of MLA layers: decodes on the latent cache, prefills on decompressed keys and values in chunks.

A prefill attends to its own tokens first, causally, then to its cached context chunk by chunk; the partial results are
merged by their log-sum-exp. The contexts of all prefills, one behind the other, are cut every ``workspace_tokens``
tokens, which bounds what is decompressed at a time: per token ``kv_lora_rank + qk_rope_head_dim`` elements of latent,
and per head ``2 * qk_nope_head_dim + qk_rope_head_dim + v_head_dim`` of keys and values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError
from attn_select.layer.config import Phase
from attn_select.runtime import ops
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.integers import size
from attn_select.runtime.kv_cache import kernel_block_table
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, VarlenMetadata
from attn_select.runtime.mla_context import ContextChunk, context_chunks, context_parts, shifted, spans_of
from attn_select.runtime.scales import Scales
from attn_select.runtime.step_metadata import AttentionMetadata, Part
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES

WORKSPACE_TOKENS = 8192
"""Cached tokens that are decompressed at a time unless a group says otherwise: at 128 heads of DeepSeek-V3 in bfloat16
9 MiB of latents and 896 MiB of keys and values."""


class MLALayerGroup(LayerGroup):
    """What MLA layers ask of a group beside what all layers do."""

    def build_step(
        self, common: CommonAttentionMetadata, prefix: int = 0, fast: bool = False, captured: bool = False
    ) -> AttentionMetadata:
        """As ``LayerGroup.build_step``; MLA layers use no cascade, so ``prefix`` changes nothing."""
        # One backend computes all of sparse MLA as decodes, but may do more for prefills, which replays would not do.
        longest = self.config.max_decode_query_len if self.whole == "decode" else self.reorder_batch_threshold or 0
        if captured and common.max_query_len > longest:
            raise BatchError(
                f"queries of {common.max_query_len} tokens: MLA layers are captured in decode alone, here up to "
                f"{longest} tokens",
                hint="a decode has 1 + num_speculative_tokens tokens at most",
            )
        slots, parts = self.written_slots(common), []
        for phase, rows, requests in self.phases_of(common):
            if phase == "decode" or self.config.sparse:
                parts.append(self.latent_part(phase, rows, requests, slots, fast, captured))
            else:
                parts.append(self.dense_prefill(rows, requests))
        return AttentionMetadata(self, common, common.num_actual_tokens, slots, tuple(parts))

    def written_slots(self, common: CommonAttentionMetadata) -> Tensor:
        """Return where the step's latents go in this group's own cache, int64 ``(T,)``: here the batch's slots."""
        return cast(Tensor, common.slot_mapping)

    def own_slots(self, topk_indices: Tensor) -> Tensor:
        """Return the chosen slots ``(T, sparse_top_k)`` that lie in this group's own cache: here all of them."""
        return topk_indices

    def latent_part(
        self, phase: Phase, rows: slice, common: CommonAttentionMetadata, slots: Tensor, fast: bool, captured: bool
    ) -> Part:
        """Return requests that are computed on latents; ``slots`` are the step's."""
        backend = self.backend_for(phase)
        spans = spans_of(self.config, common.query_start_loc_cpu)
        return Part(phase, rows, backend.build(backend.batch(common), 0, fast, captured), spans)

    @abstractmethod
    def dense_prefill(self, rows: slice, common: CommonAttentionMetadata) -> Part:
        """Return prefills, which are computed on decompressed keys and values."""

    @abstractmethod
    def load_chunk(self, chunk: ContextChunk, kv_cache: Tensor, scales: Scales) -> Tensor:
        """Return a chunk's cached latents, ``(num_tokens, head_size)``, in the workspace."""

    @cached_property
    def reorder_batch_threshold(self) -> int | None:
        """As ``LayerGroup.reorder_batch_threshold``."""
        if "decode" not in self.backends:  # prefill alone computes queries of any length
            return None
        decoders = [own.builder for own in self.distinct if "decode" in own.context.plans]
        thresholds = [builder.reorder_batch_threshold for builder in decoders]
        wanted = min((threshold for threshold in thresholds if threshold is not None), default=None)
        return self.config.max_decode_query_len if wanted is None and self.whole is None else wanted


class MLAAttentionGroup(MLALayerGroup):
    """The group of MLA layers.

    Where one backend computes all of sparse MLA on latents, its builder sees whole batches, as decodes.

    Args:
        selection, device, capacity, options: as for ``LayerGroup``.
        workspace_tokens: cached tokens decompressed at a time in prefill.

    Attributes:
        workspace: ``(workspace_tokens, head_size)`` in the compute dtype: a chunk's latents. Reserved here, shared by
            all layers.
    """

    def __init__(
        self,
        selection: Selection,
        device: torch.device | str | None = None,
        capacity: Capacity | None = None,
        *,
        workspace_tokens: int = WORKSPACE_TOKENS,
        **options: Any,
    ) -> None:
        if not selection.config.mla:
            raise ConfigError(
                "the selection's layers are not MLA: make their group with attention_group or AttentionGroup",
                fields=["kv_lora_rank"],
            )
        self.workspace_tokens = size("workspace_tokens", workspace_tokens)
        super().__init__(selection, device, capacity, **options)
        self.whole = "decode" if self.config.sparse and self.unified else None
        if "decode" not in self.backends:
            self.whole = "prefill"
        self.workspace = torch.empty(
            workspace_tokens if "prefill" in self.backends and not self.config.sparse else 0,
            self.config.head_size,
            dtype=PLAIN_DTYPES[self.config.dtype],
            device=self.device,
        )

    def dense_prefill(self, rows: slice, common: CommonAttentionMetadata) -> Part:
        """As ``MLALayerGroup.dense_prefill``."""
        return self.prefill_in_chunks(rows, common, self.kernel_block_size)

    def prefill_in_chunks(
        self,
        rows: slice,
        common: CommonAttentionMetadata,
        cache_block_size: int | None,
        finished: Callable[[ContextChunk, Tensor, Tensor], ContextChunk] | None = None,
    ) -> Part:
        """Return prefills whose cached contexts, in blocks of ``cache_block_size`` tokens, are cut in chunks."""
        # ``finished`` makes of each chunk what ``load_chunk`` takes, given its requests' first positions and lengths.
        backend, config, context = self.backend_for("prefill"), self.config, common.num_computed_tokens_cpu
        new = VarlenMetadata.of_new_tokens(common, causal=common.causal and not config.non_causal)
        new.mm_prefix_ranges = shifted(common.mm_prefix_ranges, context)
        own = backend.build_prefill(new)
        chunks: tuple[ContextChunk, ...] = ()
        if parts := context_parts(common, config, self.workspace_tokens):
            if not backend.context.plans["prefill"].returns_lse:
                raise BatchError(
                    f"a prefill with {int(context.max())} cached tokens: {backend.spec.name} returns no LSE to merge "
                    "its parts by",
                    hint="prefill whole prompts, or choose another backend for prefill",
                )
            table = cast(Tensor, common.block_table_tensor)
            if (ratio := cast(int, self.block_size) // cast(int, cache_block_size)) > 1:
                table = kernel_block_table(table, ratio)
            chunks = context_chunks(parts, common, config, table, backend.build_prefill)
            if finished is not None:
                chunks = tuple(finished(chunk, *part) for chunk, part in zip(chunks, parts, strict=True))
        spans = spans_of(config, common.query_start_loc_cpu)
        return Part("prefill", rows, own, spans, chunks)

    def load_chunk(self, chunk: ContextChunk, kv_cache: Tensor, scales: Scales) -> Tensor:
        """As ``MLALayerGroup.load_chunk``."""
        where = (chunk.block_table, chunk.starts, chunk.start_loc, chunk.num_tokens, kv_cache.shape[1])
        ops.gather_cache_mla(kv_cache, self.workspace, *where, self.config, scales)
        return self.workspace[: chunk.num_tokens]
