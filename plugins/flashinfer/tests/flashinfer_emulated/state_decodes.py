"""What FlashInfer's decodes of layers that keep a state do, of one token per request, by the float64 recurrence.

Sources: the checks of flashinfer/gdn_decode.py, flashinfer/kda_kernels/recurrent_kda.py and
csrc/selective_state_update.cu. ``states`` has the entries of each release.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import flashinfer_emulated as fi
from attn_select.layer.state import StateConfig
from attn_select.reference.oracle_state import state_reference
from flashinfer_emulated import need

INDICES = (torch.int32, torch.int64)


def gated_delta_net(
    tokens: tuple[Tensor, Tensor, Tensor], gates: tuple[Tensor, ...], scale: float, pool: Tensor, slots: Any
) -> Tensor:
    """Compute ``gated_delta_rule_decode_pretranspose`` in a pool ``(slots, HV, V, K)``; output ``(B, 1, HV, V)``."""
    (query, key, value), (a_log, a, dt_bias, b) = tokens, gates
    (batch, each, heads, size), v_heads = query.shape, value.shape[2]
    need(each == 1, f"Decode only supports T=1, got T={each}")
    need(query.dtype in fi.HALVES, f"q must be float16/bfloat16, got {query.dtype}")
    need(a.dtype in fi.HALVES and b.dtype in fi.HALVES, f"a {a.dtype}, b {b.dtype}")
    need(a_log.dtype == torch.float32, f"A_log must be float32, got {a_log.dtype}")
    need(dt_bias.dtype in (torch.bfloat16, torch.float32), f"dt_bias {dt_bias.dtype}")
    need(a.shape == b.shape == (batch, 1, v_heads), f"a {tuple(a.shape)}, b {tuple(b.shape)}")
    need(pool.shape[1:] == (v_heads, 128, 128) and size == 128, f"pool {tuple(pool.shape)}", ValueError)
    need(pool.dtype in (torch.float32, torch.bfloat16), f"state {pool.dtype}")
    # The entry lets it pass: its kernel reads q, k and v as bfloat16 then.
    need(pool.dtype == torch.float32 or query.dtype == torch.bfloat16, f"state {pool.dtype} and q {query.dtype}")
    config = StateConfig(recurrence="gated_delta_net", num_heads=heads, num_v_heads=v_heads, head_size=size)
    log_decay = -a_log.double().exp() * functional.softplus(a.double() + dt_bias.double())
    need(abs(scale - config.scale) < 1e-9, f"scale {scale}")
    rows = (query[:, 0], key[:, 0], value[:, 0], log_decay[:, 0], b[:, 0].double().sigmoid())
    return in_pool(config, rows, pool, slots).unsqueeze(1)


def kimi_delta_attention(
    tokens: tuple[Tensor, ...], scale: float, bounds: Tensor, pool: Tensor, source: Tensor, slots: Any
) -> Tensor:
    """Compute ``recurrent_kda`` of packed decodes ``(1, B, H, K)``; output alike."""
    query, _, value, log_decay, _ = tokens
    (one, batch, heads, size), v_heads = query.shape, value.shape[2]
    need(one == 1, f"Batch size must be 1 with cu_seqlens, got B={one}", ValueError)
    need(size in (64, 128) and value.shape[3] == size, f"HEAD_DIM must be 64 or 128, got K={size}", ValueError)
    need(all(each.dtype == torch.bfloat16 for each in tokens), "q, k, v, g and beta must be bfloat16", TypeError)
    need(log_decay.shape == (1, batch, v_heads, size), f"g {tuple(log_decay.shape)}")
    need(bounds.tolist() == list(range(batch + 1)), "decodes step by one token: the kernel runs no more")
    need(
        source.dtype == torch.bfloat16 and source.shape[1:] == (v_heads, size, size), "initial_state_source", ValueError
    )
    need(source.data_ptr() == pool.data_ptr(), "the states are read from the pool that they are written to")
    config = StateConfig(recurrence="kda", num_heads=heads, head_size=size)
    need(abs(scale - config.scale) < 1e-9, f"scale {scale}")
    return in_pool(config, tuple(each[0] for each in tokens), pool, slots).unsqueeze(0)


def mamba(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor, pool: Tensor, slots: Any
) -> Tensor:
    """Compute ``selective_state_update`` of one token; x ``(B, heads, dim)``, b and c ``(B, groups, dstate)``."""
    (batch, heads, width), (_, groups, size) = x.shape, b.shape
    need(pool.shape[1:] == (heads, width, size) and pool.is_contiguous(), f"state {tuple(pool.shape)}", RuntimeError)
    need(pool.shape[0] >= batch, "state.size(0) must be >= x.size(0)", RuntimeError)
    need(heads // groups in (1, 2, 4, 8, 16, 32, 64), f"{heads} heads in {groups} groups", RuntimeError)
    need(x.is_contiguous() and b.is_contiguous() and c.is_contiguous(), "x, B and C are contiguous", RuntimeError)
    need(x.dtype == b.dtype == c.dtype, "B and C must have the same dtype as x", RuntimeError)
    need(dt.dtype == d.dtype == bias.dtype, "D and dt_bias must have the same dtype as dt", RuntimeError)
    for name, tensor, shape, strides in (
        ("A", a, (heads, width, size), (1, 0, 0)),
        ("D", d, (heads, width), (1, 0)),
        ("dt_bias", bias, (heads, width), (1, 0)),
        ("dt", dt, (batch, heads, width), (heads, 1, 0)),
    ):
        need(tuple(tensor.shape) == shape, f"{name} {tuple(tensor.shape)}, not {shape}", RuntimeError)
        need(
            tensor.stride()[-len(strides[-2:]) :] == strides[-2:], f"{name} has strides {tensor.stride()}", RuntimeError
        )
    step = functional.softplus(dt[..., 0].double() + bias[:, 0].double())
    config = StateConfig(recurrence="mamba2", num_heads=groups, num_v_heads=heads, head_size=size, v_head_size=width)
    found = in_pool(config, (c, b, x, step * a[:, 0, 0].double(), step), pool, slots)
    return found + (d.double() * x.double()).to(x.dtype)


def in_pool(config: StateConfig, rows: tuple[Tensor, ...], pool: Tensor, slots: Any) -> Tensor:
    """Run one token of each request; read and write states ``(HV, V, K)`` at the slots given."""
    read, write = slots
    need(read.dtype in INDICES and write.dtype == read.dtype, f"indices {read.dtype} and {write.dtype}")
    for name, each in (("read", read), ("write", write)):
        need(bool(((each >= 0) & (each < len(pool))).all()), f"slots to {name}: {each.tolist()} of {len(pool)}")
    before = pool.clone()  # kernels run side by side: what one writes another must not need
    output = torch.empty_like(rows[2])
    for request, (source, target) in enumerate(zip(read.tolist(), write.tolist(), strict=True)):
        own = [each[request : request + 1] for each in rows]
        query, key, value, log_decay, strength = own
        found, states = state_reference(config, query, key, value, log_decay, strength, before[source].mT)
        output[request] = found[0].to(output.dtype)
        pool[target] = states[0].mT.to(pool.dtype)
    return output
