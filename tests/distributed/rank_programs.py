"""What the ranks of the tests do; a module, since their processes import it."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from attn_select import AttentionConfig, select
from attn_select.errors import AttnSelectError
from attn_select.runtime import Attention, BlockTable, Capacity, ContextParallel, attention_group, prepare_batch
from attn_select.testing import BackendConformance
from attn_select.testing.rank_conformance import check_on_group
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.facts.torch_mla_sparse import TORCH_MLA_SPARSE
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA

CAPACITY = Capacity(4, 64, 256)


class Sdpa(BackendConformance):
    spec = TORCH_SDPA
    device = "cpu"
    seed = 19


class Mla(BackendConformance):
    spec = TORCH_MLA
    device = "cpu"
    seed = 19


class MlaSparse(BackendConformance):
    spec = TORCH_MLA_SPARSE
    device = "cpu"
    seed = 19


def conformance(rank: int, suite: type[BackendConformance], num_layers: int) -> list[str]:
    """Run a suite's layers over all ranks."""
    return check_on_group(suite(), None, num_layers)


def generation(rank: int, name: str, prompts: list[list[int]], queries: str, interleave: int) -> list[list[int]]:
    """Generate by a model of random weights, the same on all ranks, whose caches lie on all of them."""
    import models_for_tests as models
    from paged_engine import generated

    ranks = ContextParallel(queries=queries, interleave=interleave)
    with torch.inference_mode():
        return generated(models.built(getattr(models, name)), prompts, ranks)


def layer(**fields: Any) -> AttentionConfig:
    """Return a small layer over two ranks."""
    given = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32", "block_size": 8}
    return AttentionConfig(**{**given, "decode_context_parallel_size": 2, **fields})


def group_of(rank: int, fields_by_rank: list[dict[str, Any]]) -> str:
    """Make a group, of each rank's own fields, and return the error."""
    try:
        selection = select(layer(**fields_by_rank[rank]), "cpu")
        attention_group(selection, capacity=CAPACITY, context_parallel=ContextParallel())
    except AttnSelectError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def steps(rank: int, lens_by_rank: list[int], lost: int | None = None, how: str = "") -> str:
    """Run two decodes of each rank's own lengths, and return the error.

    Args:
        lost: a rank that does not come to the second, for which the others wait for a second: they have all met in
            the first, so no slow machine is taken for a lost rank.
        how: ``ends``, or ``waits`` for another message, which ends when the others have.
    """
    group = attention_group(select(layer(), "cpu"), capacity=CAPACITY, context_parallel=ContextParallel())
    one = Attention(group)
    table = BlockTable(1, 4, group.block_size or 0, "cpu")
    table.set_row(0, [1, 0])
    cache = group.allocate_kv_cache(2)
    query, key, value = (torch.randn(1, heads, 16) for heads in (4, 2, 2))
    try:
        for step in range(2):
            if step and rank == lost:
                if how == "ends":
                    os._exit(1)
                with suppress(RuntimeError):
                    dist.recv(torch.empty(1), src=1 - rank)
            elif step and lost is not None:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
            one(query, key, value, cache, group.build(prepare_batch([1], [lens_by_rank[rank] + step], table)))
    except AttnSelectError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
