"""FlashInfer's native wrappers: what all calls of a phase have in common, lists of pages, and which wrappers are kept.

FlashInfer plans on the host and runs on the device. A wrapper without CUDA graphs serves every batch; with them there
is one decode wrapper per batch size, whose index lists stay where they are.

Attention sinks are a variant of the prefill kernel, compiled as ``BatchAttentionWithAttentionSinkWrapper`` does it
(flashinfer/attention/_core.py 0.6.14). That class names the compiled module by query dtype and window alone. A second
head size or cache dtype in one process would get the first kernel. Here the name holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from attn_select.layer.layouts import FLASHINFER_HND
from attn_select.runtime.backend import BackendContext
from attn_select.runtime.metadata import BatchError
from attn_select.runtime.torch_dtypes import FP8_DTYPES, PLAIN_DTYPES, storage_dtype
from attn_select_flashinfer.facts.libraries import INT_WORKSPACE
from attn_select_flashinfer.facts.mha_kernels import NativeKernel
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.plans import PinnedRing, Plan, Schedule, Wrapper

E4M3 = FP8_DTYPES["fp8_e4m3"]
LIST_BYTES = 12
"""Per block of a grid, in the lists at the start of a schedule: its request, its rows and its keys, int32 each."""
LEAST_BLOCKS = 1024
"""More than a captured grid has with few requests: two blocks per SM. With many it has fewer than four per request."""


def hnd_or_nhd(context: BackendContext) -> str:
    """Return the cache's layout as FlashInfer calls it."""
    return "HND" if context.kv_layout == FLASHINFER_HND else "NHD"


