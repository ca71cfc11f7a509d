"""The operations of the sparse indexer in torch (``attn_select.runtime.ops`` calls them).

None synchronises with a GPU. ``attn_select.runtime.indexer`` says what is computed and how keys are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.runtime.torch_ops import scatter_rows

MOST_SCORES = 2**24
"""Products of heads, tokens and keys that are held at once: 64 MiB in float32."""
E4M3_MAX = 448.0


@dataclass(slots=True)
class IndexedRows:
    """Which keys each token of a batch may choose from."""

    # int32 ``(T,)`` on the device, the token's request, and the position before which it sees keys; 0 for padding.
    request: Tensor
    num_keys: Tensor
    block_table: Tensor
    # On the host: prefix sums of the query lengths, B + 1, and a bound of each request's keys, B.
    bounds: Sequence[int]
    seq_lens: Sequence[int]
    max_seq_len: int


def index_key_views(index_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor | None]:
    """Return views of the keys ``(num_blocks, block_size, head_dim)`` and of their scales."""
    # A block of an FP8 cache ``(num_blocks, block_size, head_dim + 4)`` holds the e4m3 codes of all its tokens, then
    # their float32 scales ``(num_blocks, block_size)``. Caches of other dtypes have none.
    if index_cache.dtype != torch.uint8:
        return index_cache, None
    num_blocks, block_size, _ = index_cache.shape
    by_block = index_cache.view(num_blocks, -1)
    keys = by_block[:, : block_size * head_dim].view(num_blocks, block_size, head_dim)
    return keys, by_block[:, block_size * head_dim :].view(torch.float32)


def quantize_e4m3(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes of ``(..., D)`` and their scales ``(...)``, one for each row."""
    # A scale is ``max |x| / 448``, at least ``1e-4 / 448``, rounded up to a power of two
    # (deepseek-ai/DeepSeek-V3.2-Exp inference/kernel.py act_quant with scale_fmt ue8m0; vllm-project/vllm
    # csrc/cache_kernels.cu, indexer_k_quant).
    rows = numbers.float()
    scales = torch.exp2((rows.abs().amax(-1).clamp_min_(1e-4) / E4M3_MAX).log2_().ceil_())
    return (rows / scales.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def indexer_k_quant_and_cache(key: Tensor, index_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write indexer keys into their paged cache.

    Args:
        key: ``(T, D)``, rope applied.
        index_cache: uint8 ``(num_blocks, block_size, D + 4)``, quantised as ``quantize_e4m3`` does, or ``(num_blocks,
            block_size, D)`` of another dtype, cast.
        slot_mapping: int64 ``(T,)``; tokens with slot -1 are skipped.
    """
    keys, scales = index_key_views(index_cache, key.shape[1])
    if scales is None:
        scatter_rows(keys, key.to(keys.dtype), slot_mapping)
        return
    codes, own = quantize_e4m3(key)
    scatter_rows(keys, codes.view(torch.uint8), slot_mapping)
    scatter_rows(scales, own, slot_mapping)


def indexer_topk(
    query: Tensor, weights: Tensor, index_cache: Tensor, rows: IndexedRows, block_size: int, topk_indices: Tensor
) -> None:
    """Write for each token the slots of the ``top_k`` keys with the largest scores, -1 behind the last.

    ``score = sum_h weights[h] * relu(query[h] . key)``, in float32; with an FP8 cache each ``query[h]`` is quantised as
    keys are.

    Args:
        query: ``(T, H, D)``.
        weights: float32 ``(T, H)``.
        index_cache: as in ``indexer_k_quant_and_cache``.
        rows: which keys each token may choose from.
        block_size: tokens per block of tables and cache.
        topk_indices: int32 ``(T, top_k)``, written.
    """
    heads, size = query.shape[1:]
    query = query.float()
    keys, scales = index_key_views(index_cache, size)
    if scales is not None:
        codes, own = quantize_e4m3(query)
        # relu lets a positive factor through, so the query's scales may go into the weights.
        query, weights = codes.float(), weights * own
    topk_indices.fill_(-1)
    for request, seq_len in enumerate(rows.seq_lens):
        start, end = rows.bounds[request], rows.bounds[request + 1]
        if start == end or not seq_len:
            continue
        position = torch.arange(seq_len, dtype=torch.int32, device=query.device)
        # A bound may be above the length, and a table is stale behind it.
        last = (rows.num_keys[end - 1] - 1).clamp_min(0)
        seen = torch.minimum(position, last)
        block = rows.block_table[request].index_select(0, seen // block_size)
        offset = seen % block_size
        own_keys = _read(keys, scales, block, offset)
        slot = block * block_size + offset
        step = max(1, MOST_SCORES // (heads * seq_len))
        for first in range(start, end, step):
            # So many tokens at a time that their products with all heads and keys stay below MOST_SCORES.
            part = slice(first, min(first + step, end))
            products = (query[part].flatten(0, 1) @ own_keys.T).relu_().view(-1, heads, seq_len)
            scores = torch.bmm(weights[part].unsqueeze(1), products).squeeze(1)
            visible = position < rows.num_keys[part].unsqueeze(1)
            # Of scores -inf the places are arbitrary: what the token does not see is void.
            chosen = scores.masked_fill_(~visible, -torch.inf).topk(min(topk_indices.shape[1], seq_len)).indices
            void = ~visible.gather(1, chosen)
            topk_indices[part, : chosen.shape[1]] = slot[chosen].masked_fill_(void, -1).int()


def _read(keys: Tensor, scales: Tensor | None, block: Tensor, offset: Tensor) -> Tensor:
    """Return the keys float32 ``(N, D)`` at blocks and offsets ``(N,)``."""
    stored = keys[block, offset]
    if scales is None:
        return stored.float()
    return stored.view(torch.float8_e4m3fn).float() * scales[block, offset].unsqueeze(1)
