"""FlashAttention's functions without a GPU: each provider's signature and rules, computed by the float64 oracle.

``SIGNATURES`` is what each provider's source has, by provider and function; ``test_fa_signatures`` compares it with
what is installed. The rules are those of csrc/flash_attn/flash_api.cpp v2.8.3 (FA2) and hopper/flash_api.cpp 0251105
(FA3), and of vLLM's and SGLang's forks where they differ. Where a kernel would go out of bounds, these raise.
"""

from __future__ import annotations

import inspect
import sys
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from attn_select.reference.oracle import attention_reference

Arguments = dict[str, Any]
E4M3 = torch.float8_e4m3fn

_KVCACHE_HEAD = (
    "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), "
)
_SGL_VARLEN_HEAD = (
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None, "
    "page_table=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
)
_SGL_END = "sm_margin=0, return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3"

SIGNATURES = {
    "vllm": {
        "flash_attn_varlen_func": "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, "
        "seqused_k=None, q_v=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, "
        "out=None, scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, "
        "output_scale=None, fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, "
        "mask_mod=None, aux_tensors=None, dynamic_causal=None",
        "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
        "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    },
    "vllm with FA4": {
        "flash_attn_varlen_func": "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, "
        "seqused_k=None, q_v=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, "
        "out=None, scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, "
        "output_scale=None, fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, "
        "mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_tensor_leading_dims=None, "
        "dynamic_causal=None, gather_kv_indices=None, gather_kv_valid_length=None",
    },
    "flash-attn-3": {
        "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
        "seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
        "sm_margin=0, return_attn_probs=False",
        "flash_attn_with_kvcache": _KVCACHE_HEAD + "attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
        "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    },
    "flash-attn": {
        "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
        "return_attn_probs=False, block_table=None",
    },
    "flash-attn-4": {
        "_flash_attn_fwd": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, "
        "softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, "
        "mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, "
        "score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, "
        "aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
        "gather_bwd_recompute_p=False",
    },
    "sglang-kernel": {
        "flash_attn_varlen_func": _SGL_VARLEN_HEAD + "only_qv=False, " + _SGL_END + ", out=None",
        "flash_attn_with_kvcache": _KVCACHE_HEAD + "attention_chunk=None, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, " + _SGL_END + ", out=None",
        "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k=None, "
        "cu_seqlens_k_new=None, seqused_q=None, leftpad_k=None, page_size=None, max_seqlen_k_new=0, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    },
    "sgl-kernel": {
        "flash_attn_varlen_func": _SGL_VARLEN_HEAD + _SGL_END,
        "flash_attn_with_kvcache": _KVCACHE_HEAD + "attention_chunk=None, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, " + _SGL_END,
    },
}
"""Parameters without annotations: vllm 0.26.0, vllm 0.33.0 (with FA4), flash-attention 0251105 (FA3) and v2.8.3 (FA2),
flash-attn-4 4.0.0b36, sglang-kernel 0.4.10, sgl-kernel 0.3.21."""

MODULES = {
    "vllm": "vllm.vllm_flash_attn.flash_attn_interface",
    "vllm with FA4": "vllm.vllm_flash_attn.flash_attn_interface",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn": "flash_attn",
    "flash-attn-4": "flash_attn.cute.interface",
    "sglang-kernel": "sgl_kernel.flash_attn",
    "sgl-kernel": "sgl_kernel.flash_attn",
}


def signature(provider: str, function: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {SIGNATURES[provider][function]}: None", {"torch": torch}))


def install(monkeypatch: Any, provider: str) -> list[Arguments]:
    """Put a provider's emulated module in ``sys.modules``; return the list that its calls are added to."""
    calls: list[Arguments] = []
    name = MODULES[provider]
    parts = name.split(".")
    for depth in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    module = ModuleType(name)
    for function in SIGNATURES[provider]:
        setattr(module, function, _emulated(provider, function, calls))
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def _emulated(provider: str, function: str, calls: list[Arguments]) -> Callable[..., Any]:
    signed = signature(provider, function)
    compute = {
        "flash_attn_varlen_func": _varlen,
        "flash_attn_with_kvcache": _kvcache,
        "get_scheduler_metadata": _schedule,
        "_flash_attn_fwd": _cute,
    }[function]

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signed.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append({"function": function, **bound.arguments})
        return compute(provider, dict(bound.arguments))

    call.__signature__ = signed  # type: ignore[attr-defined]
    call.__name__ = function
    return call


def need(condition: Any, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _varlen(provider: str, a: Arguments) -> Any:
    version = a.get("fa_version", 2 if provider == "flash-attn" else 3)
    if provider == "vllm with FA4":
        return _gather(a)
    paged = a.get("block_table") is not None
    if provider == "vllm":
        need((a["cu_seqlens_k"] is None) != (a["seqused_k"] is None), "cu_seqlens_k or seqused_k, not both")
        need(not paged or a["seqused_k"] is not None, "seqused_k must be provided if block_table is provided")
        if version == 2:
            refused = [n for n in ("s_aux", "q_v", "scheduler_metadata", "q_descale") if a[n] is not None]
            need(not refused and a["num_splits"] <= 1, f"FA2 does not support {refused}")
        need(version == 2 or a["alibi_slopes"] is None, f"Alibi is not supported in FA{version}")
    need(not paged or version == 2 or provider == "vllm", "flash_attn_varlen_func does not page")
    bound = a["max_seqlen_k"]
    wanted = a["return_attn_probs"] if "return_softmax_lse" not in a else a["return_softmax_lse"]
    if version == 2 and paged:
        _refuse_keyless(a, wanted)
    out, lse = _attend(provider, version, a, a["k"], a["v"], a.get("block_table"), bound)
    if not wanted:
        return out
    return (out, lse, None) if provider in ("flash-attn", "sglang-kernel", "sgl-kernel") else (out, lse)


def _gather(a: Arguments) -> Any:
    """FA4 on gathered rows (vLLM 0.33.0 vllm_flash_attn/cute/interface.py: ``qv``, ``gather_kv_indices``)."""
    q, qv, k, v, rows = a["q"], a["q_v"], a["k"], a["v"], a["gather_kv_indices"]
    tokens, heads, size = q.shape
    need(a["fa_version"] == 4 and a["block_table"] is None and not a["causal"], "gathers without pages and causality")
    need(a["window_size"] is None and not a["softcap"] and a["s_aux"] is None, "no window, cap or sinks with qv")
    need(a["alibi_slopes"] is None and a["q_descale"] is None, "no slopes or descales with qv")
    need({t.dtype for t in (q, qv, k, v)} == {torch.bfloat16}, "one dtype")
    need(tuple(qv.shape) == (tokens, heads, 512) and size == 64, "sizes of qv")
    need(heads in (8, 16, 32, 64, 128), f"{heads} heads")
    need(tuple(k.shape) == (len(k), 1, 64) and tuple(v.shape) == (len(k), 1, 512), "a flat cache of one head")
    need(all(t.stride(-1) == 1 for t in (q, qv, k, v)), "contiguous last dimension")
    need(tuple(rows.shape[:-1]) == (tokens,) and rows.shape[-1] % 128 == 0, f"rows {tuple(rows.shape)}")
    valid = a["gather_kv_valid_length"]
    for each, length in (
        (a["cu_seqlens_q"], tokens + 1), (a["cu_seqlens_k"], tokens + 1), (a["seqused_k"], tokens), (valid, tokens)
    ):  # fmt: skip
        need(tuple(each.shape) == (length,) and each.dtype == torch.int32 and each.is_contiguous(), "int32 vectors")
    need(rows.dtype == torch.int32 and torch.equal(a["cu_seqlens_q"], torch.arange(tokens + 1).int()), "one query each")
    need(a["max_seqlen_q"] == 1 and bool((a["seqused_k"] == len(k)).all()) and a["max_seqlen_k"] == len(k), "bounds")
    out = torch.zeros(tokens, heads, 512, dtype=q.dtype)
    lse = torch.full((tokens, heads), -torch.inf)
    for token in range(tokens):
        kept = rows[token, : int(valid[token])]
        need(bool((kept >= 0).all() and (kept < len(k)).all()), "rows of the cache")
        if not len(kept):
            continue
        keys, values = k[kept.long(), 0].double(), v[kept.long(), 0].double()
        scores = (q[token].double() @ keys.T + qv[token].double() @ values.T) * a["softmax_scale"]
        out[token] = (scores.softmax(-1) @ values).to(q.dtype)
        lse[token] = scores.logsumexp(-1).float()
    return (out, lse) if a["return_softmax_lse"] else out


def _refuse_keyless(a: Arguments, lse: bool) -> None:
    """FA2's paged kernel spoils other rows' LSE for a request without keys, and with unequal queries other memory."""
    lens = a["cu_seqlens_k"].diff() if a.get("seqused_k") is None else a["seqused_k"]
    queries = a["cu_seqlens_q"].diff()
    keyless = bool(((lens == 0) & (queries > 0)).any())
    need(not (keyless and lse), "FA2 gives no LSE beside a request without keys")
    need(not keyless or bool((queries == a["max_seqlen_q"]).all()), "FA2 writes out of bounds")


def _kvcache(provider: str, a: Arguments) -> Any:
    need(all(a[n] is None for n in ("k", "v", "cache_leftpad", "cache_batch_idx")), "emulated without appending")
    a["seqused_k"], a["cu_seqlens_k"] = a["cache_seqlens"], None
    bound = a["page_table"].shape[1] * a["k_cache"].shape[1]
    out, lse = _attend(provider, 3, a, a["k_cache"], a["v_cache"], a["page_table"], bound)
    return (out, lse, None, None) if a["return_softmax_lse"] else out


def _cute(provider: str, a: Arguments) -> Any:
    """FA4 (flash-attn-4 4.0.0b36 flash_attn/cute/interface.py, _flash_attn_fwd) on 9.0, and on 10.x with FP8."""
    unused = ("qv", "seqused_q", "lse", "scheduler_metadata", "score_mod", "mask_mod", "gather_kv_indices")
    need(all(a[name] is None for name in unused), "emulated without these")
    need((a["cu_seqlens_k"] is None) != (a["seqused_k"] is None), "cu_seqlens_k or seqused_k, not both")
    left, right = (-1 if a[name] is None else a[name] for name in ("window_size_left", "window_size_right"))
    need(min(left, right) >= -1, "None stands for no bound")
    a |= {"window_size": (left, right), "s_aux": a["learnable_sink"], "softcap": a["softcap"] or 0.0}
    out, lse = _attend(provider, 4, a, a["k"], a["v"], a["page_table"], a["max_seqlen_k"])
    return out, (lse if a["return_lse"] else None), None, None, None


def _schedule(provider: str, a: Arguments) -> torch.Tensor:
    heads, kv_heads = (a[n] for n in (("num_heads", "num_heads_k") if "num_heads" in a else _HEADS))
    key = _schedule_key(
        a["batch_size"],
        a["max_seqlen_q"],
        a["max_seqlen_k"],
        heads,
        kv_heads,
        a["headdim"],
        a["headdim_v"] or a["headdim"],
        a["qkv_dtype"],
        a["page_size"],
        a["causal"],
        tuple(a["window_size"]),
        a["has_softcap"],
        a["num_splits"],
    )
    need(a["cache_seqlens"].dtype == torch.int32 and a["cu_seqlens_q"].dtype == torch.int32, "lengths are int32")
    schedule = torch.zeros(_schedule_size(provider, key), dtype=torch.int32)
    schedule[0] = _digest(key)
    return schedule


_HEADS = ("num_heads_q", "num_heads_kv")


def _schedule_key(*values: Any) -> tuple[Any, ...]:
    """What a schedule follows from, with causality and window as the kernel reads them."""
    batch, query, keys, heads, kv_heads, size, value_size, dtype, page, causal, (left, right), softcap, splits = values
    left, right = (-1 if left >= keys - 1 else left), (-1 if right >= query - 1 else right)
    if query == 1 and left == right == -1 and (size <= 64 or size > 128 or page is None):
        causal = False
    right = 0 if causal else right
    return (batch, query, keys, heads, kv_heads, size, value_size, str(dtype), page, left, right, softcap, splits)


def _schedule_size(provider: str, key: tuple[Any, ...]) -> int:
    batch, left, right, splits = key[0], key[9], key[10], key[12]
    causal = left < 0 and right == 0
    local = (left >= 0 or right >= 0) and not causal
    vectors = (1 + (batch <= 992 and splits != 1) if provider == "vllm" else 2 + (not local)) + (causal or local)
    return 1 + -(-batch // 4) * 4 * vectors


def _digest(key: tuple[Any, ...]) -> int:
    return zlib.crc32(repr(key).encode()) & 0x7FFFFFFF


def _attend(
    provider: str, version: int, a: Arguments, k: Any, v: Any, table: Any, key_bound: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a call by the kernel's rules and compute it; return output and LSE ``(H, T)``."""
    q, bounds, sizes = a["q"], a["cu_seqlens_q"], a.get("seqused_k")
    qv = a.get("q_v", a.get("qv"))
    batch, total, heads, kv_heads = len(bounds) - 1, q.shape[0], q.shape[1], k.shape[-2]
    size, value_size = q.shape[-1], v.shape[-1]
    fp8 = q.dtype == E4M3
    need(q.dtype in (torch.bfloat16, torch.float16) or (version >= 3 and fp8), f"FA{version} with {q.dtype}")
    need(k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype")
    for tensor in (q, k, v, *(() if qv is None else (qv,))):
        need(tensor.stride(-1) == 1 or tensor.shape[-1] == 1, "contiguous last dimension")
    for lengths in (bounds, sizes, a.get("cu_seqlens_k")):
        need(lengths is None or (lengths.dtype == torch.int32 and lengths.is_contiguous()), "int32 and contiguous")
    need(heads % kv_heads == 0 and k.shape[-1] == size, "heads and head sizes")
    widest = 512 if version == 4 and provider == "vllm" else 256
    need(size <= widest and size % (16 if fp8 else 8) == 0, f"head size {size}")
    need(value_size % (16 if fp8 else 8) == 0, f"V head size {value_size}")
    if version == 4:
        need(table is None or (size % 16 == 0 and value_size % 16 == 0), "Paged KV does not support irregular head dim")
        need(value_size <= widest, "V head size")
        need(a["num_splits"] in (0, 1), "a number of splits of its own")
    elif value_size != size:
        need(version == 3, "FA2 takes V as wide as K")
        fits = (128 < size <= 192 and 96 < value_size <= 128) or (size <= 64 and value_size <= 512)
        need(fits and not (fp8 and value_size > 256), "V widths")
    window = tuple(a["window_size"] or (-1, -1))
    left, right = window
    causal = a["causal"]
    sinks = a.get("s_aux", a.get("sinks"))
    if sinks is not None:
        need(tuple(sinks.shape) == (heads,) and sinks.is_contiguous(), "sinks")
        need(sinks.dtype == torch.bfloat16 or (version == 4 and sinks.dtype == torch.float32), "the dtype of sinks")
        need(version == 4 or provider != "vllm" or (heads <= 64 and size == value_size), "sinks in vLLM's build")
    if qv is not None:
        need(size <= 64 and value_size >= 256 and not fp8, "q_v wants head_size <= 64 and V from 256")
        need(tuple(qv.shape) == (total, heads, value_size), "q_v")
    if fp8:
        for name in ("q_descale", "k_descale", "v_descale"):
            scale = a[name]
            need(tuple(scale.shape) == (batch, kv_heads) and scale.dtype == torch.float32, f"{name} {scale.shape}")
            need(version != 4 or kv_heads > 1 or scale.stride(1) == 1, f"{name} wants a stride of 1")
    page = None
    if table is not None:
        page = k.shape[1]
        need(page % {"flash-attn": 256, "vllm": 16 if version == 2 else 1}.get(provider, 1) == 0, f"page size {page}")
        need(table.dtype == torch.int32 and table.stride(-1) == 1 and len(table) == batch, "block table")
    elif a.get("cu_seqlens_k") is not None:
        need(len(a["cu_seqlens_k"]) == batch + 1, "cu_seqlens_k")
    if a.get("scheduler_metadata") is not None:
        key = _schedule_key(
            batch, a["max_seqlen_q"], key_bound, heads, kv_heads, size, value_size, q.dtype, page, causal, window,
            a["softcap"] > 0, a["num_splits"],
        )  # fmt: skip
        made = a["scheduler_metadata"]
        need(len(made) == _schedule_size(provider, key), "scheduler_metadata has another size")
        need(int(made[0]) == _digest(key), f"scheduler_metadata was made for other arguments than {key}")
    ends, key_bounds = bounds.tolist(), None if a.get("cu_seqlens_k") is None else a["cu_seqlens_k"].tolist()
    query_lens = bounds.diff()
    need(int(query_lens.max()) <= a["max_seqlen_q"] and ends[-1] <= total, "max_seqlen_q")
    swapped = heads > kv_heads and window == (-1, -1) and a.get("alibi_slopes") is None
    if version == 2 and a["max_seqlen_q"] == 1 and swapped:
        need(total == batch and bool((query_lens == 1).all()), "with max_seqlen_q = 1 every request has one query")
    out_dtype = torch.bfloat16 if fp8 else q.dtype
    out = a.get("out")
    if out is None:
        out = torch.full((total, heads, value_size), torch.nan, dtype=out_dtype)
    need(out.dtype == out_dtype and tuple(out.shape) == (total, heads, value_size) and out.stride(-1) == 1, "out")
    lse = torch.full((heads, total), torch.nan)
    for r in range(batch):
        rows, unused = slice(ends[r], ends[r + 1]), v[:0]
        keys = int(sizes[r]) if sizes is not None else key_bounds[r + 1] - key_bounds[r]
        need(keys <= key_bound, f"{keys} keys, max_seqlen_k {key_bound}")
        if table is not None:
            need(keys <= table.shape[1] * page, f"{keys} keys in a table of {table.shape[1]} pages")
            used = table[r, : -(-keys // page)].long()
            k_r, v_r = (_rows(t, used).flatten(0, 1) for t in (k, v))
            if qv is not None and value_size > 256 and page % 64 == 0 and a["max_seqlen_q"] * heads > 64 * kv_heads:
                # Pages come by TMA, in whole tiles of 64 keys: what lies behind the last key gets weight 0.
                unused = v_r[keys : -(-keys // 64) * 64]
            k_r, v_r = k_r[:keys], v_r[:keys]
        else:
            part = slice(key_bounds[r], key_bounds[r + 1])
            k_r, v_r = k[part], v[part]
        if fp8:
            group = heads // kv_heads
            q_r = q[rows].float() * a["q_descale"][r].repeat_interleave(group)[:, None]
            k_r, v_r = k_r.float() * a["k_descale"][r][:, None], v_r.float() * a["v_descale"][r][:, None]
        else:
            q_r = q[rows]
        if qv is not None:
            q_r, k_r = torch.cat([q_r, qv[rows]], -1), torch.cat([k_r, v_r], -1)
        need(left < 0 or right == (0 if causal else left), f"window {window} with causal = {causal}")
        result, row_lse = attention_reference(
            q_r,
            k_r,
            v_r,
            scale=a["softmax_scale"],
            causal=causal,
            sliding_window=None if left < 0 else left + 1,
            logits_soft_cap=a["softcap"] or None,
            alibi_slopes=a.get("alibi_slopes"),
            sinks=sinks,
        )
        positions = torch.arange(keys - len(q_r), keys)
        blind = positions < 0 if causal or not keys else torch.zeros(len(q_r), dtype=torch.bool)
        blind |= keys == 0
        if version == 4 and sinks is not None:
            row_lse[blind] = sinks.double()  # softmax.py, apply_learnable_sink
        elif version >= 3:
            row_lse[blind] = -torch.inf  # a sink is not counted where nothing is computed
        else:
            row_lse[blind] = torch.inf
            if a.get("alibi_slopes") is not None and causal and (left < 0 or left >= key_bound):
                row_lse = row_lse + positions[:, None] * a["alibi_slopes"]
        if len(unused):
            result = result + (0 * unused.double()).sum(0)
        out[rows] = result.to(out_dtype)
        lse[:, rows] = row_lse.T.float()
    return out, lse


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Index blocks; torch indexes no FP8."""
    if tensor.dtype == E4M3:
        return tensor.view(torch.uint8)[index].view(E4M3)
    return tensor[index]
