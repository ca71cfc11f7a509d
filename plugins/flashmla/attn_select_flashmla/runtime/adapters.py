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
    unread: tuple[Tensor, Tensor] | None = None  # table and lengths that sparse decoding is given

    def fill(self, metadata: Callable[..., Result], seq_lens: Tensor, query: Tensor, **options: Any) -> None:
        """Let the build's function make it for queries ``(B, q_len, H, 576)``, unless it is made already."""
        if self.tiles is None:
            self.tiles, self.splits = metadata(seq_lens, query.shape[1] * query.shape[2], 1, **options)


@dataclass(slots=True)
class DecodeBatch:
    """What ``flash_mla_with_kvcache`` needs of a batch of B requests."""

    block_table: Tensor | None  # int32 ``(B, W)``; block_table, seq_lens: None where slots are given
    seq_lens: Tensor | None  # int32 ``(B,)`` on the device
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

    def dense(self, query: Tensor, kv_cache: Tensor, batch: DecodeBatch, scale: float, out: Tensor | None) -> Result:
        """Attend with ``query (B, q_len, H, 576)`` to a 16-bit ``kv_cache (blocks, 64, 1, 576)`` of its dtype.

        ``batch`` has a schedule of ``new_schedule``. ``out`` is contiguous, ``(B, 1, q_len * H, 512)``: the output's
        own shape is documented, but this one is checked. Returns the output ``(B, q_len, H, 512)``, where it was
        written into ``out`` of its shape, and the LSE ``(B, H, q_len)``.
        """
        return self._call(query, kv_cache, batch, scale, **self._options(out))

    def dense_fp8(
        self, query: Tensor, kv_cache: Tensor, batch: DecodeBatch, scale: float, descales: tuple[Tensor, ...]
    ) -> Result:
        """As ``dense`` with query and cache in e4m3, and a ``TensorSchedule``; the output is bfloat16.

        ``descales`` float32 ``(1,)`` undo the quantisation of query and cache.
        """
        schedule: TensorSchedule = batch.schedule
        assert batch.seq_lens is not None
        schedule.fill(self._fp8_metadata, batch.seq_lens, query)
        tensors = query, kv_cache, batch.block_table, batch.seq_lens, RANK, schedule.tiles, schedule.splits
        return self._fp8_decode(*tensors, scale, batch.causal, descale_q=descales[0], descale_k=descales[1])

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
        """Attend with bfloat16 ``query (B, q_len, 64 or 128, 576)``, each token to its own of ``kv_cache``.

        That is uint8 ``(blocks, 64, 1, 656)``. ``indices (B, q_len, top_k)`` are slots, top_k a multiple of 64; -1, and
        no other negative one, is void. ``sinks`` are float32 ``(H,)``; the plan asks no build that takes none for them.
        ``out (B, q_len, H, 512)`` is contiguous. Returns the same as ``dense``.
        """
        options = {"is_fp8_kvcache": True, "indices": indices, **self._options(out)}
        if self.build.sinks.value:
            options["attn_sink"] = sinks
        return self._call(query, kv_cache, DecodeBatch(None, None, False, schedule), scale, **options)

    def _options(self, out: Tensor | None) -> dict[str, Any]:
        return {**self.extra, "out": out} if out is not None and self.writes_output else {**self.extra}

    @abstractmethod
    def _call(self, query: Tensor, kv_cache: Tensor, batch: DecodeBatch, scale: float, **options: Any) -> Result:
        """Call ``flash_mla_with_kvcache``."""

    def sparse_prefill(
        self, query: Tensor, kv: Tensor, indices: Tensor, scale: float, sinks: Tensor | None, out: Tensor | None
    ) -> Result:
        """Attend with ``query (T, 64 or 128, 576 or 512)``, each token to its own of ``kv (S, 1, 576 or 512)``.

        ``indices (T, 1, top_k)`` are positions, top_k a multiple of 128; void where negative, or from S on. ``sinks``
        are float32 ``(H,)``, ``out (T, H, 512)`` is contiguous. Returns the output like ``out``, and the LSE ``(T,
        H)``.
        """
        options = self._options(out)
        if sinks is not None:
            options["attn_sink"] = sinks
        output, _, lse = self._sparse(query, kv, indices, scale, RANK, **options)
        return output, lse * math.log(2) if self.sparse_lse_base2 else lse


