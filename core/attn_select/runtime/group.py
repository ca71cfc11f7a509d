"""The layers of one kind: the loaded backends of a selection, and one metadata build per step for all of them."""

from __future__ import annotations

from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.step_metadata import AttentionMetadata, Part


class AttentionGroup(LayerGroup):
    """The group of layers with keys and values per head, whose kernels run a step without more.

    Arguments, attributes and errors are ``LayerGroup``'s.
    """

    def build_step(
        self, common: CommonAttentionMetadata, prefix: int = 0, fast: bool = False, captured: bool = False
    ) -> AttentionMetadata:
        """As ``LayerGroup.build_step``."""
        if prefix:
            self.check_prefix(common, prefix)
        parts = []
        for phase, rows, requests in self.phases_of(common):
            backend = self.backend_for(phase)
            # What a batch was split by is more than a builder knows of its part.
            decodes = None if self.whole else requests.num_reqs if phase == "decode" else 0
            batch = backend.batch(requests, decodes)
            cascade = prefix and self.config.attention_chunk_size is None
            shares = cascade and backend.builder.use_cascade_attention(prefix, batch)
            parts.append(Part(phase, rows, backend.build(batch, prefix if shares else 0, fast, captured)))
        return AttentionMetadata(self, common, common.num_actual_tokens, common.slot_mapping, tuple(parts))
