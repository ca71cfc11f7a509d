"""What a group of layers is made of and hands out: its capacity, its backends, a step's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attn_select.config import Phase
from attn_select.errors import ConfigError
from attn_select.runtime.backend import AttentionBackend, AttentionMetadataBuilder, BackendContext
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.spec import BackendSpec


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
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: accepted are integers from 1", fields=[name])


@dataclass(slots=True)
class Served:
    """One backend as a group uses it: what was chosen, loaded, and the builder that all layers share."""

    spec: BackendSpec
    backend: type[AttentionBackend]
    context: BackendContext
    builder: AttentionMetadataBuilder[Any]


@dataclass(slots=True)
class Part:
    """The requests of a batch that one backend computes.

    Attributes:
        phase: which of the group's backends.
        start, end: the tokens, ``start .. end - 1``.
        metadata: what its builder built.
    """

    phase: Phase
    start: int
    end: int
    metadata: Any


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch as the layers of a group want it.

    Attributes:
        common: the batch, tables in the allocator's blocks.
        num_actual_tokens: tokens; what lies behind is padding.
        slot_mapping: int64 slots of the step's keys and values; None without a cache.
        parts: one, or decodes and prefills apart where different backends serve them.
    """

    common: CommonAttentionMetadata
    num_actual_tokens: int
    slot_mapping: Tensor | None
    parts: tuple[Part, ...]
