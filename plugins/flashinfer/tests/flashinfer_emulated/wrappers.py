"""FlashInfer's wrappers without a GPU: paged prefill and decode (fa2, fa3, also with sinks), ragged prefill, MLA.

They plan on the host and run on the device. Rules by source: the Python of each wrapper (prefill.py, decode.py,
mla/_core.py), plans in include/flashinfer/attention/scheduler.cuh, head sizes in utils.cuh, module kinds in
jit/attention/modules.py, launches in csrc/batch_prefill.cu (fa2) and batch_prefill_sm90.cu (fa3), the bounds of the MLA
kernels in attention/mla.cuh and mla_hopper.cuh, all 0.6.14.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from attn_select.testing import attention_reference
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

    def _send(self, schedule: Schedule, rows: int, size: int, split: bool, fixed: int | None) -> None:
        """Write the schedule into the pinned buffer that stands there and start its copy, as ``cudaMemcpyAsync`` would.

        Args:
            rows: the most queries of a captured wrapper, else those of this batch.
            size: of V's heads.
            split: whether long sequences may be split, and ``fixed`` into how many pages each.
        """
        need(fi.world.graph is None, "plan cannot be used in a CUDA graph")
        need(schedule.heads % schedule.kv_heads == 0, "num_qo_heads should be divisible by num_kv_heads", RuntimeError)
        scratch, ints = self._float_workspace_buffer, self._int_workspace_buffer
        if self._backend == "fa2":
            wanted = fa2_bytes(schedule, rows, size, self._use_cuda_graph, split, fixed or -1)
        else:
            wanted = (fa3_bytes(schedule, rows, size, self._use_cuda_graph), 0)
        for needed, buffer in zip(wanted, (ints, scratch), strict=True):
            room = buffer.numel() * buffer.element_size()
            text = f"Buffer overflow when allocating memory: {needed} of {room} bytes available in AlignedAllocator. "
            need(needed <= room, f"{text}Increase the workspace buffer size.", RuntimeError)
        pinned = self._pin_memory_int_workspace_buffer
        need(len(pinned) >= len(ints), f"pinned buffer {tuple(pinned.shape)} for {tuple(ints.shape)}")
        if self._backend == "fa2":
            _fill_blocks(pinned, Blocks.of(schedule, rows, size, self._use_cuda_graph, split, fixed or -1))
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


@dataclass(frozen=True)
class Blocks:
    """fa2's grid (``PrefillSplitQOKVIndptr``).

    Attributes:
        tile: queries of a block; ``tiles`` of each request.
        chunks: into how many splits each request's keys are cut.
        padded: blocks of the grid, in graphs more than there is work for.
        split: whether partial results are merged, which is when spare blocks are masked too.
    """

    tile: int
    tiles: list[int]
    chunks: list[int]
    padded: int
    split: bool

    @classmethod
    def of(cls, schedule: Schedule, rows: int, size: int, graph: bool, may_split: bool, fixed: int) -> Blocks:
        group, batch = schedule.heads // schedule.kv_heads, len(schedule.kv_lens)
        packed = [(end - first) * group for first, end in pairwise(schedule.qo_indptr)]
        pages = [end - first for first, end in pairwise(schedule.kv_indptr)]
        tile = _fa2_tile((rows - batch + 1) * group if graph else sum(packed) // batch, size)
        tiles = [-(-length // tile) for length in packed]
        if schedule.window_left >= 0:
            pages = [min(count, -(-(schedule.window_left + tile) // schedule.page_size)) for count in pages]
        most, split, chunk = 2 * SMS // schedule.kv_heads, False, fixed
        if may_split and fixed <= 0:
            chunk = max(128 // schedule.page_size, 1)
            high = longest = max(1, *pages)
            while chunk < high:
                middle = (chunk + high) // 2
                works = sum(count * -(-max(each, 1) // middle) for count, each in zip(tiles, pages, strict=True))
                chunk, high = (middle + 1, high) if works > most else (chunk, middle)
            split = graph or chunk < longest
        chunks = [-(-max(each, 1) // chunk) if may_split else 1 for each in pages]
        split = split or (may_split and fixed > 0 and max(chunks) > 1)
        works = sum(count * each for count, each in zip(tiles, chunks, strict=True))
        padded = max(most, -(-rows * group // tile) + batch - 1) if graph else works
        need(works <= padded, "new batch size should not exceed padded batch size", RuntimeError)
        return cls(tile, tiles, chunks, padded, split)


def _fill_blocks(pinned: Tensor, blocks: Blocks) -> None:
    """Write each block's request, rows and keys; unsplit, spare blocks are run by what stood there before."""
    numbered = zip(blocks.tiles, blocks.chunks, strict=True)
    own = [
        (request, tile, chunk)
        for request, (tiles, chunks) in enumerate(numbered)
        for tile, chunk in itertools.product(range(tiles), range(chunks))
    ]
    stride = _aligned(4 * blocks.padded) // 4
    lists = [pinned.view(torch.int32)[i * stride : i * stride + blocks.padded] for i in range(3)]
    for list_, numbers in zip(lists, zip(*own, strict=True), strict=False):
        list_[: len(own)] = torch.tensor(numbers)
    if not blocks.split:
        for block in zip(*(list_[len(own) :].tolist() for list_ in lists), strict=True):
            need(block in own, f"a spare block of the grid is run as request, rows and keys {block}")


