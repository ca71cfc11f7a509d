"""The layers of one kind: the loaded backends of a selection, and one metadata build per step for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_select.decide.selection import Selection
from attn_select.layer.config import Phase
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.kernel_blocks import KernelTables
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.loaded_backend import LoadedBackend, load_backends
from attn_select.runtime.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from attn_select.runtime.step_metadata import AttentionMetadata, Part


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
        bounds = capacity or Capacity()
        here, backends = load_backends(selection, device, bounds, cuda_graphs=cuda_graphs, phases=phases)
        super().__init__(selection, here, backends, bounds, cuda_graphs=cuda_graphs, checked=checked)
        self._tables = KernelTables(self.block_size, bounds.max_num_seqs, bounds.max_model_len)

    @property
    def reorder_batch_threshold(self) -> int | None:
        """As ``LayerGroup.reorder_batch_threshold``."""
        wanted = [own.builder.reorder_batch_threshold for own in self.distinct]
        if len(self.distinct) > 1:
            wanted.append(self.config.max_decode_query_len)
        return min((threshold for threshold in wanted if threshold is not None), default=None)

    def build(
        self, common_attn_metadata: CommonAttentionMetadata, common_prefix_len: int = 0, fast_build: bool = False
    ) -> AttentionMetadata:
        """As ``LayerGroup.build``."""
        common = common_attn_metadata
        self.check_batch(common)
        if common_prefix_len:
            self.checks.prefix(common, common_prefix_len)
        parts = []
        for phase, rows, requests, decodes in self._phases_of(common):
            backend = self.backend_for(phase)
            batch = self._for_kernel(backend, requests, decodes)
            metadata = backend.build(self._prefix(backend, common_prefix_len, batch), batch, fast_build)
            parts.append(Part(phase, rows, metadata))
        return AttentionMetadata(self, common, common.num_actual_tokens, common.slot_mapping, tuple(parts))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> AttentionMetadata:
        """As ``LayerGroup.build_for_cudagraph_capture``."""
        common = common_attn_metadata
        self.check_batch(common)
        short = common.max_query_len <= self.config.max_decode_query_len
        phase = next(iter(self.backends)) if self.unified else "decode" if short else "prefill"
        backend = self.backend_for(phase)
        batch = self._for_kernel(backend, common, self._decodes(backend, common))
        part = Part(phase, slice(0, common.num_actual_tokens), backend.build_for_capture(batch))
        return AttentionMetadata(self, common, common.num_actual_tokens, common.slot_mapping, (part,))

    def _phases_of(
        self, common: CommonAttentionMetadata
    ) -> list[tuple[Phase, slice, CommonAttentionMetadata, int | None]]:
        """Return phase, tokens, requests and how many of these are decodes: of each phase that has tokens."""
        # Of a batch that one backend computes whole, the number is known where that backend wants its decodes first.
        tokens = common.num_actual_tokens
        if not tokens:  # kernels need not know of such steps
            return []
        if self.unified:
            phase, backend = next(iter(self.backends.items()))
            return [(phase, slice(0, tokens), common, self._decodes(backend, common))]
        longest = self.config.max_decode_query_len if "decode" in self.backends else 1
        split = split_decodes_and_prefills(common, self.reorder_batch_threshold or longest)
        decodes, first = split.num_decodes, split.num_decode_tokens
        found: list[tuple[Phase, slice, CommonAttentionMetadata, int | None]] = []
        if first:
            found.append(("decode", slice(0, first), common.requests(0, decodes), decodes))
        if split.num_prefills:
            found.append(("prefill", slice(first, tokens), common.requests(decodes, common.num_reqs), 0))
        return found

    def _prefix(self, backend: LoadedBackend, prefix: int, common: CommonAttentionMetadata) -> int:
        able = prefix and self.config.attention_chunk_size is None
        return prefix if able and backend.builder.use_cascade_attention(prefix, common) else 0

    @staticmethod
    def _decodes(backend: LoadedBackend, common: CommonAttentionMetadata) -> int | None:
        """Return how many requests are decodes, where the batch is cut in chunks and the builder wants them first."""
        if backend.chunks is None or (threshold := backend.builder.reorder_batch_threshold) is None:
            return None
        return split_decodes_and_prefills(common, threshold).num_decodes

    def _for_kernel(
        self, backend: LoadedBackend, common: CommonAttentionMetadata, num_decodes: int | None
    ) -> CommonAttentionMetadata:
        """Return the batch as the kernel wants it: its blocks, the width of its tables, a request for each chunk."""
        common = self._tables.in_kernel_blocks(backend.context, common)
        return common if backend.chunks is None else backend.chunks.cut(common, num_decodes)
