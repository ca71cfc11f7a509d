"""Requests served through one layer that keeps a state, each token compared with the float64 recurrence."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.layer.config import CUDA_GRAPH_LEVELS, CudaGraphLevel
from attn_select.layer.state import StateConfig
from attn_select.reference.comparison import ErrorBound, RelativeError, relative_error, same_bits
from attn_select.reference.state_problems import StateProblem, Tokens, each_of
from attn_select.runtime.batch import prepare_batch
from attn_select.runtime.cuda_graph import CudaGraphRunner
from attn_select.runtime.metadata import CommonAttentionMetadata, decodes_first
from attn_select.runtime.states import StateGroup, StatePool, StateSlots, StaticStates

GRAPH_SIZES = (2, 5, 16)
"""Requests that decodes are captured for: most batches are padded."""
STATE_BOUNDS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2.5e-2}
"""Relative errors of an output's norm that are accepted, by the coarser of compute and state dtype: the inputs of the
recurrence are rounded once behind the convolution, its state after each step."""


def state_bound(config: StateConfig) -> ErrorBound:
    """Return the errors of a layer's outputs that are accepted, rows with ``StateReference.usual`` as their spread."""
    coarser = max(config.dtype, config.state_dtype, key=lambda name: STATE_BOUNDS[name])
    norm = STATE_BOUNDS[coarser]
    return ErrorBound(norm, 5 * norm, 0.0, f"{coarser}, rounded behind the convolution and in the state")


@dataclass(slots=True)
class _Known:
    """What the reference knows of a request: its state and window, and those behind each token of its last step."""

    state: Tensor | None = None
    window: Tensor | None = None
    states: list[Tensor] = field(default_factory=list)
    windows: list[Tensor | None] = field(default_factory=list)
    # Tokens that the state has seen, ``last`` of them in the last step.
    seen: int = 0
    last: int = 0


