"""What FlashInfer's wrappers without a GPU share: they plan on the host and run on the device.

Rules by source: plans in include/flashinfer/attention/scheduler.cuh, head sizes in utils.cuh, module kinds in
jit/attention/modules.py, all 0.6.14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from flashinfer_emulated import need

HEAD_SIZES = (64, 128, 256)
"""Head sizes of 0.6.14's kernels; 80, 96 and 192 raise on an H100. From compute capability 10.0 fa2 takes 512 too."""
SPLIT_DIMS = ((192, 128),)
"""K and V sizes that differ and that both ragged kernels have."""
SMS = 132
INT_WORKSPACE = 8 << 20


@dataclass(frozen=True)
class Schedule:
    """What ``plan`` writes into the pinned buffer and copies: fa2 splits pages by it, fa3 takes the lengths from it."""

    qo_indptr: tuple[int, ...]
    kv_indptr: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    kv_heads: int
    page_size: int
    causal: bool
    window_left: int


def send(pinned: Tensor, device: Tensor, schedule: Any) -> None:
    """Write a schedule into a pinned buffer and start its copy, as ``cudaMemcpyAsync`` would."""
    fi.world.memory[pinned.data_ptr()] = schedule
    fi.stream(lambda: fi.world.memory.update({device.data_ptr(): fi.world.memory[pinned.data_ptr()]}))


