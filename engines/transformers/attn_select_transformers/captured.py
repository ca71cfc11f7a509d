"""CUDA graphs of continuous batching: decodes by block tables, at addresses that stay where they are.

The engine captures one graph per padded number of requests, and replays it without calling us. So each kind of layers
has batches of fixed addresses here, into which every step's is copied before its replay (``runtime.cuda_graph``). That
happens on the engine's compute stream, where steps run one after another, in its asynchronous mode too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_select.errors import ConfigError
from attn_select.runtime import AttentionMetadata, Capacity
from attn_select.runtime.cuda_graph import StaticBatch, check_level
from attn_select_transformers.kinds import Kernels, Kind
from attn_select_transformers.paged import Cache, Lens, common_of, lens_of

logger = logging.getLogger("attn_select_transformers")
_GRAPHS = "_attn_select_graphs"


@dataclass(slots=True)
class Fixed:
    """The layers of one kind in one group of the engine's cache."""

    # Of the layers whose tensors keep their addresses, whichever thread captures or replays.
    kernels: Kernels
    batch: StaticBatch
    layer: Cache
    # Of the step, or of the capture.
    metadata: AttentionMetadata


class Graphs:
    """The captured decodes of one of the engine's caches."""

    def __init__(self, most_requests: int) -> None:
        # Whether the model runs to be captured, so that its layers take what ``fixed`` returns.
        self.recording = False
        self._most_requests = most_requests
        self._fixed: dict[tuple[Kind, int], Fixed] = {}

    def fixed(
        self, kind: Kind, lens: Lens, layer: Cache, size: int, options: dict[str, Any]
    ) -> tuple[Kernels, AttentionMetadata]:
        """Return the kernels and the metadata of a layer, for ``size`` requests with the padding."""
        # The first layer of a kind makes its batch, and fills it.
        key = (kind, layer.index)
        if key not in self._fixed:
            longest = options["block_table"].shape[-1] * layer.page
            capacity = Capacity(self._most_requests, self._most_requests, longest)
            own = Kernels(kind.selection, kind.device, capacity, cuda_graphs=True)
            batch = StaticBatch(own.group, 1)
            common = common_of(own, lens, layer, kind.device, options)
            self._fixed[key] = Fixed(own, batch, layer, own.group.build(batch.load(common, size)))
        return self._fixed[key].kernels, self._fixed[key].metadata

    def load(self, lens: Lens, size: int, options: dict[str, Any]) -> None:
        """Copy a step into every batch, for the replay that follows."""
        for fixed in self._fixed.values():
            common = common_of(fixed.kernels, lens, fixed.layer, fixed.kernels.device, options)
            fixed.metadata = fixed.kernels.group.build(fixed.batch.load(common, size))

    def refusal(self) -> str | None:
        """Return why a kind's kernels cannot be captured; None where all can."""
        for fixed in self._fixed.values():
            try:
                check_level(fixed.kernels.group)
            except ConfigError as error:
                return error.message
        return None

    def prepare_capture(self, size: int) -> None:
        """Build what is captured: bounds that hold for every step of this size."""
        for fixed in self._fixed.values():
            fixed.metadata = fixed.kernels.group.build_for_cudagraph_capture(fixed.batch.dummy(size))


def graphs_of(cache: Any) -> Graphs | None:
    """Return the captured decodes of a cache while the model runs to be captured; else None."""
    graphs: Graphs | None = getattr(cache, _GRAPHS, None)
    return graphs if graphs is not None and graphs.recording else None


def load(runner: Any, options: dict[str, Any]) -> None:
    """Copy a step of decodes to where its graph reads it, captured before or to be captured now."""
    io = runner.inputs_and_outputs
    graphs: Graphs | None = getattr(runner.cache, _GRAPHS, None)
    if graphs is not None and io.use_block_table and runner.use_cuda_graph_decode:
        with torch.cuda.stream(io.compute_stream):
            graphs.load(lens_of(runner.cache), options["input_ids"].shape[1], options)


def capture(runner: Any, forward: Callable[..., Any], stream: Any, *arguments: Any) -> None:
    """Run a step of decodes and capture it; where its kernels cannot be captured, say so and leave graphs out."""
    cache, options = runner.cache, arguments[1]
    size = options["input_ids"].shape[1]
    graphs: Graphs | None = getattr(cache, _GRAPHS, None)
    if graphs is None:
        graphs = cache.__dict__[_GRAPHS] = Graphs(runner.cb_config.max_requests_per_batch)
    graphs.recording = True
    try:
        with torch.cuda.stream(stream):
            forward(*arguments)  # what the step computes; its layers make their batches
        if refusal := graphs.refusal():
            logger.warning("attn-select: continuous batching runs without CUDA graphs: %s", refusal)
            runner.use_cuda_graph_decode = False
            return
        with torch.cuda.stream(stream):
            graphs.prepare_capture(size)
            forward(*arguments)  # compiles and allocates what the capture must find
            graphs.prepare_capture(size)  # anew: what a run fills in once would stay out of the graph
        graph = recorded(forward, arguments, stream, runner.graph_pool_id)
    finally:
        graphs.recording = False
    runner.inputs_and_outputs.set_graph(graph)
    with torch.cuda.stream(stream):
        graphs.load(lens_of(cache), size, options)
        graph.replay()  # the step again, whose output the runs above have overwritten


def recorded(forward: Callable[..., Any], arguments: Sequence[Any], stream: Any, pool: Any) -> Any:
    """Return a CUDA graph of a call; other threads may use the device meanwhile, as the engine wants it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, pool=pool, capture_error_mode="thread_local"):
        forward(*arguments)
    return graph
