"""The oracle's attention against loops over Python floats, torch's own attention, and what must not change it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from attn_select.layer.config import AttentionConfig
from attn_select.reference.oracle import attention_options
from attn_select.testing import attention_reference, merge_reference

EXACT = {"rtol": 1e-11, "atol": 1e-11}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensors(
    rows: int, seq_len: int, heads: int = 4, kv_heads: int = 2, size: int = 8, value_size: int = 6, seed: int = 0
):
    return (
        randn(rows, heads, size, seed=seed),
        randn(seq_len, kv_heads, size, seed=seed + 1),
        randn(seq_len, kv_heads, value_size, seed=seed + 2),
    )


def by_hand(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mm_prefix_ranges: tuple[tuple[int, int], ...] = (),
    tree_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention one number at a time, by another route than the oracle's: no softmax shift, no tensors of scores."""
    rows, heads, _ = query.shape
    seq_len, kv_heads, value_size = values.shape
    output = torch.zeros(rows, heads, value_size, dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    for row in range(rows):
        position = seq_len - rows + row
        for head in range(heads):
            kv_head = head * kv_heads // heads
            denominator = 0.0 if sinks is None else math.exp(sinks[head])
            total = [0.0] * value_size
            for key in range(seq_len):
                sees = key <= position or not causal
                if sliding_window is not None:
                    sees = sees and -sliding_window < key - position < sliding_window
                if attention_chunk_size is not None:
                    sees = sees and key - key % attention_chunk_size == position - position % attention_chunk_size
                if tree_mask is not None and key >= seq_len - rows:
                    sees = sees and bool(tree_mask[row, key - seq_len + rows])
                for first, last in mm_prefix_ranges:
                    sees = sees or (position in range(first, last + 1) and key in range(first, last + 1))
                if not sees:
                    continue
                pairs = zip(query[row, head].tolist(), keys[key, kv_head].tolist(), strict=True)
                score = scale * sum(q * k for q, k in pairs)
                if logits_soft_cap is not None:
                    score = logits_soft_cap * math.tanh(score / logits_soft_cap)
                if alibi_slopes is not None:
                    score -= float(alibi_slopes[head]) * abs(position - key)
                denominator += math.exp(score)
                for index, value in enumerate(values[key, kv_head].tolist()):
                    total[index] += math.exp(score) * value
            if denominator:
                output[row, head] = torch.tensor(total, dtype=torch.float64) / denominator
                lse[row, head] = math.log(denominator)
    return output, lse


FEATURES = {
    "plain": {},
    "non-causal": {"causal": False},
    "window of 1": {"sliding_window": 1},
    "window": {"sliding_window": 3},
    "window of all": {"sliding_window": 100},
    "two-sided window": {"sliding_window": 3, "causal": False},
    "chunks": {"attention_chunk_size": 3},
    "chunks of one": {"attention_chunk_size": 1},
    "one chunk": {"attention_chunk_size": 100},
    "soft cap": {"logits_soft_cap": 0.7},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "two-sided alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": False},
    "sinks": {"sinks": torch.tensor([0.3, -2.0, 4.0, 0.0])},
    "mm prefix": {"mm_prefix_ranges": ((1, 3), (5, 6))},
    "mm prefix and window": {"mm_prefix_ranges": ((0, 5),), "sliding_window": 2},
    "everything": {
        "sliding_window": 4,
        "logits_soft_cap": 1.5,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "sinks": torch.tensor([0.3, -2.0, 4.0, 0.0]),
        "mm_prefix_ranges": ((2, 5),),
    },
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize(("rows", "seq_len"), [(1, 7), (3, 7), (7, 7), (9, 7)])
def test_equals_loops_over_numbers(features: dict, rows: int, seq_len: int) -> None:
    query, keys, values = tensors(rows, seq_len)
    expected = by_hand(query, keys, values, scale=0.35, **features)
    torch.testing.assert_close(attention_reference(query, keys, values, scale=0.35, **features), expected, **EXACT)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize(("rows", "seq_len"), [(1, 7), (7, 7), (9, 7)])
def test_the_spread_is_the_norm_of_terms_that_are_orthogonal(features: dict, rows: int, seq_len: int) -> None:
    """Each key gets dimensions of its own, so that no two terms share one."""
    query, keys, values = tensors(rows, seq_len)
    apart = torch.einsum("shd,st->shtd", values, torch.eye(seq_len, dtype=torch.float64)).flatten(2)
    wanted = attention_reference(query, keys, apart, scale=0.35, **features)[0].norm(dim=-1)
    spread = torch.full((rows, 4), torch.nan, dtype=torch.float64)
    attention_reference(query, keys, values, scale=0.35, spread=spread, **features)
    torch.testing.assert_close(spread, wanted, **EXACT)


@pytest.mark.parametrize("features", [{}, {"sliding_window": 3}, {"mm_prefix_ranges": ((0, 3),)}])
@pytest.mark.parametrize(("rows", "seq_len"), [(1, 7), (4, 7), (7, 7), (9, 7)])
def test_a_tree_of_drafts_equals_loops_over_numbers(features: dict, rows: int, seq_len: int) -> None:
    query, keys, values = tensors(rows, seq_len)
    tree = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        tree[row] |= tree[(row - 1) // 2]
    expected = by_hand(query, keys, values, scale=0.35, tree_mask=tree, **features)
    found = attention_reference(query, keys, values, scale=0.35, tree_mask=tree, **features)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("rows", "seq_len", "kv_heads"), [(16, 16, 4), (5, 33, 2), (1, 64, 1), (31, 32, 4)])
def test_equals_torch_sdpa(causal: bool, rows: int, seq_len: int, kv_heads: int) -> None:
    query, keys, values = tensors(rows, seq_len, kv_heads=kv_heads, size=16, value_size=16)
    expected = scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, keys, values)),
        attn_mask=causal_lower_right(rows, seq_len) if causal else None,
        scale=0.25,
        enable_gqa=kv_heads != 4,
    )
    output, _ = attention_reference(query, keys, values, scale=0.25, causal=causal)
    torch.testing.assert_close(output, expected[0].transpose(0, 1), **EXACT)


