"""The adapters of vLLM's, upstream's and SGLang's functions, and which of them a plan means."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from attn_select.errors import KernelMismatchError
from attn_select.runtime.metadata import prefix_sums
from attn_select.spec import BackendPlan
from attn_select_flash_attn.adapters import Adapter, Arguments, Shape, Step
from attn_select_flash_attn.providers import FLASH_ATTN_2, FLASH_ATTN_3, KERNELS, VLLM, Kernel

_DESCALES = ("q_descale", "k_descale", "v_descale")
_LSE = ("return_softmax_lse",)


class VllmAdapter(Adapter):
    """vLLM's build: one function for both versions, paged and packed."""

    latent_query = "q_v"

    def _passes(self) -> tuple[str, ...]:
        names = ("max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k", "seqused_k", "block_table", "q_v")
        masks = ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "s_aux")
        return (*names, *masks, *_DESCALES, "scheduler_metadata", "num_splits", "out", *_LSE, "fa_version")

    def layer_arguments(
        self, scale: float, softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None
    ) -> Arguments:
        return {**super().layer_arguments(scale, softcap, alibi_slopes, sinks), "fa_version": self.kernel.version}

    def step_arguments(
        self, step: Step, schedule: Tensor | None = None, key_start_loc: Tensor | None = None
    ) -> Arguments:
        keys: Arguments = {"cu_seqlens_k": step.key_start_loc}
        if step.block_table is not None:
            keys = {"seqused_k": step.seq_lens, "block_table": step.block_table}
        return {
            "max_seqlen_q": self.longest_query(step),
            "cu_seqlens_q": step.query_start_loc,
            "max_seqlen_k": step.max_key_len,
            "num_splits": step.num_splits,
            "scheduler_metadata": schedule,
            **keys,
            **step.mask,
        }

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor | None,
        lse: bool,
        layer: Arguments,
        step: Arguments,
        extra: Arguments,
    ) -> tuple[Tensor, Tensor | None]:
        result = self.function(query, key, value, out=out, return_softmax_lse=lse, **layer, **step, **extra)
        return result if lse else (result, None)


class KvCacheAdapter(Adapter):
    """Paged FA3, upstream's and SGLang's: ``flash_attn_with_kvcache`` with packed queries."""

    function_name = "flash_attn_with_kvcache"

    def _passes(self) -> tuple[str, ...]:
        names = ("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "qv", *_DESCALES)
        masks = ("softmax_scale", "causal", "window_size", "softcap", "scheduler_metadata", "num_splits")
        return (*names, *masks, *_LSE, *_own(self.kernel))

    def key_bound(self, step: Step, shape: Shape) -> int:
        """Return what the table holds: the function is not told (hopper/flash_api.cpp 0251105, mha_fwd, seqlen_k)."""
        assert step.block_table is not None
        return step.block_table.shape[1] * (shape.page_size or 1)

    def step_arguments(
        self, step: Step, schedule: Tensor | None = None, key_start_loc: Tensor | None = None
    ) -> Arguments:
        return {
            "cache_seqlens": step.seq_lens,
            "page_table": step.block_table,
            "cu_seqlens_q": step.query_start_loc,
            "max_seqlen_q": step.max_query_len,
            "scheduler_metadata": schedule,
            "num_splits": step.num_splits,
            **step.mask,
        }

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor | None,
        lse: bool,
        layer: Arguments,
        step: Arguments,
        extra: Arguments,
    ) -> tuple[Tensor, Tensor | None]:
        if out is not None:
            extra = {"out": out, **extra}
        result = self.function(query, key, value, return_softmax_lse=lse, **layer, **step, **extra)
        return (result[0], result[1]) if lse else (result, None)


class VarlenAdapter(Adapter):
    """Packed K and V with upstream's FA3 and SGLang's; upstream's FA2 also pages so."""

    def __init__(self, kernel: Kernel, *, paged: bool) -> None:
        super().__init__(kernel, paged=paged)
        upstream = kernel.library in (FLASH_ATTN_2, FLASH_ATTN_3)
        self._lse: Arguments = {"return_attn_probs" if upstream else "return_softmax_lse": True}

    def _passes(self) -> tuple[str, ...]:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        masks = ("softmax_scale", "causal", "window_size", "softcap")
        if self.kernel.version == 2:
            return (*names, *masks, "return_attn_probs", "alibi_slopes", "block_table")
        lse = "return_attn_probs" if self.kernel.library is FLASH_ATTN_3 else "return_softmax_lse"
        return (*names, *masks, lse, "num_splits", *_own(self.kernel))

    def step_arguments(
        self, step: Step, schedule: Tensor | None = None, key_start_loc: Tensor | None = None
    ) -> Arguments:
        bounds = step.key_start_loc
        if step.seq_lens is not None:
            bounds = prefix_sums(step.seq_lens)
            if key_start_loc is not None:
                key_start_loc = key_start_loc[: len(bounds)]
                bounds = key_start_loc.copy_(bounds)
        arguments: Arguments = {
            "cu_seqlens_q": step.query_start_loc,
            "cu_seqlens_k": bounds,
            "max_seqlen_q": self.longest_query(step),
            "max_seqlen_k": step.max_key_len,
            **step.mask,
        }
        if step.block_table is not None:
            arguments["block_table"] = step.block_table
        if self.kernel.version == 3:
            arguments["num_splits"] = step.num_splits
        return arguments

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor | None,
        lse: bool,
        layer: Arguments,
        step: Arguments,
        extra: Arguments,
    ) -> tuple[Tensor, Tensor | None]:
        if out is not None:
            extra = {"out": out, **extra}
        if not lse:
            return self.function(query, key, value, **layer, **step, **extra), None
        result = self.function(query, key, value, **layer, **step, **extra, **self._lse)
        return result[0], result[1]


def _own(kernel: Kernel) -> tuple[str, ...]:
    """Return the arguments that only some builds of FA3 have."""
    sinks = ("sinks",) if kernel.sink_heads.value else ()
    return (*sinks, "out") if kernel.out.value else sinks


@cache
def adapter(kernel: Kernel, *, paged: bool) -> Adapter:
    """Return the adapter of one build; imports its library.

    Raises:
        ImportError: the library cannot be imported.
        KernelMismatchError: its version, build or signature does not fit.
    """
    if kernel.library is VLLM:
        return VllmAdapter(kernel, paged=paged)
    if kernel.version == 3 and paged:
        return KvCacheAdapter(kernel, paged=paged)
    return VarlenAdapter(kernel, paged=paged)


def kernel_of(plan: BackendPlan) -> Kernel:
    """Return the build that a plan names."""
    for kernel in KERNELS:
        named = f"{kernel.library.distribution} ({kernel.module})"
        if plan.provider == named and plan.path.startswith(f"FA{kernel.version}"):
            return kernel
    raise KernelMismatchError(f"the plan's provider {plan.provider!r} with {plan.path!r} is none of this plugin's")