def fa2_bytes(schedule: Schedule, rows: int, size: int, graph: bool, may_split: bool, fixed: int) -> tuple[int, int]:
    """Return the bytes of a schedule and of the partial results (``PrefillPlan``)."""
    blocks, batch = Blocks.of(schedule, rows, size, graph, may_split, fixed), len(schedule.kv_lens)
    ints = 3 * _aligned(4 * blocks.padded) + _aligned(4 * (batch + 1)) + 16 + 16 * graph
    if not blocks.split:
        return ints, 0
    partial = schedule.heads * blocks.padded * blocks.tile * (size + 1) * 4
    return ints + _aligned(4 * (rows + 1)) + blocks.padded, partial


def _fa2_tile(packed: int, size: int) -> int:
    """``FA2DetermineCtaTileQ``."""
    if size >= 512:
        return 16 if packed <= 32 else 32
    if packed > 64 and size < 256:
        return 128
    return 64 if packed > 16 else 16


def fa3_bytes(schedule: Schedule, rows: int, size: int, graph: bool) -> int:
    """Return the bytes of a schedule (``PrefillSM90Plan``); there are no partial results."""
    tile = 192 if size == 64 else 128
    per_head = -(-rows // tile) + len(schedule.kv_lens) - 1
    tiles = sum(-(-(end - first) // tile) for first, end in pairwise(schedule.qo_indptr))
    works = per_head if graph else tiles
    heads = 1 if per_head > 4096 else schedule.heads
    return 7 * _aligned(4 * works * heads) + _aligned(4 * (SMS + 1))


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


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


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: Any = "NHD",
        use_cuda_graph: Any = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: Any = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        fi.called("BatchPrefillWithPagedKVCacheWrapper.__init__", locals())
        self._begin(float_workspace_buffer, kv_layout, backend, use_cuda_graph)
        self._variant = None if jit_args is None else SinkVariant(jit_args, jit_kwargs or {}, backend)
        if use_cuda_graph:
            buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
            for buffer in buffers:
                need(torch.is_tensor(buffer), "the buffers should be torch.Tensors in CUDA graph mode", ValueError)
            fi.on_device(*buffers)
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            need(len(paged_kv_indptr_buf) == self._fixed_batch_size + 1, "length of paged_kv_indptr_buf", ValueError)
            need(
                len(paged_kv_last_page_len_buf) == self._fixed_batch_size,
                "length of paged_kv_last_page_len_buf",
                ValueError,
            )
        self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr_buf, paged_kv_indptr_buf
        self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = paged_kv_indices_buf, paged_kv_last_page_len_buf
        self._max_total_num_rows: int | None = None

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim_qk: Any,
        page_size: Any,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: Any = False,
        pos_encoding_mode: Any = "NONE",
        use_fp16_qk_reduction: Any = False,
        sm_scale: Any = None,
        window_left: Any = -1,
        logits_soft_cap: Any = None,
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
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: Any = False,
    ) -> None:
        name = "BatchPrefillWithPagedKVCacheWrapper.plan"
        fi.called(name, locals())
        need(custom_mask is None and packed_custom_mask is None, "custom masks are not emulated")
        need(
            pos_encoding_mode == "NONE" and not use_fp16_qk_reduction, "positions and fp16 reductions are not emulated"
        )
        need(max_sequence_kv is None, "without the host's KV lengths plan fails in fa2 and fa3", UnboundLocalError)
        self._dtypes = dtypes_of(q_data_type, kv_data_type, o_data_type)
        self._soft_cap = logits_soft_cap or 0.0
        batch = len(qo_indptr) - 1
        need(batch > 0, "max() arg is an empty sequence", ValueError)
        fi.check_list(qo_indptr, batch + 1, "qo_indptr")
        fi.check_list(paged_kv_indptr, batch + 1, "paged_kv_indptr")
        fi.check_list(paged_kv_last_page_len, batch, "paged_kv_last_page_len")
        fi.check_list(paged_kv_indices, len(paged_kv_indices), "paged_kv_indices")
        queries = fi.check_indptr(fi.to_host(qo_indptr, f"{name}.qo_indptr"), "qo_indptr")
        pages = fi.check_indptr(fi.to_host(paged_kv_indptr, f"{name}.paged_kv_indptr"), "paged_kv_indptr")
        last = fi.to_host(paged_kv_last_page_len, f"{name}.paged_kv_last_page_len").tolist()
        need(
            pages[-1] <= len(paged_kv_indices),
            f"{len(paged_kv_indices)} page indices, paged_kv_indptr ends at {pages[-1]}",
        )
        lens = _kv_lens(pages, last, page_size)
        if seq_lens is not None:
            given = fi.to_host(seq_lens, f"{name}.seq_lens").flatten().tolist()
            held = [length if end > first else 0 for length, first, end in zip(lens, pages, pages[1:], strict=False)]
            need(given == held, f"seq_lens {given}, but pages and last page lengths give {held}")
            lens = given
        if self._use_cuda_graph:
            most = self._max_total_num_rows = self._max_total_num_rows or queries[-1]
            need(queries[-1] <= most, f"The total number of rows {queries[-1]} cannot exceed {most}", ValueError)
            need(batch == self._fixed_batch_size, f"batch size {batch}, fixed {self._fixed_batch_size}", ValueError)
            need(
                len(paged_kv_indices) <= len(self._paged_kv_indices_buf),
                "paged_kv_indices exceeds the allocated buffer size",
                ValueError,
            )
            fi.copy_late(self._qo_indptr_buf, qo_indptr)
            fi.copy_late(self._paged_kv_indptr_buf, paged_kv_indptr)
            fi.copy_late(self._paged_kv_last_page_len_buf, paged_kv_last_page_len)
            self._paged_kv_indices_buf[: len(paged_kv_indices)].copy_(paged_kv_indices)
        else:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = fi.to_device(qo_indptr), fi.to_device(paged_kv_indptr)
            self._paged_kv_indices_buf = paged_kv_indices
            self._paged_kv_last_page_len_buf = fi.to_device(paged_kv_last_page_len)
        self._choose(*self._dtypes[:2])
        self._dims = (head_dim_qk, head_dim_vo or head_dim_qk)
        if self._variant is not None:
            self._variant.check(self._backend, self._dtypes, self._dims, window_left)
        self._check_module(*self._dtypes, self._dims, self._soft_cap)
        fa3_fp8 = self._backend == "fa3" and self._dtypes[0] in fi.FP8
        need(not (fa3_fp8 and window_left >= 0), "FP8 fa3 with a window waits forever before 0.6.15")
        self._sm_scale = sm_scale
        lists = tuple(tuple(each) for each in (queries, pages, lens))
        schedule = Schedule(*lists, num_qo_heads, num_kv_heads, page_size, causal, window_left)
        most = self._max_total_num_rows or queries[-1]
        self._send(schedule, most, self._dims[1], not disable_split_kv, fixed_split_size)

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: Any = False,
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
    ) -> Any:
        fi.called("BatchPrefillWithPagedKVCacheWrapper.run", locals())
        need(
            fi.world.graph is None or self._use_cuda_graph,
            "a captured wrapper without use_cuda_graph: the next plan moves its lists",
        )
        schedule = self._schedule
        k, v = fi.unpack(paged_kv_cache, self._kv_layout)
        self._check_query(q, k.dtype)
        rows = schedule.qo_indptr[-1]
        need(q.shape[0] == rows, f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({rows})", ValueError)
        need(window_left is None or window_left == schedule.window_left, "window_left", AssertionError)
        need(sinks is None, "fa2 and fa3 ignore sinks here: they take them from a variant's arguments")
        fi.check_cache(k, v, every_stride=self._backend == "fa2")
        size, kv_heads = k.shape[1 if self._kv_layout == "NHD" else 2], k.shape[2 if self._kv_layout == "NHD" else 1]
        need(size == schedule.page_size, f"pages of {size}, planned {schedule.page_size}")
        need(kv_heads == schedule.kv_heads, f"{kv_heads} KV heads, planned {schedule.kv_heads}")
        need(
            q.shape[-1] == k.shape[-1] == self._dims[0],
            f"head sizes {q.shape[-1]}, {k.shape[-1]}, planned {self._dims[0]}",
        )
        scale = self._scales(self._sm_scale, q.shape[-1], q_scale, k_scale)
        out, lse = self._results(q, v.shape[-1], out, lse, return_lse)
        if self._variant is not None:
            call = self._variant.arguments(args, schedule.heads)
        else:
            call = {"scale": scale, **fp8_scales(q, args, schedule)}
        lists = (
            self._qo_indptr_buf,
            self._paged_kv_indptr_buf,
            fi.moment(self._paged_kv_indices_buf),
            self._paged_kv_last_page_len_buf,
        )
        fi.launch(partial(self._attend, schedule, fi.moment(q), (k, v), lists, out, lse, v_scale, call))
        return (out, lse) if return_lse else out

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
        descale = call.get("v_scales", torch.ones(schedule.heads))
        for request, length in enumerate(lens):
            rows = slice(queries[request], queries[request + 1])
            own = indices[pages[request] : pages[request + 1]]
            unseen = schedule.causal and 0 < length < rows.stop - rows.start
            need(
                self._backend == "fa2" or not unseen,
                f"request {request}: fa3 gives queries that see none of {length} keys the mean of what it masked",
            )
            k, v = (fi.gather(half, own, length, self._kv_layout) for half in halves)
            part, part_lse = fi.attend(
                q[rows].double() * call.get("q_scales", torch.ones(schedule.heads))[:, None],
                k, v, call["scale"], causal=schedule.causal, window_left=schedule.window_left,
                soft_cap=self._soft_cap, sinks=call.get("sinks"),
            )  # fmt: skip
            out[rows] = (part * descale.double()[:, None]).to(out.dtype)
            if lse is not None:
                lse[rows] = part_lse.float()
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
    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: Any = "NHD",
        use_cuda_graph: Any = False,
        use_tensor_cores: Any = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: Any = "auto",
        jit_args: Any = None,
    ) -> None:
        fi.called("BatchDecodeWithPagedKVCacheWrapper.__init__", locals())
        need(jit_args is None, "variants are emulated for prefill")
        need(use_tensor_cores, "decode without tensor cores is not emulated")
        self._begin(float_workspace_buffer, kv_layout, backend, use_cuda_graph)
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        arange: dict[str, Any] = {}
        if use_cuda_graph:
            for buffer in buffers:
                need(torch.is_tensor(buffer), "the buffers should be torch.Tensors in cudagraph mode", ValueError)
            batch = len(paged_kv_last_page_len_buffer)
            need(
                len(paged_kv_indptr_buffer) == batch + 1,
                "The size of paged_kv_indptr_buffer should be batch_size + 1",
                ValueError,
            )
            arange["qo_indptr_buf"] = torch.arange(batch + 1, dtype=torch.int32)
        names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend=backend, **arange,
            **dict(zip(names, buffers, strict=True)),
        )  # fmt: skip
        fi.world.calls.pop()

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        super().reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._prefill.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim: Any,
        page_size: Any,
        pos_encoding_mode: Any = "NONE",
        window_left: Any = -1,
        logits_soft_cap: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        non_blocking: Any = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: Any = False,
        q_len_per_req: Any = 1,
    ) -> None:
        name = "BatchDecodeWithPagedKVCacheWrapper.plan"
        fi.called(name, locals())
        need(q_len_per_req == 1, "fa2 decodes one token per request, whatever q_len_per_req says")
        given = kv_data_type or data_type or q_data_type
        if self._prefill._backend == "auto" and not {dtype_of(q_data_type), dtype_of(given)} & set(fi.FP8):
            self._prefill._backend = "fa2"
        seen, inner = len(fi.world.syncs), self._prefill
        inner._pin_memory_int_workspace_buffer = self._pin_memory_int_workspace_buffer
        inner._int_workspace_buffer = self._int_workspace_buffer
        inner.plan(
            torch.arange(len(last_page_len) + 1, dtype=torch.int32), indptr, indices, last_page_len, num_qo_heads,
            num_kv_heads, head_dim, page_size, causal=False, pos_encoding_mode=pos_encoding_mode,
            window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type, kv_data_type=given,
            o_data_type=o_data_type, sm_scale=sm_scale, seq_lens=seq_lens, fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
        )  # fmt: skip
        fi.world.calls.pop()
        fi.world.syncs[seen:] = [each.replace("BatchPrefill", "BatchDecode") for each in fi.world.syncs[seen:]]

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: Any = False,
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        q_len_per_req: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        fi.called("BatchDecodeWithPagedKVCacheWrapper.run", locals())
        batch = len(self._prefill._paged_kv_last_page_len_buf)
        need(len(q) == batch, f"{len(q)} queries for {batch} requests: fa2 decodes one token per request")
        result = self._prefill.run(
            q, paged_kv_cache, *args, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
            return_lse=return_lse, window_left=window_left, sinks=sinks, kv_cache_sf=kv_cache_sf,
        )  # fmt: skip
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
        ones = torch.ones(schedule.heads)
        for request in range(len(schedule.kv_lens)):
            rows, part = (slice(*each[request : request + 2]) for each in (schedule.qo_indptr, schedule.kv_indptr))
            found, found_lse = fi.attend(
                q[rows].double() * call.get("q_scales", ones)[:, None], halves[0][part], halves[1][part], call["scale"],
                causal=schedule.causal, window_left=schedule.window_left, soft_cap=self._soft_cap,
            )  # fmt: skip
            out[rows] = (found * call.get("v_scales", ones).double()[:, None]).to(out.dtype)
            if lse is not None:
                lse[rows] = found_lse.float()


