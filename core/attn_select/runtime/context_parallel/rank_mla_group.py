"""MLA layers whose cache lies on several ranks: ``ContextParallelMLAGroup``.

Decodes run on latents, with the absorbed queries of all ranks' heads against this rank's share, and the ranks merge
their results by LSE. Each query is a request of its own, since the queries of one request see different parts of a
share. Prefills run by this rank's own heads: the cached context is gathered from all ranks, chunk by chunk. With sparse
MLA all queries are decodes, each over those of the chosen tokens that lie here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.layer.config import CudaGraphLevel, Phase
from attn_select.runtime import ops
from attn_select.runtime.batch import to_device
from attn_select.runtime.context_parallel.agreement import check_step, do_alike
from attn_select.runtime.context_parallel.context_parallel import ContextParallel
from attn_select.runtime.context_parallel.merging import Merger
from attn_select.runtime.context_parallel.parts import (
    LocalBatches,
    check_selection,
    facts_of,
    local_capacity,
    part_of,
    share_memory,
)
from attn_select.runtime.context_parallel.shares import Shares
from attn_select.runtime.group import Capacity
from attn_select.runtime.kv_cache import kernel_block_table
from attn_select.runtime.metadata import CommonAttentionMetadata, Split, prefix_sums, split_decodes_and_prefills
from attn_select.runtime.mla_context import ContextChunk, context_chunks, context_parts
from attn_select.runtime.mla_group import WORKSPACE_TOKENS, MLAAttentionGroup, MLAMetadata, MLAPart
from attn_select.runtime.scales import Scales
from attn_select.runtime.ways import Served


@dataclass(slots=True)
class RankChunk(ContextChunk):
    """A ``ContextChunk`` whose tokens lie on all ranks.

    Attributes:
        local_tokens: how many this rank keeps.
        most_tokens: the most that a rank keeps; each sends as many.
        local_starts, local_start_loc: as ``starts`` and ``start_loc``, in this rank's share.
        order: int64 ``(num_tokens,)`` on the device: where each token lies in what was gathered, rank by rank.
    """

    local_tokens: int
    most_tokens: int
    local_starts: Tensor
    local_start_loc: Tensor
    order: Tensor


class ContextParallelMLAGroup(MLAAttentionGroup):
    """``MLAAttentionGroup`` for layers whose cache lies on several ranks. Every rank of the group makes one.

    Args:
        context_parallel: the ranks.
        selection, device, capacity, cuda_graphs, phases, dispatch, workspace_tokens: as for ``MLAAttentionGroup``; no
            ``dispatch``. The capacity is that of whole requests.

    Attributes:
        block_size: of the scheduler's tables: positions per block, ``size`` times the block size of a rank's cache.
        latent: the decodes of all ranks' heads; None where the group serves prefill alone.
        merged_width: of partial results when they are merged: of a latent, or of a value.

    Raises:
        ConfigError: besides those of ``MLAAttentionGroup``: the selection was made for another number of ranks, or
            ``interleave`` does not divide the block size.
        RankError: another rank cannot make its group, or made another one.
    """

    def __init__(
        self,
        selection: Selection,
        device: torch.device | str | None = None,
        capacity: Capacity | None = None,
        *,
        context_parallel: ContextParallel,
        cuda_graphs: bool = False,
        phases: Sequence[Phase] | None = None,
        dispatch: str | None = None,
        workspace_tokens: int = WORKSPACE_TOKENS,
    ) -> None:
        self.context_parallel = context_parallel
        bounds = capacity or Capacity()

        def make() -> None:
            check_selection(selection, context_parallel, dispatch)
            wanted = [phase for phase in selection.config.phases if phases is None or phase in phases]
            super(ContextParallelMLAGroup, self).__init__(
                part_of(selection, selection.config.num_heads, sinks=selection.config.sinks),
                device,
                bounds,
                cuda_graphs=cuda_graphs,
                phases=[phase for phase in wanted if phase == "prefill" and not selection.config.sparse],
                workspace_tokens=workspace_tokens,
            )
            latent: Phase = "decode" if "decode" in wanted else "prefill"
            self._make_latent(selection, latent if latent == "decode" or selection.config.sparse else None)

        do_alike(
            context_parallel.collectives,
            "attention_group",
            make,
            lambda: facts_of(selection, context_parallel, bounds),
        )
        share_memory(
            self.merger, self.config, context_parallel, self._queries.max_num_seqs, self.merged_width, self.device
        )

    def _make_latent(self, selection: Selection, phase: Phase | None) -> None:
        """Make what computes on latents, of this phase's backend, and take over what the layers ask of both parts."""
        ranks, size, capacity = self.context_parallel, selection.block_size, self.capacity
        assert size is not None  # MLA layers have a cache
        self.selection, self.config = selection, selection.config
        self.block_size = size * ranks.size
        self.shares = Shares(ranks.rank, ranks.size, ranks.interleave, size, self.device)
        self.merger = Merger(ranks.collectives, 1, ranks.sharded)
        value, rank = self.config.v_head_dim, self.config.kv_lora_rank
        assert value is not None
        assert rank is not None
        # Where every rank has all heads, each projects its own partial results, if there is less to send then.
        self.merged_width = rank if ranks.sharded else min(rank, value)
        queries = capacity.max_num_seqs * (1 + self.config.num_speculative_tokens)
        if self.config.sparse:
            queries = capacity.max_num_batched_tokens
        self._queries = Capacity(
            min(queries, capacity.max_num_batched_tokens), capacity.max_num_batched_tokens, capacity.max_model_len
        )
        self._local = LocalBatches(self.shares, self._queries, self.device, keeps=self.cuda_graphs)
        self.latent: MLAAttentionGroup | None = None
        if phase is not None:
            # Every query is a request with one token: to the kernels there are no drafts.
            part = part_of(selection, ranks.gathered_heads(self.config.num_heads), num_speculative_tokens=0)
            self.latent = MLAAttentionGroup(
                part,
                self.device,
                local_capacity(self._queries, self.block_size, size),
                cuda_graphs=self.cuda_graphs,
                phases=[phase],
                workspace_tokens=1,
            )
            self.latent.checked = False  # this group checks what layers are given
            self.kernel_block_size = self.latent.kernel_block_size
            self.served = {**self.served, **self.latent.served}
            self.backends = (*self.backends, *self.latent.backends)

    def build(
        self, common_attn_metadata: CommonAttentionMetadata, common_prefix_len: int = 0, fast_build: bool = False
    ) -> MLAMetadata:
        """As ``MLAAttentionGroup.build``, from the scheduler's lengths, tables and slots, the same on all ranks."""
        common = common_attn_metadata
        check_step(self, common)
        slots = self._local.slots(common)
        if self.config.sparse:
            local = self._local.shared(self._by_query(common), slots)
            return self._rank_metadata(common, slots, self._decoder().build(local, 0, fast_build).parts)
        split = Split(0, common.num_reqs, 0, common.num_actual_tokens)
        if (threshold := self.reorder_batch_threshold) is not None:
            split = split_decodes_and_prefills(common, threshold)
        parts: list[MLAPart] = []
        if split.num_decodes:
            latent = self._decoder()
            decodes = self._by_query(common.requests(0, split.num_decodes))
            parts.append(latent._latent_part(latent._way, "decode", self._local.shared(decodes, slots), 0, fast_build))
        if split.num_prefills:
            prefills = common.requests(split.num_decodes, common.num_reqs)
            parts.append(self._dense_prefill(self._way, "prefill", prefills, split.num_decode_tokens, fast_build))
        return self._rank_metadata(common, slots, parts)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLAMetadata:
        """As ``MLAAttentionGroup.build_for_cudagraph_capture``; the collectives are captured as well."""
        common = common_attn_metadata
        self._check_capture(common)
        slots = self._local.slots(common)
        local = self._local.shared(self._by_query(common), slots)
        part = self._decoder().build_for_cudagraph_capture(local).parts[0]
        return self._rank_metadata(common, slots, [part])

    def _latent_alone(self) -> bool:
        return self.config.sparse

    def own_slots(self, topk_indices: Tensor) -> Tensor:
        """Return those of the chosen slots that lie on this rank, in its cache, -1 behind a token's last one."""
        return self.shares.chosen(topk_indices)

    def num_slots(self, kv_cache: Tensor) -> int:
        """Return how many of the scheduler's slots may be chosen from."""
        return super().num_slots(kv_cache) * self.shares.size

    def _decoder(self) -> MLAAttentionGroup:
        if self.latent is None:
            self._server(self._way, "decode")  # raises
            raise AssertionError
        return self.latent

    def _rank_metadata(self, common: CommonAttentionMetadata, slots: Tensor, parts: Sequence[MLAPart]) -> MLAMetadata:
        decodes = sum(part.rows.stop for part in parts if part.phase == "decode")
        return MLAMetadata(self, common, common.num_actual_tokens, decodes, slots, tuple(parts))

    def _by_query(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the batch with a request for each query, which sees the keys up to its own."""
        if common.max_query_len <= 1:
            return common
        query_lens, tokens = common.query_lens_cpu, common.num_actual_tokens
        request = torch.repeat_interleave(query_lens)
        lens_cpu = torch.zeros(tokens, dtype=torch.int32)
        lens_cpu[: len(request)] = self._visible(common, request)
        rows_cpu = torch.zeros(tokens, dtype=torch.int32)
        rows_cpu[: len(request)] = request
        bounds_cpu = torch.arange(tokens + 1, dtype=torch.int32)
        here = to_device(torch.cat([lens_cpu, rows_cpu, bounds_cpu]), self.device)
        lens, rows, bounds = here.split_with_sizes([tokens, tokens, tokens + 1])
        table = common.block_table_tensor
        assert table is not None
        return replace(
            common,
            query_start_loc=self._local.keep("bounds", bounds),
            query_start_loc_cpu=bounds_cpu,
            seq_lens=lens,
            seq_lens_cpu=lens_cpu,
            num_reqs=tokens,
            max_query_len=1,
            block_table_tensor=self._local.keep_table(table.index_select(0, rows)),
            num_decodes=None,
            num_keys=None,
        )

    def _visible(self, common: CommonAttentionMetadata, request: Tensor) -> Tensor:
        """Return how many of its request's keys each query sees; they are the first."""
        every = common.seq_lens_cpu[request]
        if self.config.non_causal or not common.causal:
            return every
        behind = common.query_start_loc_cpu[1:][request] - torch.arange(len(request)) - 1
        visible = (every - behind).clamp_min(0)
        for row, ranges in enumerate(common.mm_prefix_ranges or ()):
            for first, last in ranges:
                inside = (request == row) & (visible > first) & (visible <= last)
                visible = torch.where(inside, every.clamp_max(last + 1), visible)
        return visible

    def _chunks(self, served: Served, common: CommonAttentionMetadata, context: Tensor) -> tuple[ContextChunk, ...]:
        parts = context_parts(common, self.config, self.workspace_tokens)
        if not parts:
            return ()
        self._check_mergeable(served, context)
        table, size = common.block_table_tensor, self.shares.block_size
        assert table is not None
        assert self.kernel_block_size is not None
        if size != self.kernel_block_size:
            table = kernel_block_table(table, size // self.kernel_block_size)
        chunks = context_chunks(parts, common, self.config, table, served.builder.build_prefill)
        return tuple(self._of_ranks(chunk, *part) for chunk, part in zip(chunks, parts, strict=True))

    def _of_ranks(self, chunk: ContextChunk, starts: Tensor, lengths: Tensor) -> RankChunk:
        """Return a chunk with what this rank sends of it, and the order of what comes."""
        shares = self.shares
        used = lengths.nonzero()
        who = slice(int(used[0]), int(used[-1]) + 1)
        starts, lengths = starts[who], lengths[who]
        first = torch.stack([shares.length(starts, rank) for rank in range(shares.size)])
        bounds = torch.stack(
            [prefix_sums(shares.length(starts + lengths, rank) - first[rank]) for rank in range(shares.size)]
        )
        most = int(bounds[:, -1].max())
        request = torch.repeat_interleave(lengths)
        within = torch.arange(len(request)) - (lengths.cumsum(0) - lengths)[request]
        positions = starts[request] + within
        owner = positions // shares.interleave % shares.size
        row = shares.interleave * shares.size
        local = positions // row * shares.interleave + positions % shares.interleave
        order = owner * most + bounds[owner, request] + local - first[owner, request]
        numbers = torch.cat([order.int(), first[shares.rank].int(), bounds[shares.rank].int()])
        here = to_device(numbers, self.device)
        order_here, starts_here, bounds_here = here.split_with_sizes([len(order), len(starts), len(starts) + 1])
        return RankChunk(
            rows=chunk.rows,
            block_table=chunk.block_table,
            starts=chunk.starts,
            start_loc=chunk.start_loc,
            num_tokens=chunk.num_tokens,
            spans=chunk.spans,
            metadata=chunk.metadata,
            local_tokens=int(bounds[shares.rank, -1]),
            most_tokens=most,
            local_starts=starts_here,
            local_start_loc=bounds_here,
            order=order_here,
        )

    def load_chunk(self, chunk: ContextChunk, kv_cache: Tensor, scales: Scales) -> Tensor:
        """As ``MLAAttentionGroup.load_chunk``, from the caches of all ranks."""
        assert isinstance(chunk, RankChunk)
        own = self.workspace.new_empty(chunk.most_tokens, self.workspace.shape[1])
        if chunk.local_tokens:
            where = (chunk.block_table, chunk.local_starts, chunk.local_start_loc, chunk.local_tokens)
            ops.gather_cache_mla(kv_cache, own, *where, kv_cache.shape[1], self.config, scales)
        gathered = own.new_empty(self.shares.size, *own.shape)
        self.context_parallel.collectives.all_gather(gathered, own)
        return torch.index_select(gathered.flatten(0, 1), 0, chunk.order, out=self.workspace[: chunk.num_tokens])

    @property
    def cudagraph_support(self) -> CudaGraphLevel:
        """Every query is a request to the kernels, so what captures single tokens captures uniform batches."""
        level = self._decoder().cudagraph_support if self.latent is not None else super().cudagraph_support
        return level if level == "NEVER" else "UNIFORM_BATCH"

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """As ``AttentionGroup.workspace_bytes``, of both parts; ``ranks`` is shared by the ranks."""
        found = dict(super().workspace_bytes)
        for name, size in self.latent.workspace_bytes.items() if self.latent is not None else ():
            found[name] = found.get(name, 0) + size
        return {**found, **self.merger.workspace_bytes}

    def _cache_blocks(self) -> tuple[str, int, int]:
        layout, kernel_block_size, ratio = super()._cache_blocks()
        return layout, kernel_block_size, ratio // self.context_parallel.size

    def layer_in_parts(self, layer: type[Any], **options: Any) -> LatentsAcrossRanks:
        """Return what decodes one layer of this group; every rank calls it for the same layer."""
        return LatentsAcrossRanks(self, **options)


class LatentsAcrossRanks:
    """Decodes one layer of a ``ContextParallelMLAGroup``.

    Args:
        group: the layer's.
        sinks: ``(num_heads,)`` of this rank's heads, or None.
    """

    def __init__(self, group: ContextParallelMLAGroup, *, sinks: Tensor | None) -> None:
        self.group = group
        self.sinks = None if sinks is None else group.merger.gather_heads(sinks.float().view(1, -1, 1)).flatten()
        assert group.config.kv_lora_rank is not None
        self._rank = group.config.kv_lora_rank
        self._heads = group.context_parallel.gathered_heads(group.config.num_heads)

    def forward(
        self,
        query: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        project: Callable[[Tensor, Tensor], None],
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        """Decode over all ranks' latents.

        Args:
            query: ``(T, num_heads, R + Pr)``, absorbed, of this rank's heads.
            attend: ``(query, latent, lse) -> latent``: runs the kernel on this rank's share.
            project: ``(latent, output)``: multiplies with ``W_UV``.
            output: ``(T, num_heads, V)``, written.
            output_lse: float32 ``(T, num_heads)``, written where given.
        """
        group, merger, way = self.group, self.group.merger, self.group.context_parallel.merge_way
        query = merger.gather_queries(query)
        partial, lse = merger.partials(query, self._heads, group.merged_width)
        if group.merged_width < self._rank:
            project(attend(query, query.new_empty(len(query), self._heads, self._rank), lse), partial)
            merger.merge(way, partial, lse, output, output_lse, self.sinks)
            return
        partial = attend(query, partial, lse)
        merged = output.new_empty(*output.shape[:2], self._rank)
        merger.merge(way, partial, lse, merged, output_lse, self.sinks)
        project(merged, output)
