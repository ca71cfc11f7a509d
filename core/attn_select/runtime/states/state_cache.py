"""The states of one layer: of the recurrence and of the convolution before it, a slot of each per state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.layer.cache_format import StateFormat
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


def slot_kinds(config: StateConfig, layout: str) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """Return the shape and dtype of a slot of each tensor of a ``StateCache``; None without a convolution."""
    state = tuple(int(extent) for extent in state_shape(layout, config)[1:])
    window = (config.conv_kernel_size - 1, config.conv_dim), PLAIN_DTYPES[config.dtype]
    return {"state": (state, PLAIN_DTYPES[config.state_dtype]), "conv": window if config.conv_kernel_size else None}


def allocate_states(config: StateConfig, layout: str, num_slots: int, device: torch.device) -> StateCache:
    """Return uninitialised states of one layer: a request that is new reads none."""
    made: dict[str, Any] = {
        name: kind and torch.empty((num_slots, *kind[0]), dtype=kind[1], device=device)
        for name, kind in slot_kinds(config, layout).items()
    }
    return StateCache(**made)


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


def convert_states(states: StateCache, source: StateFormat, target: StateFormat) -> StateCache:
    """Return states in the target's format, on the same device. Numbers are rounded where a dtype is narrower.

    Args:
        states: slots of one layer, in the source's format: all of a cache, or the slots that are sent.
        source: of ``states``: ``selection.state_format`` of the side that wrote them.
        target: of the result.

    Raises:
        ConfigError: the sides differ in more than dtypes and layout, or ``states`` are not of the source's format.
    """
    differ = {name: pair for name, pair in source.differences(target).items() if name not in source.converted}
    if differ:
        each = ", ".join(f"{name} = {here} and {there}" for name, (here, there) in differ.items())
        text = f"source and target store other states: {each}. Converted are {', '.join(source.converted)}"
        raise ConfigError(text, fields=[*differ])
    _check(states, source)
    # The two layouts of states differ in the order of their last two dimensions alone.
    state = states.state if source.layout == target.layout else states.state.mT
    conv = states.conv
    return StateCache(
        state.to(PLAIN_DTYPES[target.config.state_dtype], copy=True).contiguous(),
        None if conv is None else conv.to(PLAIN_DTYPES[target.config.dtype], copy=True),
    )


def _check(states: StateCache, source: StateFormat) -> None:
    """Refuse states that are not of their format."""
    for name, kind in slot_kinds(source.config, source.layout).items():
        tensor = getattr(states, name)
        seen = None if tensor is None else (tuple(tensor.shape[1:]), tensor.dtype)
        if seen != kind:
            told, accepted = (
                "None" if each is None else f"{each[1]} (num_slots, {', '.join(map(str, each[0]))})"
                for each in (seen, kind)
            )
            raise ConfigError(f"states.{name} is {told}: the source stores {accepted}", fields=["states"])
