"""MLA layers whose cache lies on several ranks: ``ContextParallelMLAGroup``.

Decodes run on latents, with the absorbed queries of all ranks' heads against this rank's share, and the ranks merge
their results by LSE. Each query is a request of its own, since the queries of one request see different parts of a
share. Prefills run by this rank's own heads: the cached context is gathered from all ranks, chunk by chunk. With sparse
MLA all queries are decodes, each over the chosen tokens that lie here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.layer.config import CudaGraphLevel, Phase
from attn_select.runtime import ops
from attn_select.runtime.batch import to_device
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.context_parallel.ranks import RankGroup
from attn_select.runtime.context_parallel.shares import local_capacity, part_of
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.metadata import CommonAttentionMetadata, prefix_sums
from attn_select.runtime.mla_context import ContextChunk
from attn_select.runtime.mla_group import MLAAttentionGroup, MLALayerGroup
from attn_select.runtime.scales import Scales
from attn_select.runtime.step_metadata import Part
from attn_select.runtime.terms import Outputs, Terms


@dataclass(slots=True)
class RankChunk(ContextChunk):
    """A ``ContextChunk`` whose tokens lie on all ranks."""

    # How many this rank keeps, and the most that a rank keeps: each sends as many, since all_gather takes equal parts.
    local_tokens: int
    most_tokens: int
    # As ``starts`` and ``start_loc``, in this rank's share.
    local_starts: Tensor
    local_start_loc: Tensor
    # int64 ``(num_tokens,)`` on the device: where each token lies in what was gathered, rank by rank.
    order: Tensor


class ContextParallelMLAGroup(RankGroup, MLALayerGroup):
    """The group of MLA layers whose cache lies on several ranks.

    Arguments and errors are ``RankGroup``'s, and ``workspace_tokens`` as for ``MLAAttentionGroup``.

    Attributes:
        dense: the prefills of this rank's own heads.
        latent: the decodes of all ranks' heads; None where the group serves prefill alone.
        merged_width: of partial results when they are merged: of a latent, or of a value.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.config.sparse or "decode" not in self.backends:
            self.whole = next(iter(self.backends))

    def make_parts(
        self, selection: Selection, device: torch.device | str | None, bounds: Capacity, **made: Any
    ) -> Sequence[LayerGroup]:
        """As ``RankGroup.make_parts``."""
        ranks, config, size = self.context_parallel, selection.config, cast(int, selection.block_size)
        value, rank = cast(int, config.v_head_dim), cast(int, config.kv_lora_rank)
        phases = made.pop("phases")
        wanted = [phase for phase in config.phases if phases is None or phase in phases]
        dense = [phase for phase in wanted if phase == "prefill" and not config.sparse]
        own_heads = part_of(selection, config.num_heads, sinks=config.sinks)
        self.dense = MLAAttentionGroup(own_heads, device, bounds, phases=dense, **made)
        # Where every rank has all heads, each projects its own partial results, if there is less to send then.
        self.merged_width = rank if ranks.sharded else min(rank, value)
        queries = bounds.max_num_seqs * config.max_decode_query_len
        if config.sparse:
            queries = bounds.max_num_batched_tokens
        self.most_queries = min(queries, bounds.max_num_batched_tokens)
        self.local_bounds = replace(bounds, max_num_seqs=self.most_queries)
        self.latent: MLAAttentionGroup | None = None
        if "decode" not in wanted and not config.sparse:
            return [self.dense]
        # Every query is a request with one token: to the kernels there are no drafts.
        self.latent = MLAAttentionGroup(
            part_of(selection, ranks.gathered_heads(config.num_heads), num_speculative_tokens=0),
            self.dense.device,
            local_capacity(self.local_bounds, size * ranks.size, size),
            phases=["decode" if "decode" in wanted else "prefill"],
            **{**made, "workspace_tokens": 1},
        )
        return [self.dense, self.latent]

    def written_slots(self, common: CommonAttentionMetadata) -> Tensor:
        """As ``MLALayerGroup.written_slots``, -1 for other ranks' tokens."""
        return self.local.slots(common)

    def latent_part(
        self, phase: Phase, rows: slice, common: CommonAttentionMetadata, slots: Tensor, fast: bool, captured: bool
    ) -> Part:
        """As ``MLALayerGroup.latent_part``, against this rank's share."""
        self.backend_for(phase)  # raises where there are no decodes
        assert self.latent is not None
        return self.latent.latent_part(
            phase, rows, self.local.shared(self._by_query(common), slots), slots, fast, captured
        )

    def dense_prefill(self, rows: slice, common: CommonAttentionMetadata) -> Part:
        """As ``MLALayerGroup.dense_prefill``, by this rank's own heads over the contexts of all ranks."""
        return self.dense.prefill_in_chunks(rows, common, self.kernel_block_size, self._of_ranks)

    def own_slots(self, topk_indices: Tensor) -> Tensor:
        """Return the chosen slots that lie on this rank, in its cache, -1 behind a token's last one."""
        return self.shares.chosen(topk_indices)

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
            query_start_loc=self.local.static.hold("bounds", bounds),
            query_start_loc_cpu=bounds_cpu,
            seq_lens=lens,
            seq_lens_cpu=lens_cpu,
            num_reqs=tokens,
            max_query_len=1,
            block_table_tensor=self.local.static.hold("table", table.index_select(0, rows)),
            num_decodes=None,
        )

    def _visible(self, common: CommonAttentionMetadata, request: Tensor) -> Tensor:
        """Return how many of its request's keys each query sees; they are the first."""
        every = common.seq_lens_cpu[request]
        if self.config.non_causal or not common.causal:
            return every
        # Queries of the same request behind this one; their keys are the ones that it does not see.
        later = common.query_start_loc_cpu[1:][request] - torch.arange(len(request)) - 1
        visible = (every - later).clamp_min(0)
        for row, ranges in enumerate(common.mm_prefix_ranges or ()):
            for first, last in ranges:
                # A query inside an image's range sees all of that range.
                inside = (request == row) & (visible > first) & (visible <= last)
                visible = torch.where(inside, every.clamp_max(last + 1), visible)
        return visible

    def _of_ranks(self, chunk: ContextChunk, starts: Tensor, lengths: Tensor) -> RankChunk:
        """Return a chunk with the rows that this rank sends, and the order of the rows that arrive."""
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
        # A row of positions holds ``interleave`` of each rank in turn (``Shares``). A rank sends its tokens request by
        # request, padded to ``most``; ``first`` counts those of a request that it keeps before the chunk begins.
        owner = positions // shares.interleave % shares.size
        row = shares.interleave * shares.size
        local = positions // row * shares.interleave + positions % shares.interleave
        order = owner * most + bounds[owner, request] + local - first[owner, request]
        numbers = torch.cat([order.int(), first[shares.rank].int(), bounds[shares.rank].int()])
        here = to_device(numbers, self.device)
        order_here, starts_here, bounds_here = here.split_with_sizes([len(order), len(starts), len(starts) + 1])
        return RankChunk(
            **{each.name: getattr(chunk, each.name) for each in fields(chunk)},
            local_tokens=int(bounds[shares.rank, -1]),
            most_tokens=most,
            local_starts=starts_here,
            local_start_loc=bounds_here,
            order=order_here,
        )

    def load_chunk(self, chunk: ContextChunk, kv_cache: Tensor, scales: Scales) -> Tensor:
        """As ``MLAAttentionGroup.load_chunk``, from the caches of all ranks."""
        assert isinstance(chunk, RankChunk)
        workspace = self.dense.workspace
        own = workspace.new_empty(chunk.most_tokens, workspace.shape[1])
        if chunk.local_tokens:
            where = (chunk.block_table, chunk.local_starts, chunk.local_start_loc, chunk.local_tokens)
            ops.gather_cache_mla(kv_cache, own, *where, kv_cache.shape[1], self.config, scales)
        gathered = own.new_empty(self.shares.size, *own.shape)
        self.context_parallel.collectives.all_gather(gathered, own)
        return torch.index_select(gathered.flatten(0, 1), 0, chunk.order, out=workspace[: chunk.num_tokens])

    @property
    def cudagraph_support(self) -> CudaGraphLevel:
        """Every query is a request to the kernels, so what captures single tokens captures uniform batches."""
        level = (self.latent or self.dense).cudagraph_support
        return level if level == "NEVER" else "UNIFORM_BATCH"

    def layer_in_parts(self, layer: type[Any], terms: Terms) -> LatentsAcrossRanks:
        """Return what decodes one layer of this group; every rank calls it for the same layer."""
        return LatentsAcrossRanks(self, terms)


