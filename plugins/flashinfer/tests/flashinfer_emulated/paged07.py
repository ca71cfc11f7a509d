"""The paged decode wrapper since 0.7: it has a back end in CuTe DSL. Otherwise it is ``paged``'s.

Rules by source: flashinfer/decode.py and flashinfer/cute_dsl/attention/wrappers/batch_decode.py 0.7.2.post1.
"""

from __future__ import annotations

import inspect
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from flashinfer_emulated import need, paged
from flashinfer_emulated.wrappers import dtypes_of


class CuteDsl:
    """What the wrapper plans and runs with ``backend="cute-dsl"``; one token per request."""

    def __init__(self, workspace: Tensor, kv_layout: str, buffers: tuple[Tensor | None, ...]) -> None:
        need(fi.world.capability in ((10, 0), (10, 3)), "CuTe DSL needs SM100 or SM103", RuntimeError)
        self._workspace, self._layout, self._buffers = workspace, kv_layout, buffers
        self._lens = torch.zeros(32768, dtype=torch.int32)

    def plan(self, lists: tuple[Tensor, ...], seq_lens: Tensor, heads: tuple[int, int], **given: Any) -> None:
        indptr, indices, last = lists
        size, page_size = given["head_dim"], given["page_size"]
        need(not given["logits_soft_cap"], "cute-dsl decode backend does not support logits_soft_cap", RuntimeError)
        need(page_size in (8, 16, 32, 64), f"page_size {page_size}", ValueError)
        need(size > 0 and size % 64 == 0, f"head_dim {size}", ValueError)
        need(heads[0] % heads[1] == 0, f"heads {heads}", ValueError)
        q, kv, o = self._dtypes = given["dtypes"]
        need(q == kv and q in fi.HALVES and o in fi.HALVES, f"dtypes {self._dtypes}")
        counts = fi.check_indptr(fi.to_host(indptr, "plan.indptr"), "indptr")
        lens = fi.to_host(seq_lens, "plan.seq_lens").tolist()
        need([-(-length // page_size) for length in lens] == [b - a for a, b in pairwise(counts)], f"lens {lens}")
        if self._buffers[0] is not None:
            kept_indptr, kept, kept_last = self._buffers
            assert kept is not None
            assert kept_last is not None
            fi.copy_late(kept_indptr, indptr)
            fi.copy_late(kept_last, last)
            kept[: len(indices)].copy_(indices)
            indptr, indices = kept_indptr, kept
        self._indptr, self._indices = fi.to_device(indptr), indices
        fi.copy_late(self._lens[: len(lens)], seq_lens)
        self._batch, self._heads, self._size, self._page = len(lens), heads, size, page_size
        self._scale, self._window = given["sm_scale"], given["window_left"]

    def run(
        self, q: Tensor, cache: Any, scale: float | None, v_scale: Any, out: Tensor, lse: Tensor | None, sinks: Any
    ) -> None:
        k, v = fi.unpack(cache, self._layout)
        need(q.dtype == k.dtype == v.dtype == self._dtypes[0], f"q.dtype {q.dtype}, cache {k.dtype}", ValueError)
        need(q.shape == (self._batch, self._heads[0], self._size), f"q {tuple(q.shape)}", ValueError)
        fi.check_tensor(out, tuple(q.shape), self._dtypes[2], "out")
        if sinks is not None:
            need(sinks.shape == (self._heads[0],) and sinks.dtype == torch.float32, f"sinks {sinks.dtype}", ValueError)
            need(sinks.is_contiguous(), "sinks tensor must be contiguous", ValueError)
        factor = self._scale * (1.0 if scale is None else scale)
        read = (self._indptr, fi.moment(self._indices), self._lens)
        fi.launch(partial(self._attend, fi.moment(q), (k, v), read, (factor, v_scale, sinks), out, lse))

    def _attend(self, q: Tensor, halves: Any, read: Any, terms: Any, out: Tensor, lse: Tensor | None) -> None:
        fi.scribble(self._workspace)
        need(not out.any(), "out is zero-initialised: clusters add to it")
        (indptr, indices, lens), (scale, v_scale, sinks) = read, terms
        for request, length in enumerate(lens[: self._batch].tolist()):
            first = int(indptr[request])
            own = indices[first : first - (-length // self._page)].tolist()
            if not length:  # a division by no weight at all
                out[request] = torch.nan
                if lse is not None:
                    lse[request] = torch.nan
                continue
            k, v = (fi.gather(half, own, length, self._layout) for half in halves)
            found, found_lse = fi.attend(
                q[request : request + 1].double(), k, v, scale, causal=True, window_left=self._window, soft_cap=0.0,
                sinks=sinks,
            )  # fmt: skip
            tail = sum(fi.nan_behind(half, own, length, self._layout) for half in halves)
            out[request] = (found[0] * (1.0 if v_scale is None else v_scale) + tail).to(out.dtype)
            if lse is not None:
                lse[request] = found_lse[0].float()


class BatchDecodeWithPagedKVCacheWrapper(paged.BatchDecodeWithPagedKVCacheWrapper):
    @fi.entry("decode.BatchDecodeWithPagedKVCacheWrapper.__init__", fi.RELEASES[1])
    def __init__(self, a: Any) -> None:
        buffers = (a.paged_kv_indptr_buffer, a.paged_kv_indices_buffer, a.paged_kv_last_page_len_buffer)
        self._cute: CuteDsl | None = None
        own = "fa2" if a.backend == "cute-dsl" else a.backend
        begin = (a.float_workspace_buffer, a.kv_layout, a.use_cuda_graph, a.use_tensor_cores)
        super().__init__(*begin, *buffers, own, a.jit_args)
        if a.backend == "cute-dsl":
            fi.world.calls[-1]["backend"] = a.backend
            self._cute = CuteDsl(a.float_workspace_buffer, a.kv_layout, buffers)

    @fi.entry("decode.BatchDecodeWithPagedKVCacheWrapper.plan", fi.RELEASES[1])
    def plan(self, a: Any) -> None:
        if self._cute is None:
            known = inspect.signature(super().plan).parameters
            super().plan(**{name: value for name, value in vars(a).items() if name in known})
            return
        fi.called("BatchDecodeWithPagedKVCacheWrapper.plan", vars(a))
        need(fi.world.graph is None, "plan cannot be used in a CUDA graph")
        dtypes = dtypes_of(a.q_data_type, a.kv_data_type, a.o_data_type)
        names = ("head_dim", "page_size", "window_left", "sm_scale", "logits_soft_cap")
        lists, heads = (a.indptr, a.indices, a.last_page_len), (a.num_qo_heads, a.num_kv_heads)
        self._cute.plan(lists, a.seq_lens, heads, dtypes=dtypes, **{name: getattr(a, name) for name in names})

    @fi.entry("decode.BatchDecodeWithPagedKVCacheWrapper.run", fi.RELEASES[1])
    def run(self, a: Any) -> Any:
        if self._cute is None:
            known = inspect.signature(super().run).parameters
            given = {name: value for name, value in vars(a).items() if name in known and name != "args"}
            return super().run(given.pop("q"), given.pop("paged_kv_cache"), *a.args, **given)
        fi.called("BatchDecodeWithPagedKVCacheWrapper.run", vars(a))
        need(not a.args and a.k_scale is None, "scales behind the cache are fa3's")
        need(fi.world.graph is None or self._use_cuda_graph, "a captured wrapper without use_cuda_graph")
        self._cute.run(a.q, a.paged_kv_cache, a.q_scale, a.v_scale, a.out, a.lse if a.return_lse else None, a.sinks)
        return (a.out, a.lse) if a.return_lse else a.out
