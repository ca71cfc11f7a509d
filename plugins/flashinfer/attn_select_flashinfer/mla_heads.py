"""Queries and outputs as FlashInfer's Blackwell MLA kernels take them: padded heads, FP8 queries, bfloat16 outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from attn_select.config import Phase
from attn_select.runtime import ops
from attn_select.runtime.backend import AttentionLayer, BackendContext
from attn_select.runtime.scales import Scales
from attn_select_flashinfer.common import LN2
from attn_select_flashinfer.mla_build import blank_rows

E4M3 = torch.float8_e4m3fn
Scale = float | Tensor


@dataclass(slots=True)
class Work:
    """What the kernel reads and writes for one call of a layer.

    Attributes:
        query: ``(T, H', R + Pr)``, H' padded heads.
        out: bfloat16 ``(T, H', R)``, contiguous; the layer's own output where that is one.
        lse: float32 ``(T, H')``, in base 2, likewise; None where it is not wanted.
        bmm1_scale, bmm2_scale: factors of scores and output.
    """

    query: Tensor
    out: Tensor
    lse: Tensor | None
    bmm1_scale: Scale
    bmm2_scale: Scale


class Heads:
    """One layer's queries and outputs.

    Args:
        context: of the layer.
        phase: whose plan says the query's dtype and the padded heads.
        scale: factor on ``q . k``.
        sinks: ``(H,)``.
        cache_scales: the kernel's second scale is the cache's, and a factor of the scores too
            (csrc/xqa/mla_sm120.cu v0.6.14: ``qScale * kvCacheScale``, and ``kvCacheScale`` on the output).
        device_scales: FP8 scales are read from the device at each call.

    Attributes:
        sinks: float32 ``(H',)``, padded; None without.
    """

    def __init__(
        self,
        context: BackendContext,
        phase: Phase,
        scale: float,
        sinks: Tensor | None,
        *,
        padded: int,
        cache_scales: bool = False,
        device_scales: bool = False,
    ) -> None:
        config = context.config
        self._heads, self._padded, self._rank = config.num_heads, padded, cast(int, config.kv_lora_rank)
        self._fp8 = context.plans[phase].query_dtype == "fp8_e4m3"
        self._scale, self._cache_scales, self._device_scales = float(scale), cache_scales, device_scales
        self._known: tuple[Scales, tuple[float, float]] | None = None
        self._own_sinks = None if sinks is None else sinks.float()
        self.sinks: Tensor | None = None
        if self._own_sinks is not None:
            self.sinks = self._own_sinks.new_zeros(padded)
            self.sinks[: self._heads] = self._own_sinks

    def begin(self, layer: AttentionLayer, query: Tensor, output: Tensor, output_lse: Tensor | None) -> Work:
        """Return what the kernel gets for ``query (T, H, R + Pr)``, ``output (T, H, R)`` and ``output_lse (T, H)``."""
        tokens = query.shape[0]
        if self._fp8:
            query = ops.quantize_fp8(query, layer.scales.q, E4M3)
        if self._padded != self._heads:
            # What the other heads hold is nobody's: rows of the kernels' products do not mix.
            own, query = query, query.new_empty(tokens, self._padded, query.shape[2])
            query[:, : self._heads] = own
        whole = self._padded == self._heads
        out, lse = output, output_lse
        if not (whole and output.dtype == torch.bfloat16 and output.is_contiguous()):
            out = torch.empty(tokens, self._padded, self._rank, dtype=torch.bfloat16, device=output.device)
        if output_lse is not None and not (whole and output_lse.is_contiguous()):
            lse = output_lse.new_empty(tokens, self._padded)
        return Work(query.contiguous(), out, lse, *self._scales(layer))

    def finish(self, work: Work, output: Tensor, output_lse: Tensor | None, blank: Tensor | None) -> None:
        """Bring results to the layer's tensors; ``blank``: bool ``(T,)``, queries without keys."""
        if work.out is not output:
            output.copy_(work.out[:, : self._heads])
        if output_lse is not None:
            assert work.lse is not None
            torch.mul(work.lse[:, : self._heads], LN2, out=output_lse)
        if blank is not None:
            blank_rows(output, output_lse, blank, self._own_sinks)

    def _scales(self, layer: AttentionLayer) -> tuple[Scale, Scale]:
        if not self._fp8:
            return self._scale, 1.0
        scales = layer.scales
        if self._device_scales:
            k = scales.k.reshape(1)
            return scales.q.reshape(1) * k * self._scale, k
        if self._known is None or self._known[0] is not scales:
            both = scales.q_float if self._cache_scales else scales.q_float * scales.k_float
            self._known = scales, (both * self._scale, scales.k_float)
        return self._known[1]
