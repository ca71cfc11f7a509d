"""One adapter per build of FlashMLA (vLLM's, SGLang's, upstream's): the runtime calls all of them alike.

FlashMLA splits each request's keys into parts by a schedule that depends on the lengths. Builds that have
``FlashMLASchedMeta`` fill one at the first call; older ones, and dense FP8, take the two tensors of
``get_mla_metadata``. Either way a schedule here begins empty and is filled by the first call that it is given to:
nothing runs while metadata is built, all layers of a step share it, and a CUDA graph that is captured with an empty
schedule makes it anew at each replay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_select.runtime.installed_builds import InstalledBuild
from attn_select_flashmla.facts.builds import (
    FLASH_MLA,
    SGL_FLASH_MLA,
    SGL_KERNEL,
    SGLANG_KERNEL,
    VLLM,
    FlashMLABuild,
    FlashMLAKernel,
    build_of,
)

Result = tuple[Tensor, Tensor]
RANK = 512
"""Width of the latents, and so of the output."""

_CACHE = ("k_cache", "block_table", "cache_seqlens", "head_dim_v")
_CALL = ("q", *_CACHE, "tile_scheduler_metadata", "num_splits", "softmax_scale", "causal")
_CALL_OPTIONS = ("is_fp8_kvcache", "indices")
_DESCALES = ("descale_q", "descale_k")
_SPARSE_FWD = ("q", "kv", "indices", "sm_scale", "d_v")
_TENSOR_METADATA = ("cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k")
_SPARSE_METADATA = ("num_heads_q", "is_fp8_kvcache", "topk")


@dataclass(slots=True, eq=False)
class TensorSchedule:
    """A schedule as tensors, for kernels that take them; empty until the first call."""

    tiles: Tensor | None = None  # int32 ``(num_sm_parts, 8)``
    splits: Tensor | None = None  # int32 ``(B + 1,)``
    # seq_lens, block_table: sparse decoding of such builds asks for them and does not read them
    seq_lens: Tensor | None = None
    block_table: Tensor | None = None


@dataclass(slots=True)
class DenseBatch:
    """What dense decoding needs of a batch of B requests."""

    block_table: Tensor  # int32 ``(B, W)``
    seq_lens: Tensor  # int32 ``(B,)`` on the device
    causal: bool  # whether a query sees no key after itself; the last query stands at the last key
    schedule: Any  # shared by all layers, filled by the first


# The returned LSE is the natural logarithm, float32, +inf in a row without keys, and without the sinks.
class Adapter(ABC):
    """FlashMLA as one distribution builds it. Shapes: B requests of ``q_len`` queries, H heads, int32 index tensors."""

    # whether the 16-bit and sparse kernels write where they are told to; else ``out`` is ignored
    writes_output: ClassVar[bool] = False
    extra: ClassVar[dict[str, Any]] = {}
    """Passed to every call."""
    sparse_lse_base2: ClassVar[bool] = False
    _takes_descales: ClassVar[bool] = False
    # Builds with dense FP8 set these two.
    _fp8_metadata: Callable[..., Result]
    _fp8_decode: Callable[..., Result]

    def __init__(self, build: FlashMLABuild) -> None:
        self.build = build
        installed = self._installed = InstalledBuild(build)
        sinks = ("attn_sink",) if build.sinks.value else ()
        out = ("out",) if self.writes_output else ()
        descales = _DESCALES if self._takes_descales else ()
        options = (*_CALL_OPTIONS, *sinks, *out, *self.extra, *descales)
        self._decode = installed.function("flash_mla_with_kvcache", _CALL, options)
        self._sparse = installed.function("flash_mla_sparse_fwd", _SPARSE_FWD, (*sinks, *out, *self.extra))

    @abstractmethod
    def new_schedule(self) -> Any:
        """Return an empty schedule for ``dense`` or ``sparse_decode``."""

    def new_fp8_schedule(self) -> TensorSchedule:
        """Return an empty schedule for ``dense_fp8``."""
        return TensorSchedule()

    @abstractmethod
    def dense(self, query: Tensor, kv_cache: Tensor, batch: DenseBatch, scale: float, out: Tensor | None) -> Result:
        """Attend over a 16-bit cache.

        Args:
            query: ``(B, q_len, H, 576)``.
            kv_cache: ``(blocks, 64, 1, 576)`` in the query's dtype.
            batch: with a schedule of ``new_schedule``.
            out: ``(B, 1, q_len * H, 512)``, contiguous: the output's own shape is documented, but this one is checked.

        Returns:
            Output ``(B, q_len, H, 512)``, where it was written into ``out`` of its shape; LSE ``(B, H, q_len)``.
        """

    def dense_fp8(
        self, query: Tensor, kv_cache: Tensor, batch: DenseBatch, scale: float, descales: tuple[Tensor, ...]
    ) -> Result:
        """As ``dense`` with query and cache in e4m3, and a schedule of ``new_fp8_schedule``; the output is bfloat16.

        ``descales`` float32 ``(1,)`` undo the quantisation of query and cache.
        """
        call = _with_tensors(query, kv_cache, batch, scale, self._fp8_metadata)
        return self._fp8_decode(*call, descale_q=descales[0], descale_k=descales[1])

    @abstractmethod
    def sparse_decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        schedule: Any,
        scale: float,
        sinks: Tensor | None,
        out: Tensor | None,
    ) -> Result:
        """Attend from each query to its own tokens of an FP8 cache.

        Args:
            query: bfloat16 ``(B, q_len, 64 or 128, 576)``.
            kv_cache: uint8 ``(blocks, 64, 1, 656)``.
            indices: ``(B, q_len, top_k)`` slots, top_k a multiple of 64; -1, and no other negative one, is void.
            sinks: float32 ``(H,)``.
            out: ``(B, q_len, H, 512)``, contiguous.

        Returns:
            As ``dense``.
        """

    def sparse_prefill(
        self, query: Tensor, kv: Tensor, indices: Tensor, scale: float, sinks: Tensor | None, out: Tensor | None
    ) -> Result:
        """Attend from each query to its own tokens of a bfloat16 run of tokens.

        Args:
            query: ``(T, 64 or 128, 576 or 512)``.
            kv: ``(S, 1, 576 or 512)``.
            indices: ``(T, 1, top_k)`` positions, top_k a multiple of 128; void where negative, or from S on.
            sinks: float32 ``(H,)``.
            out: ``(T, H, 512)``, contiguous.

        Returns:
            Output like ``out``, LSE ``(T, H)``.
        """
        options: dict[str, Any] = {"attn_sink": sinks} if sinks is not None else {}
        if self.writes_output:
            options["out"] = out
        output, _, lse = self._sparse(query, kv, indices, scale, RANK, **options, **self.extra)
        return output, lse * math.log(2) if self.sparse_lse_base2 else lse


def _with_tensors(
    query: Tensor, kv_cache: Tensor, batch: DenseBatch, scale: float, metadata: Callable[..., Result]
) -> tuple[Any, ...]:
    """Return the arguments of a dense call whose schedule is tensors, which ``metadata`` makes at the first call."""
    schedule = batch.schedule
    if schedule.tiles is None:
        schedule.tiles, schedule.splits = metadata(batch.seq_lens, query.shape[1] * query.shape[2], 1)
    tensors = (query, kv_cache, batch.block_table, batch.seq_lens)
    return (*tensors, RANK, schedule.tiles, schedule.splits, scale, batch.causal)


class ScheduleObjects(Adapter):
    """Builds that fill a ``FlashMLASchedMeta``, which their ``get_mla_metadata`` returns without arguments."""

    def __init__(self, build: FlashMLABuild) -> None:
        super().__init__(build)
        self._new = self._installed.function("get_mla_metadata")

    def new_schedule(self) -> Any:
        """Return a ``FlashMLASchedMeta``."""
        return self._new()[0]

    def dense(self, query: Tensor, kv_cache: Tensor, batch: DenseBatch, scale: float, out: Tensor | None) -> Result:
        """As ``Adapter.dense``."""
        extra = {"out": out} if out is not None and self.writes_output else self.extra
        call = (query, kv_cache, batch.block_table, batch.seq_lens, RANK, batch.schedule, None, scale, batch.causal)
        found: Result = self._decode(*call, **extra)
        return found

    def sparse_decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        schedule: Any,
        scale: float,
        sinks: Tensor | None,
        out: Tensor | None,
    ) -> Result:
        """As ``Adapter.sparse_decode``."""
        options: dict[str, Any] = {"is_fp8_kvcache": True, "indices": indices, "attn_sink": sinks, **self.extra}
        if self.writes_output:
            options["out"] = out
        result: Result = self._decode(query, kv_cache, None, None, RANK, schedule, None, scale, False, **options)
        return result


class ScheduleTensors(Adapter):
    """Builds from before ``FlashMLASchedMeta``: the two tensors of ``get_mla_metadata``."""

    def __init__(self, build: FlashMLABuild) -> None:
        super().__init__(build)
        self._metadata = self._installed.function("get_mla_metadata", _TENSOR_METADATA, _SPARSE_METADATA)

    def new_schedule(self) -> TensorSchedule:
        """Return an empty ``TensorSchedule``."""
        return TensorSchedule()

    def dense(self, query: Tensor, kv_cache: Tensor, batch: DenseBatch, scale: float, out: Tensor | None) -> Result:
        """As ``Adapter.dense``."""
        found: Result = self._decode(*_with_tensors(query, kv_cache, batch, scale, self._metadata))
        return found

    def sparse_decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        schedule: TensorSchedule,
        scale: float,
        sinks: Tensor | None,
        out: Tensor | None,
    ) -> Result:
        """As ``Adapter.sparse_decode``; the plan asks none of these builds for sinks."""
        requests, query_len, heads, _ = query.shape
        top_k = indices.shape[2]
        if schedule.tiles is None:
            schedule.seq_lens = torch.full((requests,), top_k, dtype=torch.int32, device=query.device)
            schedule.block_table = schedule.seq_lens.new_zeros(requests, 1)
            schedule.tiles, schedule.splits = self._metadata(
                schedule.seq_lens, query_len * heads, 1, num_heads_q=heads, is_fp8_kvcache=True, topk=top_k
            )
        result: Result = self._decode(
            query,
            kv_cache,
            schedule.block_table,
            schedule.seq_lens,
            RANK,
            schedule.tiles,
            schedule.splits,
            scale,
            False,
            is_fp8_kvcache=True,
            indices=indices,
        )
        return result


class Vllm(ScheduleObjects):
    """vLLM's build, which has dense FP8 in an extension of its own."""

    writes_output = True

    def __init__(self, build: FlashMLABuild) -> None:
        super().__init__(build)
        installed = self._installed
        fp8 = installed.imported("vllm.v1.attention.ops.flashmla")
        self._fp8_metadata = installed.function("get_mla_metadata_dense_fp8", _TENSOR_METADATA, module=fp8)
        self._fp8_decode = installed.function("flash_mla_with_kvcache_fp8", (*_CALL, *_DESCALES), module=fp8)


