"""The metadata of MLA layers: decodes on the latent cache, prefills on decompressed keys and values in chunks.

A prefill attends to its own tokens first, causally, then to its cached context chunk by chunk; the partial results are
merged by their log-sum-exp. The contexts of all prefills, one behind the other, are cut every ``workspace_tokens``
tokens, which bounds what is decompressed at a time: per token ``kv_lora_rank + qk_rope_head_dim`` elements of latent,
and per head ``2 * qk_nope_head_dim + qk_rope_head_dim + v_head_dim`` of keys and values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError
from attn_select.layer.config import Phase
from attn_select.runtime import ops
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.integers import size
from attn_select.runtime.kernel_blocks import KernelTables
from attn_select.runtime.kv_cache import kernel_block_table
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.loaded_backend import LoadedBackend, load_backends
from attn_select.runtime.metadata import (
    BatchError,
    CommonAttentionMetadata,
    Split,
    VarlenMetadata,
    split_decodes_and_prefills,
)
from attn_select.runtime.mla_context import ContextChunk, context_chunks, context_parts, shifted, spans_of
from attn_select.runtime.scales import Scales
from attn_select.runtime.step_metadata import AttentionMetadata, Part
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select.runtime.torch_indexer import IndexedRows

WORKSPACE_TOKENS = 8192
"""Cached tokens that are decompressed at a time unless a group says otherwise: at 128 heads of DeepSeek-V3 in bfloat16
9 MiB of latents and 896 MiB of keys and values."""


@dataclass(slots=True)
class MLAMetadata(AttentionMetadata):
    """One step's batch as MLA layers want it: decodes, then prefills, where there are any.

    Attributes:
        num_decode_tokens: the first tokens, which are decodes; with sparse MLA by one backend all.
        indexed_rows: which keys each token may choose from; made by the first ``SparseIndexer`` that is called.
    """

    num_decode_tokens: int = 0
    indexed_rows: IndexedRows | None = None


class MLALayerGroup(LayerGroup):
    """What MLA layers ask of a group beside what all layers do."""

    @abstractmethod
    def load_chunk(self, chunk: ContextChunk, kv_cache: Tensor, scales: Scales) -> Tensor:
        """Return a chunk's cached latents, ``(num_tokens, head_size)``, in the workspace."""

    @abstractmethod
    def own_slots(self, topk_indices: Tensor) -> Tensor:
        """Return the chosen slots ``(T, sparse_top_k)`` that lie in this group's own cache."""

    def check_capture(self, common: CommonAttentionMetadata, latents_alone: bool) -> None:
        """Raise BatchError for queries longer than a decode's: replayed steps would be prefills."""
        self.check_batch(common)
        # ``latents_alone``: one backend computes everything on latents, so that all tokens are decodes to it.
        longest, threshold = common.max_query_len, self.reorder_batch_threshold
        if threshold is not None and longest > threshold and not latents_alone:
            raise BatchError(
                f"queries of {longest} tokens: MLA layers are captured in decode alone, here up to {threshold} tokens",
                hint="a decode has 1 + num_speculative_tokens tokens at most",
            )

    def decode_threshold(self, latents_alone: bool) -> int | None:
        """Return up to how many tokens a query counts as a decode; ``latents_alone`` as in ``check_capture``."""
        if "decode" not in self.backends:  # prefill alone computes queries of any length
            return None
        decoders = [own.builder for own in self.distinct if "decode" in own.context.plans]
        thresholds = [builder.reorder_batch_threshold for builder in decoders]
        wanted = min((threshold for threshold in thresholds if threshold is not None), default=None)
        return self.config.max_decode_query_len if wanted is None and not latents_alone else wanted

    def metadata_of(self, common: CommonAttentionMetadata, slots: Tensor, parts: Sequence[Part]) -> MLAMetadata:
        """Return a step's metadata, given where its latents go."""
        decodes = sum(part.rows.stop for part in parts if part.phase == "decode")
        return MLAMetadata(self, common, common.num_actual_tokens, slots, tuple(parts), decodes)


Cut = Callable[[LoadedBackend, CommonAttentionMetadata, Tensor], tuple[ContextChunk, ...]]
"""Cuts the cached contexts of prefills, given how long they are, into what the workspace holds."""


