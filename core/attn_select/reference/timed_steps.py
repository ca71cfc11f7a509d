"""One step of layers of one kind, to be timed and checked: ``AttentionStep``, and ``StateStep`` of layers with a state.

Caches come from outside, so that the steps of several backends share one memory: candidates that are compared then need
it once. A step can run again and gives the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_select.backends.spec import BackendPlan
from attn_select.decide.selection import Selection
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.dtypes import is_quantized
from attn_select.layer.layouts import FP8_DS_MLA_BYTES, STATE_VK, bytes_per_slot, state_shape
from attn_select.layer.state import StateConfig
from attn_select.reference.comparison import error_bound, relative_error
from attn_select.reference.problems import FP8_SCALE, Request, timed_problem
from attn_select.reference.running import common_of, expected, layer_of
from attn_select.reference.state_problems import StateProblem
from attn_select.reference.state_serving import state_bound
from attn_select.runtime import Capacity, ContextParallel, attention_group, prepare_batch
from attn_select.runtime.kv_cache import cache_dtype, kv_cache_shape
from attn_select.runtime.states import Gates, LinearAttention, StateCache, StateGroup, StatePool
from attn_select.runtime.states.state_batch import StateMetadata
from attn_select.runtime.states.state_group import MOST_EXTRA_SLOTS
from attn_select.runtime.states.state_pool import FROM_ZERO
from attn_select.runtime.timer import Call
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES

_CHUNK = 1 << 26
"""Elements that are drawn at a time."""
_MOST_KEYS_CHECKED = 1 << 18
"""Keys of all requests that are compared with the oracle: in float64 they take 4 GiB with 8 heads of size 128."""
_MOST_TOKENS_CHECKED, _PIECE = 256, 32
"""Tokens of a request with a state that are compared, and at a time: float64 keeps the state behind each of them."""


class CacheMemory:
    """Memory for ``count`` caches of equal size, filled with random numbers that any layout of one dtype may hold."""

    # Numbers are standard normal, in FP8 divided by ``FP8_SCALE``.

    def __init__(self, config: AttentionConfig, num_bytes: int, count: int, device: torch.device) -> None:
        self._stride = -(-num_bytes // 4096) * 4096
        self._memory = torch.empty(count, self._stride, dtype=torch.uint8, device=device)
        self._packed = config.sparse and is_quantized(config.cache_dtype)
        self._dtype = torch.float8_e4m3fn if self._packed else cache_dtype("", config)
        self._spread = 1 / FP8_SCALE if is_quantized(config.cache_dtype) else 1.0
        self._fill(self._memory[0])
        for other in self._memory[1:]:
            other.copy_(self._memory[0])

    def _fill(self, memory: Tensor) -> None:
        draw, numbers = torch.Generator(memory.device).manual_seed(0), memory.view(self._dtype)
        for start in range(0, len(numbers), _CHUNK):
            part = numbers[start : start + _CHUNK]
            part.copy_(torch.randn(part.shape, generator=draw, device=memory.device).mul_(self._spread))
        if self._packed:
            self._pack(memory, draw)

    def mend(self) -> None:
        """Make the last cache what it was, where other layouts' new tokens may have made it no numbers in a layout."""
        if self._packed:
            self._fill(self._memory[-1])

    def _pack(self, memory: Tensor, draw: torch.Generator) -> None:
        """Write what a token has in ``FP8_DS_MLA`` beside its 512 numbers: four scales, and a rope part in bfloat16."""
        # Of that only bytes are taken that are finite numbers in FP8 too, since other layouts read them so.
        count = self._stride // FP8_DS_MLA_BYTES
        tokens = memory[: count * FP8_DS_MLA_BYTES].view(-1, FP8_DS_MLA_BYTES)
        tokens[:, 512:528] = torch.full((count, 4), FP8_SCALE, device=draw.device).view(torch.uint8)
        powers = torch.randint(-1, 2, (count, 64), generator=draw, device=draw.device).float().exp2()
        signs = torch.randint(0, 2, (count, 64), generator=draw, device=draw.device) * 2 - 1
        tokens[:, 528:] = (powers * signs).bfloat16().view(torch.uint8)

    def caches(self, step: AttentionStep) -> list[Tensor]:
        """Return the caches as a step's layers want them."""
        assert step.cache_shape is not None
        dtype = cache_dtype(step.group.kv_layout or "", step.group.config)
        return [row[: step.cache_bytes].view(dtype).view(step.cache_shape) for row in self._memory]


