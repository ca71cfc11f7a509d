"""One kind of layer of a model as its config describes it: before tensor parallelism and before flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attn_select.layer.models.kv_sharing import NOTHING_SHARED, Sharing


class Layer(NamedTuple):
    """Head counts are the model's totals. Fields have the names, units and defaults of ``AttentionConfig``.

    None for a count or size means that the config does not say it. ``sliding_window`` counts the query's own token; of
    an encoder, which sees as far ahead as back, it is one side with the token (vLLM's ``ENCODER_ONLY``).
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    v_head_size: int | None = None
    attn_type: str = "decoder"
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    logits_soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    position_bias: bool = False
    dual_chunk: bool = False
    mm_prefix: bool = False
    mla: tuple[int, int, int, int] | None = None
    """``attn_select.layer.config.MLA_DIMS``, or None."""
    sparse_top_k: int | None = None


class StateLayer(NamedTuple):
    """Layers that keep a state. Fields have the names and units of ``StateConfig``, counts are totals."""

    recurrence: str | None = None
    num_heads: int | None = None
    num_v_heads: int | None = None
    head_size: int | None = None
    v_head_size: int | None = None
    conv_kernel_size: int | None = None
    chunk_size: int | None = None
    state_dtype: str | None = None


class Sparse(NamedTuple):
    """Layers of a kind that no backend here serves; fields as in ``UnservedLayers``, None: the config does not say it.

    ``cache_elements`` are numbers per token of context, layer and KV head, ``indexer_elements`` per token and layer.
    """

    kind: str
    attends_to: str
    source: str = ""
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    tokens: int | None = None
    block_size: int | None = None
    window: int | None = None
    indexer_heads: int | None = None
    indexer_head_size: int | None = None
    cache_elements: float | None = None
    indexer_elements: float = 0


class Reading(NamedTuple):
    """The distinct layers of a model with their places in it, in order of appearance."""

    layers: list[tuple[Layer | StateLayer, Sequence[int]]]  # what layers ask for, and which ones do
    notes: list[str]  # what should be said about them
    sharing: Sharing = NOTHING_SHARED  # which of them cache nothing of their own
    # layers of kinds that no backend here has a kernel for, and which ones are
    unserved: Sequence[tuple[Sparse, Sequence[int]]] = ()
