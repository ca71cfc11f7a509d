"""FlashInfer's ragged prefill without a GPU (``BatchPrefillWithRaggedKVCacheWrapper`` of prefill.py, 0.6.14)."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from flashinfer_emulated import need
from flashinfer_emulated.wrappers import Schedule, Wrapper, dtypes_of, fp8_scales


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    @fi.entry("prefill.BatchPrefillWithRaggedKVCacheWrapper.__init__")
    def __init__(self, a: Any) -> None:
        need(not a.use_cuda_graph and a.jit_args is None and a.kv_layout == "NHD", "emulated for eager NHD attention")
        self._begin(a.float_workspace_buffer, a.kv_layout, a.backend, False)

    @fi.entry("prefill.BatchPrefillWithRaggedKVCacheWrapper.plan")
    def plan(self, a: Any) -> None:
        name = "BatchPrefillWithRaggedKVCacheWrapper.plan"
        need(a.custom_mask is None and a.packed_custom_mask is None, "custom masks are not emulated")
        self._dtypes = dtypes_of(a.q_data_type, a.kv_data_type, a.o_data_type)
        batch = len(a.qo_indptr) - 1
        need(batch > 0, "plan divides by the batch size", ZeroDivisionError)
        need(len(a.kv_indptr) == batch + 1, "The kv_indptr length should be equal to mask_indptr length.", ValueError)
        for each, label in ((a.qo_indptr, "qo_indptr"), (a.kv_indptr, "kv_indptr")):
            fi.check_list(each, batch + 1, label)
        queries = fi.check_indptr(fi.to_host(a.qo_indptr, f"{name}.qo_indptr"), "qo_indptr")
        keys = fi.check_indptr(fi.to_host(a.kv_indptr, f"{name}.kv_indptr"), "kv_indptr")
        self._qo_indptr_buf, self._kv_indptr_buf = fi.to_device(a.qo_indptr), fi.to_device(a.kv_indptr)
        self._choose(*self._dtypes[:2])
        self._dims = (a.head_dim_qk, a.head_dim_vo or a.head_dim_qk)
        self._soft_cap, self._sm_scale = a.logits_soft_cap or 0.0, a.sm_scale
        self._check_module(*self._dtypes, self._dims, self._soft_cap)
        lens = tuple(end - first for first, end in pairwise(keys))
        schedule = Schedule(
            tuple(queries), tuple(keys), lens, a.num_qo_heads, a.num_kv_heads, 1, a.causal, a.window_left
        )
        self._send(schedule, self._dims[1], not a.disable_split_kv, a.fixed_split_size)

    @fi.entry("prefill.BatchPrefillWithRaggedKVCacheWrapper.run")
    def run(self, a: Any) -> Any:
        out = a.out
        lse = a.lse
        need(fi.world.graph is None, "emulated for eager attention")
        schedule = self._schedule
        self._check_query(a.q, a.k.dtype)
        need(a.v.dtype == a.k.dtype, f"K {a.k.dtype}, V {a.v.dtype}")
        need(a.q_scale is None and a.k_scale is None and a.v_scale is None, "fa2 and fa3 ignore these scales")
        rows, keys = schedule.qo_indptr[-1], schedule.kv_indptr[-1]
        need(a.q.shape[0] == rows, f"q.shape[0] ({a.q.shape[0]}) does not match qo_indptr[-1] ({rows})", ValueError)
        need(len(a.k) >= keys and len(a.v) >= keys, f"{len(a.k)} keys and {len(a.v)} values, kv_indptr ends at {keys}")
        need(a.k.shape[1] == a.v.shape[1] == schedule.kv_heads, f"KV heads {a.k.shape[1]}, {a.v.shape[1]}")
        need(
            (a.q.shape[-1], a.v.shape[-1]) == self._dims and a.k.shape[-1] == self._dims[0],
            "head sizes are not the plan's",
        )
        need(a.k.stride(-1) == a.v.stride(-1) == 1, "the last dimension must be contiguous")
        fp8 = fp8_scales(a.q, a.args, schedule)
        scale = self._scales(self._sm_scale, a.q.shape[-1])
        fi.check_mask(scale * float(fp8.get("q_scales", torch.ones(1)).min()))
        if out is None and a.q.dtype in fi.FP8:
            out = torch.empty(*a.q.shape[:-1], a.v.shape[-1], dtype=torch.bfloat16)
        out, lse = self._results(a.q, a.v.shape[-1], out, lse, a.return_lse)
        fi.launch(partial(self._attend, schedule, fi.moment(a.q), (a.k, a.v), out, lse, {"scale": scale, **fp8}))
        return (out, lse) if a.return_lse else out

    def _attend(
        self, planned: Any, q: Tensor, halves: Any, out: Tensor, lse: Tensor | None, call: dict[str, Any]
    ) -> None:
        schedule = self._scheduled(planned)
        need(self._qo_indptr_buf.tolist() == list(schedule.qo_indptr), "qo_indptr on the device is not the plan's")
        need(self._kv_indptr_buf.tolist() == list(schedule.kv_indptr), "kv_indptr on the device is not the plan's")
        for request in range(len(schedule.kv_lens)):
            rows, part = (slice(*each[request : request + 2]) for each in (schedule.qo_indptr, schedule.kv_indptr))
            self._attend_request(schedule, q, (halves[0][part], halves[1][part]), rows, out, lse, call)
