"""The additive mask of causality and sliding windows, made once and sliced for every range of rows.

Who sees whom depends on positions relative to each other alone. So one band of rows, its columns counted from the
position of its last row, serves all ranges of rows of all requests, as views.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select_torch.runtime.dense_attention import visible_keys


# Rows are repeated for each of the ``group`` query heads that share a KV head: row ``r * group + g`` belongs to
# token r, as queries are packed.
class BandMask:
    """Masks for rows at neighbouring positions against keys at neighbouring positions."""

    def __init__(
        self,
        rows: int,
        group: int,
        *,
        causal: bool,
        sliding_window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # rows: most tokens of one range
        # group: query heads per KV head
        # causal, sliding_window: as in ``visible_keys``
        self.rows, self.group = rows, group
        self.causal, self.sliding_window = causal, sliding_window
        self.dtype, self.device = dtype, device
        self._first = 0
        self._mask: Tensor | None = None

    def hides(self, rows: int, first: int, end: int) -> bool:
        """Whether any of ``rows`` tokens does not see all keys ``first .. end - 1`` (relative to the last row)."""
        top = 1 - rows  # the first row, which causality hides most from; a window hides most from the last one
        window = self.sliding_window
        if self.causal:
            return end - 1 > top or (window is not None and -first >= window)
        return window is not None and (-first >= window or end - 1 - top >= window)

    def view(self, rows: int, first: int, end: int) -> Tensor:
        """Return ``(1, 1, rows * group, end - first)``: 0 where a row sees a key, else -inf."""
        # rows: tokens, at most those the band was made for
        # first, end: keys at positions ``first .. end - 1`` relative to the last row's
        if self._mask is None or first < self._first or end > self._first + self._mask.shape[1]:
            self._grow(first, end)
        assert self._mask is not None
        # Fewer rows are the band's last ones: columns count from the last row.
        part = self._mask[(self.rows - rows) * self.group :, first - self._first : end - self._first]
        return part[None, None]

    def _grow(self, first: int, end: int) -> None:
        # Contexts grow from step to step: doubling makes that a logarithmic number of new bands.
        last = end if self._mask is None else max(end, self._first + self._mask.shape[1])
        if first < self._first:
            self._first = -(1 << (-first - 1).bit_length())
        positions = torch.arange(1 - self.rows, 1, device=self.device)
        keys = torch.arange(self._first, last, device=self.device)
        seen = visible_keys(positions, keys, causal=self.causal, sliding_window=self.sliding_window)
        mask = torch.zeros(self.rows, last - self._first, dtype=self.dtype, device=self.device)
        if seen is not None:
            mask.masked_fill_(~seen, -torch.inf)
        self._mask = mask.repeat_interleave(self.group, dim=0)
