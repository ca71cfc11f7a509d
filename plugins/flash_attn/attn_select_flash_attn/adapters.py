"""One adapter per function of a FlashAttention build: the rest of the plugin calls all of them alike.

A call has three kinds of arguments: tensors; what a layer fixes (``layer_arguments``, made once per layer); and what a
step fixes (``step_arguments``, made once per step for all layers). So nothing is translated at the call itself.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_select.environment import WRONG_VERSION, Environment
from attn_select.errors import KernelMismatchError
from attn_select_flash_attn.providers import VLLM, Kernel

Arguments = dict[str, Any]
_SCHEDULE_ARGUMENTS = (
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
    """What all calls of a kind of layers have in common; schedules depend on it.

    Attributes:
        num_heads, num_kv_heads, head_size, value_size: of the kernel's Q, K and V.
        dtype: of Q, K and V.
        softcap: of logits, 0.0 for none.
        page_size: tokens per block; None where K and V lie packed.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype
    softcap: float
    page_size: int | None


@dataclass(slots=True)
class Step:
    """The lengths and the mask of one call for B requests.

    Attributes:
        query_start_loc: int32 ``(B + 1,)`` prefix sums of the query lengths.
        num_tokens: queries.
        max_query_len, max_key_len: the most of a request, or bounds.
        causal: each query sees keys up to its own position, the last query being at the last key.
        window: keys seen to the left and right, -1 for all.
        num_splits: parts that a request's keys are split into at most, 0 for the kernel's choice.
        seq_lens: int32 ``(B,)`` keys of each request; None where packed.
        block_table: int32 ``(B, W)``; None where packed.
        key_start_loc: int32 ``(B + 1,)`` prefix sums of the key lengths where packed.
    """

    query_start_loc: Tensor
    num_tokens: int
    max_query_len: int
    max_key_len: int
    causal: bool
    window: tuple[int, int]
    num_splits: int
    seq_lens: Tensor | None = None
    block_table: Tensor | None = None
    key_start_loc: Tensor | None = None

    @property
    def num_reqs(self) -> int:
        """B."""
        return len(self.query_start_loc) - 1

    @property
    def mask(self) -> Arguments:
        """Causality and window as every function names them."""
        return {"causal": self.causal, "window_size": self.window}


class Adapter(ABC):
    """One function of one build.

    Args:
        kernel: the build.
        paged: whether K and V are paged, or packed one request behind the other.

    Attributes:
        function: returns the output alone unless its argument for the LSE says otherwise.
        latent_query: name of the argument for the query that is scored against V.

    Raises:
        KernelMismatchError: the function is missing, or takes other arguments than this adapter passes.
    """

    function_name: ClassVar[str] = "flash_attn_varlen_func"
    latent_query: ClassVar[str] = "qv"

    def __init__(self, kernel: Kernel, *, paged: bool) -> None:
        self.kernel, self.paged = kernel, paged
        self.module = _module(kernel)
        self.function = self._checked(self.function_name, self._passes())
        self._schedule: Callable[..., Tensor] | None = None
        if kernel.version == 3 and paged and hasattr(self.module, "get_scheduler_metadata"):
            self._schedule = self._checked("get_scheduler_metadata", _SCHEDULE_ARGUMENTS)

    @abstractmethod
    def _passes(self) -> tuple[str, ...]:
        """Return the names of all arguments that may be passed."""

    def _checked(self, name: str, passed: tuple[str, ...]) -> Callable[..., Any]:
        function = getattr(self.module, name, None)
        where = f"{self.kernel.label}: {self.kernel.module}.{name}"
        if function is None:
            raise KernelMismatchError(f"{where} does not exist", hint=_hint(self.kernel))
        parameters = inspect.signature(function).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        missing = [argument for argument in passed if argument not in parameters]
        if missing and not open_ended:
            text = f"{where} takes no argument {', '.join(missing)}; it takes {', '.join(parameters)}"
            raise KernelMismatchError(text, hint=_hint(self.kernel))
        checked: Callable[..., Any] = function
        return checked

    def layer_arguments(
        self, scale: float, softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None
    ) -> Arguments:
        """Return what a layer fixes; ``sinks`` bfloat16 ``(num_heads,)``."""
        arguments: Arguments = {"softmax_scale": scale, "softcap": softcap}
        if alibi_slopes is not None:
            arguments["alibi_slopes"] = alibi_slopes
        if sinks is not None:
            arguments["s_aux" if self.kernel.library is VLLM else "sinks"] = sinks
        return arguments

    @abstractmethod
    def step_arguments(
        self, step: Step, schedule: Tensor | None = None, key_start_loc: Tensor | None = None
    ) -> Arguments:
        """Return what a step fixes.

        Args:
            schedule: from ``schedule``.
            key_start_loc: int32, at least ``(B + 1,)``: where prefix sums of ``seq_lens`` go if they are needed.
        """

    def longest_query(self, step: Step) -> int:
        """Return ``max_seqlen_q``.

        With 1 FA2 takes every request to have exactly one query (csrc/flash_attn/flash_api.cpp v2.8.3, mha_varlen_fwd),
        and splits its keys as it likes; 2 changes nothing else.
        """
        alone = step.max_query_len == 1 and self.kernel.version == 2
        return 2 if alone and (step.num_tokens != step.num_reqs or step.num_splits == 1) else step.max_query_len

    def key_bound(self, step: Step, shape: Shape) -> int:
        """Return what the function takes for the most keys of a request."""
        return step.max_key_len

    def schedule(self, step: Step, shape: Shape) -> Tensor | None:
        """Return FA3's schedule of a step, int32 (hopper/flash_api.cpp, mha_fwd_get_scheduler_metadata), or None.

        Every argument must be what the function will see: the schedule's size and parts follow from them.
        """
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

    @abstractmethod
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
        """Attend.

        Args:
            query: ``(T, num_heads, head_size)``.
            key: ``(num_blocks, page_size, num_kv_heads, head_size)`` or packed ``(S, num_kv_heads, head_size)``.
            value: likewise with the value's width.
            out: ``(T, num_heads, value_size)``, written; only where ``kernel.out`` says so. None: the kernel makes one.
            lse: whether the log-sum-exp is wanted.
            layer, step: from ``layer_arguments`` and ``step_arguments``.
            extra: descales ``(B, num_kv_heads)``, the latent query.

        Returns:
            The output, and where wanted the LSE, float32 ``(num_heads, T)`` as the kernel gives it.
        """


def _hint(kernel: Kernel) -> str:
    wanted = f"{kernel.library.distribution}{kernel.library.version or ''}"
    return f'written for {wanted}; install such a version, or pin another provider (provider = "…")'


def _module(kernel: Kernel) -> Any:
    """Import a build's module and check its version."""
    environment = Environment()
    library = kernel.library
    version = environment.version(library.distribution)
    if version is not None and environment.state(library) == WRONG_VERSION:
        text = f"{kernel.label}: {library.distribution} {version} is installed, {library.version} is needed"
        raise KernelMismatchError(text, hint=library.install)
    module = importlib.import_module(kernel.module)
    if not getattr(module, f"FA{kernel.version}_AVAILABLE", True):
        why = getattr(module, f"FA{kernel.version}_UNAVAILABLE_REASON", "no reason given")
        raise KernelMismatchError(f"{kernel.label}: {kernel.module} has no FA{kernel.version} here: {why}")
    return module
