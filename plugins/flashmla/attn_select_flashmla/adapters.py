"""One adapter per build of FlashMLA: the rest of the plugin calls all of them alike."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from attn_select_flashmla.adapter_base import (
    CALL,
    DESCALES,
    RANK,
    TENSOR_METADATA,
    Adapter,
    Result,
    ScheduleObjects,
    ScheduleTensors,
)
from attn_select_flashmla.providers import FLASH_MLA, KERNELS, SGL_FLASH_MLA, SGL_KERNEL, SGLANG_KERNEL, VLLM, Kernel


class Vllm(ScheduleObjects):
    """vLLM's build, which has dense FP8 in an extension of its own."""

    module_name = "vllm.third_party.flashmla.flash_mla_interface"
    fp8_module_name = "vllm.v1.attention.ops.flashmla"
    writes_output = True

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        fp8 = self._import(self.fp8_module_name)
        self._fp8_schedule = self._function("get_mla_metadata_dense_fp8", TENSOR_METADATA, module=fp8)
        self._fp8_decode = self._function("flash_mla_with_kvcache_fp8", (*CALL, *DESCALES), module=fp8)

    def _fp8_metadata(self, seq_lens: Tensor, tokens_per_kv_head: int) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = self._fp8_schedule(seq_lens, tokens_per_kv_head, 1)
        return made

    def _fp8(self, query: Tensor, kv_cache: Tensor, block_table: Tensor, *arguments: Any) -> Result:
        seq_lens, schedule, scale, causal, descales = arguments
        call = (query, kv_cache, block_table, seq_lens, RANK, schedule.tiles, schedule.splits, scale, causal)
        result: Result = self._fp8_decode(*call, *descales)
        return result


class SglFlashMla(ScheduleObjects):
    """SGLang's build of its own, which keeps what upstream dropped behind ``use_legacy``."""

    module_name = "flash_mla.flash_mla_interface"
    extra: ClassVar[dict[str, Any]] = {"use_legacy": True}

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        positional = ("seqlens_k", "num_q_tokens_per_head_k", "h_k")
        self._fp8_schedule = self._function("get_mla_decoding_metadata", positional, ("is_fp8_kvcache", "use_legacy"))

    def _descale_options(self) -> tuple[str, ...]:
        return DESCALES

    def _fp8_metadata(self, seq_lens: Tensor, tokens_per_kv_head: int) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = self._fp8_schedule(
            seq_lens, tokens_per_kv_head, 1, is_fp8_kvcache=True, use_legacy=True
        )
        return made

    def _fp8(self, query: Tensor, kv_cache: Tensor, block_table: Tensor, *arguments: Any) -> Result:
        seq_lens, schedule, scale, causal, descales = arguments
        meta = self.new_schedule()
        meta.tile_scheduler_metadata, meta.num_splits = schedule.tiles, schedule.splits
        result: Result = self._decode(
            query,
            kv_cache,
            block_table,
            seq_lens,
            RANK,
            meta,
            None,
            scale,
            causal,
            is_fp8_kvcache=True,
            descale_q=descales[0],
            descale_k=descales[1],
            use_legacy=True,
        )
        return result


class _SglKernelFp8(Adapter):
    """Dense FP8 of ``sgl_kernel``: the same functions, chosen by the query's dtype."""

    module_name = "sgl_kernel.flash_mla"
    sparse_lse_base2 = True

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._fp8_schedule = self._function("get_mla_metadata", TENSOR_METADATA, ("is_fp8_kvcache",))

    def _descale_options(self) -> tuple[str, ...]:
        return DESCALES

    def _fp8_metadata(self, seq_lens: Tensor, tokens_per_kv_head: int) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = self._fp8_schedule(seq_lens, tokens_per_kv_head, 1, is_fp8_kvcache=True)
        return made

    def _fp8(self, query: Tensor, kv_cache: Tensor, block_table: Tensor, *arguments: Any) -> Result:
        seq_lens, schedule, scale, causal, descales = arguments
        call = (query, kv_cache, block_table, seq_lens, RANK, schedule.tiles, schedule.splits, scale, causal)
        result: Result = self._decode(*call, descale_q=descales[0], descale_k=descales[1])
        return result


class SglangKernel(_SglKernelFp8, ScheduleObjects):
    """``sglang-kernel``."""


class SglKernel(_SglKernelFp8, ScheduleTensors):
    """``sgl-kernel``, the older distribution of the same module."""


class Upstream(ScheduleObjects):
    """Upstream's package; releases from before ``FlashMLASchedMeta`` are refused, whatever their version says."""

    module_name = "flash_mla.flash_mla_interface"


_ADAPTERS: dict[str, type[Adapter]] = {
    VLLM.distribution: Vllm,
    SGL_FLASH_MLA.distribution: SglFlashMla,
    SGLANG_KERNEL.distribution: SglangKernel,
    SGL_KERNEL.distribution: SglKernel,
    FLASH_MLA.distribution: Upstream,
}


@cache
def adapter_for(provider: str | None) -> Adapter:
    """Return the adapter of exactly the build that a plan names in ``provider``; one per build.

    Raises:
        KernelMismatchError: that build cannot be imported or called.
    """
    kernel = next(kernel for kernel in KERNELS if kernel.provider == provider)
    return _ADAPTERS[kernel.library.distribution](kernel)
