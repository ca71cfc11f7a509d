"""Layers that keep a state, in plain float64 and token by token, written to be read.

For each token, with a state ``S`` of ``(head_size, v_head_size)`` per value head (``attn_select.layer.state``)::

    q, k = q / sqrt(sum(q^2) + 1e-6), k / sqrt(sum(k^2) + 1e-6)     where the recurrence normalises
    S    = exp(g) * S                                               g per value head, of KDA per key channel
    u    = beta * (v - S^T k)                                       the delta rule
    u    = beta * v                                                 without it
    S    = S + k u^T
    o    = scale * S^T q

Sources: gated delta net arXiv 2412.06464, KDA arXiv 2510.26692, Mamba-2 arXiv 2405.21060 (k is B, q is C, beta is dt,
g is dt * A), lightning attention arXiv 2401.04658 (g is minus the slope, beta is 1).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from attn_select.layer.state import NORM_EPSILON, StateConfig


def state_reference(
    config: StateConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    write_strength: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of one request's T tokens and the state behind each of them, both in float64."""
    # The query and key are ``(T, num_heads, head_size)``, the value ``(T, num_v_heads, v_head_size)``, the log-decay
    # ``(T, num_v_heads)``, of KDA ``(T, num_v_heads, head_size)``, the write strength ``(T, num_v_heads)``, None: 1,
    # and the state before the first token ``(num_v_heads, head_size, v_head_size)``, None: zero.
    rule, group = config.rule, config.num_v_heads // config.num_heads
    query, key, value, log_decay = (each.double() for each in (query, key, value, log_decay))
    if rule.normalized:
        query, key = (each / (each.square().sum(-1, keepdim=True) + NORM_EPSILON).sqrt() for each in (query, key))
    query, key = query.repeat_interleave(group, dim=1), key.repeat_interleave(group, dim=1)
    decay = log_decay.exp() if rule.decay == "channel" else log_decay.exp()[..., None]
    strength = torch.ones_like(value[..., 0]) if write_strength is None else write_strength.double()
    size = (config.num_v_heads, config.head_size, config.v_head_size)
    now = torch.zeros(size, dtype=torch.float64, device=value.device) if state is None else state.double()
    outputs, states = torch.empty_like(value), value.new_empty(value.shape[0], *size)
    for token in range(value.shape[0]):
        now = decay[token][..., None] * now
        known = torch.einsum("hkv,hk->hv", now, key[token]) if rule.delta_rule else 0.0
        written = strength[token][:, None] * (value[token] - known)
        now = now + key[token][:, :, None] * written[:, None, :]
        outputs[token] = config.scale * torch.einsum("hkv,hk->hv", now, query[token])
        states[token] = now
    return outputs, states


def conv_reference(inputs: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
    """Return the causal convolution of one request's inputs ``(T, conv_dim)`` with SiLU, in float64."""
    # The weight is ``(conv_dim, conv_kernel_size)``, oldest first; ``before`` are the inputs before, None: zeros.
    width = weight.shape[1]
    head = torch.zeros(width - 1, inputs.shape[1]) if before is None else before
    rows = torch.cat([head.double(), inputs.double()])
    found = torch.stack([(rows[t : t + width] * weight.double().T).sum(0) for t in range(inputs.shape[0])])
    return functional.silu(found if bias is None else found + bias.double())
