"""``ContextParallel``: what a group of layers is told about the ranks that share its cache."""

from __future__ import annotations

from typing import Any

from attn_select.errors import ConfigError
from attn_select.runtime.context_parallel.collectives import Collectives, ProcessGroupCollectives
from attn_select.runtime.context_parallel.merging import WAYS
from attn_select.runtime.integers import size

QUERIES = ("sharded", "replicated")


class ContextParallel:
    """The ranks that share the cache of every request (decode context parallelism).

    Args:
        group: a ``torch.distributed`` process group, NCCL's for CUDA tensors, gloo's for CPUs; None: the default group.
            Anything else is taken for ``Collectives``.
        interleave: neighbouring positions that one rank keeps; divides the block size of a rank's cache.
        merge: how partial results are merged, a name of ``merging.WAYS``; ``auto``: ``symm`` where the ranks can share
            memory, else ``a2a``.
        queries: ``sharded``: every rank holds other query heads (tensor parallelism), which are gathered; the config's
            ``num_heads`` are one rank's. ``replicated``: every rank holds all query heads, and gets all outputs.

    Attributes:
        rank, size: of the group.

    Raises:
        ConfigError: an argument has another value than the accepted ones.
        RankError: there is no process group.
    """

    def __init__(self, group: Any = None, interleave: int = 1, merge: str = "auto", queries: str = "sharded") -> None:
        self.interleave, self.merge, self.queries = size("interleave", interleave), merge, queries
        for name, value, accepted in (("merge", merge, ("auto", *WAYS)), ("queries", queries, QUERIES)):
            if value not in accepted:
                raise ConfigError(f"{name} = {value!r}: accepted are {', '.join(accepted)}", fields=[name])
        given = group if hasattr(group, "gather_objects") else ProcessGroupCollectives(group)
        self.collectives: Collectives = given
        self.rank, self.size = given.rank, given.size

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different query heads."""
        return self.queries == "sharded"

    def gathered_heads(self, num_heads: int) -> int:
        """Return the query heads that every rank's kernel computes, of ``num_heads`` per rank."""
        return num_heads * self.size if self.sharded else num_heads
