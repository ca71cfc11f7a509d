"""Random problems are reproducible, mixed and poisoned; distances between results are what they say."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FP8_DS_MLA, MLA, PAGED_ATTENTION
from attn_select.testing import (
    lse_error,
    random_problem,
    relative_error,
    same_bits,
    unpack_fp8_ds_mla,
)

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
DEEPSEEK = {"num_heads": 2, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CONFIGS = {
    "plain": (AttentionConfig(**SIZES), FLASH_ATTN_NHD),
    "float16": (AttentionConfig(**SIZES, dtype="float16"), FLASHINFER_HND),
    "fp8 per head": (
        AttentionConfig(**SIZES, kv_cache_dtype="fp8_e5m2", per_head_quant_scales=True),
        PAGED_ATTENTION,
    ),
    "extras": (
        AttentionConfig(**SIZES, v_head_size=16, alibi=True, sinks=True, mm_prefix=True, sliding_window=7),
        FLASH_ATTN_NHD,
    ),
    "cross": (AttentionConfig(**SIZES, attn_type="encoder_decoder"), FLASH_ATTN_NHD),
    "encoder": (AttentionConfig(**SIZES, attn_type="encoder_only"), None),
    "mla": (AttentionConfig(**DEEPSEEK), MLA),
    "mla fp8": (AttentionConfig(**DEEPSEEK, kv_cache_dtype="fp8_e4m3"), MLA),
    "sparse": (AttentionConfig(**DEEPSEEK, sparse_top_k=8, kv_cache_dtype="fp8_ds_mla"), FP8_DS_MLA),
}
TENSORS = (
    *("query", "key", "value", "query_start_loc", "seq_lens", "kv_cache", "block_table", "slot_mapping"),
    *("alibi_slopes", "sinks", "topk_indices", "k_scale", "v_scale", "q_scale"),
)


@pytest.mark.parametrize("nan_tails", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_problem_is_sound(name: str, nan_tails: bool) -> None:
    config, layout = CONFIGS[name]
    problem = random_problem(1, config, layout, nan_tails=nan_tails)
    again = random_problem(1, config, layout, nan_tails=nan_tails)
    other = random_problem(2, config, layout, nan_tails=nan_tails)
    for field in TENSORS:
        first, second = getattr(problem, field), getattr(again, field)
        assert (first is None) == (second is None)
        assert first is None or same_bits(first, second)
    assert not torch.equal(problem.query[0], other.query[0])

    tokens = sum(query_len for query_len, _ in problem.requests)
    width = (config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0) if config.mla else config.head_size
    assert problem.query.shape == (tokens, config.num_heads, width)
    assert problem.query_start_loc.dtype == problem.seq_lens.dtype == torch.int32
    assert problem.query_start_loc[-1] == tokens
    output, lse = problem.reference()
    assert output.isfinite().all()
    assert lse.isfinite().all()
    assert output.shape == (tokens, config.num_heads, config.v_head_dim or config.value_head_size)


@given(seed=st.integers(0, 2**31), nan_tails=st.booleans(), block_size=st.sampled_from([1, 8, 16]))
def test_the_cache_holds_the_context_and_poison(seed: int, nan_tails: bool, block_size: int) -> None:
    """Finite: the context, and the tails if asked for. NaN: all else, the slots of this step's tokens among them."""
    config = AttentionConfig(**SIZES)
    problem = random_problem(seed, config, FLASH_ATTN_NHD, block_size=block_size, nan_tails=nan_tails)
    num_blocks = problem.kv_cache.shape[1]
    kind = torch.zeros(num_blocks, block_size, dtype=torch.int64)  # 0 nobody's, 1 context, 2 new, 3 tail
    for row, (query_len, seq_len) in zip(problem.block_table.tolist(), problem.requests, strict=True):
        for position in range(-(-seq_len // block_size) * block_size):
            block, offset = row[position // block_size], position % block_size
            assert kind[block, offset] == 0, "two requests share a slot"
            kind[block, offset] = 1 + (position >= seq_len - query_len) + (position >= seq_len)
    assert kind.flatten()[problem.slot_mapping].unique().tolist() == [2]
    assert int((kind == 2).sum()) == len(problem.slot_mapping)
    assert (kind == 0).all(dim=1).any(), "no block belongs to nobody"
    per_slot = problem.kv_cache.permute(1, 2, 0, 3, 4).flatten(2)
    assert per_slot[kind == 1].abs().max() < 10 if bool((kind == 1).any()) else True
    assert per_slot[(kind == 0) | (kind == 2)].isnan().all()
    tails = per_slot[kind == 3]
    assert tails.isnan().all() if nan_tails else ((tails.abs() > 9e3) | (tails == 0)).all()

    written = problem.written_cache().permute(1, 2, 0, 3, 4).flatten(2)
    assert written[kind == 2].isfinite().all()
    assert same_bits(written[kind != 2], per_slot[kind != 2])


def test_chosen_tokens_lie_in_the_past() -> None:
    config, layout = CONFIGS["sparse"]
    problem = random_problem(0, config, layout, requests=[(4, 30), (5, 5)])
    token = 0
    for row, (query_len, seq_len) in zip(problem.block_table.tolist(), problem.requests, strict=True):
        for position in range(seq_len - query_len, seq_len):
            allowed = {row[p // 16] * 16 + p % 16 for p in range(position + 1)}
            chosen = [slot for slot in problem.topk_indices[token].tolist() if slot >= 0]
            assert len(set(chosen)) == len(chosen) == min(8, position + 1)
            assert set(chosen) <= allowed
            token += 1
    assert unpack_fp8_ds_mla(problem.kv_cache).isnan().any()


def test_relative_error() -> None:
    reference = torch.tensor([[3.0, 4.0], [300.0, 400.0]], dtype=torch.float64)
    error = relative_error(reference + torch.tensor([[0.5, 0.0], [0.0, 0.0]]), reference)
    assert error.row == pytest.approx(0.1)
    assert error.norm == pytest.approx(0.5 / math.hypot(5, 500))
    assert relative_error(reference.float(), reference) == (0.0, 0.0)
    assert relative_error(reference[:0], reference[:0]) == (0.0, 0.0)
    for bad in (math.nan, math.inf):
        assert relative_error(torch.full((2, 2), bad), reference) == (math.inf, math.inf)


def test_a_row_counts_no_less_than_its_spread() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    actual = reference + torch.tensor([[0.5, 0.0], [0.0, 0.5]])
    error = relative_error(actual, reference, torch.tensor([1.0, 2.0]))
    assert error.row == pytest.approx(0.25)
    assert error.norm == pytest.approx(math.hypot(0.5, 0.5) / math.hypot(5, 2))


def test_lse_error() -> None:
    reference = torch.tensor([1.0, -math.inf, -2.0], dtype=torch.float64)
    assert lse_error(reference.float(), reference) == 0.0
    assert lse_error(torch.tensor([1.25, -math.inf, -2.125]), reference) == 0.25
    assert lse_error(torch.tensor([1.0, math.inf, -2.0]), reference) == math.inf  # FlashAttention-2's empty row
    assert lse_error(torch.tensor([1.0, -1e30, -2.0]), reference) == math.inf
    assert lse_error(torch.tensor([-math.inf, -math.inf, -2.0]), reference) == math.inf
    assert lse_error(torch.tensor([math.nan, -math.inf, -2.0]), reference) == math.inf
    assert lse_error(reference[:0], reference[:0]) == 0.0
