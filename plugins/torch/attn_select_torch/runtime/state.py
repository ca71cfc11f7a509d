"""The runtime of ``TORCH_STATE``."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from attn_select.layer.layouts import STATE_VK
from attn_select.layer.state import NORM_EPSILON
from attn_select.runtime.states import GatheredStateImpl, StateBackend, StatePart
from attn_select_torch.runtime.recurrence import CHANNEL_CHUNK, one_chunk, one_token


class TorchStateImpl(GatheredStateImpl):
    """Runs the recurrence of one layer in float32."""

    def one_token(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of one token of each request, and the states behind it."""
        tokens = self._prepared(query, key, value, log_decay, strength)
        output, new_state = one_token(*tokens, self._by_key(state), self.context.config.rule.delta_rule)
        return output, self._by_key(new_state)

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
        """Return the outputs of all tokens, request by request and chunk by chunk, and the states behind them."""
        config = self.context.config
        tokens = self._prepared(query, key, value, log_decay, strength)
        size = CHANNEL_CHUNK if config.rule.decay == "channel" else config.chunk_size
        output, state = torch.empty_like(tokens[2]), self._by_key(state)
        for request, (start, end) in enumerate(pairwise(part.query_start_loc_cpu.tolist())):
            now = state[request]
            for first in range(start, end, size):
                own = slice(first, min(first + size, end))
                q, k, v, decay, beta = (each[own].transpose(0, 1) for each in tokens)
                found, now = one_chunk(q, k, v, decay, beta, now, config.rule.delta_rule)
                output[own] = found.transpose(0, 1)
            state[request] = now
        return output, self._by_key(state)

    def _by_key(self, state: Tensor) -> Tensor:
        """Return states with the key channels before the values, or turn such states back: a view."""
        return state.mT if self.context.state_layout == STATE_VK else state

    def _prepared(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs in float32, queries and keys one per value head, strength 1 where there is none."""
        # Queries and keys are normalised and scaled.
        config, rule = self.context.config, self.context.config.rule
        query, key, value = query.float(), key.float(), value.float()
        if rule.normalized:
            query, key = (x * (x.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt() for x in (query, key))
        query = query * config.scale
        group = config.num_v_heads // config.num_heads
        query, key = query.repeat_interleave(group, dim=1), key.repeat_interleave(group, dim=1)
        decay = log_decay if rule.decay == "channel" else log_decay[..., None]
        return query, key, value, decay, torch.ones_like(value[..., 0]) if strength is None else strength


class TorchStateBackend(StateBackend):
    """Layers that keep a state in torch operators."""

    impl_cls = TorchStateImpl
