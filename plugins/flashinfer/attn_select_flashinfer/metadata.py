"""What ``FLASHINFER`` builds once per step: the batch in parts, each run by one kernel, and how the kernel is called.

A part holds what its step fixes. What a layer fixes (scales, sinks) comes as ``LayerTerms``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.backend import BackendContext
from attn_select.runtime.torch_dtypes import FP8_DTYPES
from attn_select_flashinfer.common import LN2
from attn_select_flashinfer.library import flashinfer
from attn_select_flashinfer.page_lists import PageLists
from attn_select_flashinfer.terms import LayerTerms
from attn_select_flashinfer.wrappers import NativeKernel

NO_KEYS = -4e4
"""FlashInfer's LSE is base 2, and -5e4 for a row without keys (include/flashinfer/math.cuh 0.6.14, ``math::inf``): no
finite scores come near."""
E4M3 = FP8_DTYPES["fp8_e4m3"]


@dataclass(slots=True, kw_only=True)
class Part(ABC):
    """Requests whose tokens are ``start .. end - 1``, run by one call.

    Attributes:
        phase: whose plan the call follows.
        path: which kernel it is, as the plan has it.
    """

    phase: str
    path: str
    start: int
    end: int

    @abstractmethod
    def attend(self, terms: LayerTerms, query: Tensor, kv_cache: Tensor, output: Tensor, lse: Tensor | None) -> None:
        """Attend.

        Args:
            query: ``(end - start, num_heads, head_size)`` in the compute dtype.
            kv_cache: ``(num_blocks, 2, …)``.
            output: contiguous ``(end - start, num_heads, head_size)``, written.
            lse: contiguous float32 ``(end - start, num_heads)``, written in the runtime's convention where given.
        """


@dataclass(slots=True, kw_only=True)
class NativePart(Part):
    """A call of a planned wrapper.

    Attributes:
        wrapper: FlashInfer's, planned for this step.
        kernel: what it was planned with.
        lists: the pages that it reads.
    """

    wrapper: Any
    kernel: NativeKernel
    lists: PageLists

    def attend(self, terms: LayerTerms, query: Tensor, kv_cache: Tensor, output: Tensor, lse: Tensor | None) -> None:
        self.run(terms, query, kv_cache, output, lse)
        if lse is not None:
            natural_lse(lse, terms.sinks)

    def run(self, terms: LayerTerms, query: Tensor, kv_cache: Tensor, output: Tensor, lse: Tensor | None) -> None:
        """Attend; the LSE in base 2."""
        kernel = self.kernel
        arguments, scales, divisor = terms.native(kernel)
        if divisor is not None:
            query = ops.quantize_fp8(query, divisor, kernel.query_dtype) if kernel.fp8_query else query / divisor
        if lse is None:
            self.wrapper.run(query, kv_cache, *arguments, out=output, **scales)
        else:
            self.wrapper.run(query, kv_cache, *arguments, out=output, lse=lse, return_lse=True, **scales)


@dataclass(slots=True, kw_only=True)
class FIPrefill(NativePart):
    """Queries of any length, by ``BatchPrefillWithPagedKVCacheWrapper``.

    Attributes:
        qo_indptr: int32 ``(B + 1,)`` on the host, prefix sums of the query lengths.
        causal: whether queries see keys up to their own position.
    """

    qo_indptr: Tensor
    causal: bool


@dataclass(slots=True, kw_only=True)
class FIDecode(NativePart):
    """One token per request, by ``BatchDecodeWithPagedKVCacheWrapper``."""


@dataclass(slots=True, kw_only=True)
class FICascade(Part):
    """A prefix that all requests share, attended to once by all queries, and each request's rest; merged.

    FlashInfer's ``MultiLevelCascadeAttentionWrapper`` does the same, but takes one softmax scale per plan instead of
    one per layer, no FP8 scales, no output and no sinks, and returns no LSE.
    """

    prefix: FIPrefill
    rest: FIPrefill

    def attend(self, terms: LayerTerms, query: Tensor, kv_cache: Tensor, output: Tensor, lse: Tensor | None) -> None:
        if lse is None:
            lse = output.new_empty(output.shape[:2], dtype=torch.float32)
        of_prefix, prefix_lse = torch.empty_like(output), torch.empty_like(lse)
        self.rest.run(terms, query, kv_cache, output, lse)
        self.prefix.run(terms, query, kv_cache, of_prefix, prefix_lse)
        flashinfer().merge_state_in_place(output, lse, of_prefix, prefix_lse)
        natural_lse(lse, terms.sinks)


@dataclass(slots=True, kw_only=True)
class TRTLLMPart(Part):
    """What both TRT-LLM calls take.

    Attributes:
        workspace: zeroed once; its first bytes are counters that the kernels leave at zero.
        block_tables: int32 ``(B, W)``, contiguous.
        seq_lens: int32 ``(B,)`` on the device.
        max_seq_len: the most keys of a request, or a bound.
        step: the arguments of the call that the step fixes.
    """

    workspace: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    max_seq_len: int
    window_left: int
    kv_layout: str
    fp8_query: bool
    step: dict[str, Any] = field(init=False, repr=False)

    def _shared(self) -> dict[str, Any]:
        """Return what both functions take of a step."""
        return {
            "workspace_buffer": self.workspace,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "window_left": self.window_left,
            "kv_layout": self.kv_layout,
        }

    def _call(
        self, function: Any, terms: LayerTerms, query: Tensor, kv_cache: Tensor, output: Tensor, lse: Tensor | None
    ) -> None:
        bmm1, bmm2 = terms.trtllm(self.fp8_query)
        more: dict[str, Any] = self.step
        if lse is not None:
            more = {**more, "lse": lse, "return_lse": True}
        if terms.block_scale is not None:
            more = {**more, "out_dtype": "nvfp4", "o_sf_scale": terms.output_scale}
            output = terms.fp4_output(output, self.start)
        # The kernel is told no strides of the query.
        query = ops.quantize_fp8(query, terms.scales.q, E4M3) if self.fp8_query else query.contiguous()
        function(query, kv_cache, bmm1_scale=bmm1, bmm2_scale=bmm2, sinks=terms.sinks, out=output, **more)
        if lse is not None:
            natural_lse(lse, terms.sinks)


@dataclass(slots=True, kw_only=True)
class TRTLLMPrefill(TRTLLMPart):
    """Causal queries of any length, by ``trtllm_batch_context_with_kv_cache``.

    Attributes:
        cum_seq_lens_q, cum_seq_lens_kv: int32 ``(B + 1,)`` on the device.
        max_q_len: the longest query.
    """

    cum_seq_lens_q: Tensor
    cum_seq_lens_kv: Tensor
    max_q_len: int

    def __post_init__(self) -> None:
        self.step = {
            **self._shared(),
            "max_q_len": self.max_q_len,
            "max_kv_len": self.max_seq_len,
            "batch_size": len(self.seq_lens),
            "cum_seq_lens_q": self.cum_seq_lens_q,
            "cum_seq_lens_kv": self.cum_seq_lens_kv,
        }

    def attend(self, terms: LayerTerms, query: Tensor, kv_cache: Tensor, output: Tensor, lse: Tensor | None) -> None:
        self._call(flashinfer().trtllm_batch_context_with_kv_cache, terms, query, kv_cache, output, lse)


@dataclass(slots=True, kw_only=True)
class TRTLLMDecode(TRTLLMPart):
    """Short queries, by ``trtllm_batch_decode_with_kv_cache``.

    Attributes:
        backend: ``xqa`` or ``trtllm-gen``.
        q_len_per_req: tokens of every request.
        mask: XQA's for more than one token, uint16 ``(B, q_len_per_req, 2 * ceil(q_len_per_req / 32))``, a bit per
            draft token that is seen.
        keyless: bool ``(end - start,)`` on the device, rows of requests without keys, to be blanked.
    """

    backend: str
    q_len_per_req: int
    mask: Tensor | None
    keyless: Tensor | None

    def __post_init__(self) -> None:
        self.step = {
            **self._shared(),
            "max_seq_len": self.max_seq_len,
            "q_len_per_req": self.q_len_per_req,
            "mask": self.mask,
            "backend": self.backend,
        }

    def attend(self, terms: LayerTerms, query: Tensor, kv_cache: Tensor, output: Tensor, lse: Tensor | None) -> None:
        self._call(flashinfer().trtllm_batch_decode_with_kv_cache, terms, query, kv_cache, output, lse)
        if self.keyless is not None:  # XQA writes NaN there with an FP8 cache
            blanked = output.view(torch.uint8) if output.dtype in FP8_DTYPES.values() else output
            blanked.masked_fill_(self.keyless.view(-1, 1, 1), 0)


@dataclass(slots=True)
class FlashInferMetadata:
    """One step for all layers of a kind.

    Attributes:
        context: the kind that it was planned for.
        num_actual_tokens: T.
        parts: decodes first.
    """

    context: BackendContext
    num_actual_tokens: int
    parts: list[Part] = field(default_factory=list)


def natural_lse(lse: Tensor, sinks: Tensor | None) -> None:
    """Convert FlashInfer's LSE, ``(T, num_heads)`` in base 2, in place; a row without keys has -inf or its sink."""
    empty = lse < NO_KEYS
    lse.mul_(LN2)
    if sinks is None:
        lse.masked_fill_(empty, -torch.inf)
    else:
        torch.where(empty, sinks, lse, out=lse)
