"""The sparse indexer in float64: the scores of tokens, and whether a choice of them is right.

Two sums of the same products differ by their rounding, so tokens with nearly equal scores may change places: a choice
is right if no token that it leaves out scores clearly more than one that it has.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
TIE = 1e-5
"""What sums in float32 may differ by, relative to the largest score."""


def quantized_rows(numbers: Tensor) -> Tensor:
    """Return ``(..., D)`` numbers as e4m3 with one scale for each row gives them back, float64."""
    # The scale is ``max |x| / 448``, at least ``1e-4 / 448``, rounded up to a power of two.
    rows = numbers.double()
    exponent = torch.ceil(torch.log2(rows.abs().amax(-1, keepdim=True).clamp_min(1e-4) / E4M3_MAX))
    scales = torch.exp2(exponent)
    return (rows / scales).clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn).double() * scales


def index_scores_reference(query: Tensor, weights: Tensor, keys: Tensor, *, fp8: bool) -> Tensor:
    """Return ``sum_h weights[t, h] * relu(query[t, h] . key[s])``, float64 ``(T, S)``; ``fp8``: both are quantised."""
    q, k = (quantized_rows(query), quantized_rows(keys)) if fp8 else (query.double(), keys.double())
    return torch.einsum("th,ths->ts", weights.double(), torch.einsum("thd,sd->ths", q, k).relu())


def topk_reference(scores: Tensor, num_keys: int, top_k: int) -> Tensor:
    """Return the positions, int64, of the best ``top_k`` keys of a token that sees the first ``num_keys``."""
    return scores[:num_keys].topk(min(top_k, num_keys)).indices


def wrong_choice(positions: Tensor, scores: Tensor, num_keys: int, top_k: int, *, tie: float = TIE) -> str | None:
    """Return what is wrong with one token's choice of the first ``num_keys`` keys, in any order, or None."""
    # Scores that differ by less than ``tie``, relative to the largest, count as equal.
    wanted, distinct = min(top_k, num_keys), len(set(positions.tolist()))
    if len(positions) != wanted or distinct != wanted:
        return f"{len(positions)} keys chosen, {distinct} of them distinct: accepted are {wanted}"
    if not wanted:
        return None
    if int(positions.min()) < 0 or int(positions.max()) >= num_keys:
        return f"key {int(positions.max())} chosen by a token that sees {num_keys}"
    left_out = torch.ones(num_keys, dtype=torch.bool, device=scores.device)
    left_out[positions.long()] = False
    if not bool(left_out.any()):
        return None
    seen = scores[:num_keys]
    best, worst = seen[left_out].max(), seen[positions.long()].min()
    if float(best - worst) > tie * float(seen.abs().max()):
        return f"a key with score {float(best):.6g} left out, and one with {float(worst):.6g} chosen"
    return None
