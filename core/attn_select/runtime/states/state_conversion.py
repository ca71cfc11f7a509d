"""``convert_states``: states of one side as the other side's kernels read them."""

from __future__ import annotations

from attn_select.errors import ConfigError
from attn_select.layer.layouts import state_shape
from attn_select.layer.state_format import StateFormat
from attn_select.runtime.states.state_cache import StateCache
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


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
    config = source.config
    window = (config.conv_kernel_size - 1, config.conv_dim) if config.conv_kernel_size else None
    shape = tuple(int(extent) for extent in state_shape(source.layout, config)[1:])
    for name, tensor, wanted, dtype in (
        ("state", states.state, shape, config.state_dtype),
        ("conv", states.conv, window, config.dtype),
    ):
        seen = None if tensor is None else (tuple(tensor.shape[1:]), tensor.dtype)
        accepted = None if wanted is None else (wanted, PLAIN_DTYPES[dtype])
        if seen != accepted:
            told = "none" if seen is None else f"{seen[1]} (num_slots, {', '.join(map(str, seen[0]))})"
            shown = "None" if accepted is None else f"{accepted[1]} (num_slots, {', '.join(map(str, accepted[0]))})"
            raise ConfigError(f"states.{name} is {told}: the source stores {shown}", fields=["states"])
