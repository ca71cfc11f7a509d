"""Tensors start here: caches, metadata, the protocols that backends implement, and the layers that engines call.

Needs torch and numpy. An engine's path: ``attention_group(select(config))``, ``group.allocate_kv_cache``, per step
``prepare_batch`` and ``group.build``, per layer ``Attention`` or ``MLAAttention``.
"""

from __future__ import annotations

from typing import Any

try:
    import numpy as np  # noqa: F401
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "torch"):
        raise
    raise ModuleNotFoundError(
        f"attn_select.runtime needs {error.name}, which is not installed: pip install {error.name}, or install "
        "attn-select with its extra: pip install 'attn-select[runtime]'",
        name=error.name,
    ) from None

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError, show
from attn_select.runtime.attention import Attention
from attn_select.runtime.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    BackendContext,
    MLAAttentionImpl,
)
from attn_select.runtime.batch import BlockTable, prepare_batch
from attn_select.runtime.block_pool import BlockPool, OutOfBlocksError, PoolError
from attn_select.runtime.cache_conversion import convert_kv_cache
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.cascade import common_prefix_len
from attn_select.runtime.context_parallel.collectives import RankError
from attn_select.runtime.context_parallel.context_parallel import ContextParallel
from attn_select.runtime.context_parallel.rank_group import ContextParallelGroup
from attn_select.runtime.context_parallel.rank_mla_group import ContextParallelMLAGroup
from attn_select.runtime.custom_op import forward_context
from attn_select.runtime.group import AttentionGroup
from attn_select.runtime.indexer import SparseIndexer
from attn_select.runtime.kv_cache import CacheView, key_value_views, num_blocks_for
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.metadata import (
    BatchError,
    CommonAttentionMetadata,
    VarlenMetadata,
    decodes_first,
    split_decodes_and_prefills,
)
from attn_select.runtime.mla_attention import MLAAttention
from attn_select.runtime.mla_group import MLAAttentionGroup, MLALayerGroup
from attn_select.runtime.scales import Scales
from attn_select.runtime.step_metadata import AttentionMetadata
from attn_select.runtime.terms import Outputs, Terms
from attn_select.runtime.tree_group import DraftTreeGroup


def attention_group(
    selection: Selection, *arguments: Any, context_parallel: ContextParallel | None = None, **options: Any
) -> LayerGroup:
    """Return an ``MLAAttentionGroup`` for MLA layers, else an ``AttentionGroup``; arguments are theirs.

    Where a plan says ``trees_in_two_parts`` it is a ``DraftTreeGroup``, across ranks a ``ContextParallelGroup`` or a
    ``ContextParallelMLAGroup``. All are ``LayerGroup``.

    Args:
        context_parallel: the ranks that share the cache; every one of them makes the group.

    Raises:
        ConfigError: ``selection`` is none; besides, what the class raises it for.
    """
    if not isinstance(selection, Selection):
        text = f"selection = {show(selection)}: accepted is what attn_select.select returns"
        raise ConfigError(text, fields=["selection"])
    if selection.config.sort == "state":
        text = f"selection = {show(selection)}: its layers keep a state"
        raise ConfigError(text, fields=["selection"], hint="attn_select.runtime.states.StateGroup makes their group")
    if context_parallel is not None:
        across = ContextParallelMLAGroup if selection.config.mla else ContextParallelGroup
        return across(selection, *arguments, context_parallel=context_parallel, **options)
    made: type[LayerGroup] = MLAAttentionGroup if selection.config.mla else AttentionGroup
    if selection.config.draft_tree and any(plan.trees_in_two_parts for plan in selection.plans.values()):
        made = DraftTreeGroup
    return made(selection, *arguments, **options)


__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionGroup",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "BackendContext",
    "BatchError",
    "BlockPool",
    "BlockTable",
    "CacheView",
    "Capacity",
    "CommonAttentionMetadata",
    "ContextParallel",
    "ContextParallelGroup",
    "ContextParallelMLAGroup",
    "LayerGroup",
    "MLAAttention",
    "MLAAttentionGroup",
    "MLAAttentionImpl",
    "MLALayerGroup",
    "OutOfBlocksError",
    "Outputs",
    "PoolError",
    "RankError",
    "Scales",
    "SparseIndexer",
    "Terms",
    "VarlenMetadata",
    "attention_group",
    "common_prefix_len",
    "convert_kv_cache",
    "decodes_first",
    "forward_context",
    "key_value_views",
    "num_blocks_for",
    "prepare_batch",
    "split_decodes_and_prefills",
]
