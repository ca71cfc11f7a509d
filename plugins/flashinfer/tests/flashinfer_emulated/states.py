"""Entries of layers that keep a state as FlashInfer 0.7.2.post1 has them; 0.6.14 takes fewer arguments.

Sources: flashinfer/gdn_prefill.py, its docstring and checks; of decodes see ``state_decodes``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import flashinfer_emulated as fi
from attn_select.layer.state import StateConfig
from attn_select.reference.oracle_state import state_reference
from flashinfer_emulated import need, state_prefills
from flashinfer_emulated.state_decodes import gated_delta_net, kimi_delta_attention, mamba

NEWEST = fi.RELEASES[-1]


@fi.entry("gdn_prefill.chunk_gated_delta_rule", NEWEST)
def chunk_gated_delta_rule(a: Any) -> tuple[Tensor, Tensor]:
    """Compute it by the float64 recurrence. Queries and keys are taken as they are; states are ``(N, H, V, K)``."""
    fi.called("chunk_gated_delta_rule", vars(a))
    q, k, v, g, beta, initial_state = a.q, a.k, a.v, a.g, a.beta, a.initial_state
    (tokens, heads, size), v_heads = q.shape, v.shape[1]
    need(all(each.is_contiguous() for each in (q, k, v, g, beta)), "must be contiguous", RuntimeError)
    need(q.dtype in fi.HALVES, f"q {q.dtype}", RuntimeError)
    need(g.shape == beta.shape == (tokens, v_heads), f"g {tuple(g.shape)}, beta {tuple(beta.shape)}", ValueError)
    need(g.dtype == beta.dtype == torch.float32, f"g {g.dtype}, beta {beta.dtype}", ValueError)
    need(((g >= 0) & (g <= 1)).all(), "g is the decay itself, from 0 to 1")
    need(size == v.shape[2] == 128, f"head_size {size}")
    need(a.cu_seqlens.dtype in (torch.int32, torch.int64), f"cu_seqlens {a.cu_seqlens.dtype}", ValueError)
    shape = (len(a.cu_seqlens) - 1, v_heads, size, size)
    need(initial_state.shape == shape, f"{tuple(initial_state.shape)}", ValueError)
    need(initial_state.dtype == torch.float32, f"initial_state {initial_state.dtype}", ValueError)
    need(a.output_final_state and a.output_state.shape == shape, "output_state is required", ValueError)
    # The reference normalises once more, which changes nothing of rows of length 1.
    config = StateConfig(recurrence="gated_delta_net", num_heads=heads, num_v_heads=v_heads, head_size=size)
    need(abs(a.scale - size**-0.5) < 1e-9, f"scale {a.scale}")
    output = torch.empty_like(v)
    for request, (start, end) in enumerate(pairwise(a.cu_seqlens.tolist())):
        own = slice(start, end)
        lengths = torch.linalg.vector_norm(torch.cat([q[own], k[own]]).double(), dim=-1)
        need(((lengths - 1).abs() < 0.02).all(), "q and k are not normalised by the kernel")
        found, states = state_reference(
            config, q[own], k[own], v[own], g[own].double().log(), beta[own], initial_state[request].mT
        )
        output[own] = found.to(output.dtype)
        a.output_state[request] = states[-1].mT.to(a.output_state.dtype)
    return output, a.output_state


@fi.entry("gdn_decode.gated_delta_rule_decode_pretranspose", NEWEST)
def gated_delta_rule_decode_pretranspose(a: Any) -> tuple[Tensor, Tensor]:
    fi.called("gated_delta_rule_decode_pretranspose", vars(a))
    need(a.state is None and a.use_qk_l2norm, "states lie in a pool, and the kernel normalises")
    slots = (a.initial_state_indices, a.output_state_indices)
    gates = (a.A_log, a.a, a.dt_bias, a.b)
    return gated_delta_net((a.q, a.k, a.v), gates, a.scale, a.initial_state, slots), a.initial_state


@fi.entry("mamba.selective_state_update", NEWEST)
def selective_state_update(a: Any) -> Tensor:
    fi.called("selective_state_update", vars(a))
    need(a.dt_softplus, "dt is given before its activation")
    slots = (a.state_batch_indices, a.dst_state_batch_indices)
    return mamba(a.x, a.dt, a.A, a.B, a.C, a.D, a.dt_bias, a.state, slots)


@fi.entry("kda.recurrent_kda", NEWEST)
def recurrent_kda(a: Any) -> tuple[Tensor, None]:
    fi.called("recurrent_kda", vars(a))
    need(a.use_qk_l2norm_in_kernel, "the kernel normalises")
    tokens, source = (a.q, a.k, a.v, a.g, a.beta), (a.initial_state_source, a.initial_state_indices)
    if a.q.shape[1] > len(a.cu_seqlens) - 1:  # a prefill by its own kernel, which gates choose
        need(a.use_gate_in_kernel and a.beta_is_logit, "prefills activate gates: others are slow decodes", ValueError)
        need(source == (None, None), "prefills read where they write", ValueError)
        pool = (a.initial_state, a.ssm_state_indices)
        return state_prefills.kimi_delta_attention(tokens, (a.A_log, a.dt_bias), a.scale, a.cu_seqlens, *pool), None
    need(not a.use_gate_in_kernel and not a.beta_is_logit, "decodes take gates that are activated")
    slots = (a.initial_state_indices, a.ssm_state_indices)
    states = (a.initial_state, a.initial_state_source)
    return kimi_delta_attention(tokens, a.scale, a.cu_seqlens, *states, slots), None


@fi.entry("mamba.ssd_combined_fwd", NEWEST)
def ssd_combined_fwd(a: Any) -> tuple[Tensor, Tensor]:
    fi.called("ssd_combined_fwd", vars(a))
    own = a.D is None and a.z is None
    need(a.dt_softplus and own, "dt is given before its activation, D and z are the layer's")
    inputs = (a.x, a.dt, a.A, a.B, a.C)
    return state_prefills.mamba(inputs, a.dt_bias, a.initial_states, a.seq_idx, a.chunk_indices, a.chunk_offsets)
