"""The width of a head, where the config does not say it itself."""

from __future__ import annotations

from attn_select.errors import ModelError
from attn_select.layer.models.fields import Fields


def head_size(fields: Fields, heads: int | None) -> int | None:
    """Return the width of a head: the config's own, else hidden size by heads; None where neither is there."""
    if fields.integer("head_dim", 0, 8192) == 0:
        raise fields.wrong("head_dim", 0, "an integer from 1 to 8192, or null")
    if (size := fields.size("head_dim")) is not None or heads is None:
        return size
    hidden = fields.integer("hidden_size")
    if hidden is None or fields.family.variant == "zamba":
        return None
    if hidden % heads or hidden // heads > 8192:
        raise ModelError(
            f"{fields.where}: hidden_size = {hidden} by num_attention_heads = {heads} is no head size "
            "(an integer from 1 to 8192), and there is no head_dim"
        )
    return hidden // heads
