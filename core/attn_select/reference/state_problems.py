"""Random inputs of layers that keep a state, and what float64 gives for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.layer.state import StateConfig
from attn_select.reference.oracle_state import conv_reference, state_reference
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


@dataclass(slots=True)
class Tokens:
    """What a layer gets of T tokens, as ``LinearAttention`` takes it.

    Attributes:
        channels: ``dtype`` ``(T, width)``.
        log_decay: float32 ``(T, num_v_heads)``, of KDA ``(T, num_v_heads, head_size)``.
        write_strength: float32 ``(T, num_v_heads)``; None where the recurrence has none.
    """

    channels: Tensor
    log_decay: Tensor
    write_strength: Tensor | None

    def part(self, first: int, last: int) -> Tokens:
        """Return tokens ``first .. last - 1``."""
        strength = None if self.write_strength is None else self.write_strength[first:last]
        return Tokens(self.channels[first:last], self.log_decay[first:last], strength)

    def cpu(self) -> Tokens:
        """Return them on the CPU."""
        strength = None if self.write_strength is None else self.write_strength.cpu()
        return Tokens(self.channels.cpu(), self.log_decay.cpu(), strength)


def drawn_tokens(config: StateConfig, count: int, draw: torch.Generator) -> Tokens:
    """Return random tokens on the device of ``draw``."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=draw.device)

    channels = normal(count, config.width)
    if not config.rule.normalized:  # a sum of many products: keep it near 1
        channels = channels * config.head_size**-0.25
    heads: tuple[int, ...] = (count, config.num_v_heads)
    decays = (*heads, config.head_size) if config.rule.decay == "channel" else heads
    # From a memory of thousands of tokens to none: a chunk's decays multiply to less than a float32 holds.
    log_decay = -torch.exp(normal(*decays) * 2.5 - 1.0).clamp(max=60.0)
    strength = torch.sigmoid(normal(*heads)) if config.rule.writes else None
    return Tokens(channels.to(PLAIN_DTYPES[config.dtype]), log_decay, strength)


@dataclass(slots=True)
class LayerReference:
    """What float64 gives for T tokens of one request.

    Attributes:
        output: ``(T, num_v_heads, v_head_size)``.
        usual: ``(T, num_v_heads)``, the norm that a row of the output has where the query's direction is any.
        states: ``(T, num_v_heads, head_size, v_head_size)``, behind each token.
        windows: the last inputs of the convolution behind each token; None without one.
    """

    output: Tensor
    usual: Tensor
    states: Tensor
    windows: list[Tensor | None]


def layer_reference(
    config: StateConfig,
    tokens: Tokens,
    weight: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    window: Tensor | None,
) -> LayerReference:
    """Return what a layer gives for one request's tokens: its convolution, then its recurrence.

    Args:
        config: the layer.
        tokens: the request's, on the CPU.
        weight, bias: of the convolution, as ``LinearAttention`` takes them; None without one.
        state: ``(num_v_heads, head_size, v_head_size)`` before the first token; None: zero.
        window: ``(conv_kernel_size - 1, conv_dim)``, the convolution's inputs before; None: zeros.
    """
    inputs = mixed = tokens.channels.double()
    windows: list[Tensor | None] = [None] * len(inputs)
    if weight is not None:
        mixed = conv_reference(inputs, weight, bias, window)
        width = config.conv_kernel_size - 1
        rows = torch.cat([torch.zeros(width, config.conv_dim).double() if window is None else window.double(), inputs])
        windows = [rows[i + 1 : i + 1 + width] for i in range(len(inputs))]
    keys, values = (config.num_heads, config.head_size), (config.num_v_heads, config.v_head_size)
    shapes = [values if name == "value" else keys for name in config.rule.channels]
    split = torch.split(mixed, [heads * size for heads, size in shapes], dim=-1)
    named = {
        name: each.reshape(-1, *shape) for name, each, shape in zip(config.rule.channels, split, shapes, strict=True)
    }
    query = named["query"]
    output, states = state_reference(
        config, query, named["key"], named["value"], tokens.log_decay, tokens.write_strength, state
    )
    length = torch.linalg.vector_norm(query, dim=-1).repeat_interleave(values[0] // keys[0], dim=1)
    if config.rule.normalized:
        length = torch.ones_like(length)
    usual = config.scale * length * torch.linalg.matrix_norm(states) / config.head_size**0.5
    return LayerReference(output, usual, states, windows)
