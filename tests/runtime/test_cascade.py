"""Cascade attention: when a shared prefix is attended to apart, how the batch is cut, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_select.layer.config import AttentionConfig
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BatchError,
    BlockTable,
    CommonAttentionMetadata,
    common_prefix_len,
    prepare_batch,
)
from attn_select.runtime.cascade import MIN_PREFIX, MIN_REQUESTS, split_for_cascade
from attn_select.testing import lse_error, paged_reference, relative_error

SMALL: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
Factory = Callable[..., Any]


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 20), min_size=4, max_size=4),
)
def test_common_prefix_is_the_longest(tables: list[list[int]], computed: list[int]) -> None:
    rows = [tuple(row) for row in tables]
    computed = [min(tokens, 4 * len(row)) for tokens, row in zip(computed, rows, strict=False)]
    found = common_prefix_len(rows, computed, 4)

    def shared(blocks: int) -> bool:
        return (
            all(row[:blocks] == rows[0][:blocks] and len(row) >= blocks for row in rows) and min(computed) >= 4 * blocks
        )

    assert found % 4 == 0
    assert shared(found // 4)
    assert not shared(found // 4 + 1)


@pytest.fixture
def rule(make_toy: Factory, make_group: Factory, make_batch: Factory) -> Callable[..., bool]:
    """Return ``rule(prefix=…, requests=…, common={}, toy={}, group={}, **config)``: what the rule says."""

    def ask(
        *,
        prefix: int = MIN_PREFIX,
        requests: int = MIN_REQUESTS,
        common: dict[str, Any] | None = None,
        toy: dict[str, Any] | None = None,
        group: dict[str, Any] | None = None,
        **fields: Any,
    ) -> bool:
        made = make_group(AttentionConfig(**SMALL | fields), make_toy(**toy or {}), **group or {})
        batch = make_batch([(1, MIN_PREFIX + 9)] * requests)
        said: bool = made.distinct[0].builder.use_cascade_attention(prefix, replace(batch, **common or {}))
        return said

    return ask


@pytest.mark.parametrize(
    "against",
    [
        {"prefix": MIN_PREFIX - 1},
        {"requests": MIN_REQUESTS - 1},
        {"common": {"causal": False}},
        {"toy": {"returns_lse": ()}},
        {"group": {"cuda_graphs": True}},
        {"sliding_window": 1000},
        {"alibi": True},
        {"mm_prefix": True},
        {"non_causal": True},
        {"batch_invariant": True},
        {"attn_type": "encoder_decoder"},
    ],
    ids=str,
)
def test_each_condition_counts(rule: Callable[..., bool], against: dict[str, Any]) -> None:
    assert not rule(**against)


def test_every_plan_must_return_its_lse(make_group: Factory, make_batch: Factory) -> None:
    """A batch that one backend serves whole may hold prefills, whose plan may say otherwise than decode's."""
    builder = make_group(AttentionConfig(**SMALL)).distinct[0].builder
    context = builder.context
    batch = make_batch([(1, 300)] * 8)
    for phase in ("prefill", "decode"):
        silent = {**context.plans, phase: replace(context.plans[phase], returns_lse=False)}
        assert not type(builder)(replace(context, plans=silent)).use_cascade_attention(256, batch)