class SglFlashMla(ScheduleObjects):
    """SGLang's build of its own, which keeps what upstream dropped behind ``use_legacy``."""

    extra: ClassVar[dict[str, Any]] = {"use_legacy": True}
    _takes_descales = True

    def __init__(self, build: FlashMLABuild) -> None:
        super().__init__(build)
        positional, keywords = ("seqlens_k", "num_q_tokens_per_head_k", "h_k"), ("is_fp8_kvcache", "use_legacy")
        metadata = self._installed.function("get_mla_decoding_metadata", positional, keywords)
        self._fp8_metadata = partial(metadata, is_fp8_kvcache=True, use_legacy=True)
        self._fp8_decode = self._decode_with_tensors

    def _decode_with_tensors(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        rank: int,
        tiles: Tensor,
        splits: Tensor,
        *arguments: Any,
        **descales: Tensor,
    ) -> Result:
        meta = self.new_schedule()
        meta.tile_scheduler_metadata, meta.num_splits = tiles, splits
        call = (query, kv_cache, block_table, seq_lens, rank, meta, None, *arguments)
        found: Result = self._decode(*call, is_fp8_kvcache=True, **descales, **self.extra)
        return found


class _SglKernelFp8(Adapter):
    """Dense FP8 of ``sgl_kernel``: the same functions, chosen by the query's dtype."""

    sparse_lse_base2 = True
    _takes_descales = True

    def __init__(self, build: FlashMLABuild) -> None:
        super().__init__(build)
        metadata = self._installed.function("get_mla_metadata", _TENSOR_METADATA, ("is_fp8_kvcache",))
        self._fp8_metadata = partial(metadata, is_fp8_kvcache=True)
        self._fp8_decode = self._decode


class SglangKernel(_SglKernelFp8, ScheduleObjects):
    """``sglang-kernel``."""


class SglKernel(_SglKernelFp8, ScheduleTensors):
    """``sgl-kernel``, the older distribution of the same module."""


class Upstream(ScheduleObjects):
    """Upstream's package; releases from before ``FlashMLASchedMeta`` are refused, whatever their version says."""


_ADAPTERS: dict[str, type[Adapter]] = {
    VLLM.distribution: Vllm,
    SGL_FLASH_MLA.distribution: SglFlashMla,
    SGLANG_KERNEL.distribution: SglangKernel,
    SGL_KERNEL.distribution: SglKernel,
    FLASH_MLA.distribution: Upstream,
}


@cache
def adapter_of(build: FlashMLABuild) -> Adapter:
    """Return the adapter of a build; imports its library. One per build."""
    return _ADAPTERS[build.distribution](build)


def adapter_for(kernel: FlashMLAKernel) -> Adapter:
    """Return the adapter of the build that a plan's kernel names.

    Raises:
        KernelMismatchError: the build cannot be imported, its version is another, or a function is missing or has
            another signature.
    """
    return adapter_of(build_of(kernel))
