"""One adapter per provider of the kernel: the rest of the plugin calls all of them alike.

All three compute 128 query heads on pages of 128 tokens. They read the page table as packed rows, and older releases
the cache as packed pages, whatever the strides. Rows of a request without keys are not written (vllm-project/vllm
csrc/attention/mla/sm100_cutlass_mla_kernel.cu 0f5257e, args_from_options, and beside it
cutlass_sm100_mla/kernel/sm100_fmha_mla_tma_warpspecialized.hpp 236e0fe, compute; flashinfer-ai/flashinfer
include/flashinfer/attention v0.6.14 likewise).
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from attn_select.environment import WRONG_VERSION, Environment
from attn_select.errors import KernelMismatchError
from attn_select_cutlass_mla.cutlass_mla import HEADS
from attn_select_cutlass_mla.providers import FLASHINFER, PROVIDERS, SGL_KERNEL, VLLM, Provider

RANK, ROPE = 512, 64
PAGE = 128
"""Tokens."""
BYTES_PER_SPLIT = HEADS * (RANK + 1) * 4
"""Of partial output and LSE of one request in float32 (get_workspace_size of the kernel)."""
QUERY_AND_CACHE = ("q_nope", "q_pe", "kv_c_and_k_pe_cache", "seq_lens", "page_table", "workspace")
WORKSPACE_ARGUMENTS = ("max_seq_len", "num_batches", "sm_count", "num_kv_splits")


class Adapter(ABC):
    """The kernel as one distribution brings it. Shapes: B requests of one query each.

    Args:
        provider: the distribution.

    Raises:
        ImportError: the module cannot be imported.
        KernelMismatchError: its version is another, or a function is missing or has another signature.
    """

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        environment, library = Environment(), provider.library
        version = environment.version(library.distribution)
        if version is not None and environment.state(library) == WRONG_VERSION:
            text = f"{provider.label}: {library.distribution} {version} is installed, {library.version} is needed"
            raise KernelMismatchError(text, hint=library.install)
        self.module = importlib.import_module(provider.module)

    def _function(self, name: str, *parameters: str) -> Callable[..., Any]:
        """Return a function of the module that takes exactly these parameters, and maybe others with defaults."""
        function: Callable[..., Any] | None = getattr(self.module, name, None)
        where = f"{self.provider.label}: {self.provider.module}.{name}"
        if function is None:
            raise self._mismatch(f"{where} does not exist")
        has = inspect.signature(function).parameters
        wanted = [p.name for p in has.values() if p.default is p.empty]
        if [*has][: len(parameters)] != [*parameters] or len(wanted) > len(parameters):
            raise self._mismatch(f"{where} takes ({', '.join(has)}): accepted is ({', '.join(parameters)})")
        return function

    def _mismatch(self, text: str) -> KernelMismatchError:
        wanted = f"{self.provider.library.distribution}{self.provider.library.version}"
        return KernelMismatchError(
            text, hint=f"this plugin calls the functions of {wanted}; option provider chooses another distribution"
        )

    def _ask(self, size: Callable[..., Any]) -> None:
        """Ask for a workspace: a build without code for SM100 has the Python function alone."""
        try:
            size(PAGE, 1, 1, 1)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            raise self._mismatch(
                f"{self.provider.label} is built without this kernel ({type(error).__name__}: {error})"
            ) from error

    @abstractmethod
    def workspace_bytes(self, max_seq_len: int, num_requests: int, sm_count: int, splits: int) -> int:
        """Return what a call needs: pages per request times 128, B, the device's SMs, KV splits or -1."""

    def query_factor(self, scale: float) -> float:
        """Return what the query is multiplied by for a softmax scale."""
        return 1.0

    @abstractmethod
    def decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        workspace: Tensor,
        scale: float,
        splits: int,
        out: Tensor,
        lse: Tensor,
    ) -> Tensor:
        """Attend with the one query of each request, the latest token's.

        Args:
            query: ``(B, 128, 576)``, contiguous.
            kv_cache: ``(num_pages, 128, 576)`` in the query's dtype, contiguous.
            seq_lens: int32 ``(B,)``.
            page_table: int32 ``(B, W)``, contiguous.
            workspace: uint8.
            out: ``(B, 128, 512)``, contiguous; bfloat16 for an e4m3 query, else in the query's dtype.
            lse: float32 ``(B, 128)``, contiguous, natural logarithm, for providers that return it; ``(0,)``: unwanted.

        Returns:
            The output: ``out``, or what a provider returns that does not write there.
        """


