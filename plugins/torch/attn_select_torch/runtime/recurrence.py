"""The recurrence of ``attn_select.layer.state`` in float32: one token of many requests, or a chunk of one request.

A chunk of C tokens with the state ``S`` before it, and ``G_ij`` the sum of the log-decays behind token j up to token i.
With ``u`` what each token writes, the state behind token i is ``exp(G_i) S + sum_{j <= i} exp(G_ij) k_j u_j^T``. By the
delta rule ``u_i = beta_i (v_i - exp(G_i) k_i S - sum_{j < i} (k_i . exp(G_ij) k_j) u_j)``: a triangular system for all
tokens of the chunk. Each sum is of its own tokens, and no difference of running sums: these would lose the digits of
small decays behind a large one, and be NaN behind a decay that forgets everything, whose logarithm is minus infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHANNEL_CHUNK = 16
"""Tokens of a chunk where every channel has a decay of its own: each pair of tokens takes ``head_size`` numbers."""


def one_token(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor, delta_rule: bool
) -> tuple[Tensor, Tensor]:
    """Return the output of one token of B requests, and their states behind it.

    ``query`` and ``key (B, H, K)`` are of H value heads, scaled and normalised, ``value (B, H, V)``, ``strength (B,
    H)``. ``log_decay (B, H, K)``, or ``(B, H, 1)`` where all channels decay alike. ``state (B, H, K, V)`` is written
    to. By the ``delta_rule`` what the key gives already is not written again.
    """
    # Batched products in place: element by element the states take many times as long.
    after = state.flatten(0, 1)
    row = key.flatten(0, 1)[:, None]
    written = value.flatten(0, 1)[:, None]
    after.mul_(log_decay.exp().flatten(0, 1)[..., None])
    if delta_rule:
        written = torch.baddbmm(written, row, after, alpha=-1)
    after.baddbmm_(row.mT, strength.flatten()[:, None, None] * written)
    output = torch.bmm(query.flatten(0, 1)[:, None], after)
    return output.view(value.shape), after.view(state.shape)


def one_chunk(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor, delta_rule: bool
) -> tuple[Tensor, Tensor]:
    """Return the outputs of C tokens of one request, and the state ``(H, K, V)`` behind them.

    As in ``one_token``, with ``(H, C, …)`` in the place of ``(B, H, …)``.
    """
    since_start = log_decay.cumsum(1).exp()
    between = _decays_between(log_decay)
    to_end = between[:, -1]
    writes = strength[..., None] * value
    if delta_rule:
        known = strength[..., None] * ((key * since_start) @ state)
        system = strength[..., None] * _decayed_products(key, key, between).tril(-1)
        writes = torch.linalg.solve_triangular(system, writes - known, upper=False, unitriangular=True)
    output = (query * since_start) @ state + _decayed_products(query, key, between).tril() @ writes
    return output, state * since_start[:, -1, :, None] + (key * to_end).mT @ writes


def _decays_between(log_decay: Tensor) -> Tensor:
    """Return ``exp(G_ij)`` of all tokens, ``(H, C, C, K)``; on and above the diagonal 1."""
    heads, count, channels = log_decay.shape
    later = torch.ones(count, count, dtype=torch.bool, device=log_decay.device).triu(1)
    # (H, K, j, i): a sum runs over numbers that lie side by side.
    each = log_decay.mT[:, :, None].expand(heads, channels, count, count)
    return each.where(later, 0.0).cumsum(-1).exp().permute(0, 3, 2, 1)


def _decayed_products(rows: Tensor, columns: Tensor, between: Tensor) -> Tensor:
    """Return ``rows_i . between_ij columns_j`` of all tokens, ``(H, C, C)``; above the diagonal anything finite."""
    if between.shape[-1] == 1:
        return (rows @ columns.mT) * between[..., 0]
    return torch.einsum("hik,hjk,hijk->hij", rows, columns, between)
