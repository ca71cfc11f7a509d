"""The layers of one kind whose cache lies on several ranks: ``ContextParallelGroup``.

A step is computed in two parts, each by the selected backends as they are:

- *Shared*: the queries of all ranks' heads against this rank's share of the cache. The ranks merge their results by
  LSE. A step of single tokens needs no other part, since its tokens are in the cache by then.
- *Own*: in steps with longer queries (prefill, speculative decode) the step's own tokens, which every rank has. They
  lie in a scratch cache and are attended to causally, by this rank's own heads; the shared part then sees only what was
  cached before, so that every query sees all of it and no kernel needs to know positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.runtime import ops
from attn_select.runtime.batch import to_device
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.context_parallel.ranks import RankGroup
from attn_select.runtime.context_parallel.shares import local_capacity, part_of
from attn_select.runtime.group import AttentionGroup
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.mla_context import shifted
from attn_select.runtime.static_buffers import StaticBuffers
from attn_select.runtime.step_metadata import AttentionMetadata
from attn_select.runtime.terms import Inputs, Outputs, Terms


@dataclass(slots=True)
class ContextParallelMetadata(AttentionMetadata):
    """One step's batch as layers across ranks want it."""

    # The batch against this rank's share of the cache; None where no request had anything cached.
    shared: AttentionMetadata | None = None
    # The step's own tokens; None where the shared part has them.
    own: AttentionMetadata | None = None
    # int64, where this rank's tokens go in its cache, -1 for the others.
    local_slots: Tensor | None = None