def test_rows_without_keys() -> None:
    query, keys, values = tensors(3, 1)
    output, lse = attention_reference(query, keys, values, scale=1.0)
    assert torch.equal(output[:2], torch.zeros(2, 4, 6, dtype=torch.float64))
    assert lse[:2].isneginf().all()
    assert lse[2].isfinite().all()

    query, keys, values = tensors(2, 0)
    output, lse = attention_reference(query, keys, values, scale=1.0, causal=False)
    assert not output.any()
    assert lse.isneginf().all()


def test_a_sink_is_the_lse_of_a_row_without_keys() -> None:
    """So that a partial that holds the sink and no key still counts it when it is merged."""
    sinks = torch.tensor([0.5, 1.0, -3.0, 2.0], dtype=torch.float64)
    query, keys, values = tensors(2, 5)
    empty = attention_reference(query, keys[:0], values[:0], scale=0.3, causal=False, sinks=sinks)
    assert not empty[0].any()
    torch.testing.assert_close(empty[1], sinks.expand(2, 4), **EXACT)
    rest = attention_reference(query, keys, values, scale=0.3)
    merged = merge_reference(*zip(empty, rest, strict=True))
    torch.testing.assert_close(merged, attention_reference(query, keys, values, scale=0.3, sinks=sinks), **EXACT)


def test_large_scores_do_not_overflow() -> None:
    query, keys, values = tensors(2, 4)
    output, lse = attention_reference(query * 1e3, keys * 1e3, values, scale=1.0)
    assert output.isfinite().all()
    assert lse.isfinite().all()
    assert float(lse.max()) > 1e5


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 9),
    context=st.integers(0, 20),
    cuts=st.lists(st.integers(0, 29), max_size=4),
    window=st.none() | st.integers(1, 12),
    causal=st.booleans(),
    cap=st.none() | st.floats(0.5, 30.0),
    with_sinks=st.booleans(),
    with_alibi=st.booleans(),
)
def test_parts_merge_to_the_whole(
    seed: int,
    rows: int,
    context: int,
    cuts: list[int],
    window: int | None,
    causal: bool,
    cap: float | None,
    with_sinks: bool,
    with_alibi: bool,
) -> None:
    """Any split of the keys, empty parts included, and a sink in one of them: prefix and suffix of a cascade, chunks of
    cached context, splits of a decode."""
    seq_len = context + rows
    query, keys, values = tensors(rows, seq_len, seed=seed)
    sinks = randn(4, seed=seed + 3) if with_sinks else None
    slopes = randn(4, seed=seed + 4).abs() if with_alibi else None
    options = {"causal": causal, "sliding_window": window, "logits_soft_cap": cap, "alibi_slopes": slopes}
    whole = attention_reference(query, keys, values, scale=0.35, sinks=sinks, **options)

    bounds = [0, *sorted(min(cut, seq_len) for cut in cuts), seq_len]
    owner = seed % (len(bounds) - 1)
    parts = [
        attention_reference(
            query,
            keys[start:end],
            values[start:end],
            scale=0.35,
            sinks=sinks if index == owner else None,
            query_positions=torch.arange(seq_len - rows, seq_len) - start,
            **options,
        )
        for index, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    torch.testing.assert_close(merge_reference(*zip(*parts, strict=True)), whole, **EXACT)


def test_a_config_says_what_to_do() -> None:
    sizes = {"num_heads": 2, "head_size": 8}
    assert attention_options(AttentionConfig(**sizes, logits_soft_cap=30.0))["logits_soft_cap"] == 30.0
    causal = {
        "decoder": True,
        "encoder": False,
        "encoder_only": False,
        "encoder_decoder": False,
    }
    for attn_type, expected in causal.items():
        assert attention_options(AttentionConfig(**sizes, attn_type=attn_type))["causal"] is expected
    assert attention_options(AttentionConfig(**sizes, non_causal=True))["causal"] is False
    with pytest.raises(ValueError, match="sinks missing"):
        attention_options(AttentionConfig(**sizes, sinks=True))
    with pytest.raises(ValueError, match="alibi_slopes given"):
        attention_options(AttentionConfig(**sizes), alibi_slopes=torch.ones(2))
