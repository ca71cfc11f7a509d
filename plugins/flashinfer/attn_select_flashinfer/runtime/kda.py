"""The runtime of ``FLASHINFER_KDA``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.runtime.states import Gates, StateContext, StateImpl, StatePart, slots_in_pool
from attn_select_flashinfer.facts.kda import LEAST_LOG_DECAY
from attn_select_flashinfer.runtime import library


class FlashInferKdaImpl(StateImpl):
    """Runs one layer."""

    raw_gates = ("prefill",)
    least_log_decay: ClassVar[Mapping[Phase, float]] = {"prefill": LEAST_LOG_DECAY.value}

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        library.flashinfer().check("recurrent_kda")

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
        read, write = slots_in_pool(states, part)
        # Packed, (1, T, heads, size): without cu_seqlens decodes copy the states of a pool out and back.
        tokens = {n: each.contiguous().unsqueeze(0) for n, each in (("q", query), ("k", key), ("v", value))}
        found, _ = library.flashinfer().recurrent_kda(
            **tokens,
            **(_from_numbers(gates, states, read) if phase == "decode" else _from_raw(gates, states, read, write)),
            scale=self.context.config.scale,
            initial_state=states,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=part.query_start_loc,
            ssm_state_indices=write,
        )
        output.copy_(found.squeeze(0))


def _from_numbers(gates: Gates, states: Tensor, read: Tensor) -> dict[str, Any]:
    """Return the arguments of decodes beside tokens: gates after their activation, and the slots that are read."""
    strength = gates.write_strength
    assert strength is not None
    return {
        "g": gates.log_decay.to(torch.bfloat16).unsqueeze(0),
        "beta": strength.to(torch.bfloat16).unsqueeze(0),
        "use_gate_in_kernel": False,
        "initial_state_source": states,
        "initial_state_indices": read,
    }


def _from_raw(gates: Gates, states: Tensor, read: Tensor, write: Tensor) -> dict[str, Any]:
    """Return the arguments of prefills beside tokens: raw gates."""
    # A prefill starts from the state in the slot that it writes to: the state to start from is copied there first.
    raw = gates.raw
    assert raw is not None
    assert raw.b is not None
    states[write] = states[read]
    return {
        "g": raw.a.contiguous().unsqueeze(0),
        "beta": raw.b.contiguous().unsqueeze(0),
        "A_log": raw.A_log,
        "dt_bias": raw.dt_bias,
        "use_gate_in_kernel": True,
        "beta_is_logit": True,
    }


class FlashInferKdaBackend(library.PooledStateBackend):
    """Kimi delta attention by FlashInfer."""

    impl_cls = FlashInferKdaImpl
