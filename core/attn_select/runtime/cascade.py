"""Cascade attention: a prefix that all requests share is attended to once, each request's rest by itself.

The two partial results are merged by their log-sum-exp (``ops.merge_attn_states``; FlashInfer's cascade inference,
https://flashinfer.ai/2024/02/02/cascade-inference.html). Without cascade each of B requests reads the prefix's keys and
values from memory; with it they are read once for all queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attn_select.runtime.batch import to_device
from attn_select.runtime.integers import size
from attn_select.runtime.metadata import CommonAttentionMetadata

MIN_PREFIX, MIN_REQUESTS = 256, 8
"""Tokens of prefix and requests below which cascade is not considered: vLLM's limits
(v1/attention/backends/flash_attn.py 0.33, use_cascade_attention). With a fast kernel the second call and the merge cost
more than is saved well above them, so a builder that was measured asks for more (``least_cascade_bytes``)."""


@dataclass(slots=True)
class CascadeSplit:
    """One batch as two: every query against the shared prefix, and each request against its own rest."""

    # The prefix is one request that holds all T queries, not causal. The suffix's tables and lengths start behind the
    # prefix. Sinks are counted in the suffix.

    prefix: CommonAttentionMetadata
    suffix: CommonAttentionMetadata


def common_prefix_len(block_tables: list[tuple[int, ...]], num_computed_tokens: list[int], block_size: int) -> int:
    """Return how many tokens at the start of every request lie in the same, completely cached blocks.

    Args:
        block_tables: block ids per running request (``BlockPool.blocks``).
        num_computed_tokens: tokens of each request that were cached before this step; the prefix ends before the
            first that was not, so that every request keeps a suffix.
        block_size: tokens per block.

    Raises:
        ConfigError: the block size is below 1.
    """
    block_size = size("block_size", block_size)
    if not block_tables:
        return 0
    most = min(num_computed_tokens) // block_size
    shared = 0
    for ids in zip(*block_tables, strict=False):
        if shared == most or any(block != ids[0] for block in ids):
            break
        shared += 1
    return shared * block_size


def split_for_cascade(common: CommonAttentionMetadata, prefix_len: int, block_size: int) -> CascadeSplit:
    """Cut a batch into prefix and suffix, after whole blocks. No device synchronisation."""
    # ``prefix_len`` is a multiple of ``block_size`` and at most what every request had cached before this step: then
    # no query stands inside the prefix, and it needs no mask. The halves of the tables are views: backends that cascade
    # take tables of any width.
    table = common.block_table_tensor
    assert table is not None
    assert prefix_len % block_size == 0
    blocks, tokens = prefix_len // block_size, common.num_actual_tokens
    device = common.seq_lens.device
    bounds_cpu = torch.tensor([0, tokens], dtype=torch.int32)
    lens_cpu = torch.tensor([prefix_len], dtype=torch.int32)
    prefix = replace(
        common,
        query_start_loc=to_device(bounds_cpu, device),
        query_start_loc_cpu=bounds_cpu,
        seq_lens=to_device(lens_cpu, device),
        seq_lens_cpu=lens_cpu,
        num_reqs=1,
        max_query_len=tokens,
        max_seq_len=prefix_len,
        block_table_tensor=table[:1, :blocks],
        causal=False,
        tree_mask=None,
    )
    suffix = replace(
        common,
        seq_lens=common.seq_lens - prefix_len,
        seq_lens_cpu=common.seq_lens_cpu - prefix_len,
        max_seq_len=common.max_seq_len - prefix_len,
        block_table_tensor=table[:, blocks:],
    )
    return CascadeSplit(prefix, suffix)
