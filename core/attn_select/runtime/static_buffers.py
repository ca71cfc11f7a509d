"""``StaticBuffers``: what captured kernels read of a step, at addresses that stay."""

from __future__ import annotations

import torch
from torch import Tensor


class StaticBuffers:
    """Holds tensors of steps, each at one address; where steps are not captured, every step has its own instead."""

    def __init__(self, device: torch.device, *, captured: bool) -> None:
        self._device, self._captured = device, captured
        self._kept: dict[str, Tensor] = {}

    def reserve(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> None:
        """Make room for the largest step."""
        if self._captured:
            self._kept[name] = torch.zeros(shape, dtype=dtype, device=self._device)

    def hold(self, name: str, rows: Tensor) -> Tensor:
        """Copy rows to the first places, and return these, as wide as was reserved."""
        kept = self._kept.get(name)
        if kept is None or len(rows) > len(kept):  # an encoder's slots, which no graph reads
            return rows
        kept = kept[: len(rows)]
        (kept if rows.ndim == 1 else kept[:, : rows.shape[1]]).copy_(rows)
        return kept
