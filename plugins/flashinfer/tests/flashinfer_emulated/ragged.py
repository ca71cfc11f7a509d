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
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: Any = "NHD",
        use_cuda_graph: Any = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: Any = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        fi.called("BatchPrefillWithRaggedKVCacheWrapper.__init__", locals())
        need(not use_cuda_graph and jit_args is None and kv_layout == "NHD", "emulated for eager NHD attention")
        self._begin(float_workspace_buffer, kv_layout, backend, False)

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim_qk: Any,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: Any = False,
        pos_encoding_mode: Any = "NONE",
        use_fp16_qk_reduction: Any = False,
        window_left: Any = -1,
        logits_soft_cap: Any = None,
        sm_scale: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: Any = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: Any = 0,
        max_item_len_ptr: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: Any = False,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        v_indptr: Any = None,
        o_indptr: Any = None,
    ) -> None:
        name = "BatchPrefillWithRaggedKVCacheWrapper.plan"
        fi.called(name, locals())
        need(custom_mask is None and packed_custom_mask is None, "custom masks are not emulated")
        self._dtypes = dtypes_of(q_data_type, kv_data_type, o_data_type)
        batch = len(qo_indptr) - 1
        need(batch > 0, "plan divides by the batch size", ZeroDivisionError)
        need(len(kv_indptr) == batch + 1, "The kv_indptr length should be equal to mask_indptr length.", ValueError)
        for each, label in ((qo_indptr, "qo_indptr"), (kv_indptr, "kv_indptr")):
            fi.check_list(each, batch + 1, label)
        queries = fi.check_indptr(fi.to_host(qo_indptr, f"{name}.qo_indptr"), "qo_indptr")
        keys = fi.check_indptr(fi.to_host(kv_indptr, f"{name}.kv_indptr"), "kv_indptr")
        self._qo_indptr_buf, self._kv_indptr_buf = fi.to_device(qo_indptr), fi.to_device(kv_indptr)
        self._choose(*self._dtypes[:2])
        self._dims = (head_dim_qk, head_dim_vo or head_dim_qk)
        self._soft_cap, self._sm_scale = logits_soft_cap or 0.0, sm_scale
        self._check_module(*self._dtypes, self._dims, self._soft_cap)
        lens = tuple(end - first for first, end in pairwise(keys))
        schedule = Schedule(tuple(queries), tuple(keys), lens, num_qo_heads, num_kv_heads, 1, causal, window_left)
        self._send(schedule, queries[-1], self._dims[1], not disable_split_kv, fixed_split_size)

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        o_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: Any = False,
        enable_pdl: Any = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        fi.called("BatchPrefillWithRaggedKVCacheWrapper.run", locals())
        need(fi.world.graph is None, "emulated for eager attention")
        schedule = self._schedule
        self._check_query(q, k.dtype)
        need(v.dtype == k.dtype, f"K {k.dtype}, V {v.dtype}")
        need(q_scale is None and k_scale is None and v_scale is None, "fa2 and fa3 ignore these scales")
        rows, keys = schedule.qo_indptr[-1], schedule.kv_indptr[-1]
        need(q.shape[0] == rows, f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({rows})", ValueError)
        need(len(k) >= keys and len(v) >= keys, f"{len(k)} keys and {len(v)} values, kv_indptr ends at {keys}")
        need(k.shape[1] == v.shape[1] == schedule.kv_heads, f"KV heads {k.shape[1]}, {v.shape[1]}")
        need((q.shape[-1], v.shape[-1]) == self._dims and k.shape[-1] == self._dims[0], "head sizes are not the plan's")
        need(k.stride(-1) == v.stride(-1) == 1, "the last dimension must be contiguous")
        fp8 = fp8_scales(q, args, schedule)
        scale = self._scales(self._sm_scale, q.shape[-1])
        fi.check_mask(scale * float(fp8.get("q_scales", torch.ones(1)).min()))
        if out is None and q.dtype in fi.FP8:
            out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=torch.bfloat16)
        out, lse = self._results(q, v.shape[-1], out, lse, return_lse)
        fi.launch(partial(self._attend, schedule, fi.moment(q), (k, v), out, lse, {"scale": scale, **fp8}))
        return (out, lse) if return_lse else out

    def _attend(
        self, planned: Any, q: Tensor, halves: Any, out: Tensor, lse: Tensor | None, call: dict[str, Any]
    ) -> None:
        schedule = self._scheduled(planned)
        need(self._qo_indptr_buf.tolist() == list(schedule.qo_indptr), "qo_indptr on the device is not the plan's")
        need(self._kv_indptr_buf.tolist() == list(schedule.kv_indptr), "kv_indptr on the device is not the plan's")
        for request in range(len(schedule.kv_lens)):
            rows, part = (slice(*each[request : request + 2]) for each in (schedule.qo_indptr, schedule.kv_indptr))
            self._attend_request(schedule, q, (halves[0][part], halves[1][part]), rows, out, lse, call)
