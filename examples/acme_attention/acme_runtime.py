"""The kernels of ACME_ATTN, here in plain torch: imported when a selection is loaded."""

from dataclasses import dataclass

import torch

from attn_select.runtime import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, key_value_views


@dataclass
class AcmeMetadata:
    """What the kernel takes, per batch."""

    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor


class AcmeMetadataBuilder(AttentionMetadataBuilder):
    """Called once per step; the metadata serves all layers."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        # Host copies: reading a device tensor back here would stop the GPU.
        bounds, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu.tolist()
        return AcmeMetadata(bounds, lengths, common.block_table_tensor)

    def use_cascade_attention(self, common_prefix_len, common_attn_metadata):
        return False  # build() makes nothing of a common prefix


class AcmeImpl(AttentionImpl):
    """One layer. The cache is written by the default ``do_kv_cache_update``."""

    def forward(self, query, key, value, kv_cache, attn_metadata, outputs):
        config, size = self.context.config, self.context.block_size
        keys, values = key_value_views(kv_cache, self.context.kv_layout, config)  # (num_blocks, size, heads, head_size)
        bounds = attn_metadata.query_start_loc
        for request, seq_len in enumerate(attn_metadata.seq_lens):
            rows = slice(bounds[request], bounds[request + 1])
            blocks = attn_metadata.block_table[request, : -(-seq_len // size)].long()
            k, v = (cached[blocks].flatten(0, 1)[:seq_len] for cached in (keys, values))
            attended, lse = self.attend(query[rows], k, v, config.sliding_window)
            outputs.output[rows] = attended
            if outputs.lse is not None:
                outputs.lse[rows] = lse
        return outputs.output

    def attend(self, query, keys, values, window):
        """Return output ``(T, H, D)`` and LSE ``(T, H)`` of one request; its queries are the last T of S positions."""
        group = query.shape[1] // keys.shape[1]
        keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("thd,shd->ths", query.float(), keys) * self.terms.scale
        queries, positions = len(query), torch.arange(len(keys), device=query.device)
        distance = positions[None, :] - torch.arange(len(keys) - queries, len(keys), device=query.device)[:, None]
        hidden = distance > 0
        if window is not None:
            hidden |= distance <= -window
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        lse = scores.logsumexp(-1)  # -inf for a row without keys, whose output is 0
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0)[..., None])
        return torch.einsum("ths,shd->thd", weights, values), lse


class AcmeBackend(AttentionBackend):
    """What ``load`` names."""

    impl_cls = AcmeImpl
    builder_cls = AcmeMetadataBuilder
