"""``LayerConfig``: what a layer asks for, whichever it keeps, keys and values or a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import TypeVar

from attn_select.layer.config import AttentionConfig
from attn_select.layer.state import StateConfig

LayerConfig = AttentionConfig | StateConfig
ConfigT = TypeVar("ConfigT", bound=LayerConfig, default=AttentionConfig)
"""One of the two."""


def layer_of(fields: Mapping[str, Any]) -> LayerConfig:
    """Return the config that has these fields: a ``StateConfig`` where a recurrence is among them."""
    return StateConfig(**fields) if "recurrence" in fields else AttentionConfig(**fields)
