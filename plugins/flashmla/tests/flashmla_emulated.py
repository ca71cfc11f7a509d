"""FlashMLA's functions as every build has them, computed by the oracle on any device.

Signatures, accepted shapes, dtypes and strides, and what schedules may be reused for are the builds' own; contract
tests compare the signatures with what is installed. Sources: deepseek-ai/FlashMLA csrc/api 9241ae3,
vllm-project/FlashMLA csrc/extension/sm90/dense_fp8/pybind.cpp 46d64a8, vLLM 0.26.0, sgl-flash-mla 1.0.0,
sglang-kernel 0.4.10, sgl-kernel 0.3.21.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
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
        if factors and not length:  # the kernel loads the page that the entry before the row names
            before = table.storage_offset() + request * table.stride(0) - 1
            assert before >= 0, "a request without keys has no entry before its row of the table"
            assert 0 <= int(table.as_strided((1,), (1,), before)) < len(k_cache)
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


def entry(parameters: str, run: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function with these parameters, which passes them on in a namespace."""
    signature = inspect.signature(eval(f"lambda {parameters}: None"))

    def called(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return run(SimpleNamespace(**given.arguments))

    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


def _decode(a: Any) -> tuple[Tensor, Tensor]:
    """``flash_mla_with_kvcache`` of any build."""
    assert getattr(a, "use_legacy", True)
    meta, indices, tensors = a.tile_scheduler_metadata, a.indices, (a.q, a.k_cache, a.block_table, a.cache_seqlens)
    if not isinstance(meta, FlashMLASchedMeta):
        tiles, splits = meta, a.num_splits
    elif a.q.dtype == E4M3:
        tiles, splits = meta.tile_scheduler_metadata, meta.num_splits
    else:
        calls.append("flash_mla_with_kvcache")
        assert a.num_splits is None
        result, lse = _run(*tensors, meta, a.softmax_scale, a.causal, bool(a.is_fp8_kvcache), indices, a.attn_sink)
        out = getattr(a, "out", None)
        if indices is None and out is not None:  # what dense decoding accepts, whatever its documentation says
            _check(out, "out", (a.q.dtype,), len(a.q), 1, a.q.shape[1] * a.q.shape[2], 512)
            out = out.view(result.shape)
        return _written(result, out), lse
    if a.q.dtype == E4M3:
        return _decode_fp8(SimpleNamespace(**{**vars(a), "tile_scheduler_metadata": tiles, "num_splits": splits}))
    calls.append("flash_mla_with_kvcache")
    _check_tensors(a.q, a.cache_seqlens, tiles, splits)
    if indices is None:
        return dense(*tensors, a.head_dim_v, a.softmax_scale, a.causal, None)
    assert a.is_fp8_kvcache
    assert not a.causal
    _check(a.block_table, "block_table", (torch.int32,), len(a.q), None)
    return _sparse_decode(a.q, a.k_cache, indices, a.softmax_scale, None)


def _decode_fp8(a: Any) -> tuple[Tensor, Tensor]:
    calls.append("flash_mla_with_kvcache_fp8")
    _check_tensors(a.q, a.cache_seqlens, a.tile_scheduler_metadata, a.num_splits)
    factors = (a.descale_q, a.descale_k)
    for factor in factors:
        _check(factor, "descale", (torch.float32,), 1)
        assert factor.stride() == (1,), f"a descale has strides {factor.stride()}"
    return dense(a.q, a.k_cache, a.block_table, a.cache_seqlens, a.head_dim_v, a.softmax_scale, a.causal, factors)


def _prefill(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``flash_mla_sparse_fwd`` of any build with a natural log-sum-exp."""
    assert getattr(a, "use_legacy", True)
    assert getattr(a, "return_log2_lse", None) is None
    calls.append("flash_mla_sparse_fwd")
    result, lse = _sparse_prefill(a.q, a.kv, a.indices, a.sm_scale, a.d_v, getattr(a, "attn_sink", None))
    return _written(result, getattr(a, "out", None)), lse, lse


def _prefill_log2(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    result, _, lse = _prefill(a)
    return result, lse, lse / math.log(2)


def _metadata(a: Any) -> Any:
    """``get_mla_metadata`` of SGLang's kernels."""
    if a.cache_seqlens is None:
        return FlashMLASchedMeta(), None
    assert a.topk is None or (a.is_fp8_kvcache and a.num_heads_q is not None)
    return _tensor_schedule(a.cache_seqlens, a.num_q_tokens_per_head_k, a.num_heads_k)


def _legacy_metadata(a: Any) -> tuple[Tensor, Tensor]:
    assert a.use_legacy
    assert a.is_fp8_kvcache
    return _tensor_schedule(a.seqlens_k, a.num_q_tokens_per_head_k, a.h_k)


_HEAD = "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits"
_CALL = f"{_HEAD}=None, softmax_scale=None, causal=False"
_DESCALES = "descale_q=None, descale_k=None"
_MORE = "extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None"
_SPARSE = "q, kv, indices, sm_scale, d_v=512"
_LENS = "num_heads_q=None, is_fp8_kvcache=False, topk=None"
_META = {"get_mla_metadata": entry("*args, **kwargs", lambda a: (FlashMLASchedMeta(), None))}
_UPSTREAM_CALL = f"{_CALL}, is_fp8_kvcache=False, indices=None, attn_sink=None, {_MORE}"
_UPSTREAM_SPARSE = f"{_SPARSE}, attn_sink=None, topk_length=None"
MODULES: dict[str, dict[str, dict[str, Any]]] = {
    "vllm": {
        "vllm.third_party.flashmla.flash_mla_interface": {
            **_META,
            "flash_mla_with_kvcache": entry(f"{_UPSTREAM_CALL}, out=None", _decode),
            "flash_mla_sparse_fwd": entry(f"{_UPSTREAM_SPARSE}, out=None", _prefill),
        },
        "vllm.v1.attention.ops.flashmla": {
            "get_mla_metadata_dense_fp8": entry(
                "cache_seqlens, num_q_tokens_per_head_k, num_heads_k",
                lambda a: _tensor_schedule(a.cache_seqlens, a.num_q_tokens_per_head_k, a.num_heads_k),
            ),
            "flash_mla_with_kvcache_fp8": entry(f"{_HEAD}, softmax_scale=None, causal=False, {_DESCALES}", _decode_fp8),
        },
    },
    "sgl-flash-mla": {
        "flash_mla.flash_mla_interface": {
            **_META,
            "get_mla_decoding_metadata": entry(
                "seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, is_fp8_kvcache=False, topk=None, use_legacy=False",
                _legacy_metadata,
            ),
            "flash_mla_with_kvcache": entry(
                f"{_CALL}, is_fp8_kvcache=None, indices=None, attn_sink=None, {_MORE}, enable_batch_invariant=False, "
                f"use_legacy=False, kv_format=None, {_DESCALES}",
                _decode,
            ),
            "flash_mla_sparse_fwd": entry(f"{_UPSTREAM_SPARSE}, use_legacy=False, return_log2_lse=None", _prefill),
        }
    },
    "sglang-kernel": {
        "sgl_kernel.flash_mla": {
            "get_mla_metadata": entry(
                f"cache_seqlens=None, num_q_tokens_per_head_k=None, num_heads_k=None, {_LENS}", _metadata
            ),
            "flash_mla_with_kvcache": entry(
                f"{_CALL}, {_DESCALES}, is_fp8_kvcache=False, indices=None, attn_sink=None, {_MORE}, kv_format=None",
                _decode,
            ),
            "flash_mla_sparse_fwd": entry(_UPSTREAM_SPARSE, _prefill_log2),
        }
    },
    "sgl-kernel": {
        "sgl_kernel.flash_mla": {
            "get_mla_metadata": entry(f"cache_seqlens, num_q_tokens_per_head_k, num_heads_k, {_LENS}", _metadata),
            "flash_mla_with_kvcache": entry(
                f"{_HEAD}, softmax_scale=None, causal=False, {_DESCALES}, is_fp8_kvcache=False, indices=None", _decode
            ),
            "flash_mla_sparse_fwd": entry(_SPARSE, _prefill_log2),
        }
    },
    "flash-mla": {
        "flash_mla.flash_mla_interface": {
            **_META,
            "flash_mla_with_kvcache": entry(_UPSTREAM_CALL, _decode),
            "flash_mla_sparse_fwd": entry(_UPSTREAM_SPARSE, _prefill),
        }
    },
}
"""By distribution and module, the functions."""
