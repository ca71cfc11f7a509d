"""CUDA graphs of steps: capture for a list of sizes, then replay with other lengths, block tables and slots.

A captured kernel reads the addresses it was captured with, so every step's batch is copied into buffers that stay where
they are (``StaticBatch``) and padded to a captured size. A uniform batch (decode) is padded with requests of the same
query length and no keys, a mixed one with tokens that belong to no request. Builders have buffers of their own, which
stay where they are too (``BackendContext.cuda_graphs``). Layers that keep a state have ``StaticStates`` instead. A
backend's CUDA-graph level says for which batches its builder can do that; the runner refuses all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_select.errors import ConfigError
from attn_select.layer.config import CUDA_GRAPH_LEVELS, CudaGraphLevel
from attn_select.runtime.batch import to_device
from attn_select.runtime.checks import check_columns
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata, causal_trees, check_uniform, prefix_sums
from attn_select.runtime.states import StateGroup, StateSlots, StaticStates

G = TypeVar("G", bound=LayerGroup | StateGroup)
Commons = Mapping[Any, CommonAttentionMetadata]
"""The step's batch per group: groups with caches of their own have tables and slots of their own."""
Slots = Mapping[Any, StateSlots]
"""The slots of the step's requests per group of layers that keep a state."""
Function = Callable[[Mapping[str, Tensor], Mapping[Any, Any]], Tensor]
WARM_UPS = 2
"""Eager runs before a capture: libraries allocate and compile in the first, the second runs as it will stay."""


