"""The runtime of ``FLASHINFER_GDN``."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.layer.state import NORM_EPSILON
from attn_select.runtime.states import Gates, StatePart, gathered_states, slots_in_pool
from attn_select_flashinfer.runtime import library


class FlashInferGdnImpl(library.PooledStateImpl):
    """Runs one layer."""

    raw_gates = ("decode",)

    def prefill(self, tokens: library.Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        (query, key, value), state = tokens, gathered_states(states, part)
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
        states[part.write_slots] = last.to(states.dtype)
        output: Tensor = found
        return output

    def decode(self, tokens: library.Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        raw = gates.raw
        assert raw is not None
        assert raw.b is not None
        read, write = slots_in_pool(states, part)
        # (B, 1, heads, size): one token per request.
        named = {name: each.contiguous().unsqueeze(1) for name, each in zip("qkv", tokens, strict=True)}
        found, _ = library.flashinfer().gated_delta_rule_decode_pretranspose(
            **named,
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
        output: Tensor = found.squeeze(1)
        return output


def _normalised(rows: Tensor) -> Tensor:
    """Return queries or keys of length 1 in their own dtype. The entry does it since 0.7; in 0.6.14 it does not."""
    wide = rows.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()).to(rows.dtype).contiguous()


class FlashInferGdnBackend(library.PooledStateBackend):
    """Gated delta net layers by FlashInfer."""

    impl_cls = FlashInferGdnImpl