MAX_WORKS = 16384
"""Entries of every list in the schedule; MLAPlan does not check."""
DEEPSEEK, SMALL = (512, 64), (256, 64)


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
    def __init__(
        self,
        float_workspace_buffer: Any,
        use_cuda_graph: Any = False,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len_arr: Any = None,
        backend: Any = "auto",
    ) -> None:
        fi.called("BatchMLAPagedAttentionWrapper.__init__", locals())
        need(backend in ("fa2", "fa3"), f"backend {backend!r} is not emulated")
        need(float_workspace_buffer.ndim == 1, "the workspace has one dimension")
        self._float_workspace_buffer, self._backend = float_workspace_buffer, backend
        self._int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        fi.on_device(float_workspace_buffer, qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        kv_len_arr: Any,
        num_heads: Any,
        head_dim_ckv: Any,
        head_dim_kpe: Any,
        page_size: Any,
        causal: Any,
        sm_scale: Any,
        q_data_type: Any,
        kv_data_type: Any,
        use_profiler: Any = False,
    ) -> None:
        name = "BatchMLAPagedAttentionWrapper.plan"
        fi.called(name, locals())
        need(fi.world.graph is None, "plan cannot be used in a CUDA graph")
        self._check_module((head_dim_ckv, head_dim_kpe), q_data_type, kv_data_type)
        batch = len(kv_len_arr)
        for each, length, label in ((qo_indptr, batch + 1, "qo_indptr"), (kv_indptr, batch + 1, "kv_indptr")):
            fi.check_list(each, length, label)
        fi.check_list(kv_len_arr, batch, "kv_len_arr")
        fi.check_list(kv_indices, len(kv_indices), "kv_indices")
        queries = fi.check_indptr(fi.to_host(qo_indptr, f"{name}.qo_indptr"), "qo_indptr")
        pages = fi.to_host(kv_indptr, f"{name}.kv_indptr").tolist()
        lens = fi.to_host(kv_len_arr, f"{name}.kv_len_arr").tolist()
        for request, length in enumerate(lens):
            room = (len(kv_indices) - pages[request]) * page_size
            need(length <= room, f"request {request}: {length} keys, room for {room} in kv_indices")
        if self._use_cuda_graph:
            copies = (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr), ("kv_len_arr", kv_len_arr))
            for label, given in copies:
                buffer = getattr(self, f"_{label}_buf")
                need(buffer.shape == given.shape, f"{label}: {len(given)} entries for {len(buffer)}", RuntimeError)
                fi.copy_late(buffer, given)
            need(len(kv_indices) <= len(self._kv_indices_buf), "kv_indices is longer than its buffer", RuntimeError)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
        else:
            self._qo_indptr_buf, self._kv_indptr_buf = fi.to_device(qo_indptr), fi.to_device(kv_indptr)
            self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, fi.to_device(kv_len_arr)
        self._planned = MLASchedule(tuple(queries), tuple(pages), tuple(lens), num_heads, causal)
        need(self._planned.works() <= MAX_WORKS, f"{self._planned.works()} works overflow lists of {MAX_WORKS}")
        clusters = SMS // self._planned.cluster
        wanted = 2 * clusters * 64 * self._planned.cluster * (2 * head_dim_ckv + 4)
        size = self._float_workspace_buffer.numel() * self._float_workspace_buffer.element_size()
        need(wanted <= size, f"Failed to allocate memory for mla_partial_o: {wanted} of {size} bytes", RuntimeError)
        self._dtypes, self._dims = (q_data_type, kv_data_type), (head_dim_ckv, head_dim_kpe)
        self._call = {"page_size": page_size, "scale": sm_scale}
        pinned, device = self._pin_memory_int_workspace_buffer, self._int_workspace_buffer
        send(pinned, device, self._planned)

    def _check_module(self, dims: tuple[int, int], q: torch.dtype, kv: torch.dtype) -> None:
        need(kv in (*fi.HALVES, fi.E4M3), f"MLA kv_data_type {kv} is not supported.", ValueError)
        if kv == fi.E4M3:
            need(self._backend == "fa3", "FP8 kv_data_type for MLA is only supported with the fa3 backend", ValueError)
            need(fi.world.capability[0] == 9, "FP8 kv_data_type for MLA requires an SM90 (Hopper) device", ValueError)
            need(q == torch.bfloat16, "FP8 kv_data_type currently only supports q_data_type=torch.bfloat16", ValueError)
            need(dims == DEEPSEEK, "FP8 kv_data_type currently only supports head_dim_ckv=512", ValueError)
        else:
            need(q == kv and q in fi.HALVES, f"query {q} and cache {kv}")
        need(dims in (DEEPSEEK, SMALL), f"no kernel of {dims}")
        need(self._backend == "fa2" or fi.world.capability[0] == 9, "fa3 is for compute capability 9.x", RuntimeError)
        need(self._backend == "fa2" or dims == DEEPSEEK, f"fa3 gives wrong values with {dims}")

    def run(
        self,
        q_nope: Any,
        q_pe: Any,
        ckv_cache: Any,
        kpe_cache: Any,
        out: Any = None,
        lse: Any = None,
        return_lse: Any = False,
        profiler_buffer: Any = None,
        kv_len: Any = None,
        page_table: Any = None,
        return_lse_base_on_e: Any = False,
        o_scale: Any = None,
        *,
        ckv_scale: Any = None,
        kpe_scale: Any = None,
    ) -> Any:
        fi.called("BatchMLAPagedAttentionWrapper.run", locals())
        need(o_scale is None, "o_scale is only supported with the cutlass backend for now.", ValueError)
        need(fi.world.graph is None or self._use_cuda_graph, "a captured wrapper without use_cuda_graph")
        schedule, (rank, rope) = self._planned, self._dims
        tokens = schedule.q_indptr[-1]
        for query, width in ((q_nope, rank), (q_pe, rope)):
            need(query.dtype == self._dtypes[0], f"q dtype {query.dtype} does not match {self._dtypes[0]}", ValueError)
            need(query.shape[1:] == (schedule.heads, width), f"query {tuple(query.shape)}")
            need(len(query) >= tokens and query.stride(-1) == 1, f"{len(query)} queries of {tokens}: {query.stride()}")
        for cache, width in ((ckv_cache, rank), (kpe_cache, rope)):
            need(cache.dtype == self._dtypes[1], f"cache dtype {cache.dtype} does not match", ValueError)
            need(cache.shape[1:] == (self._call["page_size"], width), f"cache {tuple(cache.shape)}")
            need(cache.stride(-1) == 1, f"cache has strides {cache.stride()}")
        fp8 = self._dtypes[1] == fi.E4M3
        given = [ckv_scale, kpe_scale]
        need(
            (None not in given) if fp8 else given == [None, None], f"scales {given} with {self._dtypes[1]}", ValueError
        )
        for scale in given:
            need(scale is None or 0 < float(scale) < float("inf"), f"scale {scale}", ValueError)
        fi.check_mask(self._call["scale"])  # an FP8 cache's scale multiplies latents, not scores
        shape = tuple(q_nope.shape)
        out = torch.empty_like(q_nope) if out is None else out
        fi.check_tensor(out, shape, q_nope.dtype, "out")
        need(out.stride(-1) == 1, f"out has strides {out.stride()}")
        if return_lse:
            lse = torch.empty(shape[:2]) if lse is None else lse
            fi.check_tensor(lse, shape[:2], torch.float32, "lse")
            need(lse.is_contiguous(), f"lse has strides {lse.stride()}")
        call = {
            **self._call, "cluster": schedule.cluster, "causal": schedule.causal, "heads": schedule.heads,
            "factors": (float(ckv_scale or 1.0), float(kpe_scale or 1.0)), "natural": return_lse_base_on_e,
        }  # fmt: skip
        parts = (fi.moment(q_nope), fi.moment(q_pe), ckv_cache, kpe_cache)
        fi.launch(partial(self._attend, parts, fi.moment(self._kv_indices_buf), out, lse if return_lse else None, call))
        return (out, lse) if return_lse else out

    def _attend(self, parts: Any, indices: Tensor, out: Tensor, lse: Tensor | None, call: dict[str, Any]) -> None:
        found = fi.world.memory.get(self._int_workspace_buffer.data_ptr())
        need(found is not None, "no schedule has arrived")
        assert found is not None
        # The grid, the mask and the page size are the call's, everything else is read from the device.
        need(found.cluster == call["cluster"], f"launched for clusters of {call['cluster']}, scheduled {found.cluster}")
        need((found.causal, found.heads) == (call["causal"], call["heads"]), "launched for another plan")
        need(not self._use_cuda_graph or self._kv_len_arr_buf.tolist() == list(found.kv_lens), "another batch's lists")
        fi.scribble(self._float_workspace_buffer)
        q_nope, q_pe, ckv, kpe = parts
        for request, length in enumerate(found.kv_lens):
            rows = slice(*found.q_indptr[request : request + 2])
            first, size = found.kv_indptr[request], call["page_size"]
            pages = indices[first : first - (-length // size)].tolist()
            halves = (fi.gather(half, pages, length, "NHD").double() for half in (ckv, kpe))
            latent, rope = (half * factor for half, factor in zip(halves, call["factors"], strict=True))
            keys = torch.cat([latent, rope], dim=1)[:, None]
            query = torch.cat([q_nope[rows], q_pe[rows]], dim=-1).double()
            for row, seen in enumerate(_visible(found, request)):
                mine = slice(rows.start + row, rows.start + row + 1)
                part = {"scale": call["scale"], "causal": False}
                values, its_lse = attention_reference(query[row : row + 1], keys[:seen], latent[:seen, None], **part)
                out[mine] = values.to(out.dtype)
                if lse is not None:
                    lse[mine] = (its_lse if call["natural"] else its_lse * fi.LOG2E).float()


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
