"""XQA's mask of draft tokens: which of a request's last tokens each of them sees; all keys before are seen."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 32


def packed_rows(drafts: int, causal: bool) -> list[list[int]]:
    """Return one row of signed 16-bit words per draft, the first draft in the lowest bit, padded to 32 bits.

    The layout is that of ``mask`` in flashinfer/xqa.py 0.6.14.
    """
    words = -(-drafts // _WORD) * 2
    seen = [(1 << (row + 1 if causal else drafts)) - 1 for row in range(drafts)]
    cut = [[(bits >> 16 * word) & 0xFFFF for word in range(words)] for bits in seen]
    return [[word - 0x10000 if word >= 0x8000 else word for word in row] for row in cut]


class DraftMasks:
    """Masks that are made once and stay where they are.

    Args:
        max_num_seqs: most requests.
        device: where kernels read them.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._max_num_seqs, self._device = max_num_seqs, device
        self._made: dict[tuple[int, bool], Tensor] = {}

    def mask(self, num_reqs: int, drafts: int, causal: bool) -> Tensor | None:
        """Return uint16 ``(num_reqs, drafts, words)``, or None for a single token."""
        if drafts == 1:
            return None
        key = drafts, causal
        if key not in self._made:
            rows = torch.tensor(packed_rows(drafts, causal), dtype=torch.int16)
            every = rows.expand(self._max_num_seqs, *rows.shape).contiguous()
            self._made[key] = every.to(self._device).view(torch.uint16)
        return self._made[key][:num_reqs]