class Vllm(Adapter):
    """``sm100_cutlass_mla_decode``."""

    def __init__(self, provider: Provider) -> None:
        super().__init__(provider)
        name = "sm100_cutlass_mla_decode"
        self._decode = self._function(name, "out", "lse", *QUERY_AND_CACHE, "scale", "num_kv_splits")
        self._size = self._function("sm100_cutlass_mla_get_workspace_size", *WORKSPACE_ARGUMENTS)
        self._ask(self._size)

    def workspace_bytes(self, max_seq_len: int, num_requests: int, sm_count: int, splits: int) -> int:
        """As ``Adapter.workspace_bytes``."""
        return int(self._size(max_seq_len, num_requests, sm_count, splits))

    def decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        workspace: Tensor,
        scale: float,
        splits: int,
        out: Tensor,
        lse: Tensor,
    ) -> Tensor:
        """As ``Adapter.decode``."""
        latent, rope = query.split_with_sizes([RANK, ROPE], dim=-1)
        self._decode(out, lse, latent, rope, kv_cache, seq_lens, page_table, workspace, scale, splits)
        return out


class SglKernel(Adapter):
    """``sgl_kernel.cutlass_mla_decode``, which returns an output of its own and no LSE."""

    def __init__(self, provider: Provider) -> None:
        super().__init__(provider)
        self._decode = self._function("cutlass_mla_decode", *QUERY_AND_CACHE, "sm_scale", "num_kv_splits")
        self._size = self._function("cutlass_mla_get_workspace_size", *WORKSPACE_ARGUMENTS)
        self._ask(self._size)

    def workspace_bytes(self, max_seq_len: int, num_requests: int, sm_count: int, splits: int) -> int:
        """As ``Adapter.workspace_bytes``."""
        return int(self._size(max_seq_len, num_requests, sm_count, splits))

    def decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        workspace: Tensor,
        scale: float,
        splits: int,
        out: Tensor,
        lse: Tensor,
    ) -> Tensor:
        """As ``Adapter.decode``."""
        latent, rope = query.split_with_sizes([RANK, ROPE], dim=-1)
        found: Tensor = self._decode(latent, rope, kv_cache, seq_lens, page_table, workspace, scale, splits)
        return found


class FlashInfer(Adapter):
    """The function of FlashInfer's compiled module: its wrapper would copy the whole cache into one tensor.

    It is called like that wrapper calls it, on a cache that is one tensor already. Compiles at the first load.
    """

    def __init__(self, provider: Provider) -> None:
        super().__init__(provider)
        built = self._function("get_mla_module")()
        name = "cutlass_mla_paged_attention"
        if not hasattr(built, name):
            raise self._mismatch(f"{provider.label}: its module has no {name}")
        self._decode: Callable[..., Any] = getattr(built, name)

    def workspace_bytes(self, max_seq_len: int, num_requests: int, sm_count: int, splits: int) -> int:
        """Return a bound: the module has no such function, and the kernel takes at most one split per SM.

        ``max(1, sm_count / B)`` splits of B requests (flashinfer-ai/flashinfer
        include/flashinfer/attention/blackwell/device/sm100_mla.hpp v0.6.14, set_split_kv), later ones half as many.
        """
        return BYTES_PER_SPLIT * max(num_requests, sm_count)

    def query_factor(self, scale: float) -> float:
        """As ``Adapter.query_factor``: the kernel has a scale of its own, ``1 / sqrt(128 + 64)``."""
        factor = float(scale * 192**0.5)
        return 1.0 if abs(factor - 1) < 1e-6 else factor

    def decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        workspace: Tensor,
        scale: float,
        splits: int,
        out: Tensor,
        lse: Tensor,
    ) -> Tensor:
        """As ``Adapter.decode``."""
        self._decode(workspace, out, lse, query, kv_cache, seq_lens, page_table, 1.0)
        return out


_ADAPTERS: dict[str, type[Adapter]] = {
    VLLM.distribution: Vllm,
    SGL_KERNEL.distribution: SglKernel,
    FLASHINFER.distribution: FlashInfer,
}


@cache
def adapter_for(label: str | None) -> Adapter:
    """Return the adapter of exactly the provider that a plan names; one per provider.

    Raises:
        ImportError, KernelMismatchError: it cannot be imported or called.
    """
    provider = next(provider for provider in PROVIDERS if provider.label == label)
    return _ADAPTERS[provider.library.distribution](provider)
