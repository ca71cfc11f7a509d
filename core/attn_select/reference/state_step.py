"""``StateStep``: one step of layers that keep a state, to be timed and checked; beside ``LayerStep``.

Every request reads one slot and writes others, so that a step can run again and gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.layer.config import Phase
from attn_select.layer.layouts import STATE_VK, bytes_per_slot, state_shape
from attn_select.layer.state import StateConfig
from attn_select.reference.problems import Request
from attn_select.reference.state_problems import DrawnGates, layer_reference
from attn_select.reference.state_serving import state_error
from attn_select.runtime import prepare_batch
from attn_select.runtime.states import Gates, LinearAttention, StateCache, StateGroup, StateSlots
from attn_select.runtime.states.state_batch import StateMetadata
from attn_select.runtime.states.state_pool import FROM_ZERO
from attn_select.runtime.timer import Call
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES

_MOST_TOKENS_CHECKED, _PIECE = 256, 32
"""Tokens of a request that are compared, and at a time: float64 keeps the state behind each of them."""


class StateMemory:
    """Memory for ``count`` caches of equal size, filled with small random numbers."""

    def __init__(self, config: StateConfig, num_slots: int, count: int, device: torch.device) -> None:
        draw = torch.Generator(device).manual_seed(0)

        def numbers(spread: float, dtype: str, *shape: int) -> Tensor:
            made = torch.randn(shape, generator=draw, device=device).mul_(spread).to(PLAIN_DTYPES[dtype])
            return made.expand(count, *shape).clone()

        per_slot = (config.num_v_heads, config.head_size, config.v_head_size)
        self._states = numbers(config.head_size**-0.5, config.state_dtype, num_slots, math.prod(per_slot))
        self._windows: Tensor | None = None
        if config.conv_kernel_size:
            window = (config.conv_kernel_size - 1, config.conv_dim)
            self._windows = numbers(1.0, config.dtype, num_slots, *window)

    def caches(self, step: StateStep) -> list[StateCache]:
        """Return the caches as a step's layers want them."""
        shape = state_shape(step.layout, step.config)[1:]
        windows = [None] * len(self._states) if self._windows is None else list(self._windows)
        return [
            step.group.adopt(StateCache(states.view(-1, *map(int, shape)), window))
            for states, window in zip(self._states, windows, strict=True)
        ]


class StateStep:
    """One batch for layers of one kind that keep a state."""

    # Requests are ``(query_len, seq_len)``; one with more tokens than new ones has a state. ``cache_bytes`` are of one
    # layer's states, ``weight_bytes`` of what each layer reads beside them, and the layers write ``output``.

    weight_bytes = 0

    def __init__(
        self,
        selection: Selection[StateConfig],
        requests: Sequence[Request],
        phases: Sequence[Phase] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        config = self.config = selection.config
        self.requests = sorted(requests)
        self.group = StateGroup(selection, device, phases=phases)
        self.layout = selection.kv_layout or ""
        lens = [query for query, _ in self.requests]
        self.common = prepare_batch(lens, [seq for _, seq in self.requests], device=self.group.device)
        self._slots = StateSlots([], [])
        self._num_slots = len(lens)
        for request, (query, seq) in enumerate(self.requests):
            has_state = seq > query
            kept = query if has_state and query <= config.max_decode_query_len else 1
            self._slots.read.append(request if has_state else FROM_ZERO)
            self._slots.write.append([self._num_slots + each for each in range(kept)])
            self._num_slots += kept
        self.cache_bytes = self._num_slots * bytes_per_slot(config)
        draw = torch.Generator(self.group.device).manual_seed(1)
        self._gates = DrawnGates(config, draw, self.group.device)
        self._tokens = self._gates.tokens(sum(lens), draw)
        self._weight: Tensor | None = None
        if config.conv_kernel_size:
            weight = torch.randn(config.conv_dim, config.conv_kernel_size, generator=draw, device=draw.device) * 0.5
            self._weight = weight.to(PLAIN_DTYPES[config.dtype])
        shape = (sum(lens), config.num_v_heads, config.v_head_size)
        self.output = self._tokens.channels.new_empty(shape)
        self._layers: list[LinearAttention] = []
        self._caches: list[StateCache] = []

    def memory(self, count: int) -> StateMemory:
        """Return memory for the caches of ``count`` layers."""
        return StateMemory(self.config, self._num_slots + self.group.extra_slots, count, self.group.device)

    def make_layers(self, caches: Sequence[StateCache]) -> None:
        """Make one layer for each cache."""
        self._caches = [*caches]
        self._layers = [LinearAttention(self.group, self._weight) for _ in self._caches]

    def build(self) -> StateMetadata:
        """Return the step's metadata, made anew."""
        return self.group.build(self.common, self._slots)

    def calls(self) -> list[Call]:
        """Build the step's metadata anew, and return for each layer the call that runs it."""
        metadata, tokens = self.build(), self._tokens
        gates = self._gates.of(tokens)
        if not any(layer.raw_gates for layer in self._layers):  # engines activate gates before the layer
            gates = Gates(gates.log_decay, gates.write_strength)
        return [
            partial(layer, tokens.channels, gates, cache, metadata, self.output)
            for layer, cache in zip(self._layers, self._caches, strict=True)
        ]

    def error(self) -> float:
        """Return the relative error, in the Euclidean norm, of the last layer's result in ``output``."""
        # Compared with the float64 recurrence are the first tokens of the first, the middle and the last request.
        bounds = self.common.query_start_loc_cpu.tolist()
        count = len(self.requests)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for request in dict.fromkeys((count - 1, 0, count // 2)):
            first, last = bounds[request], min(bounds[request + 1], bounds[request] + _MOST_TOKENS_CHECKED)
            output, usual = self._reference(request, first, last)
            found.append((self.output[first:last].cpu(), output, usual))
        seen, wanted, usual = (torch.cat(each) for each in zip(*found, strict=True))
        return state_error(seen, wanted, usual).norm

    @property
    def oracle_bytes(self) -> int:
        """Bytes that ``error`` takes at most where the layers lie: it computes on the CPU."""
        return 0

    def _reference(self, request: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return outputs and usual norms of tokens ``first .. last - 1``, the request's first ones."""
        state, window = self._before(request)
        weight = None if self._weight is None else self._weight.cpu()
        on_cpu = self._tokens.part(first, last).map(Tensor.cpu)
        outputs: list[Tensor] = []
        usual: list[Tensor] = []
        for start in range(0, last - first, _PIECE):
            piece = on_cpu.part(start, min(start + _PIECE, last - first))
            made = layer_reference(self._gates, piece, weight, None, state, window)
            state, window = made.states[-1], made.windows[-1]
            outputs.append(made.output)
            usual.append(made.usual)
        return torch.cat(outputs), torch.cat(usual)

    def _before(self, request: int) -> tuple[Tensor | None, Tensor | None]:
        """Return a request's state and window before the step, on the CPU; None where it has none."""
        slot, cache = self._slots.read[request], self._caches[-1]
        if slot == FROM_ZERO:
            return None, None
        state = cache.state[slot].cpu()
        window = None if cache.conv is None else cache.conv[slot].cpu()
        return (state.mT if self.layout == STATE_VK else state), window
