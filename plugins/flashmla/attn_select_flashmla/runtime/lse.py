"""FlashMLA's log-sum-exp in the runtime's convention."""

from __future__ import annotations

import torch
from torch import Tensor


def store_lse(target: Tensor, lse: Tensor, sinks: Tensor | None = None) -> None:
    """Write a kernel's LSE ``(T, H)`` into ``target``: -inf for a row without keys, sinks ``(H,)`` counted."""
    # The kernels give +inf for such a row, and leave the sinks out.
    target.copy_(lse)
    target.masked_fill_(target == torch.inf, -torch.inf)
    if sinks is not None:
        torch.logaddexp(target, sinks, out=target)
