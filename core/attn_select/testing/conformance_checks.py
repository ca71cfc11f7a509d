"""Comparisons with the oracle that say, where they fail, which row of which request is wrong, and how."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.dtypes import is_quantized
from attn_select.testing.error_bounds import ErrorBound
from attn_select.testing.oracle_errors import relative_error
from attn_select.testing.oracle_problems import Problem, Request

__tracebackhide__ = True  # a failure shows the test and the plugin, not the suite between them


def check_output(step: Problem, rows: Tensor, output: Tensor, reference: Tensor, bound: ErrorBound) -> None:
    """Compare rows ``(N,)`` of an output ``(T, H, Dv)`` with the reference's.

    Raises:
        AssertionError: names the worst row.
    """
    actual, wanted = output[rows].cpu().double(), reference[rows].cpu()
    size = torch.linalg.vector_norm(wanted, dim=-1)
    # A row shorter than the typical one is measured by that: what cancellation left says nothing of its terms.
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
    """Compare rows ``(N,)`` of an LSE ``(T, H)`` with the reference's.

    Raises:
        AssertionError: names the worst row, its value and the right one.
    """
    actual, wanted = lse[rows].cpu().double(), reference[rows].cpu()
    # -inf is right where it is wanted, and wrong by infinity elsewhere.
    off = torch.where(actual == wanted, 0.0, (actual - wanted).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    off /= wanted.abs().clamp_min(1.0).masked_fill(wanted.isinf(), 1.0)
    if float(off.max()) <= bound.lse:
        return
    worst = int(off.argmax())
    seen, right = float(actual.flatten()[worst]), float(wanted.flatten()[worst])
    name = _name(step, rows, off)
    raise AssertionError(f"LSE of {name} is {seen:.6g} instead of {right:.6g} (bound {bound.lse:.1e}: {bound.because})")


def check_cache(step: Problem, kv_cache: Tensor, fp8_steps: int) -> None:
    """Compare every byte of a cache after the step, written or not; an FP8 number may be ``fp8_steps`` off.

    Raises:
        AssertionError: names the first wrong byte, and whether it was to be written at all.
    """
    assert step.kv_cache is not None
    caches = (kv_cache, step.written_cache(), step.kv_cache)
    seen, wanted, before = (cache.contiguous().view(torch.uint8).short() for cache in caches)
    wrong = seen != wanted
    if is_quantized(step.config.cache_dtype):
        wrong &= (wanted == before) | ((seen - wanted).abs() > fp8_steps)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        untouched = bool((wanted == before)[place])
        what = "was touched, but belongs to no token of the step" if untouched else "is not what was to be written"
        raise AssertionError(
            f"{int(wrong.sum())} bytes of kv_cache {tuple(kv_cache.shape)} in {step.layout} are wrong: the first, at "
            f"{place} in bytes, {what}"
        )


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
