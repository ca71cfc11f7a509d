"""The layers of one kind: the loaded backends of a selection, and one metadata build per step for all of them."""

from __future__ import annotations

from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.step_metadata import AttentionMetadata, Part


class AttentionGroup(LayerGroup):
    """The group of layers with keys and values per head, whose kernels run a step without more.

    Arguments, attributes and errors are ``LayerGroup``'s.
    """

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
            self.check_prefix(common, common_prefix_len)
        parts = []
        for phase, rows, requests in self.phases_of(common):
            backend = self.backend_for(phase)
            # What a batch was split by is more than a builder knows of its part.
            decodes = None if self.whole else requests.num_reqs if phase == "decode" else 0
            batch = backend.batch(requests, decodes)
            cascade = common_prefix_len and self.config.attention_chunk_size is None
            shares = cascade and backend.builder.use_cascade_attention(common_prefix_len, batch)
            parts.append(Part(phase, rows, backend.build(common_prefix_len if shares else 0, batch, fast_build)))
        return AttentionMetadata(self, common, common.num_actual_tokens, common.slot_mapping, tuple(parts))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> AttentionMetadata:
        """As ``LayerGroup.build_for_cudagraph_capture``."""
        common = common_attn_metadata
        self.check_batch(common)
        phase = self.whole or ("decode" if common.max_query_len <= self.config.max_decode_query_len else "prefill")
        backend = self.backend_for(phase)
        part = Part(phase, slice(0, common.num_actual_tokens), backend.build_for_capture(backend.batch(common)))
        return AttentionMetadata(self, common, common.num_actual_tokens, common.slot_mapping, (part,))
