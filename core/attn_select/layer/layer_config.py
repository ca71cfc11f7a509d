"""``LayerConfig``: what a layer asks for, whichever it keeps, keys and values or a state."""

from __future__ import annotations

from typing_extensions import TypeVar

from attn_select.layer.config import AttentionConfig
from attn_select.layer.state import StateConfig

LayerConfig = AttentionConfig | StateConfig
ConfigT = TypeVar("ConfigT", bound=LayerConfig, default=AttentionConfig)
"""One of the two."""
