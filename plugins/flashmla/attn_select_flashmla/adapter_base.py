"""What every build of FlashMLA is called like, and the two kinds of schedule that builds have.

FlashMLA splits each request's keys into parts by a schedule that depends on the lengths. Builds that have
``FlashMLASchedMeta`` fill one at the first call, older ones and dense FP8 take the two tensors of ``get_mla_metadata``.
Either way a schedule here begins empty and is filled by the first call that it is given to: nothing runs while metadata
is built, all layers of a step share it, and a CUDA graph that is captured with an empty one schedules anew at each
replay.
"""

from __future__ import annotations

import importlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_select.errors import KernelMismatchError
from attn_select_flashmla.providers import Kernel

Result = tuple[Tensor, Tensor]
RANK = 512
"""Width of the latents, and so of the output."""

_CACHE = ("k_cache", "block_table", "cache_seqlens", "head_dim_v")
CALL = ("q", *_CACHE, "tile_scheduler_metadata", "num_splits", "softmax_scale", "causal")
CALL_OPTIONS = ("is_fp8_kvcache", "indices")
DESCALES = ("descale_q", "descale_k")
_SPARSE_FWD = ("q", "kv", "indices", "sm_scale", "d_v")
TENSOR_METADATA = ("cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k")
_SPARSE_METADATA = ("num_heads_q", "is_fp8_kvcache", "topk")


@dataclass(slots=True, eq=False)
class TensorSchedule:
    """A schedule as tensors, for kernels that take them; empty until the first call.

    Attributes:
        tiles: int32 ``(num_sm_parts, 8)``.
        splits: int32 ``(B + 1,)``.
        seq_lens, block_table: what sparse decoding of such builds asks for and does not read.
    """

    tiles: Tensor | None = None
    splits: Tensor | None = None
    seq_lens: Tensor | None = None
    block_table: Tensor | None = None