class LatentsAcrossRanks:
    """Decodes one layer of a ``ContextParallelMLAGroup``; the terms' sinks are those of this rank's heads."""

    def __init__(self, group: ContextParallelMLAGroup, terms: Terms) -> None:
        self.group, sinks = group, terms.sinks
        self.sinks = None if sinks is None else group.merger.gather_heads(sinks.float().view(1, -1, 1)).flatten()
        assert group.config.kv_lora_rank is not None
        self._rank = group.config.kv_lora_rank
        self._heads = group.context_parallel.gathered_heads(group.config.num_heads)

    def forward(
        self,
        query: Tensor,
        attend: Callable[[Tensor, Outputs], Tensor],
        project: Callable[[Tensor, Tensor], None],
        outputs: Outputs,
    ) -> None:
        """Decode over all ranks' latents, from ``(T, num_heads, R + Pr)`` absorbed queries of this rank's heads."""
        # ``attend`` runs the kernel on this rank's share, ``project`` multiplies latents with ``W_UV``. Outputs are
        # ``(T, num_heads, V)``, and the LSE.
        group, merger = self.group, self.group.merger
        query = merger.gather_queries(query)
        partial, lse = merger.partials(query, self._heads, group.merged_width)
        # Values are narrower than latents and every rank has all heads: what is sent is projected before it is merged.
        if group.merged_width < self._rank:
            latents = Outputs(query.new_empty(len(query), self._heads, self._rank), lse)
            project(attend(query, latents), partial)
            merger.merge(partial, lse, outputs.output, outputs.lse, self.sinks)
            return
        partial = attend(query, Outputs(partial, lse))
        merged = outputs.output.new_empty(*outputs.output.shape[:2], self._rank)
        merger.merge(partial, lse, merged, outputs.lse, self.sinks)
        project(merged, outputs.output)