class OwnBatches:
    """Lays a step's own tokens into a scratch cache, request by request from its first block on."""

    def __init__(self, block_size: int, capacity: Capacity, device: torch.device, *, captured: bool) -> None:
        self.block_size, self.device = block_size, device
        requests, tokens = capacity.max_num_seqs, capacity.max_num_batched_tokens
        self.longest = min(tokens, capacity.max_model_len)
        # Each request's last block may be filled in part: one more for each.
        self.num_blocks = -(-tokens // block_size) + requests
        self._static = StaticBuffers(device, captured=captured)
        self._static.reserve("seq_lens", requests)
        self._static.reserve("table", requests, -(-self.longest // block_size))
        self._static.reserve("slots", tokens, dtype=torch.int64)

    def batch(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the batch of the step's own tokens alone. Does not synchronise."""
        query_lens, count, tokens = common.query_lens_cpu, common.num_reqs, common.num_actual_tokens
        lens = torch.minimum(query_lens, common.seq_lens_cpu)  # padding of a CUDA graph has queries and no keys
        blocks = -(-query_lens // self.block_size)
        first = blocks.cumsum(0) - blocks
        table = first[:, None] + torch.arange(max(1, int(blocks.max())))
        request = torch.repeat_interleave(query_lens)
        # A token's place among its request's own tokens; negative where padding has a query and no key.
        within = torch.arange(len(request)) - (common.query_start_loc_cpu[:-1] + query_lens - lens)[request]
        slots = torch.full((tokens,), -1, dtype=torch.int64)
        slots[: len(request)] = torch.where(within < 0, -1, first[request] * self.block_size + within)
        width = table.shape[1]
        # One copy, int64 first for alignment.
        packed = torch.cat([slots.view(torch.int32), lens.int(), table.int().flatten()])
        here = to_device(packed, self.device)
        here_slots, here_lens, here_table = here.split_with_sizes([2 * tokens, count, count * width])
        return replace(
            common,
            seq_lens=self._static.hold("seq_lens", here_lens),
            seq_lens_cpu=lens.int(),
            max_seq_len=common.max_query_len,
            block_table_tensor=self._static.hold("table", here_table.view(count, width)),
            slot_mapping=self._static.hold("slots", here_slots.view(torch.int64)),
            mm_prefix_ranges=shifted(common.mm_prefix_ranges, common.num_computed_tokens_cpu),
            block_size=self.block_size,
        )


class ContextParallelGroup(RankGroup):
    """The group of layers with keys and values per head whose cache lies on several ranks.

    Arguments and errors are ``RankGroup``'s.

    Attributes:
        shared, own: the two parts; ``own`` is None where no step has queries of more than one token.
    """

    def make_parts(
        self, selection: Selection, device: torch.device | str | None, bounds: Capacity, **made: Any
    ) -> Sequence[LayerGroup]:
        """As ``RankGroup.make_parts``."""
        ranks, config, size = self.context_parallel, selection.config, cast(int, selection.block_size)
        # Queries see all of the context: what drafts see of each other is the own part's.
        shared = part_of(selection, ranks.gathered_heads(config.num_heads), draft_tree=False)
        self.shared = AttentionGroup(shared, device, local_capacity(bounds, size * ranks.size, size), **made)
        self.most_queries, self.merged_width = bounds.max_num_batched_tokens, config.value_head_size
        self.local_bounds = bounds
        # A step's own tokens come apart where the longest query has several: that must not depend on the batch.
        self._always_own = config.batch_invariant
        # A captured step always has both parts, and a backend that writes the cache while it attends must do so.
        writes = any(own.backend.forward_includes_kv_cache_update for own in self.shared.distinct)
        self._shared_always = made["cuda_graphs"] or writes
        self.own: AttentionGroup | None = None
        decodes_alone = "prefill" not in self.shared.backends and not config.num_speculative_tokens
        if config.attn_type == "encoder_decoder" or (decodes_alone and not self._always_own):
            return [self.shared]
        here = self.shared.device
        self._own_batches = OwnBatches(size, bounds, here, captured=made["cuda_graphs"])
        longest = Capacity(bounds.max_num_seqs, bounds.max_num_batched_tokens, self._own_batches.longest)
        self.own = AttentionGroup(part_of(selection, config.num_heads), here, longest, **made)
        self.scratch = self.own.allocate_kv_cache(self._own_batches.num_blocks)
        return [self.shared, self.own]

    def build_step(
        self, common: CommonAttentionMetadata, prefix: int = 0, fast: bool = False, captured: bool = False
    ) -> ContextParallelMetadata:
        """As ``LayerGroup.build_step``, both parts. A common prefix is not attended to apart."""
        apart = self._needs_own(common)
        local = self.local.shared(common, self.local.slots(common), own=apart)
        shared = own = None
        if not apart or self._shared_always or int(common.num_computed_tokens_cpu.max()) > 0:
            shared = self.shared.build_step(local, 0, fast, captured)
        if apart:
            assert self.own is not None
            own = self.own.build_step(self._own_batches.batch(common), 0, fast, captured)
        attended = shared or own
        parts = () if attended is None else attended.parts
        return ContextParallelMetadata(
            self,
            common,
            common.num_actual_tokens,
            common.slot_mapping,
            parts,
            shared=shared,
            own=own,
            local_slots=local.slot_mapping,
        )

    def _needs_own(self, common: CommonAttentionMetadata) -> bool:
        """Whether queries of a batch see different parts of this rank's share, so that their own tokens come apart."""
        if self.config.attn_type == "encoder_decoder":
            return False
        if common.max_query_len <= 1 and not self._always_own:
            return False
        if self.own is None:
            raise BatchError(
                f"queries of up to {common.max_query_len} tokens: this group was made for decodes of one token",
                hint="make it with the phase prefill, or select with num_speculative_tokens",
            )
        return True

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """As ``RankGroup.workspace_bytes``; ``scratch`` holds a step's own tokens."""
        return super().workspace_bytes | ({} if self.own is None else {"scratch": self.scratch.nbytes})

    def layer_in_parts(self, layer: type[Any], terms: Terms) -> AttentionAcrossRanks:
        """Return what computes one layer of this group; every rank calls it for the same layer."""
        return AttentionAcrossRanks(self, layer, terms)


class AttentionAcrossRanks:
    """Computes one layer of a ``ContextParallelGroup``; ``layer`` is the class of plain layers."""

    # The terms' sinks are those of this rank's heads, and are counted where results are merged.

    def __init__(self, group: ContextParallelGroup, layer: type[Any], terms: Terms) -> None:
        self.group = group
        self.shared = layer(group.shared, **terms.given(group.shared.config))
        self.own = None if group.own is None else layer(group.own, **terms.given(group.own.config))
        self.sinks = self.gathered_sinks = None
        if terms.sinks is not None:
            self.sinks = terms.sinks.float()
            self.gathered_sinks = group.merger.gather_heads(self.sinks.view(1, -1, 1)).flatten()
        config = group.config
        self._heads = group.shared.config.num_heads
        self._width = config.value_head_size

    def merged(self, inputs: Inputs, metadata: ContextParallelMetadata, outputs: Outputs) -> None:
        """Compute the parts and write what they give together, in the query's dtype."""
        tokens, (query, key, value, kv_cache) = metadata.num_actual_tokens, inputs
        query, outputs = query[:tokens], outputs.first(tokens)
        output, lse = outputs.output, outputs.lse
        if metadata.own is None:
            assert metadata.shared is not None
            self._shared((query, key, value, kv_cache), metadata.shared, outputs)
            return
        assert self.own is not None
        if key is None:
            raise BatchError(
                "key is None in a step with queries of several tokens: across ranks a layer attends to the step's own "
                "keys and values apart, and this one has none",
                hint="give layers that read another's cache context_parallel only for decodes of one token",
            )
        if not self.group.nan_tail_safe:
            # A NaN behind a request's end would reach a result, and the scratch cache keeps the numbers of earlier
            # steps.
            self.group.scratch.zero_()
        # Where nothing was cached, the ranks have nothing to exchange: every rank has all of the step's tokens.
        if metadata.shared is None:
            self.shared.write(key, value, kv_cache, metadata.local_slots)
            if self.sinks is None:
                self.own.forward(query, key, value, self.group.scratch, metadata.own, output, lse)
                return
        own, own_lse = torch.empty_like(output), output.new_empty(output.shape[:2], dtype=torch.float32)
        self.own.forward(query, key, value, self.group.scratch, metadata.own, own, own_lse)
        if metadata.shared is None:
            ops.merge_rank_states(own.unsqueeze(0), own_lse.unsqueeze(0), -1, self.sinks, output, lse)
            return
        # The shared part counts the sinks, and its LSE includes them; the own part must not count them again.
        merged_lse = torch.empty_like(own_lse)
        self._shared((query, key, value, kv_cache), metadata.shared, Outputs(output, merged_lse))
        ops.merge_attn_states(output, output, merged_lse, own, own_lse, lse)

    def _shared(self, inputs: Inputs, metadata: AttentionMetadata, outputs: Outputs) -> None:
        """Attend to the cache on all ranks."""
        merger, (query, *others) = self.group.merger, inputs
        gathered = merger.gather_queries(query)
        partial, partial_lse = merger.partials(query, self._heads, self._width)
        self.shared.forward(gathered, *others, metadata, partial, partial_lse)
        merger.merge(partial, partial_lse, outputs.output, outputs.lse, self.gathered_sinks)
