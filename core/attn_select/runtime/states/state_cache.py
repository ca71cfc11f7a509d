"""The states of one layer: of the recurrence and of the convolution before it, a slot of each per state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.layer.layouts import state_shape
from attn_select.layer.state import StateConfig
from attn_select.runtime.states.state_batch import StatePart
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


@dataclass(slots=True)
class StateCache:
    """The states of one layer.

    Attributes:
        state: ``state_dtype``, the shape of the selection's layout with the number of slots filled in.
        conv: ``dtype`` ``(num_slots, conv_kernel_size - 1, conv_dim)``, the last inputs of the convolution, oldest
            first; None without one.
    """

    state: Tensor
    conv: Tensor | None


def allocate_states(config: StateConfig, layout: str, num_slots: int, device: torch.device) -> StateCache:
    """Return uninitialised states of one layer: a request that is new reads none."""
    shape = [num_slots if extent == "num_slots" else int(extent) for extent in state_shape(layout, config)]
    state = torch.empty(shape, dtype=PLAIN_DTYPES[config.state_dtype], device=device)
    if not config.conv_kernel_size:
        return StateCache(state, None)
    window = (num_slots, config.conv_kernel_size - 1, config.conv_dim)
    return StateCache(state, torch.empty(window, dtype=PLAIN_DTYPES[config.dtype], device=device))


def zeros_slot(states: Tensor) -> int:
    """Return the slot of zeros that the states of a group have whose backend ``reads_zeros``.

    Nobody writes to it; the one behind it takes what padding writes (``NOWHERE``).
    """
    return states.shape[0] - 2


def slots_in_pool(states: Tensor, part: StatePart) -> tuple[Tensor, Tensor]:
    """Return the slots that a part reads and writes, for kernels that know no slot below 0.

    Args:
        states: of a group whose backend ``reads_zeros``.
        part: requests of one state each.

    Returns:
        Int32 ``(B,)`` each: a request that starts from zero reads ``zeros_slot``, padding writes to the last slot.
    """
    zeros, last = zeros_slot(states), states.shape[0] - 1
    read, write = part.read_slots, part.write_slots
    return read.masked_fill(read < 0, zeros).int(), write.masked_fill(write < 0, last).int()
