"""The causal convolution before a recurrence: one filter per channel, then SiLU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from attn_select.runtime.states.state_batch import ConvIndices


def causal_conv(inputs: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, where: ConvIndices) -> Tensor:
    """Return the convolution of a step's inputs, and write the windows of its states."""
    # Computed in float32, since every token is rounded once then, whatever the chunks of its request. Inputs are ``(T,
    # conv_dim)``, the weight ``(conv_dim, conv_kernel_size)``, oldest first, as in ``torch.nn.Conv1d``.
    starts = where.read_slots < 0
    # Filled, not multiplied by 0: a free slot may hold NaN.
    before = windows[where.read_slots.clamp(min=0)].masked_fill(starts[:, None, None], 0.0)
    rows = torch.cat([before.flatten(0, 1).to(inputs.dtype), inputs])
    # Written only now: ``rows`` is a copy of the old windows, which other requests of the step may share.
    windows[where.write_slots] = rows[where.windows].to(windows.dtype)
    found = torch.zeros(inputs.shape, device=inputs.device) if bias is None else bias.float().expand(inputs.shape)
    for tap in range(weight.shape[1]):  # one after the other: side by side they take as many times the memory
        found = torch.addcmul(found, rows[where.taps[:, tap]].float(), weight[:, tap].float())
    return functional.silu(found).to(inputs.dtype)