class MLAAttentionGroup(MLALayerGroup):
    """The group of MLA layers.

    Args:
        selection, device, capacity, cuda_graphs, phases, checked: as for ``AttentionGroup``.
        workspace_tokens: cached tokens decompressed at a time in prefill.

    Attributes:
        workspace: ``(workspace_tokens, head_size)`` in the compute dtype: a chunk's latents. Reserved here, shared by
            all layers.
        latents_alone: whether one backend computes everything on latents: its builder then sees whole batches.
    """

    def __init__(
        self,
        selection: Selection,
        device: torch.device | str | None = None,
        capacity: Capacity | None = None,
        *,
        cuda_graphs: bool = False,
        phases: Sequence[Phase] | None = None,
        workspace_tokens: int = WORKSPACE_TOKENS,
        checked: bool | None = None,
    ) -> None:
        if not selection.config.mla:
            raise ConfigError(
                "the selection's layers are not MLA: make their group with attention_group or AttentionGroup",
                fields=["kv_lora_rank"],
            )
        workspace_tokens = size("workspace_tokens", workspace_tokens)
        bounds = capacity or Capacity()
        here, backends = load_backends(selection, device, bounds, cuda_graphs=cuda_graphs, phases=phases)
        super().__init__(selection, here, backends, bounds, cuda_graphs=cuda_graphs, checked=checked)
        self._tables = KernelTables(self.block_size, bounds.max_num_seqs, bounds.max_model_len)
        self.latents_alone = self.config.sparse and self.unified
        self.workspace = torch.empty(
            workspace_tokens if "prefill" in self.backends and not self.config.sparse else 0,
            self.config.head_size,
            dtype=PLAIN_DTYPES[self.config.dtype],
            device=self.device,
        )
        self.workspace_tokens = workspace_tokens

    def build(
        self, common_attn_metadata: CommonAttentionMetadata, common_prefix_len: int = 0, fast_build: bool = False
    ) -> MLAMetadata:
        """As ``LayerGroup.build``; MLA layers use no cascade, so ``common_prefix_len`` changes nothing."""
        self.check_batch(common_attn_metadata)
        common, parts = common_attn_metadata, []
        assert common.slot_mapping is not None
        if not common.num_actual_tokens:  # kernels need not know of such steps
            return self.metadata_of(common, common.slot_mapping, [])
        if self.latents_alone:
            return self.metadata_of(common, common.slot_mapping, [self.latent_part("decode", common, 0, fast_build)])
        split = Split(0, common.num_reqs, 0, common.num_actual_tokens)
        if (threshold := self.reorder_batch_threshold) is not None:
            split = split_decodes_and_prefills(common, threshold)
        if split.num_decode_tokens:
            decodes = common.requests(0, split.num_decodes)
            parts.append(self.latent_part("decode", decodes, 0, fast_build))
        if split.num_prefills:
            prefills = common.requests(split.num_decodes, common.num_reqs)
            if self.config.sparse:
                parts.append(self.latent_part("prefill", prefills, split.num_decode_tokens, fast_build))
            else:
                parts.append(self.dense_prefill(prefills, split.num_decode_tokens, self._chunks))
        return self.metadata_of(common, common.slot_mapping, parts)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLAMetadata:
        """As ``LayerGroup.build_for_cudagraph_capture``; only decodes are captured: longer queries are a BatchError."""
        self.check_capture(common_attn_metadata, self.latents_alone)
        assert common_attn_metadata.slot_mapping is not None
        backend = self.backend_for("decode")
        common = self._tables.in_kernel_blocks(backend.context, common_attn_metadata)
        spans = spans_of(self.config, common.query_start_loc_cpu)
        part = Part("decode", slice(0, common.num_actual_tokens), backend.build_for_capture(common), spans)
        return self.metadata_of(common_attn_metadata, common_attn_metadata.slot_mapping, [part])

    def latent_part(self, phase: Phase, common: CommonAttentionMetadata, first_token: int, fast_build: bool) -> Part:
        """Return requests that are computed on latents."""
        backend = self.backend_for(phase)
        metadata = backend.build(0, self._tables.in_kernel_blocks(backend.context, common), fast_build)
        rows = slice(first_token, first_token + common.num_actual_tokens)
        spans = spans_of(self.config, common.query_start_loc_cpu)
        return Part(phase, rows, metadata, spans)

    @property
    def reorder_batch_threshold(self) -> int | None:
        """As ``LayerGroup.reorder_batch_threshold``."""
        return self.decode_threshold(self.latents_alone)

    def dense_prefill(self, common: CommonAttentionMetadata, first_token: int, cut: Cut) -> Part:
        """Return prefills, which are computed on decompressed keys and values; ``cut`` cuts their cached contexts."""
        backend = self.backend_for("prefill")
        context = common.num_computed_tokens_cpu
        new = VarlenMetadata.of_new_tokens(common, causal=common.causal and not self.config.non_causal)
        new.mm_prefix_ranges = shifted(common.mm_prefix_ranges, context)
        return Part(
            "prefill",
            rows=slice(first_token, first_token + common.num_actual_tokens),
            spans=spans_of(self.config, common.query_start_loc_cpu),
            metadata=backend.build_prefill(new),
            chunks=cut(backend, common, context),
        )

    def _chunks(
        self, backend: LoadedBackend, common: CommonAttentionMetadata, context: Tensor
    ) -> tuple[ContextChunk, ...]:
        """Cut the cached contexts into what the workspace holds."""
        parts = context_parts(common, self.config, self.workspace_tokens)
        if not parts:
            return ()
        check_mergeable(backend, context)
        table = common.block_table_tensor
        assert table is not None
        assert self.block_size is not None
        assert self.kernel_block_size is not None
        if self.block_size != self.kernel_block_size:
            table = kernel_block_table(table, self.block_size // self.kernel_block_size)
        return context_chunks(parts, common, self.config, table, backend.build_prefill)

    def load_chunk(self, chunk: ContextChunk, kv_cache: Tensor, scales: Scales) -> Tensor:
        """Return a chunk's cached latents, ``(num_tokens, head_size)``, in the workspace."""
        where = (chunk.block_table, chunk.starts, chunk.start_loc, chunk.num_tokens, kv_cache.shape[1])
        ops.gather_cache_mla(kv_cache, self.workspace, *where, self.config, scales)
        return self.workspace[: chunk.num_tokens]

    def own_slots(self, topk_indices: Tensor) -> Tensor:
        """Return the chosen slots ``(T, sparse_top_k)`` in this group's own cache: all of them."""
        return topk_indices


def check_mergeable(backend: LoadedBackend, context: Tensor) -> None:
    """Make sure that a backend returns what the parts of prefills with cached tokens are merged by."""
    if not backend.context.plans["prefill"].returns_lse:
        raise BatchError(
            f"a prefill with {int(context.max())} cached tokens: {backend.spec.name} returns no LSE to merge its "
            "parts by",
            hint="prefill whole prompts, or choose another backend for prefill",
        )