class Wrapper:
    """What the three wrappers share: workspaces, the schedule's way to the device, the kernels' rules."""

    _backend: str
    _use_cuda_graph: bool
    _soft_cap: float

    def _begin(self, workspace: Tensor, kv_layout: str, backend: str, use_cuda_graph: bool) -> None:
        need(kv_layout in ("NHD", "HND"), f"Invalid kv_layout {kv_layout}", KeyError)
        need(backend in ("auto", "fa2", "fa3"), f"backend {backend!r} is not emulated")
        need(workspace.ndim == 1, "the workspace has one dimension")
        fi.on_device(workspace)
        self._float_workspace_buffer, self._kv_layout = workspace, kv_layout
        self._backend, self._use_cuda_graph = backend, use_cuda_graph
        self._int_workspace_buffer = torch.empty(INT_WORKSPACE, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(INT_WORKSPACE, dtype=torch.uint8)

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        fi.on_device(float_workspace_buffer, int_workspace_buffer)
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace_buffer)

    def _choose(self, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        """Settle ``auto`` for good at the first plan (``determine_attention_backend``)."""
        if self._backend == "auto":
            fits = kv_dtype not in fi.FP8 or q_dtype in fi.FP8
            self._backend = "fa3" if fi.world.capability[0] == 9 and fits else "fa2"

    def _check_module(self, q: torch.dtype, kv: torch.dtype, o: torch.dtype, dims: tuple[int, int], cap: float) -> None:
        """Check what a module can be compiled for."""
        fp8 = q in fi.FP8
        need(o not in fi.FP8, "FP8 output is not supported in fa2/fa3 backends yet", AssertionError)
        need(o in fi.HALVES, f"output {o}")
        if self._backend == "fa2":
            need(not fp8, "fp8 tensor core is not supported in fa2 backend", AssertionError)
            need(q in fi.HALVES and (kv == q or kv in fi.FP8), f"fa2 with query {q} and KV {kv}")
        else:
            need(fi.world.capability[0] == 9, "fa3 is compiled for compute capability 9.0 alone", RuntimeError)
            need(q == kv, f"fa3 reads query and KV of one dtype, not {q} and {kv}")
            need(not (fp8 and cap), "fa3's FP8 variant has no soft cap")
        sizes = (*HEAD_SIZES, 512) if self._backend == "fa2" and fi.world.capability >= (10, 0) else HEAD_SIZES
        fits = dims in SPLIT_DIMS or (dims[0] == dims[1] and dims[0] in sizes)
        need(fits, f"Unsupported head_dim: {dims}", RuntimeError)

    def _send(self, schedule: Schedule, size: int, split: bool, fixed: int | None) -> None:
        """Write the schedule into the pinned buffer that stands there and start its copy, as ``cudaMemcpyAsync`` would.

        Args:
            size: of V's heads.
            split: whether long sequences may be split, and ``fixed`` into how many pages each.
        """
        need(fi.world.graph is None, "plan cannot be used in a CUDA graph")
        need(schedule.heads % schedule.kv_heads == 0, "num_qo_heads should be divisible by num_kv_heads", RuntimeError)
        scratch, ints = self._float_workspace_buffer, self._int_workspace_buffer
        # Not the size that FlashInfer works out, but one that grows with the pieces that keys are cut into.
        pieces = min(2 * SMS // schedule.kv_heads, sum(-(-length // 128) for length in schedule.kv_lens))
        needed = 64 * schedule.heads * pieces * size if self._backend == "fa2" and split and (fixed or -1) <= 0 else 0
        text = f"Buffer overflow when allocating memory: {needed} bytes in AlignedAllocator. "
        need(needed <= scratch.numel(), f"{text}Increase the workspace buffer size.", RuntimeError)
        pinned = self._pin_memory_int_workspace_buffer
        need(len(pinned) >= len(ints), f"pinned buffer {tuple(pinned.shape)} for {tuple(ints.shape)}")
        if self._backend == "fa2":
            if self._use_cuda_graph and not split:
                # The spare blocks of the grid are run by what stood there before: its request, rows and keys.
                lists = pinned[: 12 * max(2 * SMS, 4 * len(schedule.qo_indptr))]
                need(not lists.any(), "a spare block of the grid is run by an earlier schedule")
            fi.scribble(pinned)
        send(pinned, ints, schedule)
        self._schedule = schedule

    def _scales(self, sm_scale: float | None, size: int, *factors: Any) -> float:
        scale: Any = 1.0 / math.sqrt(size) if sm_scale is None else sm_scale
        for factor in factors:
            if factor is not None:
                scale = scale * factor
        need(
            isinstance(scale, float),
            "the kernel takes sm_scale as a number: q_scale and k_scale must not be tensors",
            TypeError,
        )
        return float(scale)

    def _check_query(self, q: Tensor, kv_dtype: torch.dtype) -> None:
        planned = self._dtypes
        need(q.dtype == planned[0], f"The dtype of q {q.dtype} does not match the q_data_type {planned[0]}", ValueError)
        need(
            kv_dtype == planned[1],
            f"The dtype of k {kv_dtype} does not match the kv_data_type {planned[1]}",
            ValueError,
        )
        need(q.ndim == 3 and q.stride(-1) == 1, f"query {tuple(q.shape)} with strides {q.stride()}")
        need(q.shape[1] == self._schedule.heads, f"{q.shape[1]} query heads, planned {self._schedule.heads}")

    def _results(self, q: Tensor, size: int, out: Any, lse: Any, return_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Check or make output and LSE."""
        shape = (*q.shape[:-1], size)
        if out is None:
            out = torch.zeros(shape, dtype=self._dtypes[2])
        fi.check_tensor(out, shape, self._dtypes[2], "out")
        need(out.is_contiguous() if self._backend == "fa2" else out.stride(-1) == 1, f"out has strides {out.stride()}")
        if return_lse:
            lse = torch.empty(q.shape[:-1], dtype=torch.float32) if lse is None else lse
            fi.check_tensor(lse, q.shape[:-1], torch.float32, "lse")
            need(lse.is_contiguous(), f"lse has strides {lse.stride()}")
        return out, lse if return_lse else None

    def _scheduled(self, planned: Schedule) -> Schedule:
        """Return the schedule that the kernel finds on the device, which must be the one it was launched with."""
        found = fi.world.memory.get(self._int_workspace_buffer.data_ptr())
        need(found is not None, "plan has not run", AssertionError)
        need(found == planned, "the kernel found the schedule of another plan: its buffers were written too early")
        assert isinstance(found, Schedule)
        fi.scribble(self._float_workspace_buffer)
        return found

    def _attend_request(
        self,
        schedule: Schedule,
        q: Tensor,
        keys: tuple[Tensor, Tensor],
        rows: slice,
        out: Tensor,
        lse: Tensor | None,
        call: dict[str, Any],
    ) -> None:
        """Write one request's ``rows`` of ``out`` and ``lse``: its queries see its ``keys``, which are K and V.

        ``call`` has the softmax ``scale`` and may have ``sinks`` and the factors of each head, ``q_scales`` (Q and K)
        and ``v_scales``.
        """
        ones = torch.ones(schedule.heads)
        found, found_lse = fi.attend(
            q[rows].double() * call.get("q_scales", ones)[:, None], *keys, call["scale"], causal=schedule.causal,
            window_left=schedule.window_left, soft_cap=self._soft_cap, sinks=call.get("sinks"),
        )  # fmt: skip
        out[rows] = (found * call.get("v_scales", ones).double()[:, None]).to(out.dtype)
        if lse is not None:
            lse[rows] = found_lse.float()


def dtype_of(dtype: Any) -> Any:
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def dtypes_of(q: Any, kv: Any, o: Any) -> tuple[Any, Any, Any]:
    q = dtype_of(q)
    return q, q if kv is None else dtype_of(kv), q if o is None else dtype_of(o)


def fp8_scales(q: Tensor, args: Sequence[Any], schedule: Schedule) -> dict[str, Tensor]:
    """Read scale_q, scale_k, scale_v behind the cache, which fa3 takes with an FP8 query: numbers or one per head."""
    need(not args or q.dtype in fi.FP8, f"{len(args)} more arguments are not read without an FP8 query")
    if not args:
        return {}
    need(len(args) == 3, f"scale_q, scale_k and scale_v are taken together, not {len(args)} of them")
    group = schedule.heads // schedule.kv_heads
    q_scale, k_scale, v_scale = (
        _per_head(scale, heads).repeat_interleave(times)
        for scale, heads, times in zip(args, (schedule.heads, *[schedule.kv_heads] * 2), (1, group, group), strict=True)
    )
    return {"q_scales": q_scale * k_scale, "v_scales": v_scale}


def _per_head(scale: Any, heads: int) -> Tensor:
    if not torch.is_tensor(scale):
        return torch.full((heads,), float(scale))
    need(scale.dtype == torch.float32 and scale.is_contiguous(), f"a scale per head is float32, not {scale.dtype}")
    need(tuple(scale.shape) == (heads,), f"a scale per head has {heads} entries, not {tuple(scale.shape)}")
    return scale
