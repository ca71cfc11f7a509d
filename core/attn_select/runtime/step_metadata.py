"""``AttentionMetadata``: one step's batch as the layers of a group want it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.mla_context import ContextChunk, Spans
from attn_select.runtime.torch_indexer import IndexedRows


@dataclass(slots=True)
class Part:
    """The requests of a batch that one backend computes: ``group.backends[phase]``."""

    # Of a batch that is not split, the first that the group serves.
    phase: Phase
    rows: slice
    # What the builder built: with MLA for ``forward_mqa``, in dense prefill for the step's own tokens.
    metadata: Any
    spans: Spans = ()
    # In dense MLA prefill the cached contexts, in parts that fit the workspace.
    chunks: tuple[ContextChunk, ...] = ()


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch.

    Attributes:
        group: the group that built it; layers of another one refuse it.
        common: the batch, tables in the allocator's blocks.
        num_actual_tokens: tokens; what lies behind is padding.
        slot_mapping: int64 slots of the step's keys and values, or latents; None without a cache.
        parts: one, or decodes and prefills apart where different backends serve them, decodes first; none without
            tokens.
        indexed_rows: which keys each token may choose from; made by the first ``SparseIndexer`` that is called.
    """

    group: Any
    common: CommonAttentionMetadata
    num_actual_tokens: int
    slot_mapping: Tensor | None
    parts: tuple[Part, ...]
    indexed_rows: IndexedRows | None = None
