"""One adapter per build of the kernel: the rest of the plugin calls all of them alike.

All three compute 128 query heads on pages of 128 tokens. They read the page table as packed rows, and older releases
the cache as packed pages, whatever the strides. Rows of a request without keys are not written (vllm-project/vllm
csrc/attention/mla/sm100_cutlass_mla_kernel.cu 0f5257e, args_from_options, and beside it
cutlass_sm100_mla/kernel/sm100_fmha_mla_tma_warpspecialized.hpp 236e0fe, compute; flashinfer-ai/flashinfer
include/flashinfer/attention v0.6.14 likewise).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from torch import Tensor

from attn_select.runtime.installed_builds import InstalledBuild
from attn_select_cutlass_mla.facts.builds import FLASHINFER, SGL_KERNEL, VLLM, CutlassMLAKernel, build_of
from attn_select_cutlass_mla.facts.cutlass_mla import HEADS

RANK, ROPE = 512, 64
PAGE = 128
"""Tokens."""
BYTES_PER_SPLIT = HEADS * (RANK + 1) * 4
"""Of partial output and LSE of one request in float32 (get_workspace_size of the kernel)."""
_QUERY_AND_CACHE = ("q_nope", "q_pe", "kv_c_and_k_pe_cache", "seq_lens", "page_table", "workspace")


@dataclass(slots=True)
class CutlassMLAMetadata:
    """One batch of B decodes."""

    num_reqs: int  # B; requests without a query are left out
    page_table: Tensor  # int32 ``(B, W)``, contiguous
    seq_lens: Tensor  # int32 ``(B,)`` on the device
    workspace: Tensor  # uint8, large enough for this batch
    empty: Tensor | None  # bool ``(B,)`` on the device, which requests have no keys; None: all have some


class Adapter(ABC):
    """The kernel as one distribution builds it. Shapes: B requests of one query each."""

    def __init__(self, kernel: CutlassMLAKernel) -> None:
        self.kernel, self.build = kernel, build_of(kernel)
        self._installed = InstalledBuild(self.build)

    @abstractmethod
    def workspace_bytes(self, max_seq_len: int, num_requests: int, sm_count: int) -> int:
        """Return what a call needs: pages per request times 128, B, the device's SMs."""

    def query_factor(self, scale: float) -> float:
        """Return what the query is multiplied by for a softmax scale."""
        return 1.0

    @abstractmethod
    def decode(
        self, query: Tensor, kv_cache: Tensor, batch: CutlassMLAMetadata, scale: float, out: Tensor, lse: Tensor
    ) -> Tensor:
        """Attend with the one query of each request, the latest token's; return the output: ``out``, or another tensor.

        ``query (B, 128, 576)`` and ``kv_cache (num_pages, 128, 576)`` have one dtype and are contiguous. An adapter
        with a ``query_factor`` expects the softmax's ``scale`` in the query. ``out (B, 128, 512)`` is contiguous,
        bfloat16 for an e4m3 query, else in its dtype. ``lse`` is float32 ``(B, 128)``, contiguous, its natural
        logarithm written by builds that return it; ``(0,)``: unwanted.
        """


class SizedByItsLibrary(Adapter):
    """A build whose library has a function for the workspace's size, and one that takes the query in two parts."""

    size_function: ClassVar[str]
    decode_function: ClassVar[str]
    written: ClassVar[tuple[str, ...]] = ()  # the tensors that are passed to be written
    scale: ClassVar[str]  # the argument for the softmax scale

    def __init__(self, kernel: CutlassMLAKernel) -> None:
        super().__init__(kernel)
        arguments = (*self.written, *_QUERY_AND_CACHE, self.scale, "num_kv_splits")
        self._decode = self._installed.function(self.decode_function, arguments)
        arguments = ("max_seq_len", "num_batches", "sm_count", "num_kv_splits")
        self._size = self._installed.function(self.size_function, arguments)
        try:
            self._size(PAGE, 1, 1, 1)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            # A build without code for SM100 has the Python function all the same.
            text = f"it is built without this kernel ({type(error).__name__}: {error})"
            raise self._installed.mismatch(text) from error

    def workspace_bytes(self, max_seq_len: int, num_requests: int, sm_count: int) -> int:
        """As ``Adapter.workspace_bytes``."""
        return int(self._size(max_seq_len, num_requests, sm_count, self.kernel.num_kv_splits))

    def decode(
        self, query: Tensor, kv_cache: Tensor, batch: CutlassMLAMetadata, scale: float, out: Tensor, lse: Tensor
    ) -> Tensor:
        """As ``Adapter.decode``."""
        latent, rope = query.split_with_sizes([RANK, ROPE], dim=-1)
        written = (out, lse) if self.written else ()
        tables = (batch.seq_lens, batch.page_table, batch.workspace)
        found = self._decode(*written, latent, rope, kv_cache, *tables, scale, self.kernel.num_kv_splits)
        return out if self.written else found


class Vllm(SizedByItsLibrary):
    """``sm100_cutlass_mla_decode``."""

    size_function = "sm100_cutlass_mla_get_workspace_size"
    decode_function = "sm100_cutlass_mla_decode"
    written = ("out", "lse")
    scale = "scale"


class SglKernel(SizedByItsLibrary):
    """``sgl_kernel.cutlass_mla_decode``, which returns an output of its own and no LSE."""

    size_function = "cutlass_mla_get_workspace_size"
    decode_function = "cutlass_mla_decode"
    scale = "sm_scale"


# It is called like that wrapper calls it, on a cache that is one tensor already. Compiles at the first load.
class FlashInfer(Adapter):
    """The function of FlashInfer's compiled module: its wrapper would copy the whole cache into one tensor."""

    def __init__(self, kernel: CutlassMLAKernel) -> None:
        super().__init__(kernel)
        compiled = self._installed.function("get_mla_module")()
        if not hasattr(compiled, "cutlass_mla_paged_attention"):
            raise self._installed.mismatch("the module of get_mla_module() has no cutlass_mla_paged_attention")
        self._decode: Callable[..., Any] = compiled.cutlass_mla_paged_attention

    def workspace_bytes(self, max_seq_len: int, num_requests: int, sm_count: int) -> int:
        """Return a bound: the module has no such function, and the kernel takes at most one split per SM."""
        # ``max(1, sm_count / B)`` splits of B requests (flashinfer-ai/flashinfer
        # include/flashinfer/attention/blackwell/device/sm100_mla.hpp v0.6.14, set_split_kv), later ones half as many.
        return BYTES_PER_SPLIT * max(num_requests, sm_count)

    def query_factor(self, scale: float) -> float:
        """As ``Adapter.query_factor``: the kernel has a scale of its own, ``1 / sqrt(128 + 64)``."""
        factor = float(scale * 192**0.5)
        return 1.0 if abs(factor - 1) < 1e-6 else factor

    def decode(
        self, query: Tensor, kv_cache: Tensor, batch: CutlassMLAMetadata, scale: float, out: Tensor, lse: Tensor
    ) -> Tensor:
        """As ``Adapter.decode``."""
        self._decode(batch.workspace, out, lse, query, kv_cache, batch.seq_lens, batch.page_table, 1.0)
        return out


_ADAPTERS: dict[str, type[Adapter]] = {
    VLLM.distribution: Vllm,
    SGL_KERNEL.distribution: SglKernel,
    FLASHINFER.distribution: FlashInfer,
}


@cache
def adapter_for(kernel: CutlassMLAKernel) -> Adapter:
    """Return the adapter that runs a plan's kernel; one per kernel. Importing its library may raise."""
    return _ADAPTERS[kernel.provider](kernel)
