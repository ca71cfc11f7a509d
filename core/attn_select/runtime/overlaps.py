"""Tensors that share memory with what a layer writes: results would depend on the order in which a kernel writes.

Addresses and strides decide, so views that lie between each other's elements are apart. No memory is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from attn_select.runtime.metadata import BatchError

_MOST_WORK: Any = 100_000  # NumPy's stubs know two names for numbers alone
"""Of NumPy's search for a common address. It takes a handful of steps for what layers are given; what needs more is
taken to be apart."""


def check_overlaps(written: Mapping[str, Tensor | None], read: Mapping[str, Tensor | None]) -> None:
    """Check that each written tensor has memory that no other one has; tensors that are read may share theirs."""
    targets = _arrays(written)
    others = targets | _arrays(read)
    for number, (name, target) in enumerate(targets.items()):
        for other in [*others][number + 1 :]:
            if _share(target, others[other]):
                raise BatchError(
                    f"{name} and {other} overlap in memory: the layer writes {name} (accepted: memory that no other "
                    "argument has)"
                )


def check_no_self_overlap(name: str, tensor: Tensor | None) -> None:
    """Check that no two elements of a tensor that is written lie at one address, as in an expanded one."""
    if tensor is None or tensor.is_contiguous() or not _in_memory(tensor):
        return
    array = _array(tensor)
    for axis in range(array.ndim):
        before = (slice(None),) * axis
        # Of two elements at one address that differ along this axis, one may as well be the first along it.
        if _share(array[*before, :1], array[*before, 1:]):
            raise _self_overlap(name, tensor)


def check_not_expanded(name: str, tensor: Tensor) -> None:
    """Check that no dimension of a cache has stride 0. Views that overlap otherwise are taken."""
    # Engines that keep the pages of all layers in one tensor bring them: of such a view they use some blocks alone,
    # which lie apart.
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise _self_overlap(name, tensor)


def _self_overlap(name: str, tensor: Tensor) -> BatchError:
    return BatchError(
        f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: several elements share one address "
        "(accepted: an address for each)"
    )


def _arrays(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    return {name: _array(tensor) for name, tensor in tensors.items() if tensor is not None and _in_memory(tensor)}


def _in_memory(tensor: Tensor) -> bool:
    """Whether a tensor has addresses: empty ones and those of device ``meta`` have none."""
    return tensor.numel() > 0 and tensor.data_ptr() != 0


def _array(tensor: Tensor) -> Any:
    """Return a NumPy array at the addresses of a tensor, whatever device they are of: it is never read."""
    size = tensor.element_size()
    # numpy only computes with the addresses, so those of a GPU do as well as the host's.
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * size for stride in tensor.stride()),
        "data": (tensor.data_ptr(), False),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _share(one: Any, other: Any) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return False