class ScheduleObjects(Adapter):
    """Builds that fill a ``FlashMLASchedMeta``, which their ``get_mla_metadata`` returns without arguments."""

    def __init__(self, build: FlashMLABuild) -> None:
        super().__init__(build)
        self._new = self._installed.function("get_mla_metadata")

    def new_schedule(self) -> Any:
        """Return a ``FlashMLASchedMeta``."""
        return self._new()[0]

    def _call(self, query: Tensor, kv_cache: Tensor, batch: DecodeBatch, scale: float, **options: Any) -> Result:
        call = (query, kv_cache, batch.block_table, batch.seq_lens, RANK, batch.schedule, None, scale, batch.causal)
        found: Result = self._decode(*call, **options)
        return found


class ScheduleTensors(Adapter):
    """Builds from before ``FlashMLASchedMeta``: the two tensors of ``get_mla_metadata``."""

    def __init__(self, build: FlashMLABuild) -> None:
        super().__init__(build)
        self._metadata = self._installed.function("get_mla_metadata", _TENSOR_METADATA, _SPARSE_METADATA)

    def new_schedule(self) -> TensorSchedule:
        """Return an empty ``TensorSchedule``."""
        return TensorSchedule()

    def _call(self, query: Tensor, kv_cache: Tensor, batch: DecodeBatch, scale: float, **options: Any) -> Result:
        schedule: TensorSchedule = batch.schedule
        table, lens, more = batch.block_table, batch.seq_lens, dict[str, Any]()
        if (indices := options.get("indices")) is not None:
            # Such builds ask sparse decoding for lengths and a table too, and do not read them.
            if schedule.unread is None:
                full = torch.full((query.shape[0],), indices.shape[2], dtype=torch.int32, device=query.device)
                schedule.unread = full.new_zeros(len(full), 1), full
            table, lens = schedule.unread
            more = {"num_heads_q": query.shape[2], "is_fp8_kvcache": True, "topk": indices.shape[2]}
        assert lens is not None
        schedule.fill(self._metadata, lens, query, **more)
        call = (query, kv_cache, table, lens, RANK, schedule.tiles, schedule.splits, scale, batch.causal)
        found: Result = self._decode(*call, **options)
        return found


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

    def _decode_with_tensors(self, *call: Any, **descales: Tensor) -> Result:
        """Call ``flash_mla_with_kvcache`` with a schedule of two tensors, which this build wants in an object."""
        meta = self.new_schedule()
        meta.tile_scheduler_metadata, meta.num_splits = call[5:7]
        found: Result = self._decode(*call[:5], meta, None, *call[7:], is_fp8_kvcache=True, **descales, **self.extra)
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


_ADAPTERS: dict[str, type[Adapter]] = {
    VLLM.distribution: Vllm,
    SGL_FLASH_MLA.distribution: SglFlashMla,
    SGLANG_KERNEL.distribution: SglangKernel,
    SGL_KERNEL.distribution: SglKernel,
    # Of upstream releases from before ``FlashMLASchedMeta`` are refused, whatever their version says.
    FLASH_MLA.distribution: ScheduleObjects,
}


@cache
def adapter_of(build: FlashMLABuild) -> Adapter:
    """Return the adapter of a build; imports its library. One per build."""
    return _ADAPTERS[build.distribution](build)


def adapter_for(kernel: FlashMLAKernel) -> Adapter:
    """Return the adapter of the build that a plan's kernel names; importing its library may raise."""
    return adapter_of(build_of(kernel))


def store_lse(target: Tensor, lse: Tensor, sinks: Tensor | None = None) -> None:
    """Write a kernel's LSE ``(T, H)`` into ``target``: -inf for a row without keys, sinks ``(H,)`` counted."""
    # The kernels give +inf for such a row, and leave the sinks out.
    target.copy_(lse)
    target.masked_fill_(target == torch.inf, -torch.inf)
    if sinks is not None:
        torch.logaddexp(target, sinks, out=target)
