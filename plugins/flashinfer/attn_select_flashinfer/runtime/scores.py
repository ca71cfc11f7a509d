"""How FlashInfer writes: packed, the log-sum-exp in base 2, hidden keys and rows without keys by numbers of its own."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attn_select.runtime.terms import Outputs, Terms

LN2 = math.log(2.0)
"""FlashInfer's LSE is base 2."""
NO_KEYS = -4e4
"""FlashInfer's LSE is base 2. A row without keys has -5e4 in 0.6.14 and -inf in 0.7.2 (include/flashinfer/math.cuh,
``math::inf``); no finite scores come near."""
LEAST_SCALE = 128 / 5e4
"""fa2 and fa3 hide a key by setting its raw score, before the softmax scale, to -5e4 (``math::inf`` in
include/flashinfer/math.cuh 0.6.14; hopper/mainloop_mma.cuh, hopper/quantization/mainloop_mma.cuh, prefill.cuh; mla.cuh,
mla_hopper.cuh). With a total scale below this it is less than 128 nats away. FP8 scales make it so: q 0.02, k 0.015 and
1 / sqrt(128) leave 1.3 nats, and causal prefill is off by 0.54 (H100, flashinfer 0.6.14, 2026-11-21). In 0.7.2 it is
IEEE infinity, so that no scale is too small there; the power of two is exact and stays."""


def power_for(scale: float) -> float:
    """Return the power of two, from 1, that brings a scale to ``LEAST_SCALE``."""
    return 2.0 ** max(0, math.ceil(math.log2(LEAST_SCALE / scale))) if scale < LEAST_SCALE else 1.0


def float_sinks(terms: Terms) -> Terms:
    """Return the terms with sinks as FlashInfer takes them, float32 and contiguous."""
    return terms if terms.sinks is None else replace(terms, sinks=terms.sinks.float().contiguous())


def natural_lse(lse: Tensor, sinks: Tensor | None) -> None:
    """Convert FlashInfer's LSE, ``(T, num_heads)`` in base 2, in place; a row without keys has -inf or its sink."""
    empty = lse < NO_KEYS
    lse.mul_(LN2)
    if sinks is None:
        lse.masked_fill_(empty, -torch.inf)
    else:
        torch.where(empty, sinks, lse, out=lse)


def blank_rows(outputs: Outputs, rows: Tensor, sinks: Tensor | None = None) -> None:
    """Give the rows ``(T,)`` of requests without keys output 0 and LSE -inf, or their sink, float32 ``(H,)``."""
    outputs.output.masked_fill_(rows[:, None, None], 0)
    if (lse := outputs.lse) is not None:
        empty = torch.full((), -torch.inf, device=lse.device) if sinks is None else sinks
        torch.where(rows[:, None], empty, lse, out=lse)


def packed(outputs: Outputs) -> Outputs:
    """Return the outputs, in the place of those that are not contiguous other memory: kernels read no strides there."""
    output, lse = outputs.output, outputs.lse
    if output.is_contiguous() and (lse is None or lse.is_contiguous()):
        return outputs
    return replace(outputs, output=_memory(output), lse=None if lse is None else _memory(lse))


def _memory(written: Tensor) -> Tensor:
    return written if written.is_contiguous() else torch.empty_like(written, memory_format=torch.contiguous_format)


def copy_back(made: Outputs, outputs: Outputs) -> None:
    """Bring what was written to ``packed(outputs)`` to where it belongs."""
    if made.output is not outputs.output:
        outputs.output.copy_(made.output)
    if outputs.lse is not None and made.lse is not None and made.lse is not outputs.lse:
        outputs.lse.copy_(made.lse)
