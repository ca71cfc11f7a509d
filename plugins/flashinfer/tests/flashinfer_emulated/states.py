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


def computed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor,
    output_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute it by the float64 recurrence. Queries and keys are taken as they are; states are ``(N, H, V, K)``."""
    (tokens, heads, size), v_heads = q.shape, v.shape[1]
    need(all(each.is_contiguous() for each in (q, k, v, g, beta)), "must be contiguous", RuntimeError)
    need(q.dtype in fi.HALVES, f"q {q.dtype}", RuntimeError)
    need(g.shape == beta.shape == (tokens, v_heads), f"g {tuple(g.shape)}, beta {tuple(beta.shape)}", ValueError)
    need(g.dtype == beta.dtype == torch.float32, f"g {g.dtype}, beta {beta.dtype}", ValueError)
    need(((g >= 0) & (g <= 1)).all(), "g is the decay itself, from 0 to 1")
    need(size == v.shape[2] == 128, f"head_size {size}")
    need(cu_seqlens.dtype in (torch.int32, torch.int64), f"cu_seqlens {cu_seqlens.dtype}", ValueError)
    need(initial_state.shape == (len(cu_seqlens) - 1, v_heads, size, size), f"{tuple(initial_state.shape)}", ValueError)
    need(initial_state.dtype == torch.float32, f"initial_state {initial_state.dtype}", ValueError)
    need(output_final_state and output_state.shape == initial_state.shape, "output_state is required", ValueError)
    # The reference normalises once more, which changes nothing of rows of length 1.
    config = StateConfig(recurrence="gated_delta_net", num_heads=heads, num_v_heads=v_heads, head_size=size)
    need(abs(scale - size**-0.5) < 1e-9, f"scale {scale}")
    output = torch.empty_like(v)
    for request, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        own = slice(start, end)
        lengths = torch.linalg.vector_norm(torch.cat([q[own], k[own]]).double(), dim=-1)
        need(((lengths - 1).abs() < 0.02).all(), "q and k are not normalised by the kernel")
        found, states = state_reference(
            config, q[own], k[own], v[own], g[own].double().log(), beta[own], initial_state[request].mT
        )
        output[own] = found.to(output.dtype)
        output_state[request] = states[-1].mT.to(output_state.dtype)
    return output, output_state


def chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    beta: Any = None,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: Any = False,
    cu_seqlens: Any = None,
    use_qk_l2norm_in_kernel: Any = False,
    output: Any = None,
    output_state: Any = None,
    state_checkpoints: Any = None,
    checkpoint_cu_starts: Any = None,
    checkpoint_every_n_tokens: Any = 0,
    use_cp: Any = "auto",
    state_indices: Any = None,
    _cp_chunk_len: Any = None,
    backend: Any = "auto",
    max_seqlen: Any = None,
) -> Any:
    fi.called("chunk_gated_delta_rule", locals())
    return computed(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, output_state)


def gated_delta_rule_decode_pretranspose(
    q: Any,
    k: Any,
    v: Any,
    state: Any,
    A_log: Any,
    a: Any,
    dt_bias: Any,
    b: Any,
    scale: Any = None,
    output: Any = None,
    use_qk_l2norm: Any = True,
    initial_state: Any = None,
    initial_state_indices: Any = None,
    output_state_indices: Any = None,
    intermediate_states_buffer: Any = None,
    disable_state_update: Any = False,
    backend: Any = "auto",
) -> Any:
    fi.called("gated_delta_rule_decode_pretranspose", locals())
    need(state is None and use_qk_l2norm, "states lie in a pool, and the kernel normalises")
    slots = (initial_state_indices, output_state_indices)
    return gated_delta_net((q, k, v), (A_log, a, dt_bias, b), scale, initial_state, slots), initial_state


def selective_state_update(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: Any = False,
    state_batch_indices: Any = None,
    pad_slot_id: Any = -1,
    state_scale: Any = None,
    out: Any = None,
    disable_state_update: Any = False,
    intermediate_states_buffer: Any = None,
    intermediate_state_indices: Any = None,
    intermediate_state_scales: Any = None,
    rand_seed: Any = None,
    philox_rounds: Any = 10,
    cache_steps: Any = 0,
    algorithm: Any = "auto",
    dst_state_batch_indices: Any = None,
    cu_seqlens: Any = None,
    num_accepted_tokens: Any = None,
    backend: Any = "auto",
) -> Any:
    fi.called("selective_state_update", locals())
    need(dt_softplus, "dt is given before its activation")
    return mamba(x, dt, A, B, C, D, dt_bias, state, (state_batch_indices, dst_state_batch_indices))


def recurrent_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: Any = False,
    use_qk_l2norm_in_kernel: Any = True,
    use_gate_in_kernel: Any = False,
    lower_bound: Any = None,
    cu_seqlens: Any = None,
    ssm_state_indices: Any = None,
    num_spec_tokens: Any = None,
    num_accepted_tokens: Any = None,
    output: Any = None,
    initial_state_source: Any = None,
    initial_state_indices: Any = None,
    beta_is_logit: Any = False,
) -> Any:
    fi.called("recurrent_kda", locals())
    need(use_qk_l2norm_in_kernel, "the kernel normalises")
    if q.shape[1] > len(cu_seqlens) - 1:  # a prefill by its own kernel, which gates choose
        need(use_gate_in_kernel and beta_is_logit, "prefills activate gates: others run as slow decodes", ValueError)
        need(initial_state_source is initial_state_indices is None, "prefills read where they write", ValueError)
        tokens, gates = (q, k, v, g, beta), (A_log, dt_bias)
        return state_prefills.kimi_delta_attention(
            tokens, gates, scale, cu_seqlens, initial_state, ssm_state_indices
        ), None
    need(not use_gate_in_kernel and not beta_is_logit, "decodes take gates that are activated")
    slots = (initial_state_indices, ssm_state_indices)
    return (
        kimi_delta_attention((q, k, v, g, beta), scale, cu_seqlens, initial_state, initial_state_source, slots),
        None,
    )


def ssd_combined_fwd(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: Any = False,
    initial_states: Any = None,
    seq_idx: Any = None,
    chunk_indices: Any = None,
    chunk_offsets: Any = None,
    seq_chunk_cumsum: Any = None,
    update_seq_chunk_cumsum: Any = False,
    checkpoint_token_indices: Any = None,
    checkpoint_state_slots: Any = None,
    checkpoint_states: Any = None,
    out: Any = None,
    return_final_states: Any = True,
    num_seqs: Any = None,
) -> Any:
    fi.called("ssd_combined_fwd", locals())
    need(dt_softplus and D is None and z is None, "dt is given before its activation, D and z are the layer's")
    inputs = (x, dt, A, B, C)
    return state_prefills.mamba(inputs, dt_bias, initial_states, seq_idx, chunk_indices, chunk_offsets)
