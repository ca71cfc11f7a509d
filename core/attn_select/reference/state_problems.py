"""Random inputs of layers that keep a state, and what float64 gives for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.layer.state import StateConfig
from attn_select.reference.oracle_state import conv_reference, state_reference
from attn_select.runtime.states import Gates, RawGates
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


@dataclass(slots=True)
class Tokens:
    """What a layer gets of T tokens, as ``LinearAttention`` takes it."""

    channels: Tensor
    # float32 ``(T, num_v_heads)``; None where gates are raw.
    log_decay: Tensor | None
    # As in ``RawGates``; None where gates are numbers, b of Mamba-2 too.
    a: Tensor | None
    b: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """Return the tokens with every tensor changed."""
        return Tokens(*(None if each is None else change(each) for each in self._tensors()))  # type: ignore[arg-type]

    def part(self, first: int, last: int) -> Tokens:
        """Return tokens ``first .. last - 1``."""
        return self.map(lambda each: each[first:last])

    def named(self) -> dict[str, Tensor]:
        """Return the tensors that there are, by name."""
        return {n: each for n, each in zip(_NAMES, self._tensors(), strict=True) if each is not None}

    def _tensors(self) -> list[Tensor | None]:
        return [getattr(self, name) for name in _NAMES]


_NAMES = ("channels", "log_decay", "a", "b")
_FORGETS = 2.0
"""Standard deviations: one number of 44 lies above."""


def joined(parts: Sequence[Tokens]) -> Tokens:
    """Return the tokens of several requests, one behind the other."""
    named = [part.named() for part in parts]
    found = [torch.cat([each[name] for each in named]) if name in named[0] else None for name in _NAMES]
    return Tokens(*found)  # type: ignore[arg-type]


class DrawnGates:
    """The gates of a layer with random weights, on the CPU and on ``device``."""

    # Both copies are made here, since a captured step may make none.

    def __init__(self, config: StateConfig, draw: torch.Generator, device: torch.device) -> None:
        self.config = config
        width = (config.head_size,) if config.rule.decay == "channel" else ()
        self._shape = (config.num_v_heads, *width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=draw.device)

        # From a memory of thousands of tokens to none. A step of Mamba-2 is a factor of what is written, too: far below
        # 1 it would leave what float16 holds.
        self._spread, rates = (2.5, 1.0) if config.rule.delta_rule else (1.0, 2.5)
        weights = normal(config.num_v_heads) * rates, normal(*self._shape)
        self._weights = {each.type: [weight.to(each) for weight in weights] for each in (torch.device("cpu"), device)}

    def tokens(self, count: int, draw: torch.Generator) -> Tokens:
        """Return random tokens on the device of ``draw``."""
        config = self.config

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=draw.device)

        dtype = PLAIN_DTYPES[config.dtype]
        channels = normal(count, config.width)
        if not config.rule.normalized:  # a sum of many products: keep it near 1
            channels = channels * config.head_size**-0.25
        # A chunk's decays multiply to less than a float32 holds. Some forget everything.
        spread = normal(count, *self._shape) * self._spread
        forgets = normal(count, *self._shape) > _FORGETS
        if not config.rule.writes:
            log_decay = -torch.exp(spread * 2.5 - 1.0)
            return Tokens(channels.to(dtype), log_decay.masked_fill(forgets, -torch.inf), None, None)
        if config.rule.delta_rule:  # a step of Mamba-2 is what it writes, too
            spread = spread.masked_fill(forgets, 200.0)
        b = None if config.recurrence == "mamba2" else normal(count, config.num_v_heads).to(dtype)
        return Tokens(channels.to(dtype), None, (spread - 1.0).to(dtype), b)

    def of(self, tokens: Tokens) -> Gates:
        """Return the gates of tokens, on their device."""
        if tokens.a is None:
            return Gates(tokens.log_decay)
        a_log, dt_bias = self._weights[tokens.a.device.type]
        return Gates(raw=RawGates(A_log=a_log, a=tokens.a, dt_bias=dt_bias, b=tokens.b))


@dataclass(slots=True)
class LayerReference:
    """What float64 gives for T tokens of one request."""

    output: Tensor
    # ``(T, num_v_heads)``, the norm that a row of the output has where the query's direction is any.
    usual: Tensor
    # ``(T, num_v_heads, head_size, v_head_size)``, behind each token, and the last inputs of the convolution there.
    states: Tensor
    windows: list[Tensor | None]


def layer_reference(
    gates: DrawnGates,
    tokens: Tokens,
    weight: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    window: Tensor | None,
) -> LayerReference:
    """Return what a layer gives for one request's tokens, on the CPU: its convolution, then its recurrence."""
    # ``state`` and ``window`` are those before the first token; None: zero.
    config, made = gates.config, gates.of(tokens)
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
        config, query, named["key"], named["value"], made.log_decay, made.write_strength, state
    )
    length = torch.linalg.vector_norm(query, dim=-1).repeat_interleave(values[0] // keys[0], dim=1)
    if config.rule.normalized:
        length = torch.ones_like(length)
    usual = config.scale * length * torch.linalg.matrix_norm(states) / config.head_size**0.5
    return LayerReference(output, usual, states, windows)
