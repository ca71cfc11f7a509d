"""One adapter per function of a FlashAttention build (vLLM's, upstream's, SGLang's); the runtime calls all alike.

A call has three kinds of arguments: tensors, arguments that are fixed per layer (``layer_arguments``), and arguments
that are fixed per step for all layers (``step_arguments``). No argument is translated at the call itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_select.runtime.installed_builds import InstalledBuild
from attn_select.runtime.metadata import prefix_sums
from attn_select.runtime.terms import Outputs, Terms
from attn_select_flash_attn.facts.builds import (
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    SGL_KERNEL,
    SGLANG_KERNEL,
    VLLM,
    FlashAttnBuild,
    FlashAttnKernel,
    GatherKernel,
    build_of,
)
from attn_select_flash_attn.runtime.lse import by_token

Arguments = dict[str, Any]
_DESCALES = ("q_descale", "k_descale", "v_descale")
_SCHEDULE_POSITIONAL = ("batch_size", "max_seqlen_q", "max_seqlen_k")
_SCHEDULE_HEADS = {False: ("num_heads_q", "num_heads_kv"), True: ("num_heads", "num_heads_k")}
"""By whether it is SGLang's build."""
_SCHEDULE_KEYWORDS = (
    "qkv_dtype",
    "headdim_v",
    "cu_seqlens_q",
    "page_size",
    "causal",
    "window_size",
    "has_softcap",
    "num_splits",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What all calls of a kind of layers have in common. Schedules depend on it."""

    num_heads: int  # num_heads, num_kv_heads, head_size, value_size: of the kernel's Q, K and V
    num_kv_heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype  # of Q, K and V
    softcap: float  # of logits, 0.0 for none
    page_size: int | None  # tokens per block; None where K and V lie packed


@dataclass(slots=True)
class Step:
    """The lengths and the mask of one call for B requests."""

    query_start_loc: Tensor  # int32 ``(B + 1,)`` prefix sums of the query lengths
    num_tokens: int  # queries
    max_query_len: int  # max_query_len, max_key_len: of the longest request, or an upper bound
    max_key_len: int
    causal: bool  # each query sees keys up to its own position; the last query stands at the last key
    window: tuple[int, int]  # keys seen to the left and right, -1 for all
    num_splits: int  # most parts of a request's keys; 0: the kernel chooses
    seq_lens: Tensor | None = None  # int32 ``(B,)`` keys of each request; None where packed
    block_table: Tensor | None = None  # int32 ``(B, W)``; None where packed
    # int32 ``(B + 1,)``, prefix sums of the key lengths where packed; else a place for them, if they have one
    key_start_loc: Tensor | None = None
    schedule: Tensor | None = None  # FA3's, from ``Adapter.schedule``

    @property
    def num_reqs(self) -> int:
        """B."""
        return len(self.query_start_loc) - 1

    @property
    def mask(self) -> Arguments:
        """Causality and window as every function names them."""
        return {"causal": self.causal, "window_size": self.window}


class Adapter(ABC):
    """One function of one build."""

    function_name: ClassVar[str] = "flash_attn_varlen_func"
    tensors: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    latent_query: ClassVar[str] = "qv"  # name of the argument for the query that is scored against V
    sinks_argument: ClassVar[str] = "sinks"  # name of the argument for attention sinks

    @property
    def lse_argument(self) -> str:
        """Name of the argument that asks for the LSE."""
        return "return_softmax_lse"

    @property
    def sinks_dtype(self) -> torch.dtype:
        """What the function takes sinks in."""
        return torch.float32 if self.build.version == 4 else torch.bfloat16

    def __init__(self, build: FlashAttnBuild, *, paged: bool) -> None:
        # paged: whether K and V are paged, or packed one request behind the other
        self.build, self.paged = build, paged
        installed = InstalledBuild(build)
        if not getattr(installed.module, f"{build.kernel}_AVAILABLE", True):
            why = getattr(installed.module, f"{build.kernel}_UNAVAILABLE_REASON", "no reason given")
            raise installed.mismatch(f"{build.module} has no {build.kernel} here: {why}")
        # the installed function; it returns the output alone unless it is asked for the LSE
        self.function = installed.function(self.function_name, self.tensors, self._passes())
        self._schedule: Callable[..., Tensor] | None = None
        if build.version == 3 and paged and hasattr(installed.module, "get_scheduler_metadata"):
            heads = _SCHEDULE_HEADS[build.library in (SGLANG_KERNEL, SGL_KERNEL)]
            positional = (*_SCHEDULE_POSITIONAL, *heads, "headdim", "cache_seqlens")
            self._schedule = installed.function("get_scheduler_metadata", positional, _SCHEDULE_KEYWORDS)

    @abstractmethod
    def _passes(self) -> tuple[str, ...]:
        """Return the names of all arguments that may be passed by name."""

    def layer_arguments(self, terms: Terms) -> Arguments:
        """Return the arguments that are fixed per layer, descales aside."""
        arguments: Arguments = {"softmax_scale": terms.scale, "softcap": terms.logits_soft_cap or 0.0}
        if terms.alibi_slopes is not None:
            arguments["alibi_slopes"] = terms.alibi_slopes
        if terms.sinks is not None:
            arguments[self.sinks_argument] = terms.sinks.to(self.sinks_dtype)
        return arguments

    @abstractmethod
    def step_arguments(self, step: Step) -> Arguments:
        """Return the arguments that are fixed per step."""

    def longest_query(self, step: Step) -> int:
        """Return ``max_seqlen_q``."""
        # With 1 FA2 assumes exactly one query per request (csrc/flash_attn/flash_api.cpp v2.8.3, mha_varlen_fwd) and
        # chooses itself how to split keys. Where one of these is wrong, 2 is passed. Nothing else changes with it.
        alone = step.max_query_len == 1 and self.build.version == 2
        return 2 if alone and (step.num_tokens != step.num_reqs or step.num_splits == 1) else step.max_query_len

    def key_bound(self, step: Step, shape: Shape) -> int:
        """Return the bound on a request's keys that the function works with."""
        return step.max_key_len

    def schedule(self, step: Step, shape: Shape) -> Tensor | None:
        """Return FA3's schedule of a step, int32 (hopper/flash_api.cpp, mha_fwd_get_scheduler_metadata), or None."""
        # Every argument must be what the attention function will get: the schedule's size and contents follow from
        # them.
        if self._schedule is None:
            return None
        return self._schedule(
            step.num_reqs,
            step.max_query_len,
            self.key_bound(step, shape),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            step.seq_lens,
            qkv_dtype=shape.dtype,
            headdim_v=shape.value_size,
            cu_seqlens_q=step.query_start_loc,
            page_size=shape.page_size,
            has_softcap=shape.softcap > 0,
            num_splits=step.num_splits,
            **step.mask,
        )

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor | None, lse: bool, arguments: Arguments
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; return the output, and the LSE as the kernel gives it, float32 ``(num_heads, T)``, or None.

        ``query (T, num_heads, head_size)``; ``key (num_blocks, page_size, num_kv_heads, head_size)``, or packed ``(S,
        num_kv_heads, head_size)``, ``value`` likewise. ``out (T, num_heads, value_size)`` is for builds whose ``out``
        is true; None: the kernel makes one. ``arguments`` are those of layer and step, descales ``(B, num_kv_heads)``
        and a latent query.
        """
        if out is not None:
            arguments = {**arguments, "out": out}
        if not lse:
            return self.function(query, key, value, **arguments), None
        result = self.function(query, key, value, **arguments, **{self.lse_argument: True})
        return result[0], result[1]

    def write(
        self, query: Tensor, key: Tensor, value: Tensor, outputs: Outputs, arguments: Arguments, columns: int | None
    ) -> None:
        """As ``run``, into a layer's outputs: their output is the first ``columns`` of the kernel's, None: all."""
        direct = self.build.out.value and columns is None
        own = outputs.output if direct else None
        out, lse = self.run(query, key, value, own, outputs.lse is not None, arguments)
        if not direct:
            outputs.output.copy_(out[..., :columns])
        if outputs.lse is not None and lse is not None:
            outputs.lse.copy_(by_token(lse, self.build.version))


class VllmAdapter(Adapter):
    """vLLM's build: one function for all versions, paged and packed."""

    latent_query = "q_v"
    sinks_argument = "s_aux"

    def _passes(self) -> tuple[str, ...]:
        names = ("max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k", "seqused_k", "block_table", "q_v")
        masks = ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "s_aux")
        return (*names, *masks, *_DESCALES, "scheduler_metadata", "num_splits", "out", self.lse_argument, "fa_version")

    def layer_arguments(self, terms: Terms) -> Arguments:
        return {**super().layer_arguments(terms), "fa_version": self.build.version}

    def step_arguments(self, step: Step) -> Arguments:
        keys: Arguments = {"cu_seqlens_k": step.key_start_loc}
        if step.block_table is not None:
            keys = {"seqused_k": step.seq_lens, "block_table": step.block_table}
        return {
            "max_seqlen_q": self.longest_query(step),
            "cu_seqlens_q": step.query_start_loc,
            "max_seqlen_k": step.max_key_len,
            "num_splits": step.num_splits,
            "scheduler_metadata": step.schedule,
            **keys,
            **step.mask,
        }