@dataclass(frozen=True, eq=False)
class PhaseKernel:
    """A native kernel as one phase calls it. One object per phase: it is the wrappers' key."""

    kernel: NativeKernel
    context: BackendContext
    single_token: bool  # run by the decode wrapper, which takes one token per request

    @classmethod
    def of(cls, kernel: NativeKernel, context: BackendContext, *, decode: bool) -> PhaseKernel:
        """Return what runs the kernel that a plan names."""
        return cls(kernel, context, decode and (not kernel.sinks or kernel.backend == "cute-dsl"))

    @cached_property
    def any_length(self) -> PhaseKernel:
        """The same kernel for queries of any length: the prefill wrapper runs it. CuTe DSL has none: fa2 it is."""
        if not self.single_token:
            return self
        backend: Literal["fa2", "fa3"] = "fa2" if self.kernel.backend == "cute-dsl" else self.kernel.backend
        return PhaseKernel(replace(self.kernel, backend=backend), self.context, False)

    @cached_property
    def without_sinks(self) -> PhaseKernel:
        """The same kernel, sinks not counted."""
        return replace(self, kernel=replace(self.kernel, sinks=False)) if self.kernel.sinks else self

    @cached_property
    def planned(self) -> dict[str, Any]:
        """What every ``plan`` of the kernel gets beside the batch's lists; a layer's scale is given to ``run``."""
        config = self.context.config
        return {
            "num_qo_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim" if self.single_token else "head_dim_qk": config.head_size,
            "page_size": self.context.block_size,
            "sm_scale": 1.0,
            "window_left": -1 if config.sliding_window is None else config.sliding_window - 1,
            "logits_soft_cap": config.logits_soft_cap or 0.0,
            "q_data_type": E4M3 if self.kernel.fp8_query else PLAIN_DTYPES[config.dtype],
            "kv_data_type": storage_dtype(config.cache_dtype),
            "o_data_type": PLAIN_DTYPES[config.dtype],
            "disable_split_kv": config.batch_invariant,
        }

    def variant(self) -> dict[str, Any]:
        """Return what names and defines the module with sinks, for the wrapper's constructor."""
        planned, backend = self.planned, self.kernel.backend
        size, window = self.context.config.head_size, planned["window_left"] >= 0
        dtypes = [planned[f"{which}_data_type"] for which in ("q", "kv", "o")]
        query, cache, _ = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        uri = f"attn_select_sink_{backend}_{query}_kv_{cache}_head_{size}_swa_{window}".lower()
        declared, dtypes = library.flashinfer().attention_sink_decl[backend], [*dtypes, torch.int32]
        arguments = [uri, *dtypes, size, size, ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", declared]
        return {"jit_args": arguments, "jit_kwargs": {"use_sliding_window": window}}


# FlashInfer looks for it with Python's ``max`` over the tensor (decode.py and prefill.py 0.6.14, ``plan``): 2.3 us
# per request on an H100's host, 80 % of the time of a plan for 256.
class HostLengths(Tensor):
    """Lengths on the host of which ``max()`` asks for the largest alone."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain

    def __iter__(self) -> Iterator[Tensor]:
        yield self.amax()


# numpy (which flashinfer-python needs too) takes 1 us per operation on arrays of a batch's size, torch 2 us or more.
@dataclass(slots=True)
class PageLists:
    """The pages of a step's requests: lists on the host, page indices on the device."""

    paged_kv_indptr: Tensor  # int32 ``(B + 1,)`` on the host, prefix sums of the numbers of pages
    paged_kv_indices: Tensor  # int32 on the device, at least ``paged_kv_indptr[-1]`` long: the pages of each request
    # int32 ``(B,)`` on the host, tokens in the last page: ``page_size`` for a full one, 0 for a request without keys
    paged_kv_last_page_len: Tensor
    seq_lens: Tensor  # int32 ``(B,)`` on the host

    @classmethod
    def of(cls, seq_lens: Tensor, page_size: int, indices: Tensor | None, device: torch.device) -> PageLists:
        """Return the lists of requests with these lengths, int32 ``(B,)`` on the host."""
        # indices: where page indices are to be written, at its front; None: a new tensor on ``device``
        lens = seq_lens.numpy().copy()  # a copy: a batch may be planned again after the caller has changed its lengths
        pages = (lens + (page_size - 1)) // page_size
        indptr = np.zeros(len(lens) + 1, dtype=np.int32)
        np.add.accumulate(pages, out=indptr[1:])
        last = lens - np.maximum(pages - 1, 0) * page_size
        total = max(1, int(indptr[-1]))
        made = torch.empty(total, dtype=torch.int32, device=device) if indices is None else indices[:total]
        lengths = torch.from_numpy(lens).as_subclass(HostLengths)
        return cls(torch.from_numpy(indptr), made, torch.from_numpy(last), lengths)


# Each wrapper allocates a schedule's 8 MiB on the device and as much pinned memory. All wrappers of one role share
# one such buffer, since a step plans and runs one of them.
class WrapperPool:
    """The wrappers of one kind of layers."""

    def __init__(self, context: BackendContext, scratch: Tensor) -> None:
        # scratch: uint8 on the device, for partial results; all wrappers share it, as kernels run one after the other
        self._context, self.scratch = context, scratch
        self.ring = PinnedRing(context.device)
        self._schedules: dict[str, Schedule] = {}
        self._eager: dict[tuple[str, PhaseKernel], Wrapper] = {}
        self._captured: dict[int, Wrapper] = {}
        # by name, the lists of captured decodes, on the device, where they stay; a batch size uses the front of them
        self.buffers: dict[str, Tensor] = {}
        if context.cuda_graphs and "decode" in context.plans:
            requests, pages = context.max_num_seqs, -(-context.max_model_len // cast(int, context.block_size))
            ints: dict[str, Any] = {"dtype": torch.int32, "device": context.device}
            self.buffers = {
                "paged_kv_indptr": torch.zeros(requests + 1, **ints),
                "paged_kv_indices": torch.zeros(requests * pages, **ints),
                "paged_kv_last_page_len": torch.zeros(requests, **ints),
                "qo_indptr": torch.arange(requests + 1, **ints),  # one token per request
            }

    def eager(self, kernel: PhaseKernel, role: str) -> Wrapper:
        """Return the wrapper for batches that are not captured; ``role``: which schedule it may overwrite."""
        if (role, kernel) not in self._eager:
            self._eager[role, kernel] = self._made(kernel, role)
        return self._eager[role, kernel]

    def captured(self, kernel: PhaseKernel, num_reqs: int) -> Wrapper:
        """Return the decode wrapper of one batch size, making it if it is new."""
        if num_reqs not in self._captured:
            sizes = {"paged_kv_indptr": num_reqs + 1, "paged_kv_indices": None, "paged_kv_last_page_len": num_reqs}
            if not kernel.single_token:
                sizes["qo_indptr"] = num_reqs + 1
            ending = "buffer" if kernel.single_token else "buf"  # as the wrappers' arguments are called
            lists = {f"{name}_{ending}": self.buffers[name][:size] for name, size in sizes.items()}
            self._captured[num_reqs] = self._made(kernel, "decode", use_cuda_graph=True, **lists)
        return self._captured[num_reqs]

    def is_captured(self, num_reqs: int) -> bool:
        """Whether there is a decode wrapper of this batch size."""
        return num_reqs in self._captured

    def _made(self, kernel: PhaseKernel, role: str, **given: Any) -> Wrapper:
        entries = library.flashinfer()
        made = entries.BatchPrefillWithPagedKVCacheWrapper
        if kernel.single_token:
            made, given = entries.BatchDecodeWithPagedKVCacheWrapper, {**given, "use_tensor_cores": True}
        elif kernel.kernel.sinks:
            given |= kernel.variant()
        wrapper = made(self.scratch, hnd_or_nhd(self._context), backend=kernel.kernel.backend, **given)
        if role not in self._schedules:
            memory = torch.empty(INT_WORKSPACE, dtype=torch.uint8, device=self._context.device)
            self._schedules[role] = Schedule(memory)
        schedule = self._schedules[role]
        wrapper.reset_workspace_buffer(self.scratch, schedule.memory)
        return Wrapper(wrapper, schedule, "use_cuda_graph" in given)


class NativePlan(Plan):
    """A batch planned on a native wrapper."""

    __slots__ = ("_cleared", "_kernel", "_lists", "_more", "_pool")

    def __init__(
        self, wrapper: Wrapper, pool: WrapperPool, kernel: PhaseKernel, lists: tuple[Tensor, ...], more: dict[str, Any]
    ) -> None:
        # lists, more: what ``plan`` gets of the batch, by place and by name
        self._pool, self._kernel, self._lists, self._more = pool, kernel, lists, more
        # A captured grid has spare blocks. ``PrefillPlan`` (attention/scheduler.cuh 0.6.14) masks them only where keys
        # are split. Else they run by what the pinned buffer held before, which may be any rows. With zeros there they
        # compute the first tile of the first request once more, with the same bits.
        spare = wrapper.captured and kernel.planned["disable_split_kv"]
        self._cleared = LIST_BYTES * max(LEAST_BLOCKS, 4 * len(lists[0])) if spare else 0
        super().__init__(wrapper)

    def write(self) -> None:
        """Plan. It waits neither for the device nor for an earlier plan's copy."""
        pool, kernel = self._pool, self._kernel
        try:
            pool.ring.plan(self.wrapper.made, *self._lists, cleared=self._cleared, **kernel.planned, **self._more)
        except RuntimeError as error:
            if "workspace buffer" not in str(error):  # csrc AlignedAllocator, include/flashinfer/allocator.h 0.6.14
                raise
            text = f"{kernel.kernel}: scratch of {pool.scratch.numel()} bytes is too small for a batch of "
            raise BatchError(
                f"{text}{len(self._lists[0]) - 1} requests ({str(error).splitlines()[0]})",
                hint="raise native_workspace_bytes under [backends.FLASHINFER]",
            ) from error
