"""Layouts of KV caches and of states by name: shapes and sizes, without tensors.

Names and shapes follow vLLM (v1/attention/backends/flash_attn.py, flashinfer.py, mla/, csrc/cache_kernels.cu)
and FlashMLA's FP8 token format (deepseek-ai/FlashMLA README: 512 e4m3 + 4 float32 scales + 64 bfloat16 = 656 bytes).
"""

from __future__ import annotations

import math

from attn_select.layer.config import AttentionConfig
from attn_select.layer.dtypes import BITS
from attn_select.layer.state import StateConfig

FLASH_ATTN_NHD = "FLASH_ATTN_NHD"
"""``(2, num_blocks, block_size, num_kv_heads, head_size)``"""
FLASHINFER_NHD = "FLASHINFER_NHD"
"""``(num_blocks, 2, block_size, num_kv_heads, head_size)``"""
FLASHINFER_HND = "FLASHINFER_HND"
"""``(num_blocks, 2, num_kv_heads, block_size, head_size)``"""
MLA = "MLA"
"""``(num_blocks, block_size, kv_lora_rank + qk_rope_head_dim)``"""
FP8_DS_MLA = "FP8_DS_MLA"
"""uint8 ``(num_blocks, block_size, 656)``"""
PAGED_ATTENTION = "PAGED_ATTENTION"
"""K ``(num_blocks, num_kv_heads, head_size/x, block_size, x)`` with ``x`` = 16 bytes / element size,
V ``(num_blocks, num_kv_heads, head_size, block_size)``"""

STATE_KV = "STATE_KV"
"""``(num_slots, num_v_heads, head_size, v_head_size)``, as fla-core and transformers keep a state"""
STATE_VK = "STATE_VK"
"""``(num_slots, num_v_heads, v_head_size, head_size)``, as FlashInfer and Mamba's kernels keep it"""

LAYOUTS = (FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND, MLA, FP8_DS_MLA, PAGED_ATTENTION)
STATE_LAYOUTS = (STATE_KV, STATE_VK)
"""Layouts of states: one slot per request, no blocks."""
SPLIT_IN_PLACE = (FLASH_ATTN_NHD, MLA, FP8_DS_MLA)
"""Layouts in which a block's tokens, and then the next block's, lie one behind the other: any block size is a view."""
FP8_DS_MLA_BYTES = 656


def cache_shape(layout: str, config: AttentionConfig, block_size: int) -> list[int | str]:
    """Return the cache's shape in elements, with ``"num_blocks"`` where the pool's size goes.

    ``PAGED_ATTENTION`` stores K and V in two tensors of one flat size: the shape of both together is given.
    """
    heads = config.num_kv_heads
    # K and V are two halves of one tensor, so both have the width of the wider.
    size = max(config.head_size, config.value_head_size)
    shapes: dict[str, list[int | str]] = {
        FLASH_ATTN_NHD: [2, "num_blocks", block_size, heads, size],
        FLASHINFER_NHD: ["num_blocks", 2, block_size, heads, size],
        FLASHINFER_HND: ["num_blocks", 2, heads, block_size, size],
        MLA: ["num_blocks", block_size, size],
        FP8_DS_MLA: ["num_blocks", block_size, FP8_DS_MLA_BYTES],
        PAGED_ATTENTION: [2, "num_blocks", heads, block_size * size],
    }
    if layout not in shapes:
        raise ValueError(f"unknown KV-cache layout {layout!r}; known: {', '.join(LAYOUTS)}")
    return shapes[layout]


INDEXER_BYTES = 132
"""Of one token in the indexer's own cache, beside that of a sparse MLA layer: a key of 128 FP8 numbers and its float32
scale (DeepSeek-V3.2-Exp inference/model.py Indexer; vLLM v1/attention/backends/mla/indexer.py 0.33)."""


def bytes_per_token(layout: str, config: AttentionConfig) -> int:
    """Return the bytes that one token of one layer takes in the cache; per-tensor scales are apart and not counted.

    nvfp4 keeps one FP8 scale per 16 elements beside the data (vLLM utils/torch_utils.py 0.33, nvfp4_kv_cache_full_dim).
    """
    if layout == FP8_DS_MLA:
        return FP8_DS_MLA_BYTES
    dtype = "fp8_e4m3" if config.cache_dtype == "fp8_ds_mla" else config.cache_dtype
    elements = math.prod(extent for extent in cache_shape(layout, config, 1) if isinstance(extent, int))
    return elements * BITS[dtype] // 8 + (elements // 16 if dtype == "nvfp4" else 0)


def state_shape(layout: str, config: StateConfig) -> list[int | str]:
    """Return the shape in elements of one layer's states, with ``"num_slots"`` where the pool's size goes."""
    sizes = {STATE_KV: [config.head_size, config.v_head_size], STATE_VK: [config.v_head_size, config.head_size]}
    if layout not in sizes:
        raise ValueError(f"unknown layout of states {layout!r}; known: {', '.join(STATE_LAYOUTS)}")
    return ["num_slots", config.num_v_heads, *sizes[layout]]


def bytes_per_request(config: StateConfig) -> int:
    """Return the bytes that a running request of one layer takes, whatever its length.

    It has the slot of its state and one more for each draft token, to go back to the accepted one.
    """
    return bytes_per_slot(config) * config.max_decode_query_len


def bytes_per_slot(config: StateConfig) -> int:
    """Return the bytes of one state of one layer, and of the tokens that the convolution sees before the next one."""
    state = config.num_v_heads * config.head_size * config.v_head_size * BITS[config.state_dtype] // 8
    return state + max(0, config.conv_kernel_size - 1) * config.conv_dim * BITS[config.dtype] // 8
