"""Compares results with their references: relative errors, accepted errors with their reasons, and the worst row.

Accepted errors are given in units of the unit roundoff u, half the distance from 1 to the next number: 2^-24 in
float32, 2^-11 in float16, 2^-8 in bfloat16, 2^-4 in e4m3. The output is a weighted mean of values. Rounding independent
numbers costs 0.3 to 0.6 u in the norm; the squares of several such errors add up:

- *16 bits*: the weights are rounded before they meet V, and the output once more; scores are sums in float32: 2 u.
- *16 bits with MLA or an FP8 cache*: absorbed queries, decompressed or rescaled keys and values are products that are
  rounded too: 4 u. A key with a relative error of u gives its score, and so the LSE, such an error: 4 u.
- *float32*: nothing is rounded in between, but sums of hundreds of terms are: 32 u, or 64 u where factors are sums too.
- *FP8 query*: the reference rounds the query likewise, but kernels round the weights to e4m3 too (FlashAttention-3,
  TRT-LLM, FlashMLA): 1 u of e4m3.
- *FP8 output*: 1 u of e4m3, against the reference saturated to 448 scales, the most that such an output holds: a kernel
  does right to cut what is larger, and rounding exactly would be off by more than any bound.

A single row may have three times the error of all rows together, since its terms may cancel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.dtypes import is_quantized
from attn_select.reference.oracle_paged import token_views
from attn_select.reference.problems import Problem, Request

__tracebackhide__ = True  # a failure shows the test and the plugin, not the suite between them


class RelativeError(NamedTuple):
    """Relative errors in the Euclidean norm."""

    norm: float
    """``||actual - reference|| / ||reference||`` over everything."""
    row: float
    """The same per row, one head of one token; the largest. It finds a single wrong row among many right ones."""


def relative_error(actual: Tensor, reference: Tensor, spread: Tensor | None = None) -> RelativeError:
    """Return the errors of ``actual`` ``(..., Dv)`` against ``reference`` of the same shape.

    Args:
        spread: ``(...)``, the least that a row counts (``attention_reference``): where its terms cancel, their errors
            do not, and no bound holds for what is left. None: a row counts what it is.

    Where the reference is 0 the error is 0 if the result is 0 too, else inf. A NaN or an infinity in ``actual`` makes
    both inf. Nothing to compare is an error of 0.

    Raises:
        ValueError: the shapes differ (broadcasting would hide it), or the reference is not finite.
    """
    actual, reference = _comparable(actual, reference)
    if not reference.isfinite().all():
        raise ValueError("the reference holds NaN or infinity")
    if not actual.isfinite().all():
        return RelativeError(torch.inf, torch.inf)
    if not reference.numel():
        return RelativeError(0.0, 0.0)
    difference = torch.linalg.vector_norm(actual - reference, dim=-1)
    size = torch.linalg.vector_norm(reference, dim=-1)
    if spread is not None:
        size = size.maximum(spread)
    rows = _ratio(difference, size)
    return RelativeError(float(_ratio(difference.norm(), size.norm())), float(rows.max()))


def lse_error(actual: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference of two log-sum-exps; inf where one is -inf and the other is not, and for
    NaN.

    Absolute, because a shift of the LSE by d changes a partial's weight in a merge by the factor ``exp(d)``.
    """
    actual, reference = _comparable(actual, reference)
    if not reference.numel():
        return 0.0
    same = actual == reference  # also -inf with -inf, whose difference would be NaN
    difference = torch.where(same, 0.0, (actual - reference).abs())
    return float(difference.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit, so that poison (NaN) compares equal to itself."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    first, second = (each.flatten().contiguous().view(torch.uint8) for each in (actual, expected))
    return torch.equal(first, second)


def _comparable(actual: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != reference.shape:
        raise ValueError(f"shape {tuple(actual.shape)} is compared with {tuple(reference.shape)}")
    return actual.to(reference.device).double(), reference.double()


def _ratio(difference: Tensor, size: Tensor) -> Tensor:
    return torch.where(difference == 0, 0.0, difference / size)


UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
E4M3_ROUNDOFF = 2.0**-4
ROW = 3
"""How many times the error of all rows together a single row may have."""


class ErrorBound(NamedTuple):
    """The most that is accepted, and why."""

    norm: float
    """As in ``RelativeError``."""
    row: float
    """As in ``RelativeError``."""
    lse: float
    """Absolute where the LSE lies between -1 and 1, else relative to it: the error of a score grows with the score."""
    because: str


def error_bound(config: AttentionConfig, plans: Mapping[Phase, BackendPlan]) -> ErrorBound:
    """Return the bound for a layer that runs by ``plans``. The least exact plan decides."""
    u, dtype = UNIT_ROUNDOFF[config.dtype], config.dtype
    products = config.mla or is_quantized(config.cache_dtype)
    if any(is_quantized(plan.rounds_to or plan.query_dtype) for plan in plans.values()):
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


def check_output(step: Problem, rows: Tensor, output: Tensor, reference: Tensor, bound: ErrorBound) -> None:
    """Compare rows ``(N,)`` of an output ``(T, H, Dv)`` with their reference; AssertionError names the worst row."""
    actual, wanted = output[rows].cpu().double(), reference.cpu()
    size = torch.linalg.vector_norm(wanted, dim=-1)
    # The error of a short row is taken relative to the typical length: its terms cancel, but their errors do not.
    off = torch.linalg.vector_norm(actual - wanted, dim=-1) / size.clamp_min(float(size.square().mean().sqrt()))
    off = torch.where((actual == wanted).all(dim=-1), 0.0, off).nan_to_num(nan=torch.inf, posinf=torch.inf)
    norm, row = relative_error(actual, wanted).norm, float(off.max())
    if not (norm <= bound.norm and row <= bound.row):
        name = _name(step, rows, off)
        if row == torch.inf and not actual.isfinite().all():
            raise AssertionError(f"output of {name} holds NaN or infinity")
        raise AssertionError(
            f"output is off by {norm:.2e} (bound {bound.norm:.1e}), worst in {name} by {row:.2e} "
            f"(bound {bound.row:.1e}: {bound.because})"
        )


def check_lse(step: Problem, rows: Tensor, lse: Tensor, reference: Tensor, bound: ErrorBound) -> None:
    """Compare rows ``(N,)`` of an LSE ``(T, H)`` with their reference; AssertionError names the worst row."""
    actual, wanted = lse[rows].cpu().double(), reference.cpu()
    # -inf is right where it is wanted, and wrong by infinity elsewhere.
    off = torch.where(actual == wanted, 0.0, (actual - wanted).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    off /= wanted.abs().clamp_min(1.0).masked_fill(wanted.isinf(), 1.0)
    if float(off.max()) <= bound.lse:
        return
    worst = int(off.argmax())
    seen, right = float(actual.flatten()[worst]), float(wanted.flatten()[worst])
    name = _name(step, rows, off)
    raise AssertionError(f"LSE of {name} is {seen:.6g} instead of {right:.6g} (bound {bound.lse:.1e}: {bound.because})")


def check_cache(step: Problem, kv_cache: Tensor) -> None:
    """Compare every byte of a cache after the step, written or not."""
    # A backend may clear the slots behind a sequence's end in its last block. They belong to the request, and zeros
    # keep the numbers of the block's former owner out of the result.
    assert step.kv_cache is not None
    caches = (kv_cache, step.written_cache(), step.kv_cache)
    seen, wanted, before = (cache.contiguous().view(torch.uint8) for cache in caches)
    if torch.equal(seen, wanted):
        return
    wrong = (seen != wanted) & ((seen != 0) | ~_unused_tails(step))
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        untouched = bool((wanted == before)[place])
        what = "was changed, but belongs to no token of the step" if untouched else "differs from the token's number"
        raise AssertionError(
            f"{int(wrong.sum())} bytes of kv_cache {tuple(kv_cache.shape)} in {step.layout} are wrong: the first, at "
            f"{place} in bytes, {what}"
        )


def _unused_tails(step: Problem) -> Tensor:
    """Return which bytes of the cache lie behind a sequence's end in its last block."""
    assert step.kv_cache is not None
    assert step.block_table is not None
    assert step.layout is not None
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[step.kv_cache.element_size()]
    marked = torch.zeros_like(step.kv_cache.contiguous().view(whole))
    for view in token_views(marked, step.layout, step.config):
        size = view.shape[1]
        for row, (_, seq_len) in zip(step.block_table.tolist(), step.requests, strict=True):
            if seq_len % size:
                view[row[seq_len // size], seq_len % size :] = 255 if whole is torch.uint8 else -1
    return marked.view(torch.uint8) != 0


def request_name(index: int, request: Request) -> str:
    """Return a request as messages name it."""
    return f"request {index} (query of {request[0]}, {request[1]} keys)"


def _name(step: Problem, rows: Tensor, off: Tensor) -> str:
    """Return token and head of the largest of errors ``(N, H)``."""
    place, head = divmod(int(off.argmax()), off.shape[1])
    row = int(rows[place])
    request = int(torch.searchsorted(step.query_start_loc.cpu()[1:], row, right=True))
    token = row - int(step.query_start_loc[request])
    return f"{request_name(request, step.requests[request])}, token {token}, head {head}"
