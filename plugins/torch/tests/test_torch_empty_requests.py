"""Requests without query tokens, some or all of a step: every builder takes them, and other results stay right."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch")

from hypothesis import given

from attn_select import select
from attn_select.runtime import BlockTable, Capacity, attention_group, prepare_batch
from attn_select.testing import gqa_layer, mla_layer, strategies

LAYERS = {
    "TORCH_SDPA": gqa_layer(dtype="float32"),
    "FLEX_ATTENTION": gqa_layer(dtype="float32"),
    "TORCH_MLA": mla_layer(dtype="float32"),
    "TORCH_MLA_SPARSE": mla_layer(dtype="float32", sparse_top_k=40),
}


@cache
def group_of(backend: str) -> Any:
    return attention_group(select(LAYERS[backend], "cpu", backend=backend), "cpu", Capacity(8, 512, 1024))


@pytest.mark.parametrize("backend", LAYERS)
@given(lens=strategies.step_lens())
def test_every_step_is_built(backend: str, lens: tuple[list[int], list[int]]) -> None:
    group = group_of(backend)
    table = BlockTable(8, -(-1000 // group.block_size), group.block_size, "cpu")
    for row, tokens in enumerate(lens[1]):
        table.append_row(row, range(-(-tokens // group.block_size)))
    assert group.build(prepare_batch(*lens, table)).num_actual_tokens == sum(lens[0])
