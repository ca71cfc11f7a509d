"""How ``FLASHINFER`` calls its kernels: the parts of a step, each run by one kernel, and what a layer passes to each.

A part holds what its step fixes. What a layer fixes is ``LayerArguments``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_select.runtime import ops
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.torch_dtypes import FP8_DTYPES
from attn_select_flashinfer.facts.mha_kernels import TrtllmKernel
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.native_wrappers import E4M3, PhaseKernel
from attn_select_flashinfer.runtime.plans import Plan
from attn_select_flashinfer.runtime.scores import blank_rows, float_sinks, natural_lse, power_for


class Native(NamedTuple):
    """What ``run`` of a native wrapper gets."""

    arguments: tuple[Any, ...]  # behind query and cache
    keywords: dict[str, Any]  # scales, and sinks where ``run`` takes them
    # what the query is divided by: a float32 ``()`` tensor where it is quantised, a power of two where it is not, None
    # for 1
    query_scale: Tensor | float | None


class LayerArguments:
    """A layer's terms as the kernels take them, in different forms; each form is made once."""

    __slots__ = ("_made", "_output_scale", "_scale", "quantized", "scales", "sinks")

    def __init__(self, terms: Terms, *, quantized: bool) -> None:
        # terms: of their scales the host's floats are passed: a device tensor would have to be read back
        # quantized: whether the cache is FP8: otherwise the scales are not read
        self._scale, self.scales, self.quantized = terms.scale, terms.scales, quantized
        self.sinks = float_sinks(terms).sinks
        self._made: dict[PhaseKernel, Native] = {}
        self._output_scale: tuple[Tensor, float] | None = None

    def output_scale(self, outputs: Outputs) -> float | None:
        """Return the scale of a quantised output, which kernels take as a number; read back once, in a warm-up step."""
        # An FP8 number times it is the output; with FP4 it is ``o_sf_scale``, which the block scales are multiplied by.
        if outputs.scale is None:
            return None
        if self._output_scale is None or self._output_scale[0] is not outputs.scale:
            self._output_scale = outputs.scale, float(outputs.scale)
        return self._output_scale[1]

    def native(self, kernel: PhaseKernel) -> Native:
        """Return what a native kernel gets."""
        # The wrappers multiply ``sm_scale``, planned as 1, by ``q_scale``, and the output by ``v_scale`` in a kernel of
        # its own, unless it is 1 (flashinfer/prefill.py, decode.py 0.6.14). So ``q_scale`` is everything that the
        # scores are multiplied by. Where that is below ``LEAST_SCALE``, queries are divided by a power of two and
        # ``q_scale`` is multiplied by it. That is exact, except for FP8 numbers that become too small to matter.
        if kernel not in self._made:
            self._made[kernel] = self._fp8(kernel) if kernel.kernel.fp8_query else self._plain(kernel)
        return self._made[kernel]

    def _fp8(self, kernel: PhaseKernel) -> Native:
        """Return scales per head, as fa3 reads them. It folds them into its products, so no other kernel runs."""
        scales = self.scales
        least_k = float(scales.k.min()) if scales.k.ndim else scales.k_float
        query = scales.q * power_for(self._scale * scales.q_float * least_k)
        config = kernel.context.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        by_head = (s.expand(count).contiguous() for s, count in zip((query, scales.k, scales.v), heads, strict=True))
        return Native(tuple(by_head), {"q_scale": self._scale}, query)

    def _plain(self, kernel: PhaseKernel) -> Native:
        scale, keywords = self._scale, dict[str, Any]()
        if self.quantized:
            scale *= self.scales.k_float
            if self.scales.v_float != 1.0:
                keywords["v_scale"] = self.scales.v_float
        power = power_for(scale)
        scale *= power
        divisor = None if power == 1.0 else power
        if kernel.kernel.sinks and kernel.single_token:
            return Native((), {**keywords, "q_scale": scale, "sinks": self.sinks}, divisor)
        if kernel.kernel.sinks:
            return Native((self.sinks, scale), keywords, divisor)
        return Native((), {**keywords, "q_scale": scale}, divisor)

    def trtllm(self, fp8_query: bool, outputs: Outputs) -> tuple[float, float]:
        """Return ``bmm1_scale`` and ``bmm2_scale``."""
        # The second is XQA's one scale for K and V, which the first is divided by (xqa_batch_decode_with_kv_cache in
        # flashinfer/decode.py 0.6.14), so an FP8 output's scale goes there too, and with 16 bits it must be 1.
        output_scale = None if outputs.block_scale is not None else self.output_scale(outputs)
        bmm1, bmm2 = self._scale, 1.0
        if self.quantized:
            bmm1, bmm2 = bmm1 * self.scales.k_float, self.scales.v_float
        if fp8_query:
            bmm1 *= self.scales.q_float
        return bmm1, bmm2 if output_scale is None else bmm2 / output_scale


