"""How far a result is from its reference. What distance is allowed depends on dtype and path and is not said here."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RelativeError(NamedTuple):
    """Relative errors in the Euclidean norm."""

    norm: float
    """``||actual - reference|| / ||reference||`` over everything."""
    row: float
    """The same per row, one head of one token; the largest. It finds a single wrong row among many right ones."""


def relative_error(actual: Tensor, reference: Tensor) -> RelativeError:
    """Return the errors of ``actual`` ``(..., Dv)`` against ``reference`` of the same shape.

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
    return torch.equal(actual.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


def _comparable(actual: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != reference.shape:
        raise ValueError(f"shape {tuple(actual.shape)} is compared with {tuple(reference.shape)}")
    return actual.to(reference.device).double(), reference.double()


def _ratio(difference: Tensor, size: Tensor) -> Tensor:
    return torch.where(difference == 0, 0.0, difference / size)
