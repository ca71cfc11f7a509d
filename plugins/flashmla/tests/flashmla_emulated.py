"""FlashMLA's functions as every build has them, computed by the oracle on any device.

Signatures, accepted shapes, dtypes and strides, and what schedules may be reused for are the builds' own; contract
tests compare the signatures with what is installed. Sources: deepseek-ai/FlashMLA csrc/api 9241ae3,
vllm-project/FlashMLA csrc/extension/sm90/dense_fp8/pybind.cpp 46d64a8, vLLM 0.26.0, sgl-flash-mla 1.0.0,
sglang-kernel 0.4.10, sgl-kernel 0.3.21.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from attn_select.testing import attention_reference, unpack_fp8_ds_mla

E4M3 = torch.float8_e4m3fn
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
calls: list[str] = []
"""The functions called, in order."""


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Filled at the first call: then the shapes and lengths it was filled for are the only ones it serves."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None

    def use(self, config: tuple[Any, ...], lengths: Tensor) -> None:
        if not self.have_initialized:
            calls.append("schedule")
            self.have_initialized, self.config, self.tile_scheduler_metadata = True, config, lengths.clone()
        assert self.config == config, f"the schedule was made for {self.config}, not {config}"
        assert torch.equal(self.tile_scheduler_metadata, lengths), "the schedule was made for other lengths"


def _check(tensor: Tensor, name: str, dtypes: tuple[torch.dtype, ...], *shape: int | None) -> None:
    assert tensor.dtype in dtypes, f"{name} is {tensor.dtype}, accepted are {dtypes}"
    fits = tensor.ndim == len(shape) and all(w in (None, s) for s, w in zip(tensor.shape, shape, strict=True))
    assert fits, f"{name} is {tuple(tensor.shape)}, accepted is {shape}"
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"{name} has strides {tensor.stride()}"


def _written(result: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return result
    _check(out, "out", (result.dtype,), *result.shape)
    assert out.is_contiguous()
    return out.copy_(result)


def _flipped(lse: Tensor) -> Tensor:
    """Return an LSE as the kernels give it: +inf in rows without keys."""
    return lse.masked_fill(lse == -torch.inf, torch.inf).float()


def dense(
    q: Tensor, k_cache: Tensor, table: Tensor, lens: Tensor, head_dim_v: int, scale: float, causal: bool, factors: Any
) -> tuple[Tensor, Tensor]:
    """Return output and LSE of dense decoding; ``factors`` undo the quantisation of query and cache."""
    batch, query_len, heads, width = q.shape
    assert width == 576
    assert head_dim_v == 512
    _check(q, "q", (E4M3,) if factors else SIXTEEN_BITS, batch, query_len, heads, width)
    _check(k_cache, "k_cache", (q.dtype,), None, 64, 1, width)
    _check(table, "block_table", (torch.int32,), batch, None)
    _check(lens, "cache_seqlens", (torch.int32,), batch)
    assert lens.is_contiguous()
    q_factor, k_factor = (1.0, 1.0) if not factors else (float(factor) for factor in factors)
    stored = k_cache.view(torch.uint8) if factors else k_cache
    out = torch.empty(batch, query_len, heads, 512, dtype=torch.bfloat16 if factors else q.dtype, device=q.device)
    lse = torch.empty(batch, heads, query_len, device=q.device)
    for request, length in enumerate(lens.tolist()):
        keys = stored[table[request, : -(-length // 64)].long()].view(k_cache.dtype)
        keys = keys.double().reshape(-1, 1, width)[:length] * k_factor
        query = q[request].double() * q_factor
        found, found_lse = attention_reference(query, keys, keys[..., :512], scale=scale, causal=causal)
        out[request], lse[request] = found, _flipped(found_lse).T
    return out, lse


def sparse(q: Tensor, latents: Tensor, indices: Tensor, scale: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output ``(T, H, 512)`` and LSE ``(T, H)`` of tokens that attend to rows of float64 ``(S, 576 or 512)``."""
    tokens, heads, _ = q.shape
    assert heads in (64, 128), f"{heads} query heads, accepted are 64 and 128"
    out = torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(tokens, heads, device=q.device)
    if sinks is not None:
        _check(sinks, "attn_sink", (torch.float32,), heads)
    for token, chosen in enumerate(indices):
        keys = latents[chosen[(chosen >= 0) & (chosen < len(latents))].long()][:, None]
        options: dict[str, Any] = {"scale": scale, "causal": False}
        found, found_lse = attention_reference(q[token : token + 1], keys, keys[..., :512], sinks=sinks, **options)
        if sinks is not None:  # it counts in the output alone
            _, found_lse = attention_reference(q[token : token + 1], keys, keys[..., :512], **options)
        out[token], lse[token] = found[0], _flipped(found_lse[0])
    return out, lse


