"""vLLM's KV cache of a layer in a layout of attn-select, as a view.

Two protocols. Until 0.26 vLLM asks a backend for the shape of its cache (``get_kv_cache_shape``): attn-select's own.
From 0.32 on every backend gets ``(num_blocks, num_kv_heads, block_size, 2 * head_size)``, keys in the first half of the
last dimension and values in the second, with strides by the engine's layout (vllm/v1/kv_cache_layout.py).
"""

from __future__ import annotations

from torch import Tensor

from attn_select.layer.layouts import FLASHINFER_NHD

LAYOUT = FLASHINFER_NHD
"""The layout of attention's caches: a block's keys and values lie together, as vLLM's page sizes and packing want."""
_OWN_AXES = 5


def own_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """Return a cache's shape in ``LAYOUT``."""
    return num_blocks, 2, block_size, num_kv_heads, head_size


def own_view(kv_cache: Tensor, head_size: int) -> Tensor:
    """Return a layer's cache in ``LAYOUT``: ``(num_blocks, 2, block_size, num_kv_heads, head_size)``, strided."""
    if kv_cache.ndim == _OWN_AXES:
        return kv_cache
    blocks, heads, tokens, _ = kv_cache.shape
    return kv_cache.view(blocks, heads, tokens, 2, head_size).permute(0, 3, 2, 1, 4)