class AttentionStep:
    """One batch for attention layers of one kind; requests are ``(query_len, seq_len)``."""

    # The layers are no cross-attention. Of the ranks that share a cache every one makes the step. ``cache_shape`` and
    # ``cache_bytes`` are of one cache in the group's layout; None and 0 without one. ``weight_bytes`` are of what each
    # layer reads beside it.

    def __init__(
        self,
        selection: Selection,
        requests: Sequence[Request],
        phases: Sequence[Phase] | None = None,
        device: torch.device | str | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        config = self.config = selection.config
        tokens, longest = sum(query for query, _ in requests), max(seq_len for _, seq_len in requests)
        options: dict[str, Any] = {"phases": phases, "context_parallel": context_parallel}
        group: Any = attention_group(selection, device, Capacity(len(requests), tokens, longest), **options)
        self.group = group
        self.problem = timed_problem(1, config, group.kv_layout, group.block_size, sorted(requests), group.device)
        self.common = common_of(self.problem)
        self.cache_shape: tuple[int, ...] | None = None
        self.cache_bytes = 0
        if config.has_cache:
            blocks = sum(-(-seq_len // group.block_size) for _, seq_len in requests)
            ranks = 1 if context_parallel is None else context_parallel.size
            blocks *= group.block_size // ranks // group.kernel_block_size
            self.cache_shape = kv_cache_shape(group.kv_layout, config, blocks, group.kernel_block_size)
            self.cache_bytes = math.prod(self.cache_shape) * cache_dtype(group.kv_layout, config).itemsize
        self.weight_bytes = 0 if self.problem.kv_b_proj is None else self.problem.kv_b_proj.nbytes
        width = config.v_head_dim or config.value_head_size
        self.output = self.problem.query.new_empty(tokens, config.num_heads, width)
        self._layers: list[Any] = []
        self._caches: list[Tensor | None] = []

    def bound(self, plans: Mapping[Phase, BackendPlan]) -> float:
        """Return the accepted ``error`` of layers that run by ``plans``."""
        return error_bound(self.config, plans).norm

    def memory(self, num_bytes: int, count: int) -> CacheMemory | None:
        """Return memory for ``count`` caches of ``num_bytes``; None for layers without one."""
        return CacheMemory(self.config, num_bytes, count, self.group.device) if self.config.has_cache else None

    def make_layers(self, caches: Sequence[Tensor | None]) -> None:
        """Make one layer for each cache; MLA layers have weights of their own."""
        self._caches, problem = [*caches], self.problem
        self._layers = []
        for _ in caches:
            self._layers.append(layer_of(self.group, problem))
            if problem.kv_b_proj is not None:
                problem = dataclasses.replace(problem, kv_b_proj=problem.kv_b_proj.clone())

    def build(self) -> Any:
        """Return the step's metadata, made anew."""
        return self.group.build(self.common)

    def calls(self) -> list[Call]:
        """Build the step's metadata anew, and return for each layer the call that runs it."""
        metadata, problem = self.build(), self.problem
        inputs, chosen = (problem.query, problem.key, problem.value), problem.topk_indices
        last = (metadata, self.output) if chosen is None else (metadata, self.output, chosen)
        return [partial(layer, *inputs, cache, *last) for layer, cache in zip(self._layers, self._caches, strict=True)]

    def error(self) -> float:
        """Return the relative error, in the Euclidean norm, of the last layer's result in ``output``."""
        # Compared with the float64 oracle are the first and the last token of some requests.
        tokens: set[int] = set()
        for request in self._compared():
            own = self.problem.tokens_of(request, request + 1)
            tokens |= {own.start, own.stop - 1}
        found = [
            (rows, output) for _, _, rows, output, _ in expected(self.group, self.problem, self._caches[-1], tokens)
        ]
        seen, wanted = zip(*[(self.output[rows], output) for rows, output in found], strict=True)
        return relative_error(torch.cat(seen), torch.cat(wanted)).norm

    def _compared(self) -> list[int]:
        """Return the requests that ``error`` compares: the last, the first and the middle one, or those that fit."""
        requests, total = self.problem.requests, 0
        chosen: list[int] = []
        for request in _few(len(requests)):
            total += requests[request][1]
            if total > _MOST_KEYS_CHECKED and chosen:
                break
            chosen.append(request)
        return chosen

    @property
    def oracle_bytes(self) -> int:
        """Bytes that ``error`` takes at most at a time: the longest request's keys and values in float64, thrice."""
        config, longest = self.config, max(self.problem.requests[request][1] for request in self._compared())
        per_key = config.head_size if config.mla else config.num_kv_heads * (config.head_size + config.value_head_size)
        return 3 * 8 * longest * per_key


def _few(count: int) -> list[int]:
    """Return the last, the first and the middle of so many requests."""
    return [*dict.fromkeys((count - 1, 0, count // 2))]


class StateMemory:
    """Memory for ``count`` caches of equal size, filled with small random numbers."""

    def __init__(self, config: StateConfig, num_slots: int, count: int, device: torch.device) -> None:
        draw = torch.Generator(device).manual_seed(0)

        def numbers(spread: float, dtype: str, *shape: int) -> Tensor:
            made = torch.randn(shape, generator=draw, device=device).mul_(spread).to(PLAIN_DTYPES[dtype])
            return made.expand(count, *shape).clone()

        per_slot = config.num_v_heads * config.head_size * config.v_head_size
        self._states = numbers(config.head_size**-0.5, config.state_dtype, num_slots, per_slot)
        self._windows: list[Tensor | None] = [None] * count
        if config.conv_kernel_size:
            self._windows = [*numbers(1.0, config.dtype, num_slots, config.conv_kernel_size - 1, config.conv_dim)]

    def caches(self, step: StateStep) -> list[StateCache]:
        """Return the caches as a step's layers want them."""
        shape = state_shape(step.layout, step.config)[1:]
        return [
            step.group.adopt(StateCache(states.view(-1, *map(int, shape)), window))
            for states, window in zip(self._states, self._windows, strict=True)
        ]


class StateStep:
    """One batch for layers of one kind that keep a state, as ``AttentionStep``."""

    # Requests are ``(query_len, seq_len)``; one with more tokens than new ones has a state. Each reads one slot and
    # writes others.

    weight_bytes = 0
    # Of what ``error`` takes where the layers lie: it computes on the CPU.
    oracle_bytes = 0

    def __init__(
        self,
        selection: Selection[StateConfig],
        requests: Sequence[Request],
        phases: Sequence[Phase] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        config = self.config = selection.config
        self.group = StateGroup(selection, device, phases=phases)
        self.layout = selection.kv_layout or ""
        requests = sorted(requests)
        lens = [query for query, _ in requests]
        self.common = prepare_batch(lens, [seq for _, seq in requests], device=self.group.device)
        # Enough that no request writes over the state that it reads: the step runs again and again.
        drafts = config.max_decode_query_len
        self._num_slots = sum(1 + (query if query < seq and query <= drafts else 1) for query, seq in requests)
        pool = StatePool(self._num_slots, config.num_speculative_tokens)
        for request in range(len(lens)):
            pool.add(request)
        pool.commit(pool.step({r: seq - query for r, (query, seq) in enumerate(requests) if query < seq}))
        self._slots = pool.step(dict(enumerate(lens)))
        self.cache_bytes = self._num_slots * bytes_per_slot(config)
        draw = torch.Generator(self.group.device).manual_seed(1)
        self._problem = StateProblem(config, draw, self.group.device)
        self._tokens = self._problem.tokens(sum(lens))
        self.output = self._tokens["channels"].new_empty(sum(lens), config.num_v_heads, config.v_head_size)
        self._layers: list[LinearAttention] = []
        self._caches: list[StateCache] = []

    def bound(self, plans: Mapping[Phase, BackendPlan]) -> float:
        """Return the accepted ``error``, the same by all plans."""
        return state_bound(self.config).norm

    def memory(self, num_bytes: int, count: int) -> StateMemory:
        """Return memory for the caches of ``count`` layers, whose size all backends have in common."""
        return StateMemory(self.config, self._num_slots + MOST_EXTRA_SLOTS, count, self.group.device)

    def make_layers(self, caches: Sequence[StateCache]) -> None:
        """Make one layer for each cache."""
        self._caches = [*caches]
        self._layers = [self._problem.layer(self.group) for _ in self._caches]

    def build(self) -> StateMetadata:
        """Return the step's metadata, made anew."""
        return self.group.build(self.common, self._slots)

    def calls(self) -> list[Call]:
        """Build the step's metadata anew, and return for each layer the call that runs it."""
        metadata, gates = self.build(), self._problem.gates(self._tokens)
        if not any(layer.raw_gates for layer in self._layers):  # engines activate gates before the layer
            gates = Gates(gates.log_decay, gates.write_strength)
        return [
            partial(layer, self._tokens["channels"], gates, cache, metadata, self.output)
            for layer, cache in zip(self._layers, self._caches, strict=True)
        ]

    def error(self) -> float:
        """Return the relative error, in the Euclidean norm, of the last layer's result in ``output``."""
        # Compared with the float64 recurrence are the first tokens of the first, the middle and the last request.
        bounds = self.common.query_start_loc_cpu.tolist()
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for request in _few(len(bounds) - 1):
            state, window = self._before(request)
            last = min(bounds[request + 1], bounds[request] + _MOST_TOKENS_CHECKED)
            for start in range(bounds[request], last, _PIECE):
                end = min(start + _PIECE, last)
                piece = {name: each[start:end].cpu() for name, each in self._tokens.items()}
                made = self._problem.reference(piece, state, window)
                state, window = made.states[-1], made.windows[-1]
                found.append((self.output[start:end].cpu(), made.output, made.usual))
        return relative_error(*(torch.cat(each) for each in zip(*found, strict=True))).norm

    def _before(self, request: int) -> tuple[Tensor | None, Tensor | None]:
        """Return a request's state and window before the step, on the CPU; None where it has none."""
        slot, cache = self._slots.read[request], self._caches[-1]
        if slot == FROM_ZERO:
            return None, None
        state = cache.state[slot].cpu()
        window = None if cache.conv is None else cache.conv[slot].cpu()
        return (state.mT if self.layout == STATE_VK else state), window


TimedStep = AttentionStep | StateStep


def timed_step(
    selection: Selection[Any],
    requests: Sequence[Request],
    phases: Sequence[Phase] | None = None,
    device: torch.device | str | None = None,
    context_parallel: ContextParallel | None = None,
) -> TimedStep:
    """Return one step of a selection's layers; ``phases``: whose backends run, None: all. No ranks share a state."""
    if isinstance(selection.config, StateConfig):
        return StateStep(selection, requests, phases, device)
    return AttentionStep(selection, requests, phases, device, context_parallel)
