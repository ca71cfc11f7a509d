"""``BatchMLAPagedAttentionWrapper`` since 0.7: it plans from metadata, and each plan has buffers of its own.

Rules by source: flashinfer/mla/_batch_mla/_wrapper.py, _contracts.py, _planning.py and _backends/_fa_common.py of
0.7.2.post1. The kernels are those of ``mla06``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from flashinfer_emulated import mla06, need


class Kernels(mla06.BatchMLAPagedAttentionWrapper):
    """What a wrapper plans: ``run`` reads the plan from here."""

    dims = (*mla06.BatchMLAPagedAttentionWrapper.dims, mla06.WITHOUT_ROPE)


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Any = None
    kv_indptr: Any = None
    kv_indices: Any = None
    kv_len_arr: Any = None
    cum_seq_lens_q: Any = None
    block_tables: Any = None
    seq_lens: Any = None
    max_q_len: Any = None

    @classmethod
    def csr(cls, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any) -> MLAPlanMetadata:
        return cls(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)


class BatchMLAPagedAttentionWrapper:
    @fi.entry("mla.BatchMLAPagedAttentionWrapper.__init__", fi.RELEASES[1])
    def __init__(self, a: Any) -> None:
        self._reserved = (a.qo_indptr, a.kv_indptr, a.kv_indices, a.kv_len_arr)
        self._made = (a.float_workspace_buffer, a.use_cuda_graph, *self._reserved, a.backend)
        self._use_cuda_graph = a.use_cuda_graph
        self._planned_backend: Kernels | None = None
        self._kernels()  # it is checked as the older one is

    def _kernels(self) -> Kernels:
        return Kernels(*self._made)

    @fi.entry("mla.BatchMLAPagedAttentionWrapper.plan", fi.RELEASES[1])
    def plan(self, a: Any) -> None:
        need(a.metadata is not None and a.qo_indptr is None, "flat lists are deprecated", DeprecationWarning)
        need(a.query_layout == a.kv_cache_layout == "split", f"{a.query_layout} and {a.kv_cache_layout}: not emulated")
        lists = (a.metadata.qo_indptr, a.metadata.kv_indptr, a.metadata.kv_indices, a.metadata.kv_len_arr)
        for given in lists:
            need(given.ndim == 1 and given.is_contiguous() and given.dtype == torch.int32, f"{given}", ValueError)
        self._check_pages(*lists[1:], a.page_size)
        if a.causal:
            self._check_tiles(lists[0], lists[3], a.num_heads)
        if self._use_cuda_graph:
            self._check_reserved(lists)
        kernels = Kernels.__new__(Kernels)
        self._fill(kernels)
        sizes = (a.num_heads, a.head_dim_ckv, a.head_dim_kpe, a.page_size, a.causal, a.sm_scale)
        kernels.plan(*lists, *sizes, a.q_data_type, a.kv_data_type, a.use_profiler)
        self._planned_backend, self._lse_mode = kernels, a.lse_mode
        self._int_workspace_buffer = kernels._int_workspace_buffer
        self._pin_memory_int_workspace_buffer = kernels._pin_memory_int_workspace_buffer

    def _fill(self, kernels: Kernels) -> None:
        """Give a plan its buffers. Of an earlier one a captured wrapper keeps the device's, whose address is baked."""
        calls = len(fi.world.calls)
        kernels.__init__(*self._made)  # type: ignore[misc]
        del fi.world.calls[calls:]
        if self._use_cuda_graph and self._planned_backend is not None:
            kernels._int_workspace_buffer = self._planned_backend._int_workspace_buffer
        pinned = kernels._pin_memory_int_workspace_buffer
        weakref.finalize(pinned, _reused, pinned.data_ptr())

    @staticmethod
    def _check_pages(indptr: Tensor, indices: Tensor, lens: Tensor, page_size: int) -> None:
        need(len(indptr) == len(lens) + 1, "CSR metadata batch dimensions must agree", ValueError)
        need(int(indptr[-1]) <= len(indices), f"{len(indices)} entries but kv_indptr[-1] is {indptr[-1]}", ValueError)
        wanted = (lens + page_size - 1) // page_size
        need(torch.equal(indptr.diff(), wanted), f"page counts {indptr.diff()} must equal {wanted}", ValueError)

    @staticmethod
    def _check_tiles(q_indptr: Tensor, lens: Tensor, heads: int) -> None:
        """Refuse a query that the end of a tile cuts in two where the first key of a tile of 64 would be left out."""
        tile = 128 if int(q_indptr[-1]) * heads // len(lens) > 64 else 64
        for queries, keys in zip(q_indptr.diff().tolist(), lens.tolist(), strict=True):
            for end in range(tile, queries * heads, tile):
                query, rest = divmod(end, heads)
                key = keys - queries + query
                cut = rest and query < queries and 0 <= key < keys and key % 64 == 0
                need(not cut, f"query {query}, key {key}: native execution would omit a visible key", ValueError)

    def _check_reserved(self, lists: tuple[Tensor, ...]) -> None:
        for place, (kept, given) in enumerate(zip(self._reserved, lists, strict=True)):
            fits = len(kept) >= len(given) if place == 2 else kept.shape == given.shape
            need(fits, "reserved buffer has insufficient or incompatible capacity", ValueError)
            apart = kept.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
            need(apart or kept.data_ptr() == given.data_ptr(), "only exact reuse is allowed", ValueError)

    @fi.entry("mla.BatchMLAPagedAttentionWrapper.run", fi.RELEASES[1])
    def run(self, a: Any) -> Any:
        kernels = self._planned_backend
        need(kernels is not None, "BatchMLAPagedAttentionWrapper.run() called before plan().", RuntimeError)
        assert kernels is not None
        need(a.q_nope is a.ckv_cache is None, "separate tensors are deprecated", DeprecationWarning)
        need(type(a.query) is type(a.kv_cache) is tuple, "structural values are exact tuples", TypeError)
        mode = ("basee" if a.return_lse_base_on_e else "base2") if a.return_lse else "none"
        need(mode == self._lse_mode, f"LSE mode mismatch: planned {self._lse_mode}, got {mode}", ValueError)
        names = ("out", "lse", "return_lse", "return_lse_base_on_e", "o_scale", "ckv_scale", "kpe_scale")
        return kernels.run(*a.query, *a.kv_cache, **{name: getattr(a, name) for name in names})


def _reused(address: int) -> None:
    """The allocator gives a dropped buffer away: a copy that is still to come finds other bytes there."""
    fi.world.memory[address] = None
