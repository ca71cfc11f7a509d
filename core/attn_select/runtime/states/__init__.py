"""Layers that keep a state of fixed size per request instead of keys and values (``attn_select.layer.state``).

An engine's path: ``StateGroup(select(config))``, ``group.allocate(num_slots)`` per layer, per step ``StatePool.step``
and ``group.build``, per layer ``LinearAttention``.
"""

from attn_select.runtime.states.gates import Gates, RawGates
from attn_select.runtime.states.gathered import GatheredStateImpl, gathered_states
from attn_select.runtime.states.linear_attention import LinearAttention
from attn_select.runtime.states.state_backend import StateBackend, StateContext, StateImpl
from attn_select.runtime.states.state_batch import StateMetadata, StatePart
from attn_select.runtime.states.state_cache import StateCache, convert_states, slots_in_pool, zeros_slot
from attn_select.runtime.states.state_group import StateGroup
from attn_select.runtime.states.state_pool import OutOfSlotsError, StatePool, StateSlots
from attn_select.runtime.states.static_states import StaticStates

__all__ = [
    "Gates",
    "GatheredStateImpl",
    "LinearAttention",
    "OutOfSlotsError",
    "RawGates",
    "StateBackend",
    "StateCache",
    "StateContext",
    "StateGroup",
    "StateImpl",
    "StateMetadata",
    "StatePart",
    "StatePool",
    "StateSlots",
    "StaticStates",
    "convert_states",
    "gathered_states",
    "slots_in_pool",
    "zeros_slot",
]
