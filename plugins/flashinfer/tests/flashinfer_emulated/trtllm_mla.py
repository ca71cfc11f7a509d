"""FlashInfer's ``trtllm_batch_decode_with_kv_cache_mla`` without a GPU: trtllm-gen, CuTe DSL, XQA, sparse on 12.x.

Rules by source: mla/_core.py, mla/_sparse_mla_sm120.py, cute_dsl/attention (mla_dispatch.py, monolithic,
wrappers/batch_mla.py), csrc/trtllm_fmha_kernel_launcher.cu, csrc/fmhaReduction.cu and csrc/xqa/mla_sm120.cu, all
0.6.14. Tensors reach the kernels as bare pointers, see ``trtllm``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from attn_select.testing import attention_reference, unpack_fp8_ds_mla
from flashinfer_emulated import need
from flashinfer_emulated.mla06 import DEEPSEEK, SMALL
from flashinfer_emulated.trtllm import GUARD, check_gen_sinks

HEAD_TILES = (8, 16, 32, 64, 128)
MAX_BATCH = 8192


@fi.entry("mla.trtllm_batch_decode_with_kv_cache_mla")
def trtllm_batch_decode_with_kv_cache_mla(a: Any) -> Any:
    out = a.out
    lse = a.lse
    need(a.uses_shared_paged_kv_idx, "not emulated")
    skips = a.skip_softmax_threshold_scale_factor is not None  # nothing is left out here: the exact result is within it
    need(
        not skips or (a.backend == "trtllm-gen" and not a.sparse_mla_top_k), "skip_softmax is not supported", ValueError
    )
    need(a.max_q_len is None and a.cum_seq_lens_q is None, "not emulated")
    for scale in (a.bmm1_scale, a.bmm2_scale):
        tensor = torch.is_tensor(scale)
        need(not tensor or scale.dtype == torch.float32, "scale tensors must have dtype torch.float32", TypeError)
        need(not tensor or a.backend == "trtllm-gen", f"{a.backend} takes scales as floats", ValueError)
    dims = (a.kv_lora_rank, a.qk_rope_head_dim)
    call = {"scales": (a.bmm1_scale, a.bmm2_scale), "sinks": a.sinks, "rank": a.kv_lora_rank, "most": a.max_seq_len}
    if a.backend == "sparse":
        need(a.kv_scale_format in ("auto", "pow2_fp32"), "not emulated")
        _check_sparse_12(
            a.query, a.kv_cache, a.block_tables, a.seq_lens, a.sparse_mla_top_k, dims, a.bmm2_scale, a.sinks
        )
        found = _out_and_lse(a.query, out, lse, a.return_lse)
        fi.launch(partial(_sparse_12, fi.moment(a.query), a.kv_cache, a.block_tables, *found, call))
        return found if a.return_lse else found[0]
    need(a.query.dtype == a.kv_cache.dtype, f"query {a.query.dtype}, cache {a.kv_cache.dtype}", ValueError)
    dtypes = (torch.bfloat16, fi.E4M3, *([torch.float16] if a.backend == "cute-dsl" else []))
    need(a.query.dtype in dtypes, f"no kernel of {a.query.dtype}", ValueError)
    need(a.kv_cache.ndim == 3 and a.kv_cache.is_contiguous(), f"kv_cache {tuple(a.kv_cache.shape)}")
    need(a.query.shape[-1] == a.kv_cache.shape[-1] == sum(dims), f"Expected head dim {sum(dims)}", ValueError)
    need(a.query.stride(-1) == 1, f"query has strides {a.query.stride()}")
    if a.backend == "xqa":
        need(a.sinks is None, "XQA MLA does not support sinks", ValueError)
        need(a.query.size(1) == 1, "XQA MLA only supports q_len_per_request == 1", ValueError)
        need(not a.return_lse and lse is None, "XQA MLA does not support return_lse/lse output", NotImplementedError)
        return _xqa_mla(a.query, a.kv_cache, a.workspace_buffer, a.block_tables, a.seq_lens, out, dims, call)
    if a.backend == "cute-dsl":
        need(a.sparse_mla_top_k == 0, "cute-dsl does not support sparse_mla_top_k", ValueError)
        modular = a.sinks is not None if a.cute_dsl_impl == "auto" else a.cute_dsl_impl == "modular"
        return _cute_dsl_mla(
            a.query, a.kv_cache, a.workspace_buffer, (a.block_tables, a.seq_lens), out, lse, a.return_lse, dims,
            modular, call,
        )  # fmt: skip
    need(a.backend == "trtllm-gen", f"Backend {a.backend} not supported", ValueError)
    need(fi.world.capability in ((10, 0), (10, 3)), "trtllm-gen is for compute capability 10.0 and 10.3", RuntimeError)
    need(dims in (DEEPSEEK, SMALL), f"Unsupported MLA dimensions {dims}", ValueError)
    need(
        a.kv_cache.shape[1] in (32, 64),
        f"trtllm-gen requires block_size in (32, 64), got {a.kv_cache.shape[1]}",
        ValueError,
    )
    need(
        a.query.shape[-2] in HEAD_TILES, f"The numHeadsQ/numHeadsKv is not supported: {a.query.shape[-2]}", RuntimeError
    )
    check_gen_sinks(a.sinks, a.query.shape[-2])
    need(a.query.ndim == 4, f"Expected query.ndim == 4, got {a.query.ndim}", ValueError)
    call |= {"bounds": torch.arange(len(a.query) + 1) * a.query.shape[1], "longest": a.query.shape[1]}
    _check_mla_table(
        a.block_tables, a.seq_lens, len(call["bounds"]) - 1, a.kv_cache.shape[1], a.sparse_mla_top_k, a.query.shape[1]
    )
    out, lse = _out_and_lse(a.query, out, lse, a.return_lse, a.kv_lora_rank)
    run = partial(
        _gen_mla, fi.moment(a.query), a.kv_cache, a.workspace_buffer, (a.block_tables, a.seq_lens), out, lse, call
    )
    fi.launch(partial(run, a.sparse_mla_top_k))
    return (out, lse) if a.return_lse else out


def _check_mla_table(table: Tensor, lens: Tensor, batch: int, page: int, top_k: int, query_len: int) -> None:
    need(batch <= MAX_BATCH, f"{batch} requests: there are counters for {MAX_BATCH}")
    fi.check_list(lens, batch, "seq_lens")
    need(table.dtype == torch.int32, f"block_tables is {table.dtype}: read as int32")
    need(
        table.is_contiguous(), f"block_tables has strides {table.stride()}: its rows are read as {table.shape[-1]} wide"
    )
    if top_k:
        need(
            tuple(table.shape) == (batch, query_len, top_k), f"Expected page_table.shape, got {table.shape}", ValueError
        )
        return
    need(table.ndim == 2 and len(table) == batch, f"block_tables {tuple(table.shape)} of {batch} requests", ValueError)
    need(
        table.shape[1] % (128 // page) == 0,
        f"Expected block_num % (128 / block_size) == 0: {table.shape[1]}",
        ValueError,
    )


def _out_and_lse(query: Tensor, out: Any, lse: Any, return_lse: bool, rank: int = 512) -> tuple[Tensor, Tensor | None]:
    shape = (*query.shape[:-1], rank)
    out = torch.empty(shape, dtype=torch.bfloat16) if out is None else out
    fi.check_tensor(out, shape, torch.bfloat16, "out")
    need(out.is_contiguous(), f"out has strides {out.stride()}")
    if not return_lse:
        return out, None
    flat = (shape[0] * shape[1], shape[2])
    lse = torch.empty(flat) if lse is None else lse
    need(tuple(lse.shape) in (flat, shape[:3]), f"lse must have shape {flat} or {shape[:3]}", ValueError)
    need(lse.dtype == torch.float32, f"lse is {lse.dtype}", ValueError)
    return out, lse.view(flat)


def _gen_mla(
    q: Tensor, cache: Tensor, workspace: Tensor, lists: Any, out: Tensor, lse: Any, call: dict[str, Any], top_k: int
) -> None:
    table, lens = lists
    bounds, longest = call["bounds"].tolist(), call["longest"]
    heads, batch = q.shape[-2], len(bounds) - 1
    size = workspace.numel() * workspace.element_size()
    statistics = 0 if lse is None else 8 * heads * batch * -(-longest // 256) * 256 + GUARD
    need(fi.SEMAPHORES + statistics < size, f"workspace of {size} bytes for {statistics} of statistics", RuntimeError)
    fi.check_semaphores(workspace)
    fi.scribble(workspace, fi.SEMAPHORES)
    scale, factor = (float(each) for each in call["scales"])
    flat, flat_out, page = q.reshape(-1, *q.shape[-2:]), out.view(-1, *out.shape[-2:]), cache.shape[1]
    for request in range(batch):
        rows, length = slice(*bounds[request : request + 2]), int(lens[request])
        need(length <= call["most"], f"request {request}: {length} keys, max_seq_len {call['most']}")
        if length == 0:  # a sum of no weights is divided by
            flat_out[rows] = torch.nan
            if lse is not None:
                lse[rows] = torch.nan
            continue
        if top_k:
            chosen = _slots(cache, table[request, 0])
            keys, behind = chosen[:length], float((0.0 * chosen[length:].double()).sum())
        else:
            need(length <= table.shape[1] * page, f"request {request}: {length} keys, {table.shape[1]} pages")
            pages = table[request, : -(-length // page)].tolist()
            keys, behind = fi.gather(cache, pages, length, "NHD"), fi.nan_behind(cache, pages, length, "NHD")
        keys = keys.double()[:, None]
        # Every query is a CTA of its own, which sees as many keys as stand before it.
        found, its_lse = attention_reference(
            flat[rows].double(), keys, keys[..., : call["rank"]], scale=scale, causal=True, sinks=call["sinks"]
        )
        flat_out[rows] = (found * factor + behind).bfloat16()
        if lse is not None:
            lse[rows] = (its_lse * fi.LOG2E).float()


def _cute_dsl_mla(
    query: Tensor,
    cache: Tensor,
    workspace: Tensor,
    lists: tuple[Tensor, Tensor],
    out: Any,
    lse: Any,
    return_lse: bool,
    dims: Any,
    modular: bool,
    call: dict[str, Any],
) -> Any:
    need(fi.world.capability in ((10, 0), (10, 3)), "cute-dsl requires SM100/SM103", ValueError)
    need(dims == DEEPSEEK and cache.shape[1] in (2, 4, 8, 16, 32, 64, 128), f"no kernel of {dims}, {cache.shape[1]}")
    need(0 < query.shape[-2] <= 128, f"{query.shape[-2]} heads", ValueError)
    need(modular or call["sinks"] is None, "sinks is only supported by the modular implementation", ValueError)
    need(not modular or not (return_lse or lse is not None), "no lse on the modular path", NotImplementedError)
    table, lens = lists
    need(query.ndim == 4, f"Expected query.ndim == 4, got {query.ndim}", ValueError)
    bounds, longest = torch.arange(len(query) + 1) * query.shape[1], query.shape[1]
    _check_mla_table(table, lens, len(bounds) - 1, cache.shape[1], 0, query.shape[1])
    splits = -(-148 // max(1, len(bounds) - 1))
    wanted = (len(bounds) - 1) * 128 * -(-longest * query.shape[-2] // 128) * splits * 513 * 4 if splits > 2 else 0
    need(workspace.numel() * workspace.element_size() >= wanted, f"workspace_buffer too small: {wanted}", ValueError)
    shape = (*query.shape[:-1], 512)
    out = torch.empty(shape, dtype=torch.bfloat16) if out is None else out
    fi.check_tensor(out, shape, torch.bfloat16, "out")
    need(out.is_contiguous(), f"out must be contiguous, got strides {out.stride()}", ValueError)
    flat_lse = None
    if return_lse:
        flat = (query[..., 0, 0].numel(), query.shape[-2])
        lse = torch.empty(flat) if lse is None else lse
        need(tuple(lse.shape) in (flat, query.shape[:-1]), f"lse must have shape {flat}", ValueError)
        need(lse.dtype == torch.float32 and lse.is_contiguous(), f"lse is {lse.dtype}, {lse.stride()}", ValueError)
        flat_lse = lse.view(flat)
    query = fi.moment(query)

    def attend() -> None:
        scale, factor = (float(each) for each in call["scales"])
        rows, flat_out = query.reshape(-1, *query.shape[-2:]), out.view(-1, *out.shape[-2:])
        starts, page = bounds.tolist(), cache.shape[1]
        for request in range(len(starts) - 1):
            mine, length = slice(*starts[request : request + 2]), int(lens[request])
            need(mine.stop - mine.start <= longest, f"request {request}: more than {longest} queries")
            need(0 < length <= call["most"], f"request {request}: {length} keys, max_seq_len {call['most']}")
            pages = table[request, : -(-length // page)].tolist()
            keys = fi.gather(cache, pages, length, "NHD").double()[:, None]
            # The modular kernel has no mask among the tokens of one request.
            found, its_lse = attention_reference(
                rows[mine].double(), keys, keys[..., :512], scale=scale, causal=not modular, sinks=call["sinks"]
            )
            behind = fi.nan_behind(cache, pages, length, "NHD")
            flat_out[mine] = (found * factor + behind).bfloat16()
            if flat_lse is not None:
                flat_lse[mine] = its_lse.float()

    fi.launch(attend)
    return (out, lse) if return_lse else out


def _slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the tokens of physical slots."""
    flat = (cache.view(torch.uint8) if cache.dtype == fi.E4M3 else cache).flatten(0, 1)
    need(bool((slots >= 0).all()) and bool((slots < len(flat)).all()), f"slots {slots.tolist()}: out of bounds")
    chosen = flat[slots.long()]
    return chosen.view(cache.dtype) if cache.dtype == fi.E4M3 else chosen