class StateServing:
    """Serves requests through one layer. All slots hold NaN at the start and when a request gives them back."""

    # ``cuda_graphs``: decodes of one length run as replays of CUDA graphs, as far as the backend allows; on a CPU they
    # run on the memory that graphs would read. ``seconds`` are of the last step: slots, metadata and the layer, host
    # time with the device idle at the end.

    def __init__(
        self,
        selection: Selection[StateConfig],
        num_slots: int,
        seed: int,
        device: torch.device | str | None = None,
        *,
        cuda_graphs: bool = False,
    ) -> None:
        self.config = selection.config
        self.group = StateGroup(selection, device, cuda_graphs=cuda_graphs)
        self.pool = StatePool(num_slots, self.config.num_speculative_tokens)
        self.cache = self.group.allocate(num_slots)
        draw = torch.Generator().manual_seed(seed)
        self._problem = StateProblem(self.config, draw, self.group.device, bias=True)
        self.layer = self._problem.layer(self.group)
        self._known: dict[object, _Known] = {}
        self.seconds, self.replays = 0.0, 0
        self._poison([*range(num_slots), *([-1] if cuda_graphs else [])])
        self._graphs: dict[int, CudaGraphRunner[StateGroup] | StaticStates] = {}

    def add(self, request: object) -> None:
        """Add a request, whose state is zero."""
        self.pool.add(request)
        self._known[request] = _Known()

    def fork(self, source: object, target: object) -> None:
        """Add ``target`` with the state of ``source``."""
        self.pool.fork(source, target)
        known = self._known[source]
        self._known[target] = _Known(known.state, known.window, seen=known.seen)

    def free(self, request: object) -> None:
        """Give back a request's slots, which hold NaN then unless another request holds them too."""
        slots = self.pool.slots_of(request)
        self.pool.free(request)
        del self._known[request]
        in_use = {slot for other in self._known for slot in self.pool.slots_of(other)}
        self._poison([slot for slot in slots if slot not in in_use])

    def accept(self, request: object, num_tokens: int) -> None:
        """Keep the first tokens of the request's last step, a decode with drafts."""
        self.pool.accept(request, num_tokens)
        known = self._known[request]
        known.state, known.window = known.states[num_tokens - 1], known.windows[num_tokens - 1]
        known.seen += num_tokens - known.last

    def drafts_of(self, request: object) -> int:
        """Return how many states the request's last step wrote: ``accept`` takes from 1 to as many."""
        return self.pool.written_of(request)

    def step(self, num_tokens: Mapping[Any, int]) -> RelativeError:
        """Run a step of random inputs; return the error of all its outputs against the reference."""
        found, drawn = self.run(num_tokens)
        expected, usual = zip(*[self._reference(name, tokens) for name, tokens in drawn.items()], strict=True)
        return relative_error(found, torch.cat(expected), torch.cat(usual))

    def run(self, num_tokens: Mapping[Any, int]) -> tuple[Tensor, dict[Any, Tokens]]:
        """Run a step of random inputs; return its output, decodes first, and the inputs. The reference lags behind."""
        names = list(num_tokens)
        order = decodes_first([num_tokens[name] for name in names], self.config.max_decode_query_len)
        lens = {names[i]: num_tokens[names[i]] for i in order}
        drawn = {name: self._problem.tokens(count) for name, count in lens.items()}
        device, counts = self.group.device, list(lens.values())
        parts = [*drawn.values()]
        brought = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        inputs = each_of(brought, lambda each: each.to(device, copy=True))
        for name, count in lens.items():
            self._known[name].last = count
            self._known[name].seen += count
        began = time.perf_counter()
        common = prepare_batch(counts, [self._known[name].seen for name in lens], device=device)
        slots = self.pool.step(lens)
        if (graphs := self._graphs_of(counts)) is None:
            found = self._layer_of(inputs, {self.group: self.group.build(common, slots)})
        else:
            self.replays += 1
            if isinstance(graphs, StaticStates):
                found = self._unrecorded(graphs, inputs, common, slots)
            else:
                found = graphs(inputs, {self.group: common}, {self.group: slots})
        if found.is_cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - began
        for name, each in brought.items():
            if not same_bits(inputs[name].cpu(), each):
                raise AssertionError(f"{name} was changed: it is the caller's")
        return found, drawn

    def _graphs_of(self, counts: Sequence[int]) -> CudaGraphRunner[StateGroup] | StaticStates | None:
        """Return what replays a step of requests with these numbers of tokens; None where it runs eagerly."""
        # On a CPU that is the memory that graphs would read.
        each = counts[0]
        level: CudaGraphLevel = "UNIFORM_SINGLE_TOKEN_DECODE" if each == 1 else "UNIFORM_BATCH"
        reached = CUDA_GRAPH_LEVELS.index(self.group.cudagraph_support) >= CUDA_GRAPH_LEVELS.index(level)
        uniform = set(counts) == {each} and each <= self.config.max_decode_query_len and len(counts) <= GRAPH_SIZES[-1]
        if not (self.group.cuda_graphs and reached and uniform):
            return None
        if each not in self._graphs:
            inputs = self._problem.tokens(1)
            if self.group.device.type == "cuda":
                inputs = each_of(inputs, lambda tensor: tensor.to(self.group.device))
                runner = CudaGraphRunner(self._layer_of, [self.group], inputs, GRAPH_SIZES, query_len=each)
                runner.capture()
                self._graphs[each] = runner
            else:
                static = self._graphs[each] = StaticStates(self.group, each, GRAPH_SIZES[-1])
                for size in GRAPH_SIZES:  # as a capture does, also those with more requests than there are slots
                    self._layer_of(_padded(inputs, 0, static.padded_tokens(size)), {self.group: static.metadata(size)})
        return self._graphs[each]

    def _unrecorded(
        self, static: StaticStates, inputs: Tokens, common: CommonAttentionMetadata, slots: StateSlots
    ) -> Tensor:
        """Run decodes on the memory that graphs of them would read, without a graph."""
        size = next(size for size in GRAPH_SIZES if size >= common.num_reqs)
        static.load(common, slots, size)
        padded = _padded(inputs, common.num_actual_tokens, static.padded_tokens(size))
        return self._layer_of(padded, {self.group: static.metadata(size)})[: common.num_actual_tokens]

    def _layer_of(self, inputs: Mapping[str, Tensor], metadata: Mapping[Any, Any]) -> Tensor:
        gates = self._problem.gates({**inputs})
        found: Tensor = self.layer(inputs["channels"], gates, self.cache, metadata[self.group])
        return found

    def _reference(self, request: object, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the norms that they have for queries of any direction."""
        known = self._known[request]
        found = self._problem.reference(tokens, known.state, known.window)
        known.states, known.windows = list(found.states), found.windows
        known.state, known.window = known.states[-1], known.windows[-1]
        return found.output, found.usual

    def _poison(self, slots: list[int]) -> None:
        self.cache.state[slots] = torch.nan
        if self.cache.conv is not None:
            self.cache.conv[slots] = torch.nan


def _padded(inputs: Tokens, tokens: int, padded: int) -> Tokens:
    """Return the first tokens with zeros behind them."""
    return each_of(inputs, lambda each: torch.cat([each[:tokens], each.new_zeros(padded - tokens, *each.shape[1:])]))
