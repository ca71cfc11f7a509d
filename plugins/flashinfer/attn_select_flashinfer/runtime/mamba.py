"""The runtime of ``FLASHINFER_MAMBA``."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.runtime.states import Gates, StateContext, StateImpl, StatePart, slots_in_pool
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.pooled_states import PooledStateBackend


class FlashInferMambaImpl(StateImpl):
    """Runs the decodes of one layer.

    Raises:
        KernelMismatchError: FlashInfer's entry takes no such arguments.
    """

    raw_gates = ("decode",)

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        library.flashinfer().check("selective_state_update")
        self._no_skip = torch.zeros(context.config.num_v_heads, device=context.device)

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
        raw, config = gates.raw, self.context.config
        assert raw is not None
        read, write = slots_in_pool(states, part)
        width, size = config.v_head_size, config.head_size

        def per_head(numbers: Tensor) -> Tensor:
            """One number for all channels of a head, as the kernel demands: strides of 0."""
            return numbers.unsqueeze(-1).expand(*numbers.shape, width)

        rate = per_head(-raw.A_log.exp()).unsqueeze(-1).expand(-1, width, size)
        # dt, its bias and D share one dtype. The layer adds D times x itself.
        found = library.flashinfer().selective_state_update(
            state=states,
            x=value.contiguous(),
            dt=per_head(raw.a.float()),
            A=rate,
            B=key.contiguous(),
            C=query.contiguous(),
            D=per_head(self._no_skip),
            dt_bias=per_head(raw.dt_bias),
            dt_softplus=True,
            state_batch_indices=read,
            dst_state_batch_indices=write,
        )
        output.copy_(found)


class FlashInferMambaBackend(PooledStateBackend):
    """Decodes of Mamba-2 layers by FlashInfer."""

    impl_cls = FlashInferMambaImpl
