"""What FlashInfer's prefills of KDA and Mamba-2 do, by the float64 recurrence.

Sources: ``_flash_kda_prefill_is_eligible`` and ``_is_state_pool_tensor`` of flashinfer/kda_prefill.py, and
``CakeSSDCombined.run`` of flashinfer/mamba/cake_ssd_combined.py with the docstring of ssd_combined.py, 0.7.2.post1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import flashinfer_emulated as fi
from attn_select.layer.state import StateConfig
from attn_select.reference.oracle_state import state_reference
from flashinfer_emulated import need

CHUNK, WIDTH, SIZE = 128, 64, 128


def kimi_delta_attention(
    tokens: tuple[Tensor, ...], gates: tuple[Tensor, Tensor], scale: float, bounds: Tensor, pool: Tensor, slots: Tensor
) -> Tensor:
    """Compute ``recurrent_kda`` of packed prefills ``(1, T, H, 128)`` in a pool; the states before are in its slots."""
    query, key, value, raw, beta = tokens
    a_log, dt_bias = gates
    one, _, heads, size = query.shape
    need(one == 1 and size == 128, f"q {tuple(query.shape)}", ValueError)
    for name, each in (("q", query), ("k", key), ("v", value), ("g", raw)):
        need(each.dtype == torch.bfloat16 and each.is_contiguous(), f"{name} {each.dtype} {each.stride()}", ValueError)
        need(each.shape == query.shape, f"{name} {tuple(each.shape)}", ValueError)
    need(beta.dtype == torch.bfloat16 and beta.shape == query.shape[:3], f"beta {tuple(beta.shape)}", ValueError)
    need(beta.stride(-1) == 1, f"beta has strides {beta.stride()}", ValueError)
    need(a_log.dtype == dt_bias.dtype == torch.float32, f"A_log {a_log.dtype}, dt_bias {dt_bias.dtype}", ValueError)
    need(a_log.shape == (heads,) and dt_bias.shape == (heads, size), f"dt_bias {tuple(dt_bias.shape)}", ValueError)
    need(a_log.is_contiguous() and dt_bias.is_contiguous(), "A_log and dt_bias are contiguous", ValueError)
    need(pool.dtype == torch.bfloat16, f"pool {pool.dtype}: float32 with a bound of the gate alone", ValueError)
    need(pool.shape[1:] == (heads, size, size) and pool[0].is_contiguous(), f"pool {tuple(pool.shape)}", ValueError)
    need(slots.dtype == torch.int32 and slots.shape == (len(bounds) - 1,), f"slots {slots.dtype}", ValueError)
    config = StateConfig(recurrence="kda", num_heads=heads, head_size=size)
    need(abs(scale - config.scale) < 1e-9, f"scale {scale}")
    log_decay = -a_log.double().exp()[:, None] * functional.softplus(raw[0].double() + dt_bias.double())
    rows = (query[0], key[0], value[0], log_decay, beta[0].double().sigmoid())
    output = torch.empty_like(value[0])
    for slot, own, found, last in _requests(config, rows, bounds, [pool[slot] for slot in slots.tolist()], slots):
        output[own], pool[slot] = found.to(output.dtype), last.to(pool.dtype)
    return output.unsqueeze(0)


def mamba(
    inputs: tuple[Tensor, ...], dt_bias: Tensor, states: Tensor, seq_idx: Tensor, chunks: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``ssd_combined_fwd`` of packed requests; output ``(1, T, heads, 64)`` and states behind them."""
    x, dt, rate, b, c = inputs
    (one, tokens, heads, width), (groups, size) = x.shape, b.shape[2:]
    need((one, width, size) == (1, WIDTH, SIZE), f"x {tuple(x.shape)}, B {tuple(b.shape)}", ValueError)
    need(heads % groups == 0 and c.shape == b.shape, f"C {tuple(c.shape)}", ValueError)
    need(x.dtype == b.dtype == c.dtype == torch.bfloat16, "x, B, and C must be bfloat16", ValueError)
    need(dt.shape == (1, tokens, heads) and dt.dtype in (torch.bfloat16, torch.float32), f"dt {dt.dtype}", ValueError)
    need(rate.shape == (heads,) and rate.dtype == torch.float32, f"A {rate.dtype}", ValueError)
    need(dt_bias.shape == (heads,) and dt_bias.dtype in (torch.bfloat16, torch.float32), "dt_bias", ValueError)
    need(states.dtype in (*fi.HALVES, torch.float32), f"initial_states {states.dtype}", ValueError)
    need(states.shape[1:] == (heads, WIDTH, SIZE), f"initial_states {tuple(states.shape)}", ValueError)
    need(seq_idx.shape == (1, tokens) and seq_idx.dtype in (torch.int32, torch.int64), "seq_idx", ValueError)
    need(chunks.dtype == offsets.dtype == torch.int32 and chunks.shape == offsets.shape, "chunk_indices", ValueError)
    request = seq_idx[0].tolist()
    need(sorted(set(request)) == list(range(len(states))) and request == sorted(request), f"seq_idx {request}")
    bounds = torch.tensor([request.index(each) for each in range(len(states))] + [tokens])
    starts = sorted({*bounds[:-1].tolist(), *range(0, tokens, CHUNK)})
    need((chunks * CHUNK + offsets).tolist() == starts and bool((offsets < CHUNK).all()), f"pieces at {starts}")
    step = functional.softplus(dt[0].double() + dt_bias.double())
    config = StateConfig(recurrence="mamba2", num_heads=groups, num_v_heads=heads, head_size=SIZE, v_head_size=WIDTH)
    output, behind = torch.empty_like(x[0]), torch.empty_like(states)
    rows = (c[0], b[0], x[0], step * rate.double(), step)
    numbers = torch.arange(len(states))
    for number, own, found, last in _requests(config, rows, bounds, list(states), numbers):
        output[own], behind[number] = found.to(output.dtype), last.to(behind.dtype)
    return output.unsqueeze(0), behind


def _requests(
    config: StateConfig, rows: tuple[Tensor, ...], bounds: Tensor, states: list[Tensor], places: Tensor
) -> list[Any]:
    """Return of each request where its state goes, its rows, their outputs, and the state ``(H, V, K)`` behind them."""
    done = []
    for place, state, (first, end) in zip(places.tolist(), states, pairwise(bounds.tolist()), strict=True):
        query, key, value, log_decay, strength = (each[first:end] for each in rows)
        found, after = state_reference(config, query, key, value, log_decay, strength, state.mT)
        done.append((place, slice(first, end), found, after[-1].mT))
    return done