def _sparse_decode(
    q: Tensor, k_cache: Tensor, indices: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, query_len, heads, _ = q.shape
    _check(q, "q", (torch.bfloat16,), batch, query_len, heads, 576)
    _check(k_cache, "k_cache", (torch.uint8, torch.int8, E4M3), None, None, 1, 656)
    assert k_cache.stride(1) == 656
    _check(indices, "indices", (torch.int32,), batch, query_len, None)
    assert indices.shape[2] % 64 == 0
    assert int(indices.min()) >= -1, "an index below -1 is read as an address"
    assert int(indices.max()) < k_cache.shape[0] * k_cache.shape[1]
    latents = unpack_fp8_ds_mla(k_cache.view(torch.uint8).reshape(-1, 656))
    out, lse = sparse(q.flatten(0, 1), latents, indices.flatten(0, 1), scale, sinks)
    return out.view(batch, query_len, heads, 512), lse.view(batch, query_len, heads).transpose(1, 2)


def _run(
    q: Tensor,
    k_cache: Tensor,
    table: Tensor | None,
    lens: Tensor | None,
    meta: FlashMLASchedMeta,
    softmax_scale: float | None,
    causal: bool,
    is_fp8: bool,
    indices: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run what a ``FlashMLASchedMeta`` goes with."""
    assert softmax_scale is not None
    top_k = None if indices is None else indices.shape[-1]
    config = (*q.shape[:3], *k_cache.shape[1:3], causal, is_fp8, top_k)
    if indices is not None:
        assert is_fp8
        assert not causal
        meta.use(config, torch.tensor([]))
        return _sparse_decode(q, k_cache, indices, softmax_scale, sinks)
    assert not is_fp8
    assert sinks is None
    assert table is not None
    assert lens is not None
    meta.use(config, lens)
    return dense(q, k_cache, table, lens, 512, softmax_scale, causal, None)


def _tensor_schedule(lens: Tensor, tokens: int, heads_k: int) -> tuple[Tensor, Tensor]:
    """Return what stands for a schedule as tensors: the lengths it was made for, and the rows per request."""
    calls.append("schedule")
    _check(lens, "cache_seqlens", (torch.int32,), None)
    assert heads_k == 1
    return lens.clone(), torch.tensor([tokens])


def _check_tensors(q: Tensor, lens: Tensor | None, tiles: Tensor, splits: Tensor | None) -> None:
    assert lens is not None
    assert splits is not None
    assert torch.equal(tiles, lens), "the schedule was made for other lengths"
    assert int(splits) == q.shape[1] * q.shape[2], "the schedule was made for other queries"


def _sparse_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens, heads, width = q.shape
    assert width in (576, 512)
    _check(q, "q", (torch.bfloat16,), tokens, heads, width)
    _check(kv, "kv", (torch.bfloat16,), None, 1, width)
    _check(indices, "indices", (torch.int32,), tokens, 1, None)
    assert indices.shape[2] % 128 == 0
    assert d_v == 512
    return sparse(q, kv.squeeze(1).double(), indices.squeeze(1), sm_scale, sinks)


# --- vLLM -------------------------------------------------------------------------------------


def get_mla_metadata(*args: Any, **kwargs: Any) -> Any:
    return FlashMLASchedMeta(), None


def vllm_flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    is_fp8_kvcache: Any = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    out: Any = None,
) -> Any:
    calls.append("flash_mla_with_kvcache")
    assert num_splits is None
    tensors = (q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata)
    result, lse = _run(*tensors, softmax_scale, causal, is_fp8_kvcache, indices, attn_sink)
    if indices is None and out is not None:  # what dense decoding accepts, whatever its documentation says
        _check(out, "out", (q.dtype,), len(q), 1, q.shape[1] * q.shape[2], 512)
        out = out.view(result.shape)
    return _written(result, out), lse


def vllm_flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any,
    d_v: Any = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: Any = None,
) -> Any:
    calls.append("flash_mla_sparse_fwd")
    result, lse = _sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink)
    return _written(result, out), lse, lse


def get_mla_metadata_dense_fp8(cache_seqlens: Any, num_q_tokens_per_head_k: Any, num_heads_k: Any) -> Any:
    return _tensor_schedule(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


def flash_mla_with_kvcache_fp8(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: Any = None,
    causal: Any = False,
    descale_q: Any = None,
    descale_k: Any = None,
) -> Any:
    calls.append("flash_mla_with_kvcache_fp8")
    _check_tensors(q, cache_seqlens, tile_scheduler_metadata, num_splits)
    for factor in (descale_q, descale_k):
        _check(factor, "descale", (torch.float32,), 1)
        assert factor.stride() == (1,), f"a descale has strides {factor.stride()}"
    factors = (descale_q, descale_k)
    return dense(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, factors)


# --- sgl-flash-mla ----------------------------------------------------------------------------


def get_mla_decoding_metadata(
    seqlens_k: Any,
    num_q_tokens_per_head_k: Any,
    h_k: Any,
    h_q: Any = None,
    is_fp8_kvcache: Any = False,
    topk: Any = None,
    use_legacy: Any = False,
) -> Any:
    assert use_legacy
    assert is_fp8_kvcache
    return _tensor_schedule(seqlens_k, num_q_tokens_per_head_k, h_k)


def sgl_flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    is_fp8_kvcache: Any = None,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    enable_batch_invariant: Any = False,
    use_legacy: Any = False,
    kv_format: Any = None,
    descale_q: Any = None,
    descale_k: Any = None,
) -> Any:
    assert use_legacy
    meta, scale = tile_scheduler_metadata, softmax_scale
    if is_fp8_kvcache and indices is None:
        tensors = (meta.tile_scheduler_metadata, meta.num_splits)
        arguments = (q, k_cache, block_table, cache_seqlens, head_dim_v, *tensors, scale, causal, descale_q, descale_k)
        return flash_mla_with_kvcache_fp8(*arguments)
    calls.append("flash_mla_with_kvcache")
    return _run(q, k_cache, block_table, cache_seqlens, meta, scale, causal, bool(is_fp8_kvcache), indices, attn_sink)


def sgl_flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any,
    d_v: Any = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
    use_legacy: Any = False,
    return_log2_lse: Any = None,
) -> Any:
    assert use_legacy
    assert return_log2_lse is None
    return vllm_flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink)


# --- sglang-kernel and sgl-kernel -------------------------------------------------------------


def sglang_get_mla_metadata(
    cache_seqlens: Any = None,
    num_q_tokens_per_head_k: Any = None,
    num_heads_k: Any = None,
    num_heads_q: Any = None,
    is_fp8_kvcache: Any = False,
    topk: Any = None,
) -> Any:
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    return _tensor_schedule(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


def sglang_flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    descale_q: Any = None,
    descale_k: Any = None,
    is_fp8_kvcache: Any = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
    kv_format: Any = None,
) -> Any:
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        arguments = (q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits)
        options = (softmax_scale, causal, descale_q, descale_k, is_fp8_kvcache, indices)
        return sgl_kernel_flash_mla_with_kvcache(*arguments, *options)
    calls.append("flash_mla_with_kvcache")
    tensors = (q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata)
    return _run(*tensors, softmax_scale, causal, is_fp8_kvcache, indices, attn_sink)


def sglang_flash_mla_sparse_fwd(
    q: Any, kv: Any, indices: Any, sm_scale: Any, d_v: Any = 512, attn_sink: Any = None, topk_length: Any = None
) -> Any:
    result, _, lse = vllm_flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink)
    return result, lse, lse / math.log(2)


def sgl_kernel_get_mla_metadata(
    cache_seqlens: Any,
    num_q_tokens_per_head_k: Any,
    num_heads_k: Any,
    num_heads_q: Any = None,
    is_fp8_kvcache: Any = False,
    topk: Any = None,
) -> Any:
    if topk is not None:
        assert is_fp8_kvcache
        assert num_heads_q is not None
    return _tensor_schedule(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


def sgl_kernel_flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: Any = None,
    causal: Any = False,
    descale_q: Any = None,
    descale_k: Any = None,
    is_fp8_kvcache: Any = False,
    indices: Any = None,
) -> Any:
    if q.dtype == E4M3:
        arguments = (q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits)
        return flash_mla_with_kvcache_fp8(*arguments, softmax_scale, causal, descale_q, descale_k)
    calls.append("flash_mla_with_kvcache")
    _check_tensors(q, cache_seqlens, tile_scheduler_metadata, num_splits)
    if indices is None:
        return dense(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, None)
    assert is_fp8_kvcache
    assert not causal
    _check(block_table, "block_table", (torch.int32,), len(q), None)
    return _sparse_decode(q, k_cache, indices, softmax_scale, None)


def sgl_kernel_flash_mla_sparse_fwd(q: Any, kv: Any, indices: Any, sm_scale: Any, d_v: Any = 512) -> Any:
    return sglang_flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v)


# --- upstream ---------------------------------------------------------------------------------


def upstream_flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: Any,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: Any = None,
    causal: Any = False,
    is_fp8_kvcache: Any = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
) -> Any:
    arguments = (q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits)
    return vllm_flash_mla_with_kvcache(*arguments, softmax_scale, causal, is_fp8_kvcache, indices, attn_sink)


def upstream_flash_mla_sparse_fwd(
    q: Any, kv: Any, indices: Any, sm_scale: Any, d_v: Any = 512, attn_sink: Any = None, topk_length: Any = None
) -> Any:
    return vllm_flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink)


_META = {"get_mla_metadata": get_mla_metadata}
MODULES: dict[str, dict[str, dict[str, Any]]] = {
    "vllm": {
        "vllm.third_party.flashmla.flash_mla_interface": {
            **_META,
            "flash_mla_with_kvcache": vllm_flash_mla_with_kvcache,
            "flash_mla_sparse_fwd": vllm_flash_mla_sparse_fwd,
        },
        "vllm.v1.attention.ops.flashmla": {
            "get_mla_metadata_dense_fp8": get_mla_metadata_dense_fp8,
            "flash_mla_with_kvcache_fp8": flash_mla_with_kvcache_fp8,
        },
    },
    "sgl-flash-mla": {
        "flash_mla.flash_mla_interface": {
            **_META,
            "get_mla_decoding_metadata": get_mla_decoding_metadata,
            "flash_mla_with_kvcache": sgl_flash_mla_with_kvcache,
            "flash_mla_sparse_fwd": sgl_flash_mla_sparse_fwd,
        }
    },
    "sglang-kernel": {
        "sgl_kernel.flash_mla": {
            "get_mla_metadata": sglang_get_mla_metadata,
            "flash_mla_with_kvcache": sglang_flash_mla_with_kvcache,
            "flash_mla_sparse_fwd": sglang_flash_mla_sparse_fwd,
        }
    },
    "sgl-kernel": {
        "sgl_kernel.flash_mla": {
            "get_mla_metadata": sgl_kernel_get_mla_metadata,
            "flash_mla_with_kvcache": sgl_kernel_flash_mla_with_kvcache,
            "flash_mla_sparse_fwd": sgl_kernel_flash_mla_sparse_fwd,
        }
    },
    "flash-mla": {
        "flash_mla.flash_mla_interface": {
            **_META,
            "flash_mla_with_kvcache": upstream_flash_mla_with_kvcache,
            "flash_mla_sparse_fwd": upstream_flash_mla_sparse_fwd,
        }
    },
}
"""By distribution and module, the functions."""
