"""What groups of layers with a sharded cache have in common: the selections of their parts, and the local batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.runtime.batch import to_device
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.context_parallel.agreement import do_alike
from attn_select.runtime.context_parallel.context_parallel import ContextParallel
from attn_select.runtime.context_parallel.merging import Merger
from attn_select.runtime.context_parallel.shares import Shares
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.mla_context import shifted
from attn_select.runtime.static_buffers import StaticBuffers
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


def check_selection(selection: Selection, context_parallel: ContextParallel) -> None:
    """Raise ConfigError for a selection that these ranks cannot run, or cannot merge batch-invariantly."""
    ranks = selection.config.decode_context_parallel_size
    if ranks != context_parallel.size:
        raise ConfigError(
            f"decode_context_parallel_size = {ranks}, but the process group has {context_parallel.size} ranks",
            fields=["decode_context_parallel_size"],
            hint=f"select with decode_context_parallel_size = {context_parallel.size}, or start {ranks} ranks",
        )
    if selection.config.batch_invariant and (merge := context_parallel.merge) in ("ag_rs", "symm"):
        text = f"merge = {merge!r} with batch_invariant = True: how results are summed depends on the batch"
        raise ConfigError(f"{text} (accepted: auto, a2a)", fields=["merge", "batch_invariant"])


def make_alike(
    context_parallel: ContextParallel, selection: Selection, capacity: Capacity, make: Callable[[], None]
) -> None:
    """Make the parts of a group on every rank; RankError where another rank cannot, or makes others."""

    def checked() -> None:
        check_selection(selection, context_parallel)
        make()

    ranks = context_parallel.collectives
    do_alike(ranks, "attention_group", checked, lambda: facts_of(selection, context_parallel, capacity))


def part_of(selection: Selection[Any], num_heads: int, **changes: Any) -> Selection:
    """Return the selection for one rank's kernels: plain layers of ``num_heads`` query heads."""
    # Sinks are counted where the partial results are merged, so the kernels get none, unless ``changes`` says so. An
    # output is quantised after that.
    fields: dict[str, Any] = {"num_heads": num_heads, "decode_context_parallel_size": 1, "sinks": False}
    fields |= {"output_quantization": "none", **changes}
    return replace(selection, config=selection.config.model_copy(update=fields))


def local_capacity(capacity: Capacity, per_block: int, block_size: int) -> Capacity:
    """Return the capacity of one rank's share: blocks of ``per_block`` positions, of which it keeps ``block_size``."""
    return replace(capacity, max_model_len=-(-capacity.max_model_len // per_block) * block_size)


def share_memory(
    merger: Merger,
    config: AttentionConfig,
    context_parallel: ContextParallel,
    tokens: int,
    width: int,
    device: torch.device,
) -> None:
    """Let steps go by ``symm`` where that is asked for, or ``auto`` and possible. Every rank calls it."""
    merge = context_parallel.merge
    if merge not in ("auto", "symm") or (merge == "auto" and config.batch_invariant):
        return
    heads = context_parallel.gathered_heads(config.num_heads)
    shared = merger.share_memory(tokens, heads, config.head_size, width, PLAIN_DTYPES[config.dtype], device)
    if merge == "symm" and not shared:
        text = "merge = 'symm': these ranks cannot read each other's memory (accepted: auto, ag_rs, a2a)"
        raise ConfigError(text, fields=["merge"], hint="it needs CUDA devices of one host with peer access")


def facts_of(selection: Selection, context_parallel: ContextParallel, capacity: Capacity) -> dict[str, str]:
    """Return what all ranks of a group must have in common."""
    return {
        "selections": str({p: f"{n}, {selection.plans[p].kernel}" for p, n in selection.selected.items() if n}),
        "configs": str(selection.config.model_dump(exclude_defaults=True)),
        "caches": f"{selection.kv_layout}, blocks of {selection.block_size}",
        "interleaves": str(context_parallel.interleave),
        "ways to merge": context_parallel.merge,
        "queries": context_parallel.queries,
        "capacities": str(capacity),
    }


class LocalBatches:
    """Turns the scheduler's batches into one rank's: its share of lengths, and its slots."""

    def __init__(self, shares: Shares, capacity: Capacity, device: torch.device, *, captured: bool) -> None:
        self.shares, self.static = shares, StaticBuffers(device, captured=captured)
        requests, tokens = capacity.max_num_seqs, capacity.max_num_batched_tokens
        self.static.reserve("seq_lens", requests)
        self.static.reserve("slots", tokens, dtype=torch.int64)
        self.static.reserve("bounds", requests + 1)
        self.static.reserve("table", requests, -(-capacity.max_model_len // (shares.size * shares.block_size)))

    def slots(self, common: CommonAttentionMetadata) -> Tensor:
        """Return where this rank's tokens of a batch go in its cache, int64 ``(T,)``, -1 for the others."""
        assert common.slot_mapping is not None
        return self.static.hold("slots", self.shares.slots(common.slot_mapping))

    def shared(self, common: CommonAttentionMetadata, slots: Tensor, *, own: bool = False) -> CommonAttentionMetadata:
        """Return the batch against this rank's share of the cache."""
        # ``own``: leave the step's own tokens out; every query then sees all that is left, and no mask is needed.
        lens, lens_cpu, most = common.seq_lens, common.seq_lens_cpu, common.max_seq_len
        if own:
            lens = (lens - common.query_start_loc.diff()).clamp_min(0)
            lens_cpu = (lens_cpu - common.query_lens_cpu).clamp_min(0)
        local_cpu = self.shares.length(lens_cpu)
        return replace(
            common,
            seq_lens=self.static.hold("seq_lens", self.shares.length(lens)),
            seq_lens_cpu=local_cpu,
            max_seq_len=self.shares.length(most),
            slot_mapping=slots[: common.num_actual_tokens],
            causal=common.causal and not own,
            mm_prefix_ranges=None,
            tree_mask=None,
            block_size=self.shares.block_size,
        )


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
