"""The runtime of ``FLASHINFER_KDA``."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.runtime.states import Gates, StateContext, StateImpl, StatePart, slots_in_pool
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.pooled_states import PooledStateBackend


class FlashInferKdaImpl(StateImpl):
    """Runs the decodes of one layer.

    Raises:
        KernelMismatchError: FlashInfer's entry takes no such arguments.
    """

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
        """Run the decodes of a step, as ``StateImpl.forward`` documents it."""
        strength = gates.write_strength
        assert strength is not None
        read, write = slots_in_pool(states, part)
        # Packed, (1, B, heads, size): without cu_seqlens the kernel copies the states of a pool out and back.
        tokens = {n: each.contiguous().unsqueeze(0) for n, each in (("q", query), ("k", key), ("v", value))}
        found, _ = library.flashinfer().recurrent_kda(
            **tokens,
            g=gates.log_decay.to(torch.bfloat16).unsqueeze(0),
            beta=strength.to(torch.bfloat16).unsqueeze(0),
            scale=self.context.config.scale,
            initial_state=states,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=False,
            cu_seqlens=part.query_start_loc,
            ssm_state_indices=write,
            initial_state_source=states,
            initial_state_indices=read,
        )
        output.copy_(found.squeeze(0))


class FlashInferKdaBackend(PooledStateBackend):
    """Decodes of Kimi delta attention by FlashInfer."""

    impl_cls = FlashInferKdaImpl
