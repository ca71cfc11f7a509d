"""Random layers that keep a state, their random inputs, and what float64 gives for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_select.layer.state import StateConfig
from attn_select.reference.oracle_state import conv_reference, state_reference
from attn_select.runtime.states import Gates, LinearAttention, RawGates, StateGroup
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES

Tokens = dict[str, Tensor]
"""What a layer gets of T tokens, as ``LinearAttention`` takes it: ``channels``, and ``log_decay`` or, where gates are
raw, ``a`` and ``b``, of Mamba-2 ``a`` alone."""
_FORGETS = 2.0
"""Standard deviations: one number of 44 lies above."""


@dataclass(slots=True)
class StateReference:
    """What float64 gives for T tokens of one request."""

    output: Tensor
    # ``(T, num_v_heads)``, the norm that a row of the output has where the query's direction is any: where a query and
    # what the state holds are nearly orthogonal, the output is near 0, and its error is not.
    usual: Tensor
    # ``(T, num_v_heads, head_size, v_head_size)``, behind each token, and the last inputs of the convolution there.
    states: Tensor
    windows: list[Tensor | None]


class StateProblem:
    """A layer with random weights, which draws tokens for itself and says what it makes of them."""

    # Weights are drawn on the device of ``draw``. Both copies are made here, since a captured step may make none.

    def __init__(self, config: StateConfig, draw: torch.Generator, device: torch.device, bias: bool = False) -> None:
        self.config, self._draw = config, draw
        self._dtype = PLAIN_DTYPES[config.dtype]
        weights: dict[str, Tensor] = {}
        if config.conv_kernel_size:
            weights["conv"] = (self._normal(config.conv_dim, config.conv_kernel_size) * 0.5).to(self._dtype)
            if bias:
                weights["bias"] = (self._normal(config.conv_dim) * 0.1).to(self._dtype)
        width = (config.head_size,) if config.rule.decay == "channel" else ()
        self._per_head = (config.num_v_heads, *width)
        # From a memory of thousands of tokens to none. A step of Mamba-2 is a factor of what is written, too: far below
        # 1 it would leave what float16 holds.
        self._spread, rates = (2.5, 1.0) if config.rule.delta_rule else (1.0, 2.5)
        weights |= {"A_log": self._normal(config.num_v_heads) * rates, "dt_bias": self._normal(*self._per_head)}
        places = {torch.device("cpu"), device}
        self._weights = {place.type: {name: each.to(place) for name, each in weights.items()} for place in places}

    def layer(self, group: StateGroup) -> LinearAttention:
        """Return the layer, of a group on the problem's device."""
        weights = self._weights[group.device.type]
        return LinearAttention(group, weights.get("conv"), weights.get("bias"))

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draw, device=self._draw.device)

    def tokens(self, count: int) -> Tokens:
        """Return random tokens on the device of ``draw``."""
        config = self.config
        channels = self._normal(count, config.width)
        if not config.rule.normalized:  # a sum of many products: keep it near 1
            channels = channels * config.head_size**-0.25
        found = {"channels": channels.to(self._dtype)}
        # A chunk's decays multiply to less than a float32 holds. Some forget everything.
        spread = self._normal(count, *self._per_head) * self._spread
        forgets = self._normal(count, *self._per_head) > _FORGETS
        if not config.rule.writes:
            return found | {"log_decay": (-torch.exp(spread * 2.5 - 1.0)).masked_fill(forgets, -torch.inf)}
        if config.rule.delta_rule:  # a step of Mamba-2 is what it writes, too
            spread = spread.masked_fill(forgets, 200.0)
        found["a"] = (spread - 1.0).to(self._dtype)
        if config.recurrence != "mamba2":
            found["b"] = self._normal(count, config.num_v_heads).to(self._dtype)
        return found

    def gates(self, tokens: Tokens) -> Gates:
        """Return the gates of tokens, on their device."""
        if "a" not in tokens:
            return Gates(tokens["log_decay"])
        weights: dict[str, Any] = self._weights[tokens["a"].device.type]
        raw = RawGates(A_log=weights["A_log"], a=tokens["a"], dt_bias=weights["dt_bias"], b=tokens.get("b"))
        return Gates(raw=raw)

    def reference(self, tokens: Tokens, state: Tensor | None, window: Tensor | None) -> StateReference:
        """Return what the layer gives for one request's tokens, on the CPU: its convolution, then its recurrence.

        Args:
            state: ``(num_v_heads, head_size, v_head_size)`` before the first token; None: zero.
            window: ``(conv_kernel_size - 1, conv_dim)``, the convolution's inputs before it; None: zero.
        """
        config, weights, gates = self.config, self._weights["cpu"], self.gates(tokens)
        inputs = mixed = tokens["channels"].double()
        windows: list[Tensor | None] = [None] * len(inputs)
        if "conv" in weights:
            mixed = conv_reference(inputs, weights["conv"], weights.get("bias"), window)
            width = config.conv_kernel_size - 1
            before = torch.zeros(width, config.conv_dim) if window is None else window
            rows = torch.cat([before.double(), inputs])
            windows = [rows[i + 1 : i + 1 + width] for i in range(len(inputs))]
        keys, values = (config.num_heads, config.head_size), (config.num_v_heads, config.v_head_size)
        shapes = [values if name == "value" else keys for name in config.rule.channels]
        split = torch.split(mixed, [heads * size for heads, size in shapes], dim=-1)
        named = {
            name: each.reshape(-1, *shape)
            for name, each, shape in zip(config.rule.channels, split, shapes, strict=True)
        }
        query = named["query"]
        output, states = state_reference(
            config, query, named["key"], named["value"], gates.log_decay, gates.write_strength, state
        )
        length = torch.linalg.vector_norm(query, dim=-1).repeat_interleave(values[0] // keys[0], dim=1)
        if config.rule.normalized:
            length = torch.ones_like(length)
        usual = config.scale * length * torch.linalg.matrix_norm(states) / config.head_size**0.5
        return StateReference(output, usual, states, windows)


def each_of(tokens: Tokens, change: Callable[[Tensor], Tensor]) -> Tokens:
    """Return the tokens with every tensor changed."""
    return {name: change(each) for name, each in tokens.items()}