def fp4_output(outputs: Outputs, start: int) -> Any:
    """Return FlashInfer's view of FP4 output rows ``(T, num_heads, head_size / 2)`` and all rows' block scales."""
    tokens, heads, packed = outputs.output.shape
    shape = (tokens, heads, 2 * packed)
    return library.flashinfer().FP4Tensor(outputs.output, outputs.block_scale, start, shape)


@dataclass(slots=True, kw_only=True)
class Part(ABC):
    """Requests whose tokens are ``start .. end - 1``, run by one call."""

    start: int
    end: int

    @abstractmethod
    def attend(self, layer: LayerArguments, query: Tensor, kv_cache: Tensor, outputs: Outputs) -> None:
        """Attend ``query (end - start, num_heads, head_size)`` to ``kv_cache (num_blocks, 2, …)``.

        The query is in the compute dtype. The outputs are contiguous, of these tokens.
        """


@dataclass(slots=True, kw_only=True)
class NativePart(Part):
    """A call of a planned wrapper: one token per request by the decode wrapper, or queries of any length."""

    plan: Plan  # of this step, on one of FlashInfer's wrappers
    kernel: PhaseKernel  # what it was planned with
    seq_lens: Tensor | None = None  # of CuTe DSL's decode alone: int32 ``(B,)`` on the device

    def attend(self, layer: LayerArguments, query: Tensor, kv_cache: Tensor, outputs: Outputs) -> None:
        if self.seq_lens is not None:
            outputs.output.zero_()  # CuTe DSL's clusters add to it (reduction "atomic")
        self.run(layer, query, kv_cache, outputs)
        if outputs.lse is not None:
            natural_lse(outputs.lse, layer.sinks)
        if self.seq_lens is not None:  # FlashInfer does not say what that kernel writes for a request without keys
            blank_rows(outputs, self.seq_lens == 0, layer.sinks)

    def run(self, layer: LayerArguments, query: Tensor, kv_cache: Tensor, outputs: Outputs) -> None:
        """Attend; the LSE in base 2."""
        kernel = self.kernel
        arguments, scales, divisor = layer.native(kernel)
        if divisor is not None:
            query = ops.quantize_fp8(query, divisor, E4M3) if kernel.kernel.fp8_query else query / divisor
        run = self.plan.ready().run
        if outputs.lse is None:
            run(query, kv_cache, *arguments, out=outputs.output, **scales)
        else:
            run(query, kv_cache, *arguments, out=outputs.output, lse=outputs.lse, return_lse=True, **scales)


# FlashInfer's ``MultiLevelCascadeAttentionWrapper`` does the same, but takes one softmax scale per plan instead of
# one per layer, no FP8 scales, no output and no sinks, and returns no LSE.
@dataclass(slots=True, kw_only=True)
class Cascade(Part):
    """A prefix that all requests share, attended to once by all queries, and each request's rest; merged."""

    prefix: NativePart
    rest: NativePart

    def attend(self, layer: LayerArguments, query: Tensor, kv_cache: Tensor, outputs: Outputs) -> None:
        output, lse = outputs.output, outputs.lse
        if lse is None:
            lse = output.new_empty(output.shape[:2], dtype=torch.float32)
        of_prefix, prefix_lse = torch.empty_like(output), torch.empty_like(lse)
        self.rest.run(layer, query, kv_cache, Outputs(output, lse))
        self.prefix.run(layer, query, kv_cache, Outputs(of_prefix, prefix_lse))
        library.flashinfer().merge_state_in_place(output, lse, of_prefix, prefix_lse)
        natural_lse(lse, layer.sinks)


@dataclass(slots=True, kw_only=True)
class TrtllmPart(Part):
    """A call of one of the TRT-LLM functions."""

    function: Callable[..., Any]
    kernel: TrtllmKernel  # what it runs
    step: dict[str, Any]  # the arguments that the step fixes
    keyless: Tensor | None = None  # bool ``(end - start,)`` on the device, rows of requests without keys, to be blanked

    def attend(self, layer: LayerArguments, query: Tensor, kv_cache: Tensor, outputs: Outputs) -> None:
        bmm1, bmm2 = layer.trtllm(self.kernel.fp8_query, outputs)
        output, lse = outputs.output, outputs.lse
        more: dict[str, Any] = self.step
        if lse is not None:
            more = {**more, "lse": lse, "return_lse": True}
        if outputs.block_scale is not None:
            more = {**more, "out_dtype": "nvfp4", "o_sf_scale": layer.output_scale(outputs)}
            output = fp4_output(outputs, self.start)
        # The kernel takes no strides of the query.
        query = ops.quantize_fp8(query, layer.scales.q, E4M3) if self.kernel.fp8_query else query.contiguous()
        self.function(query, kv_cache, bmm1_scale=bmm1, bmm2_scale=bmm2, sinks=layer.sinks, out=output, **more)
        if lse is not None:
            natural_lse(lse, layer.sinks)
        if self.keyless is not None:  # XQA writes NaN there with an FP8 cache
            written = outputs.output
            blanked = written.view(torch.uint8) if written.dtype in FP8_DTYPES.values() else written
            blanked.masked_fill_(self.keyless.view(-1, 1, 1), 0)