class GatherAdapter(VllmAdapter):
    """vLLM's FA4 on rows of K and V that a list of each token names."""

    def _passes(self) -> tuple[str, ...]:
        return (*super()._passes(), "gather_kv_indices", "gather_kv_valid_length")


class KvCacheAdapter(Adapter):
    """Paged FA3, upstream's and SGLang's: ``flash_attn_with_kvcache`` with packed queries."""

    function_name = "flash_attn_with_kvcache"
    tensors = ("q", "k_cache", "v_cache")

    def _passes(self) -> tuple[str, ...]:
        names = ("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "qv", *_DESCALES)
        masks = ("softmax_scale", "causal", "window_size", "softcap", "scheduler_metadata", "num_splits")
        return (*names, *masks, self.lse_argument, *_own(self.build))

    def key_bound(self, step: Step, shape: Shape) -> int:
        """Return what the table holds: the function takes no bound (hopper/flash_api.cpp 0251105, mha_fwd)."""
        assert step.block_table is not None
        return step.block_table.shape[1] * (shape.page_size or 1)

    def step_arguments(self, step: Step) -> Arguments:
        return {
            "cache_seqlens": step.seq_lens,
            "page_table": step.block_table,
            "cu_seqlens_q": step.query_start_loc,
            "max_seqlen_q": step.max_query_len,
            "scheduler_metadata": step.schedule,
            "num_splits": step.num_splits,
            **step.mask,
        }


class VarlenAdapter(Adapter):
    """Packed K and V with upstream's FA3 and SGLang's, and upstream's FA2, which takes a paged cache as well."""

    @property
    def lse_argument(self) -> str:
        """Name of the argument that asks for the LSE."""
        upstream = self.build.library in (FLASH_ATTN_2, FLASH_ATTN_3)
        return "return_attn_probs" if upstream else "return_softmax_lse"

    def _passes(self) -> tuple[str, ...]:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        masks = ("softmax_scale", "causal", "window_size", "softcap")
        more = ("alibi_slopes", "block_table") if self.build.version == 2 else ("num_splits", *_own(self.build))
        return (*names, *masks, self.lse_argument, *more)

    def step_arguments(self, step: Step) -> Arguments:
        bounds = step.key_start_loc
        if step.seq_lens is not None:
            sums = prefix_sums(step.seq_lens)
            bounds = sums if bounds is None else bounds.copy_(sums)
        arguments: Arguments = {
            "cu_seqlens_q": step.query_start_loc,
            "cu_seqlens_k": bounds,
            "max_seqlen_q": self.longest_query(step),
            "max_seqlen_k": step.max_key_len,
            **step.mask,
        }
        if step.block_table is not None:
            arguments["block_table"] = step.block_table
        if self.build.version == 3:
            arguments["num_splits"] = step.num_splits
        return arguments


# It returns the LSE, or None, beside the output, and is the one that vLLM calls in its copy.
class CuteAdapter(Adapter):
    """FA4 of flash-attn-4: the function under ``flash_attn_varlen_func``, which alone takes ``out`` and descales."""

    function_name = "_flash_attn_fwd"
    sinks_argument = "learnable_sink"

    @property
    def lse_argument(self) -> str:
        """Name of the argument that asks for the LSE."""
        return "return_lse"

    def _passes(self) -> tuple[str, ...]:
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table")
        masks = ("softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "learnable_sink")
        return (*names, *masks, *_DESCALES, "num_splits", "out", self.lse_argument)

    def step_arguments(self, step: Step) -> Arguments:
        keys: Arguments = {"cu_seqlens_k": step.key_start_loc}
        if step.block_table is not None:
            keys = {"seqused_k": step.seq_lens, "page_table": step.block_table}
        left, right = (bound if bound >= 0 else None for bound in step.window)
        return {
            "cu_seqlens_q": step.query_start_loc,
            "max_seqlen_q": step.max_query_len,
            "max_seqlen_k": step.max_key_len,
            "num_splits": step.num_splits,
            "causal": step.causal,
            "window_size_left": left,
            "window_size_right": right,
            **keys,
        }

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor | None, lse: bool, arguments: Arguments
    ) -> tuple[Tensor, Tensor | None]:
        result = self.function(query, key, value, out=out, **arguments, **{self.lse_argument: lse})
        return result[0], result[1]


def _own(build: FlashAttnBuild) -> tuple[str, ...]:
    """Return the arguments that only some builds of FA3 have."""
    sinks = ("sinks",) if build.sink_heads.value else ()
    return (*sinks, "out") if build.out.value else sinks


@cache
def adapter_for(kernel: FlashAttnKernel) -> Adapter:
    """Return the adapter of the build that a plan's kernel names; one per kernel. Importing its library may raise."""
    build = build_of(kernel)
    if isinstance(kernel, GatherKernel):
        return GatherAdapter(build, paged=False)
    if build.library is FLASH_ATTN_4:
        return CuteAdapter(build, paged=kernel.paged)
    if build.distribution == VLLM.distribution:
        return VllmAdapter(build, paged=kernel.paged)
    if build.version == 3 and kernel.paged:
        return KvCacheAdapter(build, paged=True)
    return VarlenAdapter(build, paged=kernel.paged)