class Adapter(ABC):
    """FlashMLA as one distribution brings it. Shapes: B requests of ``q_len`` queries, H heads, int32 index tensors.

    The returned LSE is the natural logarithm, float32, +inf in a row without keys, and without the sinks.

    Args:
        kernel: the build.

    Attributes:
        writes_output: whether the 16-bit and sparse kernels write where they are told to; else ``out`` is ignored.

    Raises:
        KernelMismatchError: a module cannot be imported, a function is missing or has another signature.
    """

    module_name: ClassVar[str]
    writes_output: ClassVar[bool] = False
    extra: ClassVar[dict[str, Any]] = {}
    """Passed to every call."""
    sparse_lse_base2: ClassVar[bool] = False

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.module = self._import(self.module_name)
        sinks = ("attn_sink",) if kernel.sinks.value else ()
        out = ("out",) if self.writes_output else ()
        options = (*CALL_OPTIONS, *sinks, *out, *self.extra, *self._descale_options())
        self._decode = self._function("flash_mla_with_kvcache", CALL, options)
        self._sparse = self._function("flash_mla_sparse_fwd", _SPARSE_FWD, (*sinks, *out, *self.extra))

    def _descale_options(self) -> tuple[str, ...]:
        return ()

    def _import(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            text = f"{self.kernel.provider}: {name} cannot be imported ({type(error).__name__}: {error})"
            raise KernelMismatchError(text, hint=f"reinstall it: {self.kernel.library.install}") from error

    def _function(
        self, name: str, positional: Iterable[str], keywords: Iterable[str] = (), module: ModuleType | None = None
    ) -> Callable[..., Any]:
        """Return a function of the build after comparing its signature with what is passed to it."""
        place = module or self.module
        where = f"{self.kernel.provider}: {place.__name__}.{name}"
        wanted = f"{self.kernel.library.distribution}{self.kernel.library.version or ''}"
        hint = f"this plugin calls the functions of {wanted}; option provider chooses another build"
        function: Callable[..., Any] | None = getattr(place, name, None)
        if function is None:
            raise KernelMismatchError(f"{where} does not exist", hint=hint)
        has, positional = list(inspect.signature(function).parameters), list(positional)
        missing = [argument for argument in keywords if argument not in has]
        if has[: len(positional)] != positional or missing:
            wants = f"({', '.join(positional)}, …)" + f" with {', '.join(missing)}" * bool(missing)
            raise KernelMismatchError(f"{where} takes ({', '.join(has)}): accepted is {wants}", hint=hint)
        return function

    @abstractmethod
    def new_schedule(self) -> Any:
        """Return an empty schedule for ``dense`` or ``sparse_decode``."""

    def new_fp8_schedule(self) -> TensorSchedule:
        """Return an empty schedule for ``dense_fp8``."""
        return TensorSchedule()

    @abstractmethod
    def dense(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        schedule: Any,
        scale: float,
        causal: bool,
        out: Tensor | None,
    ) -> Result:
        """Attend over a 16-bit cache.

        Args:
            query: ``(B, q_len, H, 576)``.
            kv_cache: ``(blocks, 64, 1, 576)`` in the query's dtype.
            block_table: ``(B, W)``, seq_lens ``(B,)``.
            causal: the last query stands at the last key.
            out: ``(B, 1, q_len * H, 512)``, contiguous: the output's own shape is documented, but this one is checked.

        Returns:
            Output ``(B, q_len, H, 512)``, where it was written into ``out`` of its shape; LSE ``(B, H, q_len)``.
        """

    def dense_fp8(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        schedule: TensorSchedule,
        scale: float,
        causal: bool,
        descales: tuple[Tensor, ...],
    ) -> Result:
        """As ``dense`` with query and cache in e4m3; ``descales`` float32 ``(1,)`` of both; the output is bfloat16."""
        if schedule.tiles is None:
            tokens = query.shape[1] * query.shape[2]
            schedule.tiles, schedule.splits = self._fp8_metadata(seq_lens, tokens)
        return self._fp8(query, kv_cache, block_table, seq_lens, schedule, scale, causal, descales)

    def _fp8_metadata(self, seq_lens: Tensor, tokens_per_kv_head: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(f"{self.kernel.provider} has no dense FP8 kernel, so no plan may ask for one")

    def _fp8(self, query: Tensor, kv_cache: Tensor, block_table: Tensor, *arguments: Any) -> Result:
        raise NotImplementedError(f"{self.kernel.provider} has no dense FP8 kernel, so no plan may ask for one")

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
            query: ``(T, 64 or 128, 576)``.
            kv: ``(S, 1, 576)``.
            indices: ``(T, 1, top_k)`` positions, top_k a multiple of 128; negative ones and those from S on are void.
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


class ScheduleObjects(Adapter):
    """Builds that fill a ``FlashMLASchedMeta``."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._new = self._function("get_mla_metadata", ())
        try:
            inspect.signature(self._new).bind()
        except TypeError as error:
            text = f"{kernel.provider}: get_mla_metadata{inspect.signature(self._new)} wants arguments"
            raise KernelMismatchError(
                text, hint=f"accepted is {kernel.library.version} with FlashMLASchedMeta"
            ) from error

    def new_schedule(self) -> Any:
        """Return a ``FlashMLASchedMeta``."""
        return self._new()[0]

    def dense(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        schedule: Any,
        scale: float,
        causal: bool,
        out: Tensor | None,
    ) -> Result:
        """As ``Adapter.dense``."""
        call, extra = self._decode, {"out": out} if out is not None and self.writes_output else self.extra
        found: Result = call(query, kv_cache, block_table, seq_lens, RANK, schedule, None, scale, causal, **extra)
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

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._metadata = self._function("get_mla_metadata", TENSOR_METADATA, _SPARSE_METADATA)

    def new_schedule(self) -> TensorSchedule:
        """Return an empty ``TensorSchedule``."""
        return TensorSchedule()

    def dense(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        schedule: TensorSchedule,
        scale: float,
        causal: bool,
        out: Tensor | None,
    ) -> Result:
        """As ``Adapter.dense``."""
        if schedule.tiles is None:
            schedule.tiles, schedule.splits = self._metadata(seq_lens, query.shape[1] * query.shape[2], 1)
        call = (query, kv_cache, block_table, seq_lens, RANK, schedule.tiles, schedule.splits, scale, causal)
        result: Result = self._decode(*call)
        return result

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
