"""What a layer passes to each kernel: its softmax scale, its FP8 scales, its sinks, and the scale of its output."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from attn_select.runtime.scales import Scales
from attn_select_flashinfer.library import flashinfer
from attn_select_flashinfer.wrappers import NativeKernel

LEAST_SCALE = 128 / 5e4
"""fa2 and fa3 hide a key by setting its raw score, before the softmax scale, to -5e4 (``math::inf`` in
include/flashinfer/math.cuh 0.6.14; hopper/mainloop_mma.cuh, hopper/quantization/mainloop_mma.cuh, prefill.cuh; mla.cuh,
mla_hopper.cuh). With a total scale below this it is less than 128 nats away. FP8 scales make it so: q 0.02, k 0.015 and
1 / sqrt(128) leave 1.3 nats, and causal prefill is off by 0.54 (H100, flashinfer 0.6.14, 2026-11-21)."""


class Native(NamedTuple):
    """What ``run`` of a native wrapper gets.

    Attributes:
        arguments: behind query and cache.
        keywords: scales.
        query_scale: what the query is divided by: a float32 ``()`` tensor where it is quantised, a power of two where
            it is not, None for 1.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, float]
    query_scale: Tensor | float | None


class LayerTerms:
    """A layer's terms while its scales are the same; kernels take them in different forms, each made once.

    Args:
        scale: factor on ``q . k``.
        scales: of query and cache; their host floats are passed, for a device tensor would have to be read back.
        quantized: whether the cache is FP8: otherwise the scales are not read.
        sinks: float32 ``(num_heads,)`` or None.
        output_scale: of a quantised output, on the host: an FP8 number times it is the output; with FP4 it is
            ``o_sf_scale``, which the block scales are multiplied by.
        block_scale: where FP4 block scales go.
    """

    __slots__ = ("_bmm", "_made", "_scale", "block_scale", "output_scale", "quantized", "scales", "sinks")

    def __init__(
        self,
        scale: float,
        scales: Scales,
        *,
        quantized: bool,
        sinks: Tensor | None,
        output_scale: float | None = None,
        block_scale: Tensor | None = None,
    ) -> None:
        self._scale, self.scales, self.quantized, self.sinks = scale, scales, quantized, sinks
        self.output_scale, self.block_scale = output_scale, block_scale
        self._made: dict[tuple[bool, bool], Native] = {}
        self._bmm: dict[bool, tuple[float, float]] = {}

    def native(self, kernel: NativeKernel) -> Native:
        """Return what a native kernel gets.

        The wrappers multiply ``sm_scale``, planned as 1, by ``q_scale``, and the output by ``v_scale`` in a kernel of
        its own, unless it is 1 (flashinfer/prefill.py, decode.py 0.6.14). So ``q_scale`` is everything that the scores
        are multiplied by, and where that is below ``LEAST_SCALE``, queries are divided by a power of two and it is
        multiplied by the same: exactly, but for FP8 numbers of which nothing is left that matters.
        """
        key = kernel.fp8_query, kernel.sinks
        if key not in self._made:
            self._made[key] = self._fp8(kernel) if kernel.fp8_query else self._plain(kernel)
        return self._made[key]

    def _fp8(self, kernel: NativeKernel) -> Native:
        """Scales per head, as fa3 reads them: folded into its own products, so nothing runs behind it."""
        scales = self.scales
        least_k = float(scales.k.min()) if scales.k.ndim else scales.k_float
        query = scales.q * power_for(self._scale * scales.q_float * least_k)
        heads = (kernel.num_heads, kernel.num_kv_heads, kernel.num_kv_heads)
        by_head = (s.expand(count).contiguous() for s, count in zip((query, scales.k, scales.v), heads, strict=True))
        return Native(tuple(by_head), {"q_scale": self._scale}, query)

    def _plain(self, kernel: NativeKernel) -> Native:
        scale, keywords = self._scale, {}
        if self.quantized:
            scale *= self.scales.k_float
            if self.scales.v_float != 1.0:
                keywords["v_scale"] = self.scales.v_float
        power = power_for(scale)
        scale *= power
        divisor = None if power == 1.0 else power
        if kernel.sinks:
            return Native((self.sinks, scale), keywords, divisor)
        return Native((), {**keywords, "q_scale": scale}, divisor)

    def trtllm(self, fp8_query: bool) -> tuple[float, float]:
        """Return ``bmm1_scale`` and ``bmm2_scale``.

        The second is XQA's one scale for K and V, which the first is divided by (xqa_batch_decode_with_kv_cache in
        flashinfer/decode.py 0.6.14), so an FP8 output's scale goes there too, and with 16 bits it must be 1.
        """
        if fp8_query not in self._bmm:
            self._bmm[fp8_query] = self._trtllm(fp8_query)
        return self._bmm[fp8_query]

    def _trtllm(self, fp8_query: bool) -> tuple[float, float]:
        bmm1, bmm2 = self._scale, 1.0
        if self.quantized:
            bmm1, bmm2 = bmm1 * self.scales.k_float, self.scales.v_float
        if fp8_query:
            bmm1 *= self.scales.q_float
        if self.output_scale is not None and self.block_scale is None:
            bmm2 /= self.output_scale
        return bmm1, bmm2

    def fp4_output(self, output: Tensor, start: int) -> Any:
        """Return FlashInfer's view of FP4 output rows ``(T, num_heads, head_size / 2)`` and all rows' block scales."""
        tokens, heads, packed = output.shape
        return flashinfer().FP4Tensor(output, self.block_scale, start, (tokens, heads, 2 * packed))


def power_for(scale: float) -> float:
    """Return the power of two, from 1, that brings a scale to ``LEAST_SCALE``."""
    return 2.0 ** max(0, math.ceil(math.log2(LEAST_SCALE / scale))) if scale < LEAST_SCALE else 1.0