class StaticBatch:
    """One group's batch at fixed addresses; ``query_len``: tokens per request of uniform batches, None: mixed ones."""

    def __init__(self, group: LayerGroup, query_len: int | None) -> None:
        capacity, device = group.capacity, group.device
        self.group, self.query_len = group, query_len
        requests, size = capacity.max_num_seqs, group.block_size or 1
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        # Uniform bounds never change, so ``load`` copies them for mixed batches only.
        self.query_start_loc = torch.arange(requests + 1, **ints) * (query_len or 0)
        self._uniform_cpu = torch.arange(requests + 1, dtype=torch.int32) * (query_len or 0)
        self.seq_lens = torch.zeros(requests, **ints)
        self.block_table = torch.zeros(requests, -(-capacity.max_model_len // size), **ints)
        self.slot_mapping = torch.empty(capacity.max_num_batched_tokens, dtype=torch.int64, device=device)
        self.tree_mask: Tensor | None = None
        if group.config.draft_tree:
            shape = capacity.max_num_batched_tokens, group.config.max_decode_query_len
            self.tree_mask = torch.zeros(shape, dtype=torch.bool, device=device)

    def padded_requests(self, size: int) -> int:
        """Return how many requests a batch of a captured size (requests, or tokens where mixed) has."""
        return size if self.query_len is not None else self.group.capacity.max_num_seqs

    def padded_tokens(self, size: int) -> int:
        """Return how many tokens a batch of a captured size has."""
        return size if self.query_len is None else size * self.query_len

    def check_size(self, size: int) -> None:
        """Raise ConfigError for a size to capture that is beyond the group's capacity."""
        capacity, requests, tokens = self.group.capacity, self.padded_requests(size), self.padded_tokens(size)
        if requests > capacity.max_num_seqs or tokens > capacity.max_num_batched_tokens:
            raise ConfigError(
                f"size {size} is {requests} requests and {tokens} tokens: a group was made for max_num_seqs = "
                f"{capacity.max_num_seqs} and max_num_batched_tokens = {capacity.max_num_batched_tokens}",
                fields=["sizes"],
                hint="leave that size out, or make the group with a larger Capacity",
            )

    def load(self, common: CommonAttentionMetadata, size: int) -> CommonAttentionMetadata:
        """Copy a batch into the buffers and return it padded to a captured size. Does not synchronise."""
        # What an engine has written to the first places of a buffer by itself is not copied again. Raises BatchError
        # where the group refuses the batch, or it is not uniform, has image ranges, or its block table is wider than
        # ``max_model_len`` allows.
        self.group.check_batch(common)
        if common.mm_prefix_ranges is not None and any(common.mm_prefix_ranges):
            raise BatchError("mm_prefix_ranges are given: a captured step has none, run it eagerly")
        count, requests = common.num_reqs, self.padded_requests(size)
        bounds_cpu, seq_lens_cpu = self._bounds(common, requests), common.seq_lens_cpu
        if self.query_len is None:
            self.query_start_loc[: requests + 1].copy_(to_device(bounds_cpu, self.group.device), non_blocking=True)
        _place(common.seq_lens, self.seq_lens)
        if count < requests:
            # Rows of padding keep the tables of an earlier step: they have no keys, so nothing reads them.
            self.seq_lens[count:requests].zero_()
            seq_lens_cpu = pad(seq_lens_cpu, (0, requests - count))
        if common.slot_mapping is not None:
            taken, tokens = common.num_actual_tokens, self.padded_tokens(size)
            _place(common.slot_mapping[:taken], self.slot_mapping)
            if taken < tokens:
                self.slot_mapping[taken:tokens].fill_(-1)
        if (table := common.block_table_tensor) is not None:
            check_columns(table, self.block_table.shape[1], self.group.capacity.max_model_len)
            _place(table, self.block_table)
        if self.tree_mask is not None:
            given = common.tree_mask
            # A graph has a mask captured or none: a step without trees replays it with chains.
            chains = causal_trees(common, self.tree_mask.shape[1]) if given is None else given
            self.tree_mask[: common.num_actual_tokens].copy_(chains[: common.num_actual_tokens])
        same = {"max_seq_len": common.max_seq_len, "causal": common.causal, "block_size": common.block_size}
        return self._common(size, bounds_cpu, seq_lens_cpu, **same)

    def metadata(self, size: int) -> Any:
        """Return what a batch of a captured size is captured with, built anew."""
        return self.group.build_for_cudagraph_capture(self.dummy(size))

    def dummy(self, size: int) -> CommonAttentionMetadata:
        """Return a batch to capture with: short requests in block 0 that write nothing, and the largest bounds."""
        requests, tokens = self.padded_requests(size), self.padded_tokens(size)
        each = self.query_len
        lens = torch.full((requests,), each or 0, dtype=torch.int32)
        if each is None:
            # Every request gets a token more until the rest is spread: their sum is ``tokens`` exactly.
            lens[: tokens % requests] = 1
            lens += tokens // requests
        bounds_cpu = prefix_sums(lens)
        self.query_start_loc[: requests + 1].copy_(bounds_cpu)
        self.seq_lens[:requests].copy_(lens)
        self.slot_mapping.fill_(-1)
        longest = self.group.capacity.max_model_len
        return self._common(size, bounds_cpu, lens, max_seq_len=longest, block_size=self.group.block_size)

    def _bounds(self, common: CommonAttentionMetadata, requests: int) -> Tensor:
        """Return the padded prefix sums on the host, int32 ``(requests + 1,)``."""
        if (each := self.query_len) is None:
            # Requests that only pad begin and end behind the last token, so they have no query.
            bounds = torch.full((requests + 1,), common.num_actual_tokens, dtype=torch.int32)
            bounds[: common.num_reqs + 1] = common.query_start_loc_cpu
            return bounds
        # Where none is longer their sum tells, without a tensor of lengths in every step.
        if common.max_query_len > each or int(common.query_start_loc_cpu[-1]) != each * common.num_reqs:
            check_uniform(common, each)
        return self._uniform_cpu[: requests + 1]

    def _common(self, size: int, bounds_cpu: Tensor, seq_lens_cpu: Tensor, **more: Any) -> CommonAttentionMetadata:
        requests, tokens = self.padded_requests(size), self.padded_tokens(size)
        cached = self.group.block_size is not None
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc[: requests + 1],
            query_start_loc_cpu=bounds_cpu,
            seq_lens=self.seq_lens[:requests],
            seq_lens_cpu=seq_lens_cpu,
            num_reqs=requests,
            num_actual_tokens=tokens,
            # A bound that holds for every batch of this size, since launch grids are captured with it.
            max_query_len=self.query_len or tokens,
            block_table_tensor=self.block_table[:requests] if cached else None,
            slot_mapping=self.slot_mapping[:tokens] if cached else None,
            tree_mask=None if self.tree_mask is None else self.tree_mask[:tokens],
            **more,
        )


def _place(rows: Tensor, buffer: Tensor) -> None:
    """Copy rows to the first places of a buffer, unless they are there already."""
    if rows.data_ptr() != buffer.data_ptr():
        places = buffer[: len(rows)]
        (places if rows.ndim == 1 else places[:, : rows.shape[1]]).copy_(rows)


class CudaGraphRunner(Generic[G]):
    """Captures a step for a list of sizes and replays it.

    Args:
        function: ``(inputs, attn_metadata) -> output``: runs the layers. Gets views of the static inputs and the
            metadata by group; returns a tensor with one row per token. Must not synchronise.
        groups: made with ``cuda_graphs=True``.
        inputs: per name a tensor with one row per token, of the dtype, device and trailing shape that steps will have.
        sizes: batch sizes (requests) to capture; with ``mixed`` numbers of tokens. A batch runs in the smallest that
            holds it.
        query_len: tokens per request of uniform batches (1, or 1 + draft tokens).
        mixed: capture mixed batches of prefill and decode; every backend must be at level ALWAYS.

    Raises:
        ConfigError: no CUDA device, a group without ``cuda_graphs``, a level below what is asked for (the group's
            backends are named with theirs), or a size beyond the groups' capacity.
    """

    def __init__(
        self,
        function: Function,
        groups: Sequence[G],
        inputs: Mapping[str, Tensor],
        sizes: Sequence[int],
        *,
        query_len: int = 1,
        mixed: bool = False,
    ) -> None:
        self.function, self.groups = function, tuple(groups)
        self.query_len = None if mixed else query_len
        self.sizes = sorted(set(sizes))
        for group in self.groups:
            check_level(group, query_len, mixed)
            if not group.cuda_graphs:
                raise ConfigError(
                    "a group was made without cuda_graphs=True, so its tensors change their addresses",
                    fields=["cuda_graphs"],
                    hint="attention_group(selection, cuda_graphs=True), or StateGroup(selection, cuda_graphs=True)",
                )
        if not self.sizes or self.sizes[0] < 1:
            raise ConfigError(f"sizes = {self.sizes}: accepted are integers from 1", fields=["sizes"])
        largest = self.sizes[-1]
        self.batches: dict[G, StaticBatch | StaticStates] = {}
        for group in self.groups:
            if isinstance(group, StateGroup):  # none is at level ALWAYS, which mixed batches need
                self.batches[group] = StaticStates(group, query_len, largest)
            else:
                self.batches[group] = batch = StaticBatch(group, self.query_len)
                batch.check_size(largest)
        if any(group.device.type != "cuda" for group in self.groups):
            raise ConfigError(f"device = {self.groups[0].device}: CUDA graphs need a CUDA device", fields=["device"])
        most = next(iter(self.batches.values())).padded_tokens(largest)
        self.inputs = {name: tensor.new_zeros(most, *tensor.shape[1:]) for name, tensor in inputs.items()}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def capture(self) -> None:
        """Capture every size, the largest first, so that the others fit in its memory."""
        for size in reversed(self.sizes):
            views = self._views(size)
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self.function(views, self._capture_metadata(size))
            torch.cuda.current_stream().wait_stream(stream)
            # Built anew: what a warm-up has filled in (a schedule) would otherwise stay out of the graph.
            metadata = self._capture_metadata(size)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = self.function(views, metadata)
            self._pool = self._pool or graph.pool()
            self._graphs[size] = (graph, output)

    def size_for(self, common: CommonAttentionMetadata) -> int:
        """Return the smallest captured size that holds a batch; BatchError where it is larger than all of them."""
        wanted = common.num_actual_tokens if self.query_len is None else common.num_reqs
        for size in self.sizes:
            if wanted <= size:
                return size
        unit = "tokens" if self.query_len is None else "requests"
        text = f"a batch of {wanted} {unit}: graphs were captured for {', '.join(map(str, self.sizes))}"
        raise BatchError(text, hint="run it eagerly, or capture a larger size")

    def __call__(self, inputs: Mapping[str, Tensor], commons: Commons, slots: Slots | None = None) -> Tensor:
        """Replay a step; return its output rows, ``(num_actual_tokens, …)``, valid until the next replay.

        Args:
            inputs: per name at least ``num_actual_tokens`` rows.
            commons: the batch per group.
            slots: per ``StateGroup`` what ``StatePool.step`` returned; None: there is no such group.

        Raises:
            BatchError: nothing was captured, the batch fits no size, it is not uniform, or its slots are missing.
        """
        first = commons[self.groups[0]]
        size = self.size_for(first)
        if size not in self._graphs:
            raise BatchError("nothing is captured yet", hint="call capture() first")
        tokens = first.num_actual_tokens
        for name, static in self.inputs.items():
            static[:tokens].copy_(inputs[name][:tokens], non_blocking=True)
        load_step(self.batches, commons, slots or {}, size)
        graph, output = self._graphs[size]
        graph.replay()
        return output[:tokens]

    def _views(self, size: int) -> dict[str, Tensor]:
        tokens = next(iter(self.batches.values())).padded_tokens(size)
        return {name: tensor[:tokens] for name, tensor in self.inputs.items()}

    def _capture_metadata(self, size: int) -> dict[Any, Any]:
        return {group: batch.metadata(size) for group, batch in self.batches.items()}


def load_step(batches: Mapping[Any, StaticBatch | StaticStates], commons: Commons, slots: Slots, size: int) -> None:
    """Copy a step into the buffers of all groups."""
    # States come last, since theirs commits their pool's step: where a group refuses its batch, no step is committed.
    states = {group: batch for group, batch in batches.items() if isinstance(batch, StaticStates)}
    if states.keys() - slots.keys():
        raise BatchError("slots are missing of a group of layers that keep a state", hint="StatePool.step")
    for group, batch in batches.items():
        if isinstance(batch, StaticBatch):
            # Nothing is kept of what is built: building writes the buffers whose addresses the graph holds.
            batch.group.build(batch.load(commons[group], size))
    for group, static in states.items():
        static.load(commons[group], slots[group], size)


def check_level(group: LayerGroup | StateGroup, query_len: int = 1, mixed: bool = False) -> None:
    """Raise ConfigError if a group's builders cannot capture what is wanted."""
    needed: CudaGraphLevel = "UNIFORM_SINGLE_TOKEN_DECODE" if query_len == 1 else "UNIFORM_BATCH"
    if mixed:
        needed = "ALWAYS"
    level = group.cudagraph_support
    if CUDA_GRAPH_LEVELS.index(level) < CUDA_GRAPH_LEVELS.index(needed):
        what = "mixed batches" if mixed else f"uniform batches of query length {query_len}"
        names = " with ".join(dict.fromkeys(own.spec.name for own in group.backends.values()))
        text = f"CUDA graphs of {what} need level {needed}: {names} is at {level}"
        raise ConfigError(text, fields=["cuda_graph"], hint=f"select with cuda_graph = {needed!r}")