def batch_on_a_prefix(
    prefix: int, requests: list[tuple[int, int]], size: int, spare: int = 0
) -> tuple[CommonAttentionMetadata, int]:
    """Requests ``(query_len, tokens behind the prefix)``; return the batch and its number of blocks."""
    shared = list(range(prefix // size))
    table = BlockTable(len(requests), 64, size, "cpu")
    taken = len(shared)
    for row, (_, own) in enumerate(requests):
        count = -(-own // size)
        table.append_row(row, [*shared, *range(taken, taken + count), *[0] * spare])
        taken += count
    return prepare_batch([query for query, _ in requests], [prefix + own for _, own in requests], table), taken


def test_how_a_batch_is_cut() -> None:
    common, _ = batch_on_a_prefix(8, [(1, 3), (2, 6)], 4)
    split = split_for_cascade(common, 8, 4)
    prefix, suffix = split.prefix, split.suffix
    assert prefix.query_start_loc.tolist() == prefix.query_start_loc_cpu.tolist() == [0, 3]
    assert prefix.seq_lens.tolist() == prefix.seq_lens_cpu.tolist() == [8]
    assert (prefix.num_reqs, prefix.num_actual_tokens, prefix.max_query_len, prefix.max_seq_len) == (1, 3, 3, 8)
    assert not prefix.causal
    assert prefix.block_table_tensor is not None
    assert prefix.block_table_tensor.tolist() == [[0, 1]]
    assert suffix.query_start_loc.tolist() == [0, 1, 3]
    assert suffix.seq_lens.tolist() == suffix.seq_lens_cpu.tolist() == [3, 6]
    assert (suffix.num_reqs, suffix.num_actual_tokens, suffix.max_query_len, suffix.max_seq_len) == (2, 3, 2, 6)
    assert suffix.causal
    assert suffix.block_table_tensor is not None
    assert suffix.block_table_tensor[:, 0].tolist() == [2, 3]
    assert suffix.block_table_tensor[1, 1] == 4
    lengths = [
        lens
        for half in (prefix, suffix)
        for lens in (half.query_start_loc, half.query_start_loc_cpu, half.seq_lens, half.seq_lens_cpu)
    ]
    assert {lens.dtype for lens in lengths} == {torch.int32}
    # The batch itself stays as it was.
    assert common.seq_lens.tolist() == [11, 14]


@pytest.mark.parametrize("layout", ["FLASH_ATTN_NHD", "FLASHINFER_HND"])
@pytest.mark.parametrize(
    "fields", [{}, {"sinks": True}, {"logits_soft_cap": 5.0}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str
)
def test_nothing_changes(make_toy: Factory, make_group: Factory, layout: str, fields: dict[str, Any]) -> None:
    """A mixed batch with cascade, without, and by the oracle; sinks are counted once."""
    config = AttentionConfig(**SMALL | fields)
    requests = [(1, 1), (1, 40), (3, 3), (2, 7), (5, 20), (1, 16), (1, 2), (4, 9)]
    common, blocks = batch_on_a_prefix(256, requests, 16)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(18, 2, 8, generator=generator)
    key, value = torch.randn(2, 18, 1, 8, generator=generator)
    sinks = torch.tensor([1.0, -2.0]) if config.sinks else None
    results = []
    for cascade in (True, False):
        toy = make_toy(layouts=(layout,), cascade=cascade)
        group: AttentionGroup = make_group(config, toy)
        cache = group.allocate_kv_cache(blocks)
        filled = torch.randn(cache.shape, generator=torch.Generator().manual_seed(3))
        cache.copy_(filled)
        metadata = group.build(common, common_prefix_len=256)
        assert toy.builds[-1].prefix_len == (256 if cascade else 0)
        layer = Attention(group, sinks=sinks)
        lse = torch.empty(18, 2)
        results.append((layer(query, key, value, cache, metadata, output_lse=lse), lse))
    extras: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0} if config.cache_dtype != "float32" else {}
    assert common.block_table_tensor is not None
    expected, expected_lse = paged_reference(
        query,
        cache,
        layout,
        common.block_table_tensor,
        common.query_start_loc,
        common.seq_lens,
        config,
        8**-0.5,
        sinks=sinks,
        **extras,
    )
    for output, lse in results:
        assert relative_error(output, expected).row < 1e-5
        assert lse_error(lse, expected_lse) < 1e-5


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (24, "common_prefix_len = 24: accepted are multiples of block_size = 16"),
        (-16, "common_prefix_len = -16"),
        (32, "common_prefix_len = 32: request 1 had 30 tokens cached before this step"),
    ],
)
def test_a_prefix_that_is_none(make_group: Factory, make_batch: Factory, prefix: int, message: str) -> None:
    group = make_group(AttentionConfig(**SMALL))
    with pytest.raises(BatchError, match=message):
        group.build(make_batch([(1, 40), (3, 33)]), prefix)
