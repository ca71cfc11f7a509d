"""The runtime of ``TRITON_STATE``."""

from __future__ import annotations

from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.layer.layouts import STATE_VK
from attn_select.runtime.states import Gates, StateBackend, StateContext, StateImpl, StatePart
from attn_select_triton.kernels.state_decode import decode_states, packed
from attn_select_triton.runtime import hashing
from attn_select_triton.runtime.current_device import on_device


class TritonStateImpl(StateImpl):
    """Runs the decodes of one layer."""

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        self._decode = on_device(context.device, decode_states)

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
        rule = self.context.config.rule
        written = packed(output)
        self._decode(
            packed(query),
            packed(key),
            packed(value),
            gates,
            states,
            part.query_start_loc,
            part.read_slots,
            part.write_slots,
            part.token_slots,
            written,
            scale=self.context.config.scale,
            delta_rule=rule.delta_rule,
            normalized=rule.normalized,
            v_first=self.context.state_layout == STATE_VK,
        )
        if written is not output:
            output.copy_(written)


class TritonStateBackend(StateBackend):
    """Decodes of layers that keep a state, in Triton."""

    impl_cls = TritonStateImpl

    @classmethod
    def prepare(cls) -> None:
        """Begin what Triton's first launch would wait for."""
        hashing.begin_hashing()
