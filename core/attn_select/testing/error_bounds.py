"""How far a backend's result may be from the float64 reference, per dtype and inner path, and why.

In units of the unit roundoff u, half the distance from 1 to the next number: 2^-24 in float32, 2^-11 in float16, 2^-8
in bfloat16, 2^-4 in e4m3. The output is a weighted mean of values. Rounding independent numbers costs 0.3 to 0.6 u in
the norm, and several roundings add like the legs of a triangle:

- *16 bits*: the weights are rounded before they meet V, and the output once more; scores are sums in float32: 2 u.
- *16 bits with MLA or an FP8 cache*: absorbed queries, decompressed or rescaled keys and values are products that are
  rounded too: 4 u. A key that is u off shifts its score, and so the LSE, by that much of it: 4 u.
- *float32*: nothing is rounded in between, but sums of hundreds of terms are: 32 u, or 64 u where factors are sums too.
- *FP8 query*: the reference rounds the query likewise, but kernels round the weights to e4m3 too (FlashAttention-3,
  TRT-LLM, FlashMLA): 1 u of e4m3.
- *FP8 output*: 1 u of e4m3.

One row may be worse than all together, since its terms may cancel: three times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from attn_select.config import AttentionConfig, Phase
from attn_select.dtypes import is_quantized
from attn_select.spec import BackendPlan

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
E4M3_ROUNDOFF = 2.0**-4
ROW = 3
"""Bound of one row in bounds of all."""


class ErrorBound(NamedTuple):
    """The most that is accepted, and why."""

    norm: float
    """As in ``RelativeError``."""
    row: float
    """As in ``RelativeError``."""
    lse: float
    """Absolute, and in parts of the LSE where that is beyond 1: a score's error grows with it."""
    because: str


def error_bound(config: AttentionConfig, plans: Mapping[Phase, BackendPlan]) -> ErrorBound:
    """Return the bound for a layer that runs by ``plans``, the widest of theirs."""
    u, dtype = UNIT_ROUNDOFF[config.dtype], config.dtype
    products = config.mla or is_quantized(config.cache_dtype)
    if any(is_quantized(plan.query_dtype) for plan in plans.values()):
        norm, lse, because = E4M3_ROUNDOFF, E4M3_ROUNDOFF / 4, "FP8 query: weights in e4m3"
    elif dtype == "float32":
        norm = lse = (64 if products else 32) * u
        because = "sums in float32"
    elif products:
        norm, lse, because = 4 * u, 4 * u, f"keys, values, weights and output rounded to {dtype}"
    else:
        norm, lse, because = 2 * u, u, f"weights and output rounded to {dtype}"
    if config.output_quantization == "fp8":
        norm, because = max(norm, E4M3_ROUNDOFF), f"output in e4m3, {because}"
    return ErrorBound(norm, ROW * norm, lse, because)
