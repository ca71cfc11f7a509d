"""FlashInfer's paged wrappers without a GPU: prefill and decode by fa2 and fa3, also with sinks.

Rules by source: the Python of each wrapper (prefill.py, decode.py), launches in csrc/batch_prefill.cu (fa2) and
batch_prefill_sm90.cu (fa3), all 0.6.14.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from flashinfer_emulated import need
from flashinfer_emulated.wrappers import Schedule, Wrapper, dtype_of, dtypes_of, fp8_scales


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    @fi.entry("prefill.BatchPrefillWithPagedKVCacheWrapper.__init__")
    def __init__(self, a: Any) -> None:
        self._begin(a.float_workspace_buffer, a.kv_layout, a.backend, a.use_cuda_graph)
        self._variant = None if a.jit_args is None else SinkVariant(a.jit_args, a.jit_kwargs or {}, a.backend)
        if a.use_cuda_graph:
            buffers = (a.qo_indptr_buf, a.paged_kv_indptr_buf, a.paged_kv_indices_buf, a.paged_kv_last_page_len_buf)
            for buffer in buffers:
                need(torch.is_tensor(buffer), "the buffers should be torch.Tensors in CUDA graph mode", ValueError)
            fi.on_device(*buffers)
            self._fixed_batch_size = len(a.qo_indptr_buf) - 1
            need(len(a.paged_kv_indptr_buf) == self._fixed_batch_size + 1, "length of paged_kv_indptr_buf", ValueError)
            need(
                len(a.paged_kv_last_page_len_buf) == self._fixed_batch_size,
                "length of paged_kv_last_page_len_buf",
                ValueError,
            )
        self._qo_indptr_buf, self._paged_kv_indptr_buf = a.qo_indptr_buf, a.paged_kv_indptr_buf
        self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = (
            a.paged_kv_indices_buf,
            a.paged_kv_last_page_len_buf,
        )
        self._max_total_num_rows: int | None = None

    @fi.entry("prefill.BatchPrefillWithPagedKVCacheWrapper.plan")
    def plan(self, a: Any) -> None:
        name = "BatchPrefillWithPagedKVCacheWrapper.plan"
        need(a.custom_mask is None and a.packed_custom_mask is None, "custom masks are not emulated")
        need(
            a.pos_encoding_mode == "NONE" and not a.use_fp16_qk_reduction,
            "positions and fp16 reductions are not emulated",
        )
        need(a.max_sequence_kv is None, "without the host's KV lengths plan fails in fa2 and fa3", UnboundLocalError)
        self._dtypes = dtypes_of(a.q_data_type, a.kv_data_type, a.o_data_type)
        self._soft_cap = a.logits_soft_cap or 0.0
        batch = len(a.qo_indptr) - 1
        need(batch > 0, "max() arg is an empty sequence", ValueError)
        fi.check_list(a.qo_indptr, batch + 1, "qo_indptr")
        fi.check_list(a.paged_kv_indptr, batch + 1, "paged_kv_indptr")
        fi.check_list(a.paged_kv_last_page_len, batch, "paged_kv_last_page_len")
        fi.check_list(a.paged_kv_indices, len(a.paged_kv_indices), "paged_kv_indices")
        queries = fi.check_indptr(fi.to_host(a.qo_indptr, f"{name}.qo_indptr"), "qo_indptr")
        pages = fi.check_indptr(fi.to_host(a.paged_kv_indptr, f"{name}.paged_kv_indptr"), "paged_kv_indptr")
        last = fi.to_host(a.paged_kv_last_page_len, f"{name}.paged_kv_last_page_len").tolist()
        need(
            pages[-1] <= len(a.paged_kv_indices),
            f"{len(a.paged_kv_indices)} page indices, paged_kv_indptr ends at {pages[-1]}",
        )
        lens = _kv_lens(pages, last, a.page_size)
        if a.seq_lens is not None:
            given = fi.to_host(a.seq_lens, f"{name}.seq_lens").flatten().tolist()
            held = [length if end > first else 0 for length, first, end in zip(lens, pages, pages[1:], strict=False)]
            need(given == held, f"seq_lens {given}, but pages and last page lengths give {held}")
            lens = given
        if self._use_cuda_graph:
            most = self._max_total_num_rows = self._max_total_num_rows or queries[-1]
            need(queries[-1] <= most, f"The total number of rows {queries[-1]} cannot exceed {most}", ValueError)
            need(batch == self._fixed_batch_size, f"batch size {batch}, fixed {self._fixed_batch_size}", ValueError)
            need(
                len(a.paged_kv_indices) <= len(self._paged_kv_indices_buf),
                "paged_kv_indices exceeds the allocated buffer size",
                ValueError,
            )
            fi.copy_late(self._qo_indptr_buf, a.qo_indptr)
            fi.copy_late(self._paged_kv_indptr_buf, a.paged_kv_indptr)
            fi.copy_late(self._paged_kv_last_page_len_buf, a.paged_kv_last_page_len)
            self._paged_kv_indices_buf[: len(a.paged_kv_indices)].copy_(a.paged_kv_indices)
        else:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = fi.to_device(a.qo_indptr), fi.to_device(a.paged_kv_indptr)
            self._paged_kv_indices_buf = a.paged_kv_indices
            self._paged_kv_last_page_len_buf = fi.to_device(a.paged_kv_last_page_len)
        self._choose(*self._dtypes[:2])
        self._dims = (a.head_dim_qk, a.head_dim_vo or a.head_dim_qk)
        if self._variant is not None:
            self._variant.check(self._backend, self._dtypes, self._dims, a.window_left)
        self._check_module(*self._dtypes, self._dims, self._soft_cap)
        fa3_fp8 = self._backend == "fa3" and self._dtypes[0] in fi.FP8
        need(not (fa3_fp8 and a.window_left >= 0), "FP8 fa3 with a window waits forever before 0.6.15")
        self._sm_scale = a.sm_scale
        lists = tuple(tuple(each) for each in (queries, pages, lens))
        schedule = Schedule(*lists, a.num_qo_heads, a.num_kv_heads, a.page_size, a.causal, a.window_left)
        self._send(schedule, self._dims[1], not a.disable_split_kv, a.fixed_split_size)

    @fi.entry("prefill.BatchPrefillWithPagedKVCacheWrapper.run")
    def run(self, a: Any) -> Any:
        out = a.out
        lse = a.lse
        need(
            fi.world.graph is None or self._use_cuda_graph,
            "a captured wrapper without use_cuda_graph: the next plan moves its lists",
        )
        schedule = self._schedule
        k, v = fi.unpack(a.paged_kv_cache, self._kv_layout)
        self._check_query(a.q, k.dtype)
        rows = schedule.qo_indptr[-1]
        need(a.q.shape[0] == rows, f"q.shape[0] ({a.q.shape[0]}) does not match qo_indptr[-1] ({rows})", ValueError)
        need(a.window_left is None or a.window_left == schedule.window_left, "window_left", AssertionError)
        need(a.sinks is None, "fa2 and fa3 ignore sinks here: they take them from a variant's arguments")
        fi.check_cache(k, v, every_stride=self._backend == "fa2")
        size, kv_heads = k.shape[1 if self._kv_layout == "NHD" else 2], k.shape[2 if self._kv_layout == "NHD" else 1]
        need(size == schedule.page_size, f"pages of {size}, planned {schedule.page_size}")
        need(kv_heads == schedule.kv_heads, f"{kv_heads} KV heads, planned {schedule.kv_heads}")
        need(
            a.q.shape[-1] == k.shape[-1] == self._dims[0],
            f"head sizes {a.q.shape[-1]}, {k.shape[-1]}, planned {self._dims[0]}",
        )
        scale = self._scales(self._sm_scale, a.q.shape[-1], a.q_scale, a.k_scale)
        out, lse = self._results(a.q, v.shape[-1], out, lse, a.return_lse)
        if self._variant is not None:
            call = self._variant.arguments(a.args, schedule.heads)
        else:
            call = {"scale": scale, **fp8_scales(a.q, a.args, schedule)}
        lists = (
            self._qo_indptr_buf,
            self._paged_kv_indptr_buf,
            fi.moment(self._paged_kv_indices_buf),
            self._paged_kv_last_page_len_buf,
        )
        fi.launch(partial(self._attend, schedule, fi.moment(a.q), (k, v), lists, out, lse, a.v_scale, call))
        return (out, lse) if a.return_lse else out

    def _attend(
        self,
        planned: Any,
        q: Tensor,
        halves: tuple[Tensor, Tensor],
        lists: Sequence[Tensor],
        out: Tensor,
        lse: Tensor | None,
        v_scale: Any,
        call: dict[str, Any],
    ) -> None:
        schedule = self._scheduled(planned) if not self._use_cuda_graph else self._replayed(planned)
        queries, pages, indices, last = (each.tolist() for each in lists)
        need(queries == list(schedule.qo_indptr), "the lists on the device are not those of the plan")
        need(pages == list(schedule.kv_indptr), "the lists on the device are not those of the plan")
        lens = list(schedule.kv_lens)
        if self._backend == "fa2":  # its kernels read the lists on the device, fa3's the plan's
            lens = [
                0 if first == end else (end - first - 1) * schedule.page_size + part
                for first, end, part in zip(pages, pages[1:], last, strict=False)
            ]
        for request, length in enumerate(lens):
            first, end = schedule.kv_indptr[request : request + 2]
            need(
                length <= (end - first) * schedule.page_size,
                f"request {request}: {length} tokens in {end - first} pages",
            )
            need(
                length > (end - first - 1) * schedule.page_size or end == first,
                f"request {request}: last page length {last[request]}",
            )
        for request, length in enumerate(lens):
            rows = slice(queries[request], queries[request + 1])
            own = indices[pages[request] : pages[request + 1]]
            unseen = schedule.causal and 0 < length < rows.stop - rows.start
            need(
                self._backend == "fa2" or not unseen,
                f"request {request}: fa3 gives queries that see none of {length} keys the mean of what it masked",
            )
            k, v = (fi.gather(half, own, length, self._kv_layout) for half in halves)
            self._attend_request(schedule, q, (k, v), rows, out, lse, call)
        _finish_output(out, v_scale)

    def _replayed(self, planned: Any) -> Any:
        """Return what a captured kernel finds: later plans may change lengths and pages, nothing that was baked in."""
        found = fi.world.memory.get(self._int_workspace_buffer.data_ptr())
        need(found is not None, "plan has not run", AssertionError)
        assert found is not None
        fixed = ("heads", "kv_heads", "page_size", "causal", "window_left")
        for name in fixed:
            need(getattr(found, name) == getattr(planned, name), f"{name} is baked into the graph")
        return self._scheduled(found)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    @fi.entry("decode.BatchDecodeWithPagedKVCacheWrapper.__init__")
    def __init__(self, a: Any) -> None:
        need(a.jit_args is None, "variants are emulated for prefill")
        need(a.use_tensor_cores, "decode without tensor cores is not emulated")
        self._begin(a.float_workspace_buffer, a.kv_layout, a.backend, a.use_cuda_graph)
        buffers = (a.paged_kv_indptr_buffer, a.paged_kv_indices_buffer, a.paged_kv_last_page_len_buffer)
        arange: dict[str, Any] = {}
        if a.use_cuda_graph:
            for buffer in buffers:
                need(torch.is_tensor(buffer), "the buffers should be torch.Tensors in cudagraph mode", ValueError)
            batch = len(a.paged_kv_last_page_len_buffer)
            need(
                len(a.paged_kv_indptr_buffer) == batch + 1,
                "The size of paged_kv_indptr_buffer should be batch_size + 1",
                ValueError,
            )
            arange["qo_indptr_buf"] = torch.arange(batch + 1, dtype=torch.int32)
        names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(
            a.float_workspace_buffer,
            a.kv_layout,
            a.use_cuda_graph,
            backend=a.backend,
            **arange,
            **dict(zip(names, buffers, strict=True)),
        )
        fi.world.calls.pop()

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        super().reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._prefill.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    @fi.entry("decode.BatchDecodeWithPagedKVCacheWrapper.plan")
    def plan(self, a: Any) -> None:
        need(a.q_len_per_req == 1, "fa2 decodes one token per request, whatever q_len_per_req says")
        given = a.kv_data_type or a.data_type or a.q_data_type
        if self._prefill._backend == "auto" and not {dtype_of(a.q_data_type), dtype_of(given)} & set(fi.FP8):
            self._prefill._backend = "fa2"
        seen, inner = len(fi.world.syncs), self._prefill
        inner._pin_memory_int_workspace_buffer = self._pin_memory_int_workspace_buffer
        inner._int_workspace_buffer = self._int_workspace_buffer
        same = ("pos_encoding_mode", "window_left", "logits_soft_cap", "q_data_type", "o_data_type", "sm_scale")
        same += ("seq_lens", "fixed_split_size", "disable_split_kv")
        lists = (torch.arange(len(a.last_page_len) + 1, dtype=torch.int32), a.indptr, a.indices, a.last_page_len)
        sizes = (a.num_qo_heads, a.num_kv_heads, a.head_dim, a.page_size)
        inner.plan(*lists, *sizes, causal=False, kv_data_type=given, **{name: getattr(a, name) for name in same})
        fi.world.calls.pop()
        fi.world.syncs[seen:] = [each.replace("BatchPrefill", "BatchDecode") for each in fi.world.syncs[seen:]]

    @fi.entry("decode.BatchDecodeWithPagedKVCacheWrapper.run")
    def run(self, a: Any) -> Any:
        batch = len(self._prefill._paged_kv_last_page_len_buf)
        need(len(a.q) == batch, f"{len(a.q)} queries for {batch} requests: fa2 decodes one token per request")
        same = ("q_scale", "k_scale", "v_scale", "out", "lse", "return_lse", "window_left", "sinks", "kv_cache_sf")
        result = self._prefill.run(a.q, a.paged_kv_cache, *a.args, **{name: getattr(a, name) for name in same})
        fi.world.calls.pop()
        return result


class SinkVariant:
    """The kernel variant with attention sinks, as ``jit_args`` of the prefill wrapper ask for it."""

    def __init__(self, jit_args: Sequence[Any], jit_kwargs: dict[str, Any], backend: str) -> None:
        names = ("uri", "q", "kv", "o", "index", "head_dim_qk", "head_dim_vo", "tensors", "tensor_dtypes", "scalars",
                 "scalar_dtypes", "variant", "declaration")  # fmt: skip
        self.made = dict(zip(names, jit_args, strict=True))
        self.window = jit_kwargs.get("use_sliding_window", False)
        need(backend in ("fa2", "fa3"), f"a variant is compiled for {backend!r}", AssertionError)
        wanted = (["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", fi.SINK_DECLARATIONS[backend])
        kept = ("tensors", "tensor_dtypes", "scalars", "scalar_dtypes", "variant", "declaration")
        need(tuple(self.made[name] for name in kept) == wanted, "the variant does not compile as asked for")
        need(self.made["index"] == torch.int32, "index lists are int32")
        key = (*jit_args[1:7], self.window, backend)
        known = _VARIANTS.setdefault(self.made["uri"], key)
        need(known == key, f"module {self.made['uri']} was compiled for {known}, not {key}")

    def check(self, backend: str, dtypes: tuple[Any, ...], dims: tuple[int, int], window_left: int) -> None:
        made = self.made
        need((made["q"], made["kv"], made["o"]) == dtypes, f"the variant was compiled for other dtypes than {dtypes}")
        need(
            (made["head_dim_qk"], made["head_dim_vo"]) == dims, f"the variant was compiled for other sizes than {dims}"
        )
        need(self.window == (window_left >= 0), "the variant was compiled with another sort of window")

    def arguments(self, args: Sequence[Any], heads: int) -> dict[str, Any]:
        """Read what ``run`` was given behind the cache: the sinks and the softmax scale."""
        need(len(args) == 2, f"the variant takes sink and sm_scale, not {len(args)} arguments", TypeError)
        sinks, scale = args
        need(sinks.dtype == torch.float32 and sinks.is_contiguous(), f"sinks are {sinks.dtype}: read as float32")
        need(tuple(sinks.shape) == (heads,), f"sinks {tuple(sinks.shape)}")
        need(isinstance(scale, float), "sm_scale is a number", TypeError)
        return {"sinks": sinks, "scale": scale}


_VARIANTS: dict[str, tuple[Any, ...]] = {}
"""Compiled modules by name: a name stands for the first thing it was compiled for."""


def _kv_lens(pages: list[int], last: list[int], page_size: int) -> list[int]:
    """``get_seq_lens``: a request without pages has its last page length as length, which fa3 believes."""
    lens = []
    for request, part in enumerate(last):
        count = pages[request + 1] - pages[request]
        fits = (1 if count else 0) <= part <= page_size
        need(fits, f"request {request}: last page length {part} with {count} pages of {page_size}")
        lens.append(max(count - 1, 0) * page_size + part)
    return lens


def _finish_output(out: Tensor, v_scale: Any) -> None:
    """``out *= v_scale`` behind the kernel."""
    if v_scale is not None and not (isinstance(v_scale, float) and v_scale == 1.0):
        out.mul_(v_scale)
