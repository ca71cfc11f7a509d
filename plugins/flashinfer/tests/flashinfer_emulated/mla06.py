"""``BatchMLAPagedAttentionWrapper`` until 0.6 without a GPU. ``mla07`` has that of later releases.

Rules by source: the Python of the wrapper (mla/_core.py), the bounds of the kernels in attention/mla.cuh and
mla_hopper.cuh, all 0.6.14.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from attn_select.testing import attention_reference
from flashinfer_emulated import need
from flashinfer_emulated.mla_lists import Lists
from flashinfer_emulated.wrappers import SMS, send

MAX_WORKS = 16384
"""Entries of every list in the schedule; MLAPlan does not check."""
DEEPSEEK, SMALL = (512, 64), (256, 64)
WITHOUT_ROPE = (512, 0)
"""Since 0.6.18, by fa3."""


@dataclass(frozen=True)
class MLASchedule:
    """What ``plan`` writes into the pinned buffer."""

    q_indptr: tuple[int, ...]
    kv_indptr: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    causal: bool

    @property
    def cluster(self) -> int:
        """CTAs that share a tile: the launch grid follows the mean length of packed queries."""
        return 2 if self.q_indptr[-1] * self.heads // len(self.kv_lens) > 64 else 1

    def works(self) -> int:
        """Return a bound of the entries in each list: a tile each, and as many splits as there are clusters."""
        tile = 64 * self.cluster
        lens = [end - first for first, end in zip(self.q_indptr, self.q_indptr[1:], strict=False)]
        return sum(-(-length * self.heads // tile) for length in lens) + SMS // self.cluster


class BatchMLAPagedAttentionWrapper:
    dims = (DEEPSEEK, SMALL)

    @fi.entry("mla.BatchMLAPagedAttentionWrapper.__init__")
    def __init__(self, a: Any) -> None:
        need(a.backend in ("fa2", "fa3"), f"backend {a.backend!r} is not emulated")
        need(a.float_workspace_buffer.ndim == 1, "the workspace has one dimension")
        self._float_workspace_buffer, self._backend = a.float_workspace_buffer, a.backend
        self._int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)
        self._use_cuda_graph = a.use_cuda_graph
        self._qo_indptr_buf, self._kv_indptr_buf = a.qo_indptr, a.kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = a.kv_indices, a.kv_len_arr
        fi.on_device(a.float_workspace_buffer, a.qo_indptr, a.kv_indptr, a.kv_indices, a.kv_len_arr)

    @fi.entry("mla.BatchMLAPagedAttentionWrapper.plan")
    def plan(self, a: Any) -> None:
        name = "BatchMLAPagedAttentionWrapper.plan"
        need(fi.world.graph is None, "plan cannot be used in a CUDA graph")
        self._check_module((a.head_dim_ckv, a.head_dim_kpe), a.q_data_type, a.kv_data_type)
        batch = len(a.kv_len_arr)
        for each, length, label in ((a.qo_indptr, batch + 1, "qo_indptr"), (a.kv_indptr, batch + 1, "kv_indptr")):
            fi.check_list(each, length, label)
        fi.check_list(a.kv_len_arr, batch, "kv_len_arr")
        fi.check_list(a.kv_indices, len(a.kv_indices), "kv_indices")
        queries = fi.check_indptr(fi.to_host(a.qo_indptr, f"{name}.qo_indptr"), "qo_indptr")
        pages = fi.to_host(a.kv_indptr, f"{name}.kv_indptr").tolist()
        lens = fi.to_host(a.kv_len_arr, f"{name}.kv_len_arr").tolist()
        for request, length in enumerate(lens):
            room = (len(a.kv_indices) - pages[request]) * a.page_size
            need(length <= room, f"request {request}: {length} keys, room for {room} in kv_indices")
        if self._use_cuda_graph:
            copies = (("qo_indptr", a.qo_indptr), ("kv_indptr", a.kv_indptr), ("kv_len_arr", a.kv_len_arr))
            for label, given in copies:
                buffer = getattr(self, f"_{label}_buf")
                need(buffer.shape == given.shape, f"{label}: {len(given)} entries for {len(buffer)}", RuntimeError)
                fi.copy_late(buffer, given)
            need(len(a.kv_indices) <= len(self._kv_indices_buf), "kv_indices is longer than its buffer", RuntimeError)
            self._kv_indices_buf[: len(a.kv_indices)].copy_(a.kv_indices)
        else:
            self._qo_indptr_buf, self._kv_indptr_buf = fi.to_device(a.qo_indptr), fi.to_device(a.kv_indptr)
            self._kv_indices_buf, self._kv_len_arr_buf = a.kv_indices, fi.to_device(a.kv_len_arr)
        self._planned = MLASchedule(tuple(queries), tuple(pages), tuple(lens), a.num_heads, a.causal)
        need(self._planned.works() <= MAX_WORKS, f"{self._planned.works()} works overflow lists of {MAX_WORKS}")
        clusters = SMS // self._planned.cluster
        wanted = 2 * clusters * 64 * self._planned.cluster * (2 * a.head_dim_ckv + 4)
        size = self._float_workspace_buffer.numel() * self._float_workspace_buffer.element_size()
        need(wanted <= size, f"Failed to allocate memory for mla_partial_o: {wanted} of {size} bytes", RuntimeError)
        # The numbers of MLAPlanInfo. ``MLASchedule`` stands for the lists at these offsets.
        lists = range(0, 14 * 4 * MAX_WORKS, 4 * MAX_WORKS)
        self._plan_info = [self._planned.cluster, clusters, *lists, 0, wanted]
        self._own = list(self._plan_info)
        self._dtypes, self._dims = (a.q_data_type, a.kv_data_type), (a.head_dim_ckv, a.head_dim_kpe)
        self._page_size, self._sm_scale, self._causal = a.page_size, a.sm_scale, a.causal
        pinned, device = self._pin_memory_int_workspace_buffer, self._int_workspace_buffer
        send(pinned, device, self._planned)

    def _check_module(self, dims: tuple[int, int], q: torch.dtype, kv: torch.dtype) -> None:
        need(kv in (*fi.HALVES, fi.E4M3), f"MLA kv_data_type {kv} is not supported.", ValueError)
        if kv == fi.E4M3:
            need(self._backend == "fa3", "FP8 kv_data_type for MLA is only supported with the fa3 backend", ValueError)
            need(fi.world.capability[0] == 9, "FP8 kv_data_type for MLA requires an SM90 (Hopper) device", ValueError)
            need(q == torch.bfloat16, "FP8 kv_data_type currently only supports q_data_type=torch.bfloat16", ValueError)
            need(dims[0] == 512, "FP8 kv_data_type currently only supports head_dim_ckv=512", ValueError)
        else:
            need(q == kv and q in fi.HALVES, f"query {q} and cache {kv}")
        need(dims in self.dims, f"no kernel of {dims}")
        need(self._backend == "fa2" or fi.world.capability[0] == 9, "fa3 is for compute capability 9.x", RuntimeError)
        need(self._backend == "fa2" or dims != SMALL, f"fa3 gives wrong values with {dims}")
        need(self._backend == "fa3" or dims != WITHOUT_ROPE, f"fa2 with {dims} is not emulated")

    @fi.entry("mla.BatchMLAPagedAttentionWrapper.run")
    def run(self, a: Any) -> Any:
        out = a.out
        lse = a.lse
        fi.world.calls[-1] |= {"kv_indices": self._kv_indices_buf, "sm_scale": self._sm_scale}
        need(a.o_scale is None, "o_scale is only supported with the cutlass backend for now.", ValueError)
        schedule, (rank, rope) = self._planned, self._dims
        own = self._plan_info == self._own  # else the lists of another schedule, which may lie where they stay
        need(fi.world.graph is None or self._use_cuda_graph or not own, "a captured wrapper without use_cuda_graph")
        tokens = schedule.q_indptr[-1] if own else 0
        for query, width in ((a.q_nope, rank), (a.q_pe, rope)):
            need(query.dtype == self._dtypes[0], f"q dtype {query.dtype} does not match {self._dtypes[0]}", ValueError)
            need(query.shape[1:] == (schedule.heads, width), f"query {tuple(query.shape)}")
            need(len(query) >= tokens and query.stride(-1) == 1, f"{len(query)} queries of {tokens}: {query.stride()}")
        for cache, width in ((a.ckv_cache, rank), (a.kpe_cache, rope)):
            need(cache.dtype == self._dtypes[1], f"cache dtype {cache.dtype} does not match", ValueError)
            need(cache.shape[1:] == (self._page_size, width), f"cache {tuple(cache.shape)}")
            need(cache.stride(-1) == 1, f"cache has strides {cache.stride()}")
        fp8 = self._dtypes[1] == fi.E4M3
        given = [a.ckv_scale, a.kpe_scale]
        need(
            (None not in given) if fp8 else given == [None, None], f"scales {given} with {self._dtypes[1]}", ValueError
        )
        for scale in given:
            need(scale is None or 0 < float(scale) < float("inf"), f"scale {scale}", ValueError)
        fi.check_mask(self._sm_scale)  # an FP8 cache's scale multiplies latents, not scores
        shape = tuple(a.q_nope.shape)
        out = torch.empty_like(a.q_nope) if out is None else out
        fi.check_tensor(out, shape, a.q_nope.dtype, "out")
        need(out.stride(-1) == 1, f"out has strides {out.stride()}")
        if a.return_lse:
            lse = torch.empty(shape[:2]) if lse is None else lse
            fi.check_tensor(lse, shape[:2], torch.float32, "lse")
            need(lse.is_contiguous(), f"lse has strides {lse.stride()}")
        call = {
            "page_size": self._page_size, "scale": self._sm_scale, "causal": self._causal,
            "cluster": schedule.cluster, "heads": schedule.heads,
            "factors": (float(a.ckv_scale or 1.0), float(a.kpe_scale or 1.0)), "natural": a.return_lse_base_on_e,
        }  # fmt: skip
        parts = (fi.moment(a.q_nope), fi.moment(a.q_pe), a.ckv_cache, a.kpe_cache)
        if not own:
            call["lists"] = Lists(fi.moment(self._int_workspace_buffer), tuple(self._plan_info))
        fi.launch(
            partial(self._attend, parts, fi.moment(self._kv_indices_buf), out, lse if a.return_lse else None, call)
        )
        return (out, lse) if a.return_lse else out

    def _attend(self, parts: Any, indices: Tensor, out: Tensor, lse: Tensor | None, call: dict[str, Any]) -> None:
        fi.scribble(self._float_workspace_buffer)
        q_nope, q_pe, ckv, kpe = parts
        size = call["page_size"]

        def keys_of(first: int, length: int) -> tuple[Tensor, Tensor]:
            pages = indices[first : first - (-length // size)].tolist()
            halves = (fi.gather(half, pages, length, "NHD").double() for half in (ckv, kpe))
            latent, rope = (half * factor for half, factor in zip(halves, call["factors"], strict=True))
            return torch.cat([latent, rope], dim=1)[:, None], latent[:, None]

        def attend(row: int, first: int, start: int, end: int) -> tuple[Tensor, Tensor]:
            keys, latent = keys_of(first, end)
            query = torch.cat([q_nope[row], q_pe[row]], dim=-1).double()[None]
            part = {"scale": call["scale"], "causal": False}
            values, its_lse = attention_reference(query, keys[start:], latent[start:], **part)
            return values[0], its_lse[0]

        if lists := call.get("lists"):
            need(not call["causal"], "lists of pieces that causality would cut")
            rows, row_lses = out.flatten(0, 1).clone(), torch.empty(len(out) * call["heads"])
            tokens = lists.run(attend, call["heads"], rows, row_lses)
            out[:tokens] = rows.view(out.shape)[:tokens]
            if lse is not None:
                lse[:tokens] = row_lses.view(lse.shape)[:tokens] * (1.0 if call["natural"] else fi.LOG2E)
            return
        found = fi.world.memory.get(self._int_workspace_buffer.data_ptr())
        need(found is not None, "no schedule has arrived")
        assert found is not None
        # The grid, the mask and the page size are the call's, everything else is read from the device.
        need(found.cluster == call["cluster"], f"launched for clusters of {call['cluster']}, scheduled {found.cluster}")
        need((found.causal, found.heads) == (call["causal"], call["heads"]), "launched for another plan")
        need(not self._use_cuda_graph or self._kv_len_arr_buf.tolist() == list(found.kv_lens), "another batch's lists")
        for request in range(len(found.kv_lens)):
            for row, seen in enumerate(_visible(found, request), start=found.q_indptr[request]):
                values, its_lse = attend(row, found.kv_indptr[request], 0, seen)
                out[row] = values.to(out.dtype)
                if lse is not None:
                    lse[row] = (its_lse if call["natural"] else its_lse * fi.LOG2E).float()


def _visible(schedule: MLASchedule, request: int) -> list[int]:
    """Return how many keys each query sees: under causality the loop over key tiles may end before a tile's last query.

    The kernels bound it by ``kv_len - q_len + tile_end // heads`` keys, rounded up to a tile of 64, where the last
    query of a tile sees one more unless the tile ends with it.
    """
    queries = schedule.q_indptr[request + 1] - schedule.q_indptr[request]
    length, heads, tile = schedule.kv_lens[request], schedule.heads, 64 * schedule.cluster
    if not schedule.causal:
        return [length] * queries
    seen = []
    for query in range(queries):
        own = max(0, length - queries + query + 1)
        first = query * heads // tile * tile
        loaded = max(0, length - queries + (first + tile) // heads)
        seen.append(min(own, length, -(-loaded // 64) * 64) if loaded < length else min(own, length))
    return seen
