"""What steps of layers that keep a state read, write and multiply.

Their times depend on how many requests a step has and on their new tokens, not on how long the requests are: a request
with earlier tokens reads one state, any request writes one, and a decode with drafts writes one per token. FLOPs count
the recurrence token by token (``attn_select.layer.state``); chunks multiply more, on tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_select.layer import dtypes
from attn_select.layer.layouts import bytes_per_slot
from attn_select.layer.state import StateConfig


@dataclass(frozen=True, slots=True)
class RequestStates:
    """What one request moves and multiplies in a step."""

    read_bytes: float  # of states, the windows of the convolution included
    written_bytes: float
    token_bytes: float  # queries, keys, values and gates read, and outputs written
    flops: float  # of the recurrence


def request_states(config: StateConfig, query_len: int, seq_len: int) -> RequestStates:
    """Return what a request of ``query_len`` new tokens moves and multiplies; it has ``seq_len`` tokens with them."""
    state, has_state = bytes_per_slot(config), seq_len > query_len
    kept = query_len if has_state and query_len <= config.max_decode_query_len else 1
    heads, size = config.num_v_heads, config.head_size
    numbers = config.width + heads * config.v_head_size
    gates = heads * (size if config.rule.decay == "channel" else 1) + heads * config.rule.writes
    products = 3 if config.rule.delta_rule else 2
    return RequestStates(
        read_bytes=state * has_state,
        written_bytes=state * kept,
        token_bytes=query_len * (numbers * dtypes.BITS[config.dtype] / 8 + 4 * gates),
        flops=query_len * heads * size * config.v_head_size * (2 * products + 1),
    )
