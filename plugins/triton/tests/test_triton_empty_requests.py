"""Requests without query tokens, some or all of a step: every builder takes them, and other results stay right."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given
from triton_mla_layers import DTYPE, SMALL, WITHOUT_GLUON

from attn_select import AttentionConfig
from attn_select.runtime import BlockTable, Capacity, attention_group, prepare_batch
from attn_select.testing import selection_of, strategies
from attn_select_triton.facts.paged_attention import PAGED_ATTENTION
from attn_select_triton.facts.triton_attn import TRITON_ATTN
from attn_select_triton.facts.triton_mla import TRITON_MLA
from attn_select_triton.facts.triton_mla_sparse import TRITON_MLA_SPARSE

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64}
LATENT = {"num_heads": 3, **SMALL}
DRAFTS = {"num_speculative_tokens": 3}
LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "TRITON_ATTN": (TRITON_ATTN, HEADS),
    "TRITON_ATTN, drafts": (TRITON_ATTN, {**HEADS, **DRAFTS}),
    "TRITON_ATTN, invariant": (TRITON_ATTN, {**HEADS, "batch_invariant": True}),
    "PAGED_ATTENTION": (PAGED_ATTENTION, HEADS),
    "TRITON_MLA": (TRITON_MLA, LATENT),
    "TRITON_MLA, drafts": (TRITON_MLA, {**LATENT, **DRAFTS}),
    "TRITON_MLA, invariant": (TRITON_MLA, {**LATENT, "batch_invariant": True}),
    "TRITON_MLA_SPARSE": (TRITON_MLA_SPARSE, {**LATENT, "sparse_top_k": 40}),
}


@cache
def group_of(layer: str, gpu: str) -> Any:
    spec, fields = LAYERS[layer]
    selection = selection_of(spec, AttentionConfig(dtype=DTYPE, **fields), gpu)
    return attention_group(selection, "cpu", Capacity(8, 512, 1024))


def batch_of(group: Any, query_lens: list[int], seq_lens: list[int]) -> Any:
    table = BlockTable(8, -(-1000 // group.block_size), group.block_size, "cpu")
    for row, tokens in enumerate(seq_lens):
        table.append_row(row, range(-(-tokens // group.block_size)))
    return prepare_batch(query_lens, seq_lens, table)


@pytest.mark.parametrize("gpu", [WITHOUT_GLUON, "b200"])
@pytest.mark.parametrize("layer", LAYERS)
@given(lens=strategies.step_lens(longest_decode=4))
def test_every_step_is_built(layer: str, gpu: str, lens: tuple[list[int], list[int]]) -> None:
    group = group_of(layer, gpu)
    threshold = group.reorder_batch_threshold or 4
    queries, keys = lens
    if any(threshold < query <= 4 for query in queries):  # a prefill to these layers
        order = sorted(range(len(queries)), key=lambda request: queries[request] > threshold)
        queries, keys = [queries[request] for request in order], [keys[request] for request in order]
    common = batch_of(group, queries, keys)
    assert group.build(common).num_actual_tokens == sum(queries)
    if max(queries) <= threshold:  # a group asks for no step without tokens, but engines ask builders themselves
        group.backends["decode"].builder.build(0, common)
