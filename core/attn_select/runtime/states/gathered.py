"""``GatheredStateImpl``: for kernels that take the states of a batch in one tensor, and return them in another."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.runtime.states.gates import Gates
from attn_select.runtime.states.state_backend import StateImpl
from attn_select.runtime.states.state_batch import StatePart


def gathered_states(states: Tensor, part: StatePart) -> Tensor:
    """Return the states that the requests of a part read, float32 ``(B, …)`` in the layout of ``states``, as a copy."""
    # Filled, not multiplied: a free slot may hold NaN.
    starts = (part.read_slots < 0).view(-1, *[1] * (states.ndim - 1))
    return states.index_select(0, part.read_slots.clamp(min=0)).float().masked_fill_(starts, 0.0)


class GatheredStateImpl(StateImpl):
    """Gathers the states that a part of a step reads, runs the kernel, and writes what it returns."""

    # Decodes run token by token, so that the state behind each draft can be kept.

    @abstractmethod
    def one_token(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of one token of B requests and their states behind it."""
        # ``query`` and ``key`` are ``(B, num_heads, head_size)``, ``value`` ``(B, num_v_heads, v_head_size)``, and
        # ``state`` is float32 ``(B, num_v_heads, …)`` in the layout of the context, which may be written to.

    @abstractmethod
    def varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        strength: Tensor | None,
        state: Tensor,
        part: StatePart,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of T tokens of B requests and their states behind the last ones; as ``one_token``."""

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
        state = gathered_states(states, part)
        tokens = (query, key, value, gates.log_decay, gates.write_strength)
        if phase == "decode" and part.max_query_len > 1:
            self._drafts(tokens, state, states, part, output)
            return
        found, last = self.one_token(*tokens, state) if phase == "decode" else self.varlen(*tokens, state, part)
        output.copy_(found)
        states[part.write_slots] = last.to(states.dtype)

    def _drafts(
        self,
        tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
        state: Tensor,
        states: Tensor,
        part: StatePart,
        output: Tensor,
    ) -> None:
        """Run token i of all requests that have as many, one after the other."""
        bounds = part.query_start_loc_cpu.long()
        lens = bounds.diff()
        for i in range(part.max_query_len):
            # Requests have different numbers of drafts: those that have ended keep the state of their last one.
            running = (lens > i).nonzero().flatten().to(output.device)
            at = (bounds[:-1][lens > i] + i).to(output.device)
            query, key, value, log_decay, strength = tokens
            own_strength = None if strength is None else strength[at]
            own = query[at], key[at], value[at], log_decay[at], own_strength
            found, new_state = self.one_token(*own, state[running])
            state[running] = new_state
            output[at] = found.to(output.dtype)
            if part.token_slots is not None:
                slots = part.token_slots[running, i]
                states[slots[slots >= 0]] = new_state[slots >= 0].to(states.dtype)
        states[part.write_slots] = state.to(states.dtype)
