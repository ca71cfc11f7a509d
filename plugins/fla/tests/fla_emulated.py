"""Functions with the arguments, rules and layouts of fla-core 0.6.0, computed by the float64 recurrence.

Sources: fla/ops/gated_delta_rule/chunk.py and fused_recurrent.py, fla/ops/kda/chunk.py and fused_recurrent.py,
fla/ops/simple_gla/chunk.py and fused_recurrent.py of fla-core 0.6.0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attn_select.layer.state import StateConfig
from attn_select.reference.oracle_state import state_reference

calls: list[str] = []
"""The functions that were called."""


def _run(
    recurrence: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    if state_v_first:
        initial_state = initial_state.mT
    (batch, length, heads, size), (v_heads, v_size) = q.shape, v.shape[2:]
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert q.shape == k.shape
    assert v_heads % heads == 0
    assert size <= 256, "current kernel does not support head dimension larger than 256."
    config = StateConfig(
        recurrence=recurrence, num_heads=heads, num_v_heads=v_heads, head_size=size, v_head_size=v_size
    )
    assert scale == (size**-0.5 if config.rule.scaled else 1.0)
    requests = batch
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"The batch size is expected to be 1 rather than {batch} when using `cu_seqlens`.")
        assert cu_seqlens.dtype == torch.int64
        requests = len(cu_seqlens) - 1
    if initial_state.shape[0] != requests:
        raise ValueError(f"The number of initial states is expected to be {requests}.")
    assert initial_state.shape[1:] == (v_heads, size, v_size)
    assert initial_state.dtype == torch.float32, "initial_state must be in float32."
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    parts = [(row, 0, length) for row in range(batch)]
    if cu_seqlens is not None:
        assert (g >= -60).all(), "decays between tokens are differences of running sums: they lose digits, or are NaN"
        parts = [(0, start, end) for start, end in pairwise(bounds)]
    output, final = torch.empty_like(v), torch.empty_like(initial_state)
    for request, (row, start, end) in enumerate(parts):
        own = slice(start, end)
        strength = None if beta is None else beta[row, own]
        found, states = state_reference(
            config, q[row, own], k[row, own], v[row, own], g[row, own], strength, initial_state[request]
        )
        output[row, own] = found.to(output.dtype)
        final[request] = states[-1].to(final.dtype)
    return output, final.mT.contiguous() if state_v_first else final


def _delta_rule(name: str, recurrence: str) -> Any:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert use_qk_l2norm_in_kernel
        assert output_final_state
        assert scale is not None
        assert initial_state is not None
        assert beta.shape == v.shape[:3]
        assert g.shape == (v.shape[:3] if recurrence != "kda" else (*v.shape[:3], q.shape[3]))
        calls.append(name)
        return _run(recurrence, q, k, v, g, beta, scale, initial_state, cu_seqlens, state_v_first)

    return function


def _simple_gla(name: str) -> Any:
    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert output_final_state
        assert scale is not None
        assert initial_state is not None
        assert g is not None
        assert g.shape == v.shape[:3]
        assert q.shape[2] == v.shape[2]  # one key head per value head
        calls.append(name)
        return _run("lightning", q, k, v, g, None, scale, initial_state, cu_seqlens, state_v_first)

    return function


MODULES: dict[str, dict[str, Any]] = {
    "fla.ops.gated_delta_rule": {
        name: _delta_rule(name, "gated_delta_net")
        for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    },
    "fla.ops.kda": {name: _delta_rule(name, "kda") for name in ("chunk_kda", "fused_recurrent_kda")},
    "fla.ops.simple_gla": {name: _simple_gla(name) for name in ("chunk_simple_gla", "fused_recurrent_simple_gla")},
}
