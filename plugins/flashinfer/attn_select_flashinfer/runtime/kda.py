"""The runtime of ``FLASHINFER_KDA``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.runtime.states import Gates, StatePart, slots_in_pool
from attn_select_flashinfer.facts.kda import LEAST_LOG_DECAY
from attn_select_flashinfer.runtime import library


class FlashInferKdaImpl(library.PooledStateImpl):
    """Runs one layer."""

    raw_gates = ("prefill",)
    least_log_decay: ClassVar[Mapping[Phase, float]] = {"prefill": LEAST_LOG_DECAY.value}

    def decode(self, tokens: library.Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        strength, (read, write) = gates.write_strength, slots_in_pool(states, part)
        assert strength is not None
        # Gates are given after their activation.
        gated = {
            "g": gates.log_decay.to(torch.bfloat16).unsqueeze(0),
            "beta": strength.to(torch.bfloat16).unsqueeze(0),
            "use_gate_in_kernel": False,
            "initial_state_source": states,
            "initial_state_indices": read,
        }
        return self._run(tokens, states, part, write, gated)

    def prefill(self, tokens: library.Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        raw, (read, write) = gates.raw, slots_in_pool(states, part)
        assert raw is not None
        assert raw.b is not None
        # A prefill starts from the state in the slot that it writes to: the state to start from is copied there first.
        states[write] = states[read]
        gated = {
            "g": raw.a.contiguous().unsqueeze(0),
            "beta": raw.b.contiguous().unsqueeze(0),
            "A_log": raw.A_log,
            "dt_bias": raw.dt_bias,
            "use_gate_in_kernel": True,
            "beta_is_logit": True,
        }
        return self._run(tokens, states, part, write, gated)

    def _run(
        self, tokens: library.Tokens, states: Tensor, part: StatePart, write: Tensor, gated: dict[str, Any]
    ) -> Tensor:
        # Packed, (1, T, heads, size): without cu_seqlens decodes copy the states of a pool out and back.
        named = {name: each.contiguous().unsqueeze(0) for name, each in zip("qkv", tokens, strict=True)}
        found, _ = library.flashinfer().recurrent_kda(
            **named,
            **gated,
            scale=self.context.config.scale,
            initial_state=states,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=part.query_start_loc,
            ssm_state_indices=write,
        )
        output: Tensor = found.squeeze(0)
        return output


class FlashInferKdaBackend(library.PooledStateBackend):
    """Kimi delta attention by FlashInfer."""

    impl_cls = FlashInferKdaImpl
