"""Integers that callers bring, in lists, arrays or host tensors. Nothing else is taken for a number."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from attn_select.errors import ConfigError, show


def integer(value: object) -> int | None:
    """Return a value as an int; None where it is no integer. A truth value is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def size(name: str, value: object) -> int:
    """Return a size, a count or a bound as an int; ConfigError where it is no integer from 1."""
    found = integer(value)
    if found is None or found < 1:
        raise ConfigError(f"{name} = {show(value)}: accepted are integers from 1", fields=[name])
    return found


def integers(values: object) -> list[int] | None:
    """Return a sequence of integers, a numpy array or a host tensor of one dimension as a list; None for all else."""
    # All else is text and bytes (whose elements are no numbers to who meant them), floats, truth values, sets and
    # iterators, which have no order or no length, and tensors of a device, whose reading would wait for it.
    if isinstance(values, (str, bytes, bytearray, memoryview)) or str(getattr(values, "device", "cpu")) != "cpu":
        return None
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence):
        return None
    if set(map(type, values)) <= {int}:
        return list(values)
    found = [integer(value) for value in values]
    return None if None in found else found  # type: ignore[return-value]
