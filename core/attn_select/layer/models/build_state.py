"""From a model's state layer to a ``StateConfig``: flags, tensor parallelism, dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_select.errors import ConfigError
from attn_select.layer.models.layer_kind import StateLayer
from attn_select.layer.models.shares import divides, valid_ranks
from attn_select.layer.state import StateConfig

_OF_A_MODEL = ("state_dtype", "chunk_size", "num_speculative_tokens", "cuda_graph")
"""Flags that beat a model. Sizes are the model's: a flag such as ``--num-heads`` speaks of its attention."""


def state_config(
    layer: StateLayer, where: str | None, ranks: int, dtype: Any, overrides: Mapping[str, Any]
) -> tuple[StateConfig, set[str]]:
    """Return what one rank of a state layer asks for, and the names of the flags that were used."""
    accepted = _OF_A_MODEL if where is not None else tuple(StateConfig.model_fields)
    used = {field for field in overrides if field in accepted}
    read = {field: value for field, value in layer._asdict().items() if value is not None}
    total = StateConfig(**{**read, "dtype": dtype, **{field: overrides[field] for field in used}})
    if ranks == 1:
        return total, used
    heads, v_heads = total.num_heads, total.num_v_heads
    if not divides(ranks, v_heads, heads):
        text = f"tensor_parallel_size = {ranks} does not divide the {v_heads} value heads and {heads} key heads of its "
        raise ConfigError(
            f"{text}{total.recurrence} layers",
            fields=["tensor_parallel_size", "num_v_heads"],
            hint=valid_ranks(v_heads, heads),
        )
    share = {"num_heads": max(1, heads // ranks), "num_v_heads": v_heads // ranks}
    return total.model_copy(update=share), used
