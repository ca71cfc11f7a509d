"""FlashInfer's TRT-LLM entries without a GPU: XQA and trtllm-gen decode, trtllm-gen prefill, paged and ragged.

Rules by source: decode.py, prefill.py, xqa.py, csrc/xqa/xqa_wrapper.cu and mha.cu, csrc/trtllm_fmha_kernel_launcher.cu,
jit/xqa.py, all 0.6.14. Tensors reach the kernels as bare pointers: what is not checked there and would be read wrongly
is checked here. ``trtllm_mla`` has MLA's entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from flashinfer_emulated import need

XQA_PAGES = (16, 32, 64, 128)
GEN_PAGES = (16, 32, 64)
"""trtllm-gen's pages of which tests exist; above 128 it reads wrong blocks (flashinfer-ai/flashinfer #4347)."""
XQA_GROUP = 32
GUARD = 1 << 20
"""Bytes behind trtllm-gen's softmax statistics."""
GEN_RAGGED = ((192, 128), (128, 128), (256, 256))


@fi.entry("decode.trtllm_batch_decode_with_kv_cache")
def trtllm_batch_decode_with_kv_cache(a: Any) -> Any:
    out = a.out
    out_dtype = a.out_dtype
    backend = a.backend
    lse = a.lse
    if backend == "auto":
        backend = "trtllm-gen" if fi.world.capability[0] == 10 else "xqa"
    need(backend in ("xqa", "trtllm-gen"), f"Backend {backend} not supported", KeyError)
    need(a.uses_shared_paged_kv_idx and a.skip_softmax_threshold_scale_factor is None, "not emulated")
    k, v = _halves(a.kv_cache)
    if backend == "xqa":
        need(out_dtype != "nvfp4", "xqa backend does not support nvfp4 output", ValueError)
        need(a.o_sf_scale is None and a.o_sf_vec_size is None, "xqa backend does not support o_sf_scale", ValueError)
        need(
            a.max_q_len is None and a.cum_seq_lens_q is None, "xqa backend does not support cum_seq_lens_q", ValueError
        )
        need(
            not a.return_lse and lse is None, "xqa backend does not support return_lse/lse output", NotImplementedError
        )
        if out_dtype is None:
            out_dtype = out.dtype if out is not None else a.query.dtype
        if out is None:
            out = torch.empty_like(a.query, dtype=out_dtype)
        return xqa_batch_decode_with_kv_cache(
            a.query,
            (k, v),
            a.workspace_buffer,
            a.block_tables,
            a.seq_lens,
            a.max_seq_len,
            a.bmm1_scale,
            a.bmm2_scale,
            a.window_left,
            out,
            a.sinks,
            a.kv_layout,
            a.enable_pdl,
            a.q_len_per_req,
            a.o_scale,
            a.mask,
            a.kv_cache_sf,
        )
    need(a.mask is None, "trtllm-gen does not read mask: its drafts are causal")
    k, v = (half.transpose(-3, -2) if a.kv_layout == "NHD" else half for half in (k, v))
    out = _gen_output(a.query, out, out_dtype, a.o_sf_scale, a.o_sf_vec_size)
    if a.q_len_per_req is not None:
        need(len(a.query) % a.q_len_per_req == 0, f"{len(a.query)} tokens of {a.q_len_per_req} per request")
        bounds = torch.arange(len(a.query) // a.q_len_per_req + 1, dtype=torch.int32) * a.q_len_per_req
        need(a.cum_seq_lens_q is None, "cum_seq_lens_q goes with max_q_len and q_len_per_req=None")
    else:
        need(a.max_q_len is not None, "max_q_len", AssertionError)
        fi.check_list(a.cum_seq_lens_q, len(a.cum_seq_lens_q), "cum_seq_lens_q")
        bounds = a.cum_seq_lens_q
    lse = _gen_lse(a.query, lse, a.return_lse)
    _check_gen(a.query, k, v, a.block_tables, a.seq_lens, a.sinks, (a.bmm1_scale, a.bmm2_scale), len(bounds) - 1)
    call = {
        "limits": (a.max_q_len or a.q_len_per_req, a.max_seq_len),
        "decode": True,
        "causal": True,
        "window": a.window_left,
    }
    lists = (bounds, a.block_tables, a.seq_lens)
    fi.launch(
        partial(_gen, a.query, k, v, a.workspace_buffer, lists, out, lse, (a.bmm1_scale, a.bmm2_scale), a.sinks, call)
    )
    return (out, lse) if a.return_lse else out


@fi.entry("prefill.trtllm_batch_context_with_kv_cache")
def trtllm_batch_context_with_kv_cache(a: Any) -> Any:
    out = a.out
    lse = a.lse
    dense = a.causal or a.window_left < 0
    need(dense, "Sliding-window non-causal attention is not supported for trtllm-gen", NotImplementedError)
    need(a.uses_shared_paged_kv_idx and a.skip_softmax_threshold_scale_factor is None, "not emulated")
    k, v = (half.transpose(-3, -2) if a.kv_layout == "NHD" else half for half in _halves(a.kv_cache))
    out = _gen_output(a.query, out, a.out_dtype, a.o_sf_scale, a.o_sf_vec_size)
    lse = _gen_lse(a.query, lse, a.return_lse)
    for bounds, name in ((a.cum_seq_lens_q, "cum_seq_lens_q"), (a.cum_seq_lens_kv, "cum_seq_lens_kv")):
        fi.check_list(bounds, a.batch_size + 1, name)
    _check_gen(a.query, k, v, a.block_tables, a.seq_lens, a.sinks, (a.bmm1_scale, a.bmm2_scale), a.batch_size)
    call = {"limits": (a.max_q_len, a.max_kv_len), "decode": False, "causal": a.causal, "window": a.window_left}
    call["keys"] = a.cum_seq_lens_kv
    lists = (a.cum_seq_lens_q, a.block_tables, a.seq_lens)
    fi.launch(
        partial(_gen, a.query, k, v, a.workspace_buffer, lists, out, lse, (a.bmm1_scale, a.bmm2_scale), a.sinks, call)
    )
    return (out, lse) if a.return_lse else out


@fi.entry("prefill.trtllm_ragged_attention_deepseek")
def trtllm_ragged_attention_deepseek(a: Any) -> Any:
    out = a.out
    lse = a.lse
    need(fi.world.capability in ((10, 0), (10, 3)), "trtllm-gen is for compute capability 10.0 and 10.3", RuntimeError)
    need(a.backend == "trtllm-gen", f"backend {a.backend!r} is not emulated")
    dims = (a.key.shape[2], a.value.shape[2])
    need(dims in GEN_RAGGED and a.query.shape[2] == dims[0], f"Unsupported head dimensions: {dims}", AssertionError)
    if out is None:
        out_dtype = torch.bfloat16 if a.query.dtype in fi.FP8 else a.query.dtype
        out = torch.empty(*a.query.shape[:2], dims[1], dtype=out_dtype)
    need(tuple(out.shape) == (*a.query.shape[:2], dims[1]), f"out {tuple(out.shape)}", ValueError)
    need(out.dtype not in fi.FP8, "FP8 output is not supported for trtllm_ragged_attention_deepseek", ValueError)
    need(a.query.dtype == a.key.dtype == a.value.dtype, f"{a.query.dtype}, {a.key.dtype}, {a.value.dtype}")
    need(a.query.is_contiguous() and out.is_contiguous(), "query and out are read by their shapes alone")
    need(a.key.stride(-1) == a.value.stride(-1) == 1, "the last dimension must be contiguous")
    lse = _gen_lse(a.query, lse, a.return_lse)
    for bounds, name in ((a.cum_seq_lens_q, "cum_seq_lens_q"), (a.cum_seq_lens_kv, "cum_seq_lens_kv")):
        fi.check_list(bounds, a.batch_size + 1, name)
    fi.check_list(a.seq_lens, a.batch_size, "seq_lens")
    scale, factor = (_number(each) for each in (a.bmm1_scale, a.bmm2_scale))

    def attend() -> None:
        rows, keys = (
            fi.check_indptr(a.cum_seq_lens_q, "cum_seq_lens_q"),
            fi.check_indptr(a.cum_seq_lens_kv, "cum_seq_lens_kv"),
        )
        if lse is not None:
            fi.scribble(a.workspace_buffer)
        for request in range(a.batch_size):
            mine, theirs = slice(*rows[request : request + 2]), slice(*keys[request : request + 2])
            length = theirs.stop - theirs.start
            need(
                int(a.seq_lens[request]) == length,
                f"request {request}: seq_lens {int(a.seq_lens[request])}, {length} keys",
            )
            need(
                mine.stop - mine.start <= a.max_q_len and length <= a.max_kv_len,
                f"request {request} is longer than the bounds",
            )
            found, found_lse = fi.attend(
                a.query[mine],
                a.key[theirs],
                a.value[theirs],
                scale,
                causal=a.is_causal,
                window_left=a.window_left,
                sinks=a.attention_sinks,
            )
            out[mine] = (found * factor).to(out.dtype)
            if lse is not None:
                lse[mine] = found_lse.float()

    fi.launch(attend)
    return (out, lse) if a.return_lse else out


@fi.entry("decode.xqa_batch_decode_with_kv_cache")
def xqa_batch_decode_with_kv_cache(a: Any) -> Any:
    need(fi.world.capability[0] in (9, 12), "XQA is used on compute capability 9.x and 12.x")
    k, v = _halves(a.kv_cache)
    k, v = (half.transpose(-3, -2) if a.kv_layout == "HND" else half for half in (k, v))
    size, kv_heads, head_size = k.shape[-3:]
    heads, requests = a.query.shape[1], len(a.query) // a.q_len_per_req
    need(a.query.dtype in fi.HALVES, f"Invalid dtype: {a.query.dtype} for XQA", ValueError)
    need(k.dtype in (a.query.dtype, fi.E4M3), f"XQA with a cache of {k.dtype}")
    need(size in XQA_PAGES, f"Invalid page_size: {size}, only {XQA_PAGES} are supported", ValueError)
    fits = head_size % 16 == 0 and 16 <= head_size <= 256 and a.query.shape[-1] == head_size
    need(fits, f"Invalid head_dim: {head_size}, must be divisible by 16 and in range [16, 256]", ValueError)
    need(heads % kv_heads == 0 and heads // kv_heads <= XQA_GROUP, f"{heads} query heads, {kv_heads} KV heads")
    need(len(a.query) == requests * a.q_len_per_req, f"{len(a.query)} tokens of {a.q_len_per_req} per request")
    fp8_out = a.out.dtype == fi.E4M3
    need(not fp8_out or k.dtype == fi.E4M3, "KV cache must be fp8 when output is fp8", AssertionError)
    need(fp8_out or a.out.dtype == a.query.dtype, "Output and query must have the same dtype", AssertionError)
    need(a.query.is_contiguous() and a.out.is_contiguous(), "query and out are read as contiguous")
    need(tuple(a.out.shape) == tuple(a.query.shape), f"out {tuple(a.out.shape)}")
    fi.check_cache(k, v, every_stride=True)
    _check_tables(a.block_tables, a.seq_lens, requests)
    if a.sinks is not None:
        need(a.sinks.dtype == torch.float32 and a.sinks.is_contiguous(), f"sinks are {a.sinks.dtype}: read as float32")
        need(tuple(a.sinks.shape) == (heads,), f"sinks {tuple(a.sinks.shape)}")
    if a.q_len_per_req > 1:
        need(a.mask is not None, "Mask is required for speculative decoding", AssertionError)
        words = (a.q_len_per_req + 31) // 32 * 2
        need(a.mask.dtype == torch.uint16 and a.mask.is_contiguous(), f"mask is {a.mask.dtype}: read as packed uint16")
        need(tuple(a.mask.shape) == (requests, a.q_len_per_req, words), f"mask {tuple(a.mask.shape)}")
        need(a.window_left < 0, "before 0.6.16 all drafts get the last one's window")
    else:
        need(a.mask is None or a.mask.numel() == 0, "one token per request has no mask")
    # One scale serves K and V; a cache of 16 bits has none (mha.cu: isKVCacheQuantized).
    kv_scale = _number(a.bmm2_scale) * _number(a.o_scale)
    quantized = k.dtype == fi.E4M3
    scale = _number(a.bmm1_scale) / kv_scale * (kv_scale if quantized else 1.0)
    factor = (kv_scale if quantized else 1.0) / _number(a.o_scale)
    call = {"scale": scale, "factor": factor, "window": a.window_left, "each": a.q_len_per_req, "sinks": a.sinks}
    call["full_mask_fails"] = quantized and fi.world.capability[0] == 9
    call["reads_tails"] = call["full_mask_fails"]  # the kernel for FP8 on 9.x loads whole pages
    fi.launch(
        partial(_xqa, fi.moment(a.query), k, v, a.workspace_buffer, (a.block_tables, a.seq_lens, a.mask), a.out, call)
    )
    return a.out


def _xqa(
    q: Tensor, k: Tensor, v: Tensor, workspace: Tensor, lists: Sequence[Any], out: Tensor, call: dict[str, Any]
) -> None:
    table, lens, mask = lists
    fi.check_semaphores(workspace)
    fi.scribble(workspace, fi.SEMAPHORES)
    each = call["each"]
    for request, length in enumerate(lens.tolist()):
        rows = slice(request * each, (request + 1) * each)
        need(
            length <= table.shape[1] * k.shape[1],
            f"request {request}: {length} tokens, the table holds {table.shape[1]} pages",
        )
        if length == 0:
            out[rows] = 0
            continue
        pages = table[request, : -(-length // k.shape[1])].tolist()
        visible = None
        if each > 1:
            drafts = _unpacked(mask[request], each)
            need(length >= each, f"request {request}: {each} drafts, {length} tokens")
            causal = torch.ones(each, each, dtype=torch.bool).tril()
            need(
                torch.equal(drafts, causal) or not call["full_mask_fails"],
                "before 0.6.16 an FP8 cache is masked causally",
            )
            visible = torch.cat([torch.ones(each, length - each, dtype=torch.bool), drafts], dim=1)
        keys, values = (fi.gather(half, pages, length, "NHD") for half in (k, v))
        found, _ = fi.attend(
            q[rows],
            keys,
            values,
            call["scale"],
            causal=True,
            window_left=call["window"],
            sinks=call["sinks"],
            visible=visible,
        )
        if call["reads_tails"]:
            found = found + fi.nan_behind(v, pages, length, "NHD")
        out[rows] = _stored(found * call["factor"], out.dtype)


def _gen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    workspace: Tensor,
    lists: Sequence[Tensor],
    out: Any,
    lse: Tensor | None,
    scales: Sequence[Any],
    sinks: Tensor | None,
    call: dict[str, Any],
) -> None:
    bounds, table, lens = lists
    rows = fi.check_indptr(bounds, "cum_seq_lens_q")
    heads, requests = q.shape[1], len(rows) - 1
    need(rows[-1] <= len(q), f"{len(q)} queries, cum_seq_lens_q ends at {rows[-1]}")
    statistics = 0 if lse is None else 8 * heads * requests * (-(-call["limits"][0] // 256) * 256) + GUARD
    start = fi.SEMAPHORES if call["decode"] else 0
    size = workspace.numel() * workspace.element_size()
    need(start + statistics <= size, f"workspace of {size} bytes: {start + statistics} are needed", RuntimeError)
    if call["decode"]:
        need(requests * heads <= fi.SEMAPHORES // 4, f"{requests} requests of {heads} heads: there are 2**21 counters")
        fi.check_semaphores(workspace)
    if statistics or call["decode"]:
        fi.scribble(workspace, start)  # prefill's statistics lie where decode's counters are
    lengths, scale, factor = lens.tolist(), *(_number(each) for each in scales)
    if "keys" in call:
        need(
            fi.check_indptr(call["keys"], "cum_seq_lens_kv")[-1] == sum(lengths),
            "cum_seq_lens_kv is not the sum of seq_lens",
        )
    for request, length in enumerate(lengths):
        mine = slice(*rows[request : request + 2])
        count = mine.stop - mine.start
        need(count <= call["limits"][0], f"request {request}: {count} queries, at most {call['limits'][0]}")
        need(length <= call["limits"][1], f"request {request}: {length} tokens, at most {call['limits'][1]}")
        need(
            length <= table.shape[1] * k.shape[2],
            f"request {request}: {length} tokens, the table has {table.shape[1]} pages",
        )
        pages = table[request, : -(-length // k.shape[2])].tolist()
        keys, values = (fi.gather(half, pages, length, "HND") for half in (k, v))
        found, found_lse = fi.attend(
            q[mine], keys, values, scale, causal=call["causal"], window_left=call["window"], sinks=sinks
        )
        found = found + fi.nan_behind(v, pages, length, "HND")
        out[mine] = _stored(found * factor, out.dtype)
        if lse is not None:
            lse[mine] = found_lse.float()


def _halves(cache: Any) -> tuple[Tensor, Tensor]:
    if isinstance(cache, tuple):
        return cache
    if cache.shape[1] == 1:
        return cache, cache
    need(cache.shape[1] == 2, "the second dimension must be 1 or 2", AssertionError)
    k, v = cache.unbind(dim=1)
    return k, v


def _gen_output(query: Tensor, out: Any, out_dtype: Any, o_sf_scale: Any, o_sf_vec_size: Any) -> Any:
    need(isinstance(out_dtype, torch.dtype) or out_dtype is None, f"{out_dtype} is not emulated", ValueError)
    need(o_sf_scale is None and o_sf_vec_size is None, "o_sf_scale is for nvfp4 output", AssertionError)
    out_dtype = out_dtype or (out.dtype if out is not None else query.dtype)
    out = torch.empty_like(query, dtype=out_dtype) if out is None else out
    need(out_dtype in (query.dtype, *fi.HALVES), f"Unsupported out_dtype: {out_dtype}", ValueError)
    fi.check_tensor(out, query.shape, out_dtype, "out")
    need(out.is_contiguous(), f"out has strides {out.stride()}")
    return out


def _gen_lse(query: Tensor, lse: Any, return_lse: bool) -> Any:
    if lse is None and return_lse:
        lse = torch.empty(query.shape[:2], dtype=torch.float32)
    if lse is not None:
        fi.check_tensor(lse, query.shape[:2], torch.float32, "lse")
    return lse


def _check_gen(
    query: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, sinks: Any, scales: Sequence[Any], requests: int
) -> None:
    """Check what a trtllm-gen kernel exists for; K and V in HND order."""
    need(fi.world.capability in ((10, 0), (10, 3)), "trtllm-gen is for compute capability 10.0 and 10.3", RuntimeError)
    fi.check_cache(k, v, every_stride=True)
    heads, kv_heads, size, page = query.shape[1], k.shape[1], k.shape[3], k.shape[2]
    need(heads % kv_heads == 0, f"num_qo_heads must be a multiple of num_kv_heads: {heads}, {kv_heads}", RuntimeError)
    need(
        query.shape[-1] == size, f"head_dim_k and head_dim_q must be the same: {size}, {query.shape[-1]}", RuntimeError
    )
    need(page in GEN_PAGES, f"pages of {page}")
    need(size in (64, 128, 256, 512), f"Missing TRTLLM-GEN kernel: head size {size}", RuntimeError)
    need(
        query.dtype == k.dtype and k.dtype in (*fi.HALVES, fi.E4M3),
        f"query {query.dtype}, cache {k.dtype}",
        RuntimeError,
    )
    need(query.stride(-1) == 1, f"query has strides {query.stride()}")
    need(
        k.storage_offset() * k.element_size() % 16 == 0 and k.stride(2) * k.element_size() % 16 == 0,
        "TMA wants 16 bytes",
    )
    check_gen_sinks(sinks, heads)
    for scale in scales:
        tensor = torch.is_tensor(scale)
        need(not tensor or (scale.dtype == torch.float32 and scale.numel() == 1), "scales are float32", AssertionError)
    _check_tables(table, lens, requests)


def check_gen_sinks(sinks: Any, heads: int) -> None:
    need(not isinstance(sinks, (list, tuple)), "attention_sinks is one tensor to the launcher", TypeError)
    if sinks is not None:
        need(sinks.dtype == torch.float32, "attention_sinks must be a float tensor", RuntimeError)
        need(tuple(sinks.shape) == (heads,) and sinks.is_contiguous(), f"sinks {tuple(sinks.shape)} of {heads} heads")


def _check_tables(table: Tensor, lens: Tensor, requests: int) -> None:
    fi.check_list(lens, requests, "seq_lens")
    need(table.ndim == 2, f"block_tables must be 2D for shared paged KV layout, got ndim={table.ndim}", ValueError)
    need(table.dtype == torch.int32, f"block_tables is {table.dtype}: read as int32")
    need(
        table.is_contiguous(), f"block_tables has strides {table.stride()}: its rows are read as {table.shape[1]} wide"
    )
    need(len(table) == requests, f"block_tables has {len(table)} rows, not {requests}")


def _number(scale: Any) -> float:
    """Read a scale: a number, or float32 on the device."""
    if torch.is_tensor(scale):
        need(scale.dtype == torch.float32 and scale.numel() == 1, f"scale {scale.dtype} {tuple(scale.shape)}")
    return float(scale)


def _unpacked(words: Tensor, drafts: int) -> Tensor:
    """Return bool ``(drafts, drafts)`` of a packed mask ``(drafts, words)`` of 16 bits, least significant first."""
    bits = torch.arange(16)
    return (words.int()[..., None] >> bits & 1).bool().flatten(1)[:, :drafts]


def _stored(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return numbers.clamp(-limit, limit).to(dtype)