def _xqa_mla(
    query: Tensor, cache: Tensor, workspace: Tensor, table: Tensor, lens: Tensor, out: Any, dims: Any, call: Any
) -> Tensor:
    need(fi.world.capability[0] == 12, "XQA MLA requires SM120a or SM121a", ValueError)
    need(dims == DEEPSEEK and cache.shape[1] in (16, 32, 64, 128), f"XQA MLA of {dims}, pages of {cache.shape[1]}")
    batch, _, heads, _ = query.shape
    need(heads == 128, f"XQA MLA only supports 128 query heads, got {heads}", ValueError)
    _check_mla_table(table, lens, batch, cache.shape[1], 0, 1)
    need(query.is_contiguous(), f"query has strides {query.stride()}")
    out = torch.empty(batch, heads, 512, dtype=torch.bfloat16) if out is None else out
    fi.check_tensor(out, (batch, heads, 512), torch.bfloat16, "out")
    need(out.is_contiguous(), f"out has strides {out.stride()}")

    query = fi.moment(query)

    def attend() -> None:
        fi.check_semaphores(workspace)
        fi.scribble(workspace, fi.SEMAPHORES)
        q_scale, kv_scale = (float(each) for each in call["scales"])
        for request, length in enumerate(lens.tolist()):
            need(length > 0, f"request {request} has no keys: no CTA of it ends")
            pages = table[request, : -(-length // cache.shape[1])].tolist()
            keys = fi.gather(cache, pages, length, "NHD").double()
            # The cache's scale is a factor of the scores as well as of the output (mla_sm120.cu, qkScaleLog2e).
            found, _ = attention_reference(
                query[request].double(), keys[:, None], keys[:, None, :512], scale=q_scale * kv_scale
            )
            out[request] = (found[0] * kv_scale + fi.nan_behind(cache, pages, length, "NHD")).bfloat16()

    fi.launch(attend)
    return out


def _check_sparse_12(
    query: Any, cache: Any, indices: Any, lens: Any, top_k: int, dims: Any, factor: Any, sinks: Any
) -> None:
    need(fi.world.capability[0] == 12, "SM120 sparse MLA requires SM120a or SM121a", ValueError)
    need(query.ndim == 4 and query.dtype == torch.bfloat16, f"query {query.dtype} {tuple(query.shape)}", ValueError)
    need(dims == DEEPSEEK and query.shape[-1] == 576, f"dims {dims}", ValueError)
    need(float(factor) == 1.0, "SM120 sparse MLA v32/GLM does not support bmm2_scale", ValueError)
    need(
        cache.dtype == torch.uint8 and cache.shape[1:] == (64, 656),
        f"cache {cache.dtype} {tuple(cache.shape)}",
        ValueError,
    )
    shape = (*query.shape[:2], top_k)
    need(top_k % 64 == 0, f"top-k {top_k}: whole tiles of 64", ValueError)  # since 0.7.0; 2048 alone before
    need(tuple(indices.shape) == shape and indices.dtype == torch.int32, f"indices {tuple(indices.shape)}", ValueError)
    need(indices.is_contiguous(), f"indices have strides {indices.stride()}")
    need(lens is None, "lengths of rows are not emulated")
    need(query.shape[2] in HEAD_TILES, f"no kernel of {query.shape[2]} heads", RuntimeError)
    check_gen_sinks(sinks, query.shape[2])


def _sparse_12(
    q: Tensor, cache: Tensor, indices: Tensor, out: Tensor, lse: Tensor | None, call: dict[str, Any]
) -> None:
    need(int(indices.min()) >= -1, "an index below -1 is read as an address")
    tokens = unpack_fp8_ds_mla(cache.reshape(-1, 656))
    flat, flat_out = q.reshape(-1, *q.shape[-2:]), out.view(-1, *out.shape[-2:])
    for token, chosen in enumerate(indices.reshape(len(flat), -1)):
        keys = tokens[chosen[chosen >= 0].long()].double()[:, None]
        found, its_lse = attention_reference(
            flat[token : token + 1].double(), keys, keys[..., :512], scale=float(call["scales"][0]), causal=False,
            sinks=call["sinks"],
        )  # fmt: skip
        flat_out[token] = found[0].bfloat16()
        if lse is not None:
            lse[token] = (its_lse[0] * fi.LOG2E).float()
