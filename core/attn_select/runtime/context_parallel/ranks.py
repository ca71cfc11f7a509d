"""``RankGroup``: what groups of layers whose cache lies on several ranks have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError
from attn_select.layer.config import Phase
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.context_parallel.agreement import batch_facts, check_selection, do_alike, facts_of
from attn_select.runtime.context_parallel.context_parallel import ContextParallel
from attn_select.runtime.context_parallel.merging import Merger
from attn_select.runtime.context_parallel.shares import LocalBatches, Shares
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


class RankGroup(LayerGroup):
    """A group of layers whose cache lies on several ranks. Every rank makes one, and builds the same batches.

    Args:
        context_parallel: the ranks.
        selection, device, capacity, cuda_graphs, phases: as for ``LayerGroup``; the capacity counts whole requests.

    Attributes:
        block_size: of the scheduler's tables: positions per block, ``size`` times the block size of a rank's cache.
        merged_width: of partial results when they are merged.

    Raises:
        ConfigError: as ``LayerGroup``, and: the selection was made for another number of ranks, or ``interleave`` does
            not divide the block size.
        RankError: another rank cannot make its group, or made another one.
    """

    merged_width: int
    # The most queries that are gathered at a time, and the bounds of the batches against this rank's share.
    most_queries: int
    local_bounds: Capacity

    def __init__(
        self,
        selection: Selection,
        device: torch.device | str | None = None,
        capacity: Capacity | None = None,
        *,
        context_parallel: ContextParallel,
        cuda_graphs: bool = False,
        phases: Sequence[Phase] | None = None,
        **options: Any,
    ) -> None:
        self.context_parallel, bounds = context_parallel, capacity or Capacity()
        graphs: dict[str, Any] = {"cuda_graphs": cuda_graphs}

        def make() -> dict[str, str]:
            check_selection(selection, context_parallel)
            size, ranks = selection.block_size, context_parallel
            assert size is not None  # configs without a cache have no context parallelism
            parts = self.make_parts(selection, device, bounds, phases=phases, checked=False, **graphs, **options)
            positions = size * ranks.size
            super(RankGroup, self).__init__(selection, None, bounds, parts=parts, block_size=positions, **graphs)
            self.interleave = ranks.interleave
            self.shares = Shares(ranks.rank, ranks.size, ranks.interleave, size, self.device)
            self.local = LocalBatches(self.shares, self.local_bounds, self.device, captured=cuda_graphs)
            self.merger = Merger(ranks.collectives, 1 if self.config.mla else self.config.num_kv_heads, ranks.sharded)
            return facts_of(selection, context_parallel, bounds)

        do_alike(context_parallel.collectives, "attention_group", make)
        self._share_memory()

    @abstractmethod
    def make_parts(
        self, selection: Selection, device: torch.device | str | None, bounds: Capacity, **made: Any
    ) -> Sequence[LayerGroup]:
        """Make the groups that run this rank's share; ``made`` are further arguments of theirs."""

    def _share_memory(self) -> None:
        """Let steps go by ``symm`` where that is asked for, or ``auto`` and possible. Every rank calls it."""
        config, merge = self.config, self.context_parallel.merge
        if merge not in ("auto", "symm") or (merge == "auto" and config.batch_invariant):
            return
        heads = self.context_parallel.gathered_heads(config.num_heads)
        sizes = self.most_queries, heads, config.head_size, self.merged_width
        if not self.merger.share_memory(*sizes, PLAIN_DTYPES[config.dtype], self.device) and merge == "symm":
            text = "merge = 'symm': these ranks cannot read each other's memory (accepted: auto, a2a)"
            raise ConfigError(text, fields=["merge"], hint="it needs CUDA devices of one host with peer access")

    def check_batch(self, common: CommonAttentionMetadata) -> None:
        """As ``LayerGroup.check_batch``; in checked mode RankError, too, where another rank has another batch."""
        if not self.checked:
            super().check_batch(common)
            return
        check = super().check_batch

        def checked() -> dict[str, str]:
            check(common)
            return batch_facts(common, cast(int, self.block_size))

        do_alike(self.context_parallel.collectives, "a step", checked)

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """As ``LayerGroup.workspace_bytes``, of all parts; ``ranks`` is shared by the ranks."""
        return {**super().workspace_bytes, **self.merger.workspace_bytes}
