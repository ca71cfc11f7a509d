"""Decode of layers that keep a state: every state is read once and written once, for one token or for several.

A program holds ``BLOCK_V`` columns of one request's state of one value head in registers, ``(BLOCK_K, BLOCK_V)`` in
float32, and runs the request's tokens over them one after the other. Sources of the recurrence: gated delta net, arXiv
2412.06464; Kimi delta attention, arXiv 2510.26692; Mamba-2, arXiv 2405.21060.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_select.layer.state import NORM_EPSILON
from attn_select.runtime.states import Gates
from attn_select_triton.limits import power_of_two

EPSILON = tl.constexpr(NORM_EPSILON)
TILE = 4096  # Numbers of a program's tile at most: 32 registers of each of 128 threads


@triton.jit
def load_vector(ptr, inside, NORMALIZED: tl.constexpr):
    """Return a query or key in float32, of length 1 where it is normalised. Memory traffic: the vector once."""
    found = tl.load(ptr, mask=inside, other=0.0).to(tl.float32)
    if NORMALIZED:
        found = found / tl.sqrt(tl.sum(found * found) + EPSILON)
    return found


@triton.jit
def softplus(numbers):
    """Return ``log(1 + exp(numbers))``, exact to float32's digits where the exponential is small beside 1, too."""
    # Memory traffic: none.
    power = tl.exp(tl.minimum(numbers, 20.0))
    small = power * (1 - power * (0.5 - power / 3))
    return tl.where(numbers > 20, numbers, tl.where(power < 1e-2, small, tl.log(1 + power)))


@triton.jit
def state_decode_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, rate_ptr, bias_ptr, out_ptr, states_ptr,
    query_start_loc_ptr, read_slots_ptr, write_slots_ptr, token_slots_ptr,
    scale, stride_q, stride_k, stride_v, stride_out, stride_slot, columns,
    HEADS: tl.constexpr, V_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    DELTA_RULE: tl.constexpr, BY_CHANNEL: tl.constexpr, NORMALIZED: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """One program per tile of values, request and value head."""
    # rate_ptr, bias_ptr: of raw gates. beta_ptr, token_slots_ptr: None where there is no strength of writing, and where
    # no state within the request is kept.
    # Memory traffic: the tile of the state twice, and once more for each token whose state is kept; every token's query
    # and key once per tile.
    request, v_head = tl.program_id(1) // V_HEADS, tl.program_id(1) % V_HEADS
    head = v_head // (V_HEADS // HEADS)
    start, end = tl.load(query_start_loc_ptr + request), tl.load(query_start_loc_ptr + request + 1)
    keys, values = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = keys < K, values < V
    inside = in_k[:, None] & in_v[None, :]
    place = v_head * K * V + (values[None, :] * K + keys[:, None] if V_FIRST else keys[:, None] * V + values[None, :])
    slot = tl.load(read_slots_ptr + request)
    state = tl.load(states_ptr + slot * stride_slot + place, mask=inside & (slot >= 0), other=0.0).to(tl.float32)
    # The state stays in registers over all tokens of the request.
    first = start.to(tl.int64)
    for token in range(0, end - start):
        row = first + token
        q = load_vector(q_ptr + row * stride_q + head * K + keys, in_k, NORMALIZED) * scale
        k = load_vector(k_ptr + row * stride_k + head * K + keys, in_k, NORMALIZED)
        v = tl.load(v_ptr + row * stride_v + v_head * V + values, mask=in_v, other=0.0).to(tl.float32)
        if BY_CHANNEL:
            gate = tl.load(g_ptr + (row * V_HEADS + v_head) * K + keys, mask=in_k, other=0.0).to(tl.float32)
            if rate_ptr is not None:
                bias = tl.load(bias_ptr + v_head * K + keys, mask=in_k, other=0.0)
        else:
            gate = tl.load(g_ptr + row * V_HEADS + v_head).to(tl.float32)
            if rate_ptr is not None:
                bias = tl.load(bias_ptr + v_head)
        if rate_ptr is not None:
            step = softplus(gate + bias)
            gate = -tl.exp(tl.load(rate_ptr + v_head)) * step
        decay = tl.exp(gate)
        state *= decay[:, None] if BY_CHANNEL else decay
        if DELTA_RULE:
            v -= tl.sum(state * k[:, None], 0)
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + row * V_HEADS + v_head).to(tl.float32)
            v *= tl.sigmoid(beta) if rate_ptr is not None else beta
        elif rate_ptr is not None:  # Mamba-2's step is its strength
            v *= step
        state += k[:, None] * v[None, :]
        out = tl.sum(state * q[:, None], 0)
        tl.store(out_ptr + row * stride_out + v_head * V + values, out.to(out_ptr.dtype.element_ty), mask=in_v)
        if token_slots_ptr is not None:
            kept = tl.load(token_slots_ptr + request * columns + token)
            behind = states_ptr + kept * stride_slot + place
            tl.store(behind, state.to(states_ptr.dtype.element_ty), mask=inside & (kept >= 0))
    slot = tl.load(write_slots_ptr + request)
    tl.store(states_ptr + slot * stride_slot + place, state.to(states_ptr.dtype.element_ty), mask=inside & (slot >= 0))


def decode_states(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Gates,
    states: Tensor,
    query_start_loc: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    token_slots: Tensor | None,
    output: Tensor,
    *,
    scale: float,
    delta_rule: bool,
    normalized: bool,
    v_first: bool,
) -> None:
    """Run the tokens of B requests over their states, in one launch.

    Args:
        query, key: ``(T, num_heads, head_size)``, the heads of a token one behind the other.
        value, output: ``(T, num_v_heads, v_head_size)``, likewise.
        gates: of the T tokens. Raw ones are activated here.
        states: ``(num_slots, num_v_heads, head_size, v_head_size)``, contiguous.
        query_start_loc: int32 ``(B + 1,)``.
        read_slots, write_slots: int64 ``(B,)``; -1: a state of zero, and a state that is not kept.
        token_slots: int64 ``(B, columns)``, likewise, or None.
        scale: factor on the query.
        delta_rule, normalized: of the recurrence.
        v_first: whether the last two extents of ``states`` stand the other way round.
    """
    (heads, size), (v_heads, v_size) = query.shape[1:], value.shape[1:]
    block_k = power_of_two(size)
    block_v = min(power_of_two(v_size), max(8, TILE // block_k))
    raw = gates.raw
    decay, strength = (gates.log_decay, gates.write_strength) if raw is None else (raw.a, raw.b)
    rate, bias = (None, None) if raw is None else (raw.A_log, raw.dt_bias.contiguous())
    state_decode_kernel[(triton.cdiv(v_size, block_v), read_slots.shape[0] * v_heads)](
        query, key, value, decay.contiguous(), None if strength is None else strength.contiguous(), rate, bias,
        output, states, query_start_loc, read_slots, write_slots, token_slots,
        scale, query.stride(0), key.stride(0), value.stride(0), output.stride(0), states.stride(0),
        0 if token_slots is None else token_slots.shape[1],
        HEADS=heads, V_HEADS=v_heads, K=size, V=v_size, BLOCK_K=block_k, BLOCK_V=block_v,
        DELTA_RULE=delta_rule, BY_CHANNEL=decay.ndim == 3, NORMALIZED=normalized, V_FIRST=v_first,
        num_warps=4,
    )  # fmt: skip


def packed(tensor: Tensor) -> Tensor:
    """Return a tensor whose heads and numbers of a token lie one behind the other: itself where they do."""
    return tensor if tensor[:1].is_contiguous() else tensor.contiguous()
