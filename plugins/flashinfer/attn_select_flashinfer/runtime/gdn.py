"""The runtime of ``FLASHINFER_GDN``."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.layer.state import NORM_EPSILON
from attn_select.runtime.states import (
    Gates,
    StateContext,
    StateImpl,
    StatePart,
    gathered_states,
    slots_in_pool,
)
from attn_select_flashinfer.runtime import library


class FlashInferGdnImpl(StateImpl):
    """Runs one layer."""

    raw_gates = ("decode",)

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        library.flashinfer().check(*(plan.kernel.name for plan in context.plans.values()))  # type: ignore[attr-defined]

    def forward(
        self,
        phase: Phase,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Gates,
        states: Tensor,
        part: StatePart,
        output: Tensor,
    ) -> None:
        """Run a part of a step, as ``StateImpl.forward`` documents it."""
        run = self._decode if phase == "decode" else self._prefill
        run(query, key, value, gates, states, part, output)

    def _prefill(
        self, query: Tensor, key: Tensor, value: Tensor, gates: Gates, states: Tensor, part: StatePart, output: Tensor
    ) -> None:
        state = gathered_states(states, part)
        found, last = library.flashinfer().chunk_gated_delta_rule(
            q=_normalised(query),
            k=_normalised(key),
            v=value.contiguous(),
            # The kernels add 1e-10 before their logarithm, in 0.6.14 (include/flashinfer/flat/hopper/collective) as in
            # 0.7.2 (flashinfer/gdn_kernels): a decay of 0 is no infinity.
            g=gates.log_decay.exp().contiguous(),
            beta=gates.write_strength,
            scale=self.context.config.scale,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=part.query_start_loc.long(),
            output_state=torch.empty_like(state),
        )
        output.copy_(found)
        states[part.write_slots] = last.to(states.dtype)

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, gates: Gates, states: Tensor, part: StatePart, output: Tensor
    ) -> None:
        raw = gates.raw
        assert raw is not None
        assert raw.b is not None
        read, write = slots_in_pool(states, part)
        # (B, 1, heads, size): one token per request.
        tokens = {n: each.contiguous().unsqueeze(1) for n, each in (("q", query), ("k", key), ("v", value))}
        found, _ = library.flashinfer().gated_delta_rule_decode_pretranspose(
            **tokens,
            state=None,
            A_log=raw.A_log,
            a=raw.a.contiguous().unsqueeze(1),
            dt_bias=raw.dt_bias,
            b=raw.b.contiguous().unsqueeze(1),
            scale=self.context.config.scale,
            use_qk_l2norm=True,
            initial_state=states,
            initial_state_indices=read,
            output_state_indices=write,
        )
        output.copy_(found.squeeze(1))


def _normalised(rows: Tensor) -> Tensor:
    """Return queries or keys of length 1 in their own dtype. The entry does it since 0.7; in 0.6.14 it does not."""
    wide = rows.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()).to(rows.dtype).contiguous()


class FlashInferGdnBackend(library.PooledStateBackend):
    """Gated delta net layers by FlashInfer."""

    impl_cls = FlashInferGdnImpl
