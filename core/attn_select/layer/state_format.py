"""``StateFormat``: what two sides must share to exchange the states of a layer, and a short id of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_select.layer.cache_format import Format
from attn_select.layer.state import StateConfig


@dataclass(frozen=True, slots=True)
class StateFormat(Format):
    """How the states of one layer lie in memory, and the windows of its convolution beside them."""

    prefix: ClassVar[str] = "st1"
    converted: ClassVar[tuple[str, ...]] = ("state_dtype", "conv_dtype", "state_layout")

    config: StateConfig
    layout: str  # name of ``attn_select.layer.layouts.STATE_LAYOUTS``

    def facts(self) -> dict[str, Any]:
        """Return what both sides must share, as plain data. Equal facts mean that the same bytes are the same numbers.

        Every recurrence keeps the same state (``attn_select.layer.state``): its name is no fact.
        """
        config = self.config
        keys, values = config.num_heads * config.head_size, config.num_v_heads * config.v_head_size
        widths = {"query": keys, "key": keys, "value": values}
        convolved = config.conv_kernel_size > 0
        return {
            "state_dtype": config.state_dtype,
            "num_v_heads": config.num_v_heads,
            "head_size": config.head_size,
            "v_head_size": config.v_head_size,
            "state_layout": self.layout,
            "conv_kernel_size": config.conv_kernel_size,
            "conv_channels": [[name, widths[name]] for name in config.rule.channels] if convolved else [],
            "conv_dtype": config.dtype if convolved else None,
        }
