"""The bounds of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from attn_select.runtime.integers import size


@dataclass(slots=True)
class Capacity:
    """The most that a batch may hold; persistent buffers and workspaces are sized by it.

    Attributes:
        max_num_seqs: requests.
        max_num_batched_tokens: tokens of one step, all requests together.
        max_model_len: tokens of one request.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            setattr(self, name, size(name, getattr(self, name)))
