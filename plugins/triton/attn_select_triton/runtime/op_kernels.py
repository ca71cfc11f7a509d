"""What serves the shared operations: kernels behind the signatures of ``attn_select.runtime.torch_ops``.

Triton casts to e4m3 from compute capability 8.9 on; below, torch writes e4m3.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from attn_select.layer import layouts
from attn_select.layer.config import AttentionConfig
from attn_select.runtime import torch_indexer, torch_ops
from attn_select.runtime.kv_cache import key_value_unchecked, paged_attention_views
from attn_select.runtime.rank_memory import RankMemory
from attn_select.runtime.scales import Scales
from attn_select.runtime.torch_indexer import IndexedRows
from attn_select_triton.facts.triton_support import E4M3_FROM
from attn_select_triton.kernels import cache, convert, indexer, mla_cache, rank_memory
from attn_select_triton.kernels.chosen_slots import slots_in_front
from attn_select_triton.kernels.convert import flatten_block_table
from attn_select_triton.kernels.launch import capability_of
from attn_select_triton.kernels.merge import merge_attn_states
from attn_select_triton.kernels.rank_merge import merge_rank_states, pack_attn_states
from attn_select_triton.kernels.state_conv import causal_conv

__all__ = [
    "causal_conv",
    "concat_and_cache_mla",
    "concat_and_quantize_mla_q",
    "flatten_block_table",
    "gather_cache_mla",
    "gather_rank_heads",
    "indexer_k_quant_and_cache",
    "indexer_topk",
    "merge_attn_states",
    "merge_rank_memory",
    "merge_rank_states",
    "pack_attn_states",
    "quantize_fp8",
    "reshape_and_cache",
    "slots_in_front",
]


@lru_cache(maxsize=64)
def _casts(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype != torch.float8_e4m3fn or device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= E4M3_FROM


def quantize_fp8(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale and cast in one pass."""
    if not _casts(numbers.device, dtype):
        return torch_ops.quantize_fp8(numbers, scale, dtype)
    return convert.quantize_fp8(numbers, scale, dtype)


def concat_and_quantize_mla_q(latent: Tensor, rope: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Join, scale and cast in one pass."""
    if not _casts(latent.device, dtype):
        return torch_ops.concat_and_quantize_mla_q(latent, rope, scale, dtype)
    return convert.concat_and_quantize_mla_q(latent, rope, scale, dtype)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    config: AttentionConfig,
    scales: Scales,
) -> None:
    """Write keys and values, any layout, in one pass."""
    if not _casts(kv_cache.device, kv_cache.dtype):
        torch_ops.reshape_and_cache(key, value, kv_cache, slot_mapping, layout, config, scales)
        return
    if layout == layouts.PAGED_ATTENTION:
        keys, values = paged_attention_views(kv_cache, config)
        values = values.permute(0, 3, 1, 2)
    else:
        keys, values = key_value_unchecked(kv_cache, layout, config)
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        key, value = key.contiguous(), value.contiguous()
    cache.write_kv(key, value, keys, values, slot_mapping, scales.k, scales.v)


def concat_and_cache_mla(
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    config: AttentionConfig,
    scales: Scales,
) -> None:
    """Write latents of layout ``MLA`` in one pass; ``FP8_DS_MLA`` in torch."""
    if layout != layouts.MLA or not _casts(kv_cache.device, kv_cache.dtype):
        torch_ops.concat_and_cache_mla(kv_c_normed, k_pe, kv_cache, slot_mapping, layout, config, scales)
        return
    mla_cache.concat_and_cache_mla(kv_c_normed, k_pe, kv_cache, slot_mapping, scales.k)


def gather_cache_mla(
    kv_cache: Tensor,
    output: Tensor,
    block_table: Tensor,
    starts: Tensor,
    start_loc: Tensor,
    num_tokens: int,
    block_size: int,
    config: AttentionConfig,
    scales: Scales,
) -> None:
    """Gather latents in one pass."""
    arguments = (kv_cache, output, block_table, starts, start_loc, num_tokens, block_size)
    if not _casts(kv_cache.device, kv_cache.dtype):
        torch_ops.gather_cache_mla(*arguments, config, scales)
        return
    mla_cache.gather_cache_mla(*arguments, scales.k)


def _indexes(index_cache: Tensor) -> bool:
    """Whether the kernels take a cache: products without tensor cores would spill, and not fit shared memory."""
    if index_cache.dtype == torch.uint8:
        return _casts(index_cache.device, torch.float8_e4m3fn)
    return index_cache.dtype != torch.float32 and capability_of(index_cache.device) >= (8, 0)


def indexer_k_quant_and_cache(key: Tensor, index_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write indexer keys, an FP8 cache in one pass."""
    if index_cache.dtype == torch.uint8 and _indexes(index_cache):
        indexer.indexer_k_quant_and_cache(key, index_cache, slot_mapping)
    else:
        torch_indexer.indexer_k_quant_and_cache(key, index_cache, slot_mapping)


def indexer_topk(
    query: Tensor, weights: Tensor, index_cache: Tensor, rows: IndexedRows, block_size: int, topk_indices: Tensor
) -> None:
    """Choose tokens by two kernels, one that scores and one that selects."""
    chosen = indexer if _indexes(index_cache) else torch_indexer
    chosen.indexer_topk(query, weights, index_cache, rows, block_size, topk_indices)


def gather_rank_heads(rows: Tensor, memory: RankMemory, kv_heads: int) -> Tensor:
    """Write heads into all ranks' memory; torch does where no kernel may wait for another rank."""
    gather = torch_ops.gather_rank_heads if memory.addresses is None else rank_memory.gather_rank_heads
    return gather(rows, memory, kv_heads)


def merge_rank_memory(
    output: Tensor, output_lse: Tensor | None, sinks: Tensor | None, memory: RankMemory, kv_heads: int, sharded: bool
) -> None:
    """Merge the results in all ranks' memory; torch does where no kernel may wait for another rank."""
    merge = torch_ops.merge_rank_memory if memory.addresses is None else rank_memory.merge_rank_memory
    merge(output, output_lse, sinks, memory, kv_heads, sharded)
