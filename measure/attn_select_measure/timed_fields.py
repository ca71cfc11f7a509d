"""The fields of a layer's config that move a kernel's time."""

from __future__ import annotations

from typing import Any

from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.state import StateConfig

# Fields that choose how a kernel is called. A kernel that reads 16 or 64 tokens a block reads the same bytes.
_WITHOUT_TIME = ("block_size", "cuda_graph")


def timed_fields(config: LayerConfig) -> dict[str, Any]:
    """Return the fields for a file, those at their default left out: ``layer_of`` reads them."""
    # Left out are the block size and the wish for CUDA graphs. ``kv_cache_dtype`` equal to ``dtype`` is ``auto``, a
    # ``v_head_size`` equal to ``head_size`` is None, and every soft cap is 1.0: its value moves no kernel's time.
    fields = {n: value for n, value in config.model_dump(exclude_defaults=True).items() if n not in _WITHOUT_TIME}
    if isinstance(config, StateConfig):
        return fields
    if config.kv_cache_dtype == config.dtype:
        fields.pop("kv_cache_dtype", None)
    if config.v_head_size == config.head_size:
        fields.pop("v_head_size", None)
    if config.logits_soft_cap is not None:
        fields["logits_soft_cap"] = 1.0
    return fields
