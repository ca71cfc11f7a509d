"""The runtime of ``FLASHINFER_GDN``."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.layer.state import NORM_EPSILON
from attn_select.runtime.states import Gates, StateBackend, StateContext, StateImpl, StatePart, gathered_states
from attn_select_flashinfer.runtime import library

ENTRY = "chunk_gated_delta_rule"


class FlashInferGdnImpl(StateImpl):
    """Runs the prefills of one layer.

    Raises:
        KernelMismatchError: FlashInfer's entry takes no such arguments.
    """

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        library.flashinfer().check(ENTRY)

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
        """Run the prefills of a step, as ``StateImpl.forward`` documents it."""
        state = gathered_states(states, part)
        found, last = library.flashinfer().chunk_gated_delta_rule(
            q=_normalised(query),
            k=_normalised(key),
            v=value.contiguous(),
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


def _normalised(rows: Tensor) -> Tensor:
    """Return queries or keys of length 1 in their own dtype. The entry does it since 0.7; in 0.6.14 it does not."""
    wide = rows.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()).to(rows.dtype).contiguous()


class FlashInferGdnBackend(StateBackend):
    """Prefills of gated delta net layers by FlashInfer."""

    impl_cls = FlashInferGdnImpl

    @classmethod
    def prepare(cls) -> None:
        """Import the library.

        Raises:
            KernelMismatchError: it is not installed.
        """
        library.flashinfer()
