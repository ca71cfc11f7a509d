"""Whole prompts by cuDNN's attention, as torch contains it: on Hopper it takes half the time of FlashAttention 2.

cuDNN masks from the first key on, so it computes what begins there: a request without cached context. torch builds a
graph for each shape, which takes the host tens of milliseconds. So lengths are rounded up to a few, with copies of the
last key behind it, which causality hides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select_torch.runtime.gather import CacheGather
from attn_select_torch.runtime.request_tiles import rounded

LEAST_TOKENS = 512
"""Shorter prompts share a call of ``varlen_attn``, whose kernel takes 31 us for 512 tokens, cuDNN's 16 (H200, 32 query
and 8 KV heads of 128), less than the host takes for a call."""
ATTEND = torch.ops.aten._scaled_dot_product_cudnn_attention
"""What ``scaled_dot_product_attention`` runs where it chooses cuDNN; called directly for its log-sum-exp."""


@dataclass(slots=True)
class Prompt:
    """One request whose query is its whole sequence."""

    request: int  # its number in the batch
    start: int  # start, end: its tokens
    end: int
    padded: int  # their number, rounded up
    rows: Tensor  # row numbers in the cache (``CacheGather.rows``) of ``padded`` keys


def prompts(common: CommonAttentionMetadata, gather: CacheGather) -> list[Prompt]:
    """Return the requests of a batch that cuDNN computes. No synchronisation."""
    if common.max_query_len < LEAST_TOKENS:
        return []
    assert common.block_table_tensor is not None
    found = []
    bounds, seq_lens = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu.tolist()
    for request, tokens in enumerate(seq_lens):
        start, end = bounds[request], bounds[request + 1]
        if end - start != tokens or tokens < LEAST_TOKENS:
            continue
        padded, table = rounded(tokens), common.block_table_tensor[request]
        positions = torch.arange(padded, device=table.device).clamp_(max=tokens - 1)
        columns = torch.div(positions, gather.block_size, rounding_mode="floor")
        offsets = torch.sub(positions, columns, alpha=gather.block_size)
        found.append(Prompt(request, start, end, padded, gather.rows(table[columns], offsets)))
    return found


def run(
    prompt: Prompt, query: Tensor, keys: Tensor, values: Tensor, scale: float, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return output and LSE ``(T, H)`` of ``query (T, H, D)``; keys and values are ``(1, Hkv, padded, D)``."""
    tokens = len(query)
    if prompt.padded > tokens:
        query = pad(query, (0, 0, 0, 0, 0, prompt.padded - tokens))
    out, lse, *_ = ATTEND(query.transpose(0, 1)[None], keys, values, None, wants_lse, 0.0, True, False, scale=scale)
    return out[0].transpose(0, 1)[:tokens], lse[0, :, :tokens, 0].t() if wants_lse else None
