"""The layers of one kind: the loaded backends of a selection, and one metadata build per step for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.layer.config import CudaGraphLevel, Phase
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.loaded import LoadedBackends
from attn_select.runtime.metadata import CommonAttentionMetadata, Split, split_decodes_and_prefills
from attn_select.runtime.served import Served


@dataclass(slots=True)
class Part:
    """The requests of a batch that one backend computes.

    Attributes:
        phase: decodes or prefills; of a batch that is not split, the first that the group serves.
        backend: the name of the backend that computes them.
        start, end: the tokens, ``start .. end - 1``.
        metadata: what its builder built.
    """

    phase: Phase
    backend: str
    start: int
    end: int
    metadata: Any


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch as the layers of a group want it.

    Attributes:
        group: the group that built it; layers of another one refuse it.
        common: the batch, tables in the allocator's blocks.
        num_actual_tokens: tokens; what lies behind is padding.
        slot_mapping: int64 slots of the step's keys and values; None without a cache.
        parts: one, or decodes and prefills apart where different backends serve them.
    """

    group: LayerGroup
    common: CommonAttentionMetadata
    num_actual_tokens: int
    slot_mapping: Tensor | None
    parts: tuple[Part, ...]


class AttentionGroup(LayerGroup):
    """Loads the backends of a ``Selection`` and builds their metadata, once per step for all layers of the kind.

    The layers share its workspaces: one step runs after the other. Steps side by side take a group each.

    Args:
        selection: from ``select``; every phase must have a backend.
        device: where the layers run; None: the CPU or the current CUDA device, whichever the selection was made for.
        capacity: bounds of a batch.
        cuda_graphs: whether steps will be captured (``CudaGraphRunner``).
        phases: the phases whose backends are loaded; None: all that the layers have. A batch that needs another phase
            is refused.
        checked: as for ``LayerGroup``.

    Raises:
        NoBackendError: a phase has no backend.
        RuntimeMissingError, ImportError: a backend cannot be loaded.
        ConfigError: the selection was made for a device that is not here, or the phases' kernels share no block size
            within this layout.
    """

    def __init__(
        self,
        selection: Selection,
        device: torch.device | str | None = None,
        capacity: Capacity | None = None,
        *,
        cuda_graphs: bool = False,
        phases: Sequence[Phase] | None = None,
        checked: bool | None = None,
    ) -> None:
        loaded = LoadedBackends(selection, device, capacity, cuda_graphs=cuda_graphs, phases=phases)
        super().__init__(selection, loaded, checked=checked)

    @property
    def cudagraph_support(self) -> CudaGraphLevel:
        """As ``LayerGroup.cudagraph_support``; mixed batches only where one backend serves both phases."""
        return self.loaded.cudagraph_support

    @property
    def reorder_batch_threshold(self) -> int | None:
        """As ``LayerGroup.reorder_batch_threshold``."""
        wanted = [served.builder.reorder_batch_threshold for served in self.backends]
        if len(self.backends) > 1:
            wanted.append(self.config.max_decode_query_len)
        return min((threshold for threshold in wanted if threshold is not None), default=None)

    def build(
        self, common_attn_metadata: CommonAttentionMetadata, common_prefix_len: int = 0, fast_build: bool = False
    ) -> Any:
        """As ``LayerGroup.build``."""
        self.check_batch(common_attn_metadata)
        if common_prefix_len:
            self.checks.prefix(common_attn_metadata, common_prefix_len)
        if not common_attn_metadata.num_actual_tokens:  # kernels need not know of such steps
            return self._metadata(common_attn_metadata, [])
        if self.unified:
            part = self._whole(common_attn_metadata, common_prefix_len, fast_build)
            return self._metadata(common_attn_metadata, [part])
        parts = []
        longest = self.config.max_decode_query_len if "decode" in self.served else 1
        split = split_decodes_and_prefills(common_attn_metadata, self.reorder_batch_threshold or longest)
        for phase, first, last in _by_phase(split):
            served = self.loaded.server(phase)
            start = 0 if phase == "decode" else split.num_decode_tokens
            decodes = last - first if phase == "decode" else 0
            common = self._for_kernel(served, common_attn_metadata.requests(first, last), decodes)
            metadata = served.build(self._prefix(served, common_prefix_len, common), common, fast_build)
            parts.append(Part(phase, served.spec.name, start, start + common.num_actual_tokens, metadata))
        return self._metadata(common_attn_metadata, parts)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """As ``LayerGroup.build_for_cudagraph_capture``."""
        self.check_batch(common_attn_metadata)
        phase = self._only_phase(common_attn_metadata)
        served = self.loaded.server(phase)
        common = self._for_kernel(served, common_attn_metadata, self._decodes(served, common_attn_metadata))
        metadata = served.build_for_capture(common)
        part = Part(phase, served.spec.name, 0, common.num_actual_tokens, metadata)
        return self._metadata(common_attn_metadata, [part])

    def _only_phase(self, common: CommonAttentionMetadata) -> Phase:
        if self.unified:
            return next(iter(self.served))
        return "decode" if common.max_query_len <= self.config.max_decode_query_len else "prefill"

    def _whole(self, common: CommonAttentionMetadata, prefix: int, fast: bool) -> Part:
        phase, served = next(iter(self.served.items()))
        common = self._for_kernel(served, common, self._decodes(served, common))
        metadata = served.build(self._prefix(served, prefix, common), common, fast)
        return Part(phase, served.spec.name, 0, common.num_actual_tokens, metadata)

    def _metadata(self, common: CommonAttentionMetadata, parts: Sequence[Part]) -> AttentionMetadata:
        return AttentionMetadata(self, common, common.num_actual_tokens, common.slot_mapping, tuple(parts))

    def _prefix(self, served: Served, prefix: int, common: CommonAttentionMetadata) -> int:
        able = prefix and self.config.attention_chunk_size is None
        return prefix if able and served.builder.use_cascade_attention(prefix, common) else 0

    @staticmethod
    def _decodes(served: Served, common: CommonAttentionMetadata) -> int | None:
        """Return how many requests are decodes, where the batch is cut in chunks and the builder wants them first."""
        if served.chunks is None or (threshold := served.builder.reorder_batch_threshold) is None:
            return None
        return split_decodes_and_prefills(common, threshold).num_decodes

    def _for_kernel(
        self, served: Served, common: CommonAttentionMetadata, num_decodes: int | None
    ) -> CommonAttentionMetadata:
        """Return the batch as the kernel wants it: its blocks, the width of its tables, a request for each chunk."""
        common = self.loaded.tables.in_kernel_blocks(served.context, common)
        return common if served.chunks is None else served.chunks.cut(common, num_decodes)


def _by_phase(split: Split) -> list[tuple[Phase, int, int]]:
    """Return phase, first and end request of each part that has tokens."""
    decodes, total = split.num_decodes, split.num_decodes + split.num_prefills
    parts: list[tuple[Phase, int, int]] = [("decode", 0, decodes)] if split.num_decode_tokens else []
    return [*parts, ("prefill", decodes, total)] if split.num_prefills else parts
