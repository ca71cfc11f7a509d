"""One pool for attention and states, as vLLM has it: every page holds a block of tokens or one state.

vLLM makes the attention's blocks long enough for a state, and pads the state to the block's bytes
(vLLM 0.32, platforms/interface.py, ``_align_hybrid_block_size``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attn_select.decide.selection import Selection


@dataclass(frozen=True, slots=True)
class StatePage:
    """The pages of a pool that attention and states share."""

    block_size: int  # tokens of a block of attention
    page_bytes: int  # bytes of a page of one layer
    state_bytes: int  # what the largest state takes of them

    @property
    def wasted_bytes(self) -> int:
        """Bytes of a state's page that hold nothing."""
        return self.page_bytes - self.state_bytes

    def to_dict(self) -> dict[str, int]:
        """Return the page as plain data."""
        return {**asdict(self), "wasted_bytes": self.wasted_bytes}


def state_page(selections: Sequence[Selection[Any]]) -> StatePage | None:
    """Return the pages that all layers of a model could share; None where not both sorts are there, with a backend."""
    states = [s.bytes_per_request // s.config.max_decode_query_len for s in selections if s.bytes_per_request]
    blocks = [s.block_size for s in selections if s.block_size is not None]
    tokens = [s.bytes_per_token for s in selections if s.bytes_per_token is not None]
    if not states or not blocks or not tokens:
        return None
    latent = any(s.config.sort in ("mla", "sparse_mla") for s in selections)  # whose blocks vLLM makes multiples of 128
    step, least = math.lcm(*blocks, 128 if latent else 1), min(tokens)
    block_size = step * -(-max(states) // (step * least))
    return StatePage(block_size, block_size * least, max(states))
