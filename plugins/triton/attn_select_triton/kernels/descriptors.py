"""Tensor descriptors for TMA that are made and encoded once, whatever tensor's memory they lead to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOST = 1024  # Descriptors of one kind that are kept, about 1 KB each: K or V of so many layers


class _Address:
    """Where a descriptor begins: what Triton asks of its tensor, whose memory this does not keep."""

    __slots__ = ("_address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address


class Descriptors:
    """Descriptors of rows of one kind, that is dtype, columns, strides and box, at any address."""

    # TMA's form of a descriptor, which ``relaunch`` keeps with it, says nothing else but the address and the number of
    # rows. So one that was made for a tensor that is gone fits the next tensor of this kind in its place.

    __slots__ = ("_fields", "_made", "_type")

    def __init__(self, like: Any) -> None:
        self._type, self._fields = type(like), {**like.__dict__, "base": None}
        self._made: dict[tuple[int, int], Any] = {}

    def over(self, tensor: Tensor, rows: int) -> Any:
        """Return the descriptor of ``rows`` rows from a tensor's address on. Nothing is checked."""
        place = tensor.data_ptr(), rows
        found = self._made.get(place)
        if found is None:
            if not tensor.is_cuda:  # Triton's interpreter reads the tensor itself
                return self._make(tensor, rows)
            if len(self._made) >= MOST:
                self._made.clear()
            found = self._made[place] = self._make(_Address(place[0], tensor.dtype), rows)
        return found

    def _make(self, base: Any, rows: int) -> Any:
        made = object.__new__(self._type)
        made.__dict__.update(self._fields, base=base, shape=[rows, self._fields["shape"][1]])
        return made
