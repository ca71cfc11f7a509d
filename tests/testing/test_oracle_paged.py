"""The oracle on paged caches: every layout says the same, and memory that belongs to nobody says nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD, PAGED_ATTENTION, cache_shape
from attn_select.reference.oracle_quant import quantize_query, storage_dtype
from attn_select.testing import (
    gather_reference,
    paged_reference,
    random_problem,
    slot_mapping_reference,
    write_reference,
)

HEADED = (FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND, PAGED_ATTENTION)
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
CACHE_DTYPES = ("auto", "float16", "float32", "fp8_e4m3", "fp8_e5m2")
BLOCK, BLOCKS = 4, 5


def poisoned(layout: str, config: AttentionConfig, num_blocks: int = BLOCKS, block_size: int = BLOCK) -> Tensor:
    shape = [num_blocks if size == "num_blocks" else size for size in cache_shape(layout, config, block_size)]
    cache = torch.empty(shape, dtype=storage_dtype(config.cache_dtype))
    cache.view(torch.uint8).fill_(0xFF)
    return cache


def element(cache: Tensor, layout: str, config: AttentionConfig, which: int, slot: int, head: int, d: int) -> float:
    """One number of K (0) or V (1), found as the layout's definition says, one index at a time."""
    block, offset = divmod(slot, BLOCK)
    if layout == FLASH_ATTN_NHD:
        return float(cache[which, block, offset, head, d])
    if layout == FLASHINFER_NHD:
        return float(cache[block, which, offset, head, d])
    if layout == FLASHINFER_HND:
        return float(cache[block, which, head, offset, d])
    size, x = config.head_size, 16 // cache.element_size()
    flat = cache[which, block].flatten()
    if which == 0:  # (heads, size/x, block, x)
        return float(flat[((head * (size // x) + d // x) * BLOCK + offset) * x + d % x])
    return float(flat[(head * size + d) * BLOCK + offset])  # (heads, size, block)


@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("layout", HEADED)
@pytest.mark.parametrize("v_head_size", [None, 16])
def test_writes_where_the_layout_says_and_nowhere_else(
    layout: str, kv_cache_dtype: str, v_head_size: int | None
) -> None:
    config = AttentionConfig(**SIZES, kv_cache_dtype=kv_cache_dtype, v_head_size=v_head_size)
    cache = poisoned(layout, config)
    generator = torch.Generator().manual_seed(3)
    key = torch.randn(4, 2, 32, generator=generator).bfloat16()
    value = torch.randn(4, 2, config.value_head_size, generator=generator).bfloat16()
    slots = torch.tensor([13, -1, 2, 7])
    fp8 = kv_cache_dtype.startswith("fp8")
    k_scale, v_scale = (0.5, 0.25) if fp8 else (None, None)  # powers of two: only the FP8 rounding is left
    write_reference(cache, key, value, slots, layout, config, k_scale=k_scale, v_scale=v_scale)

    stored = cache.dtype
    written = 0
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for which, (numbers, scale) in enumerate(((key, k_scale), (value, v_scale))):
            for head in range(2):
                for d in range(numbers.shape[2]):
                    expected = float((numbers[token, head, d].float() / (scale or 1.0)).to(stored))
                    assert element(cache, layout, config, which, slot, head, d) == expected
                    written += 1
    assert int(cache.float().isfinite().sum()) == written

    keys, values = gather_reference(cache, layout, slots[slots >= 0], config, k_scale=k_scale, v_scale=v_scale)
    tolerance = {"auto": 0, "float32": 0, "float16": 1e-3, "fp8_e4m3": 0.07, "fp8_e5m2": 0.13}[kv_cache_dtype]
    torch.testing.assert_close(keys, key[slots >= 0].double(), rtol=tolerance, atol=1e-3 if tolerance else 0)
    torch.testing.assert_close(values, value[slots >= 0].double(), rtol=tolerance, atol=1e-3 if tolerance else 0)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "per_head"), [("auto", False), ("fp8_e4m3", False), ("fp8_e4m3", True), ("fp8_e5m2", True)]
)
def test_every_layout_gives_the_same(kv_cache_dtype: str, per_head: bool) -> None:
    config = AttentionConfig(**SIZES, kv_cache_dtype=kv_cache_dtype, per_head_quant_scales=per_head)
    results = [random_problem(7, config, layout).reference() for layout in HEADED]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)
    assert results[0][0].isfinite().all()


def test_scales_multiply_what_is_stored() -> None:
    """Twice the scale of K is twice the softmax scale, twice the scale of V twice the output; per head as well."""
    config = AttentionConfig(**SIZES, kv_cache_dtype="fp8_e4m3", per_head_quant_scales=True)
    problem = random_problem(8, config, FLASH_ATTN_NHD)
    cache = problem.written_cache()
    tables = (problem.block_table, problem.query_start_loc, problem.seq_lens)
    fixed = (problem.query, cache, FLASH_ATTN_NHD, *tables, config)
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    output, lse = paged_reference(*fixed, problem.scale, **scales)
    twice = paged_reference(*fixed, problem.scale / 2, k_scale=2 * problem.k_scale, v_scale=2 * problem.v_scale)
    torch.testing.assert_close(twice, (2 * output, lse))
    one_head = paged_reference(
        *fixed, problem.scale, k_scale=problem.k_scale, v_scale=problem.v_scale * torch.tensor([1, 3])
    )
    torch.testing.assert_close(one_head[0], output * torch.tensor([1, 1, 3, 3])[:, None])


def test_the_query_is_quantised_likewise() -> None:
    config = AttentionConfig(**SIZES, kv_cache_dtype="fp8_e4m3")
    problem = random_problem(9, config, FLASH_ATTN_NHD)
    plain, quantised = problem.reference(), problem.reference(query_dtype="fp8_e4m3")
    assert not torch.allclose(plain[0], quantised[0], rtol=1e-3, atol=1e-3)
    by_hand = (problem.query.float() / problem.q_scale).to(torch.float8_e4m3fn).double() * problem.q_scale.double()
    tables = (problem.block_table, problem.query_start_loc, problem.seq_lens)
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    cache = problem.written_cache()
    expected = paged_reference(by_hand, cache, FLASH_ATTN_NHD, *tables, config, problem.scale, **scales)
    torch.testing.assert_close(quantised, expected)

    query = torch.tensor([[[300.0], [300.0], [300.0], [300.0]]])
    got = quantize_query(query, "fp8_e4m3", torch.tensor([1.0, 0.5]))  # one scale per KV head, 2 query heads each
    assert got.flatten().tolist() == [288.0, 288.0, 224.0, 224.0]  # 448 / 2: saturated


@given(
    seed=st.integers(0, 2**31),
    layout=st.sampled_from(HEADED),
    kv_cache_dtype=st.sampled_from(["auto", "fp8_e4m3"]),
    block_size=st.sampled_from([1, 3, 16]),
    window=st.none() | st.integers(1, 40),
    non_causal=st.booleans(),
)
def test_only_a_requests_own_tokens_count(
    seed: int, layout: str, kv_cache_dtype: str, block_size: int, window: int | None, non_causal: bool
) -> None:
    """NaN or large numbers behind a sequence's end, blocks in another order, other contents in blocks of nobody: the
    result is the same to the last bit, and finite."""
    config = AttentionConfig(**SIZES, kv_cache_dtype=kv_cache_dtype, sliding_window=window, non_causal=non_causal)
    problem = random_problem(seed, config, layout, block_size=block_size)
    cache = problem.written_cache()
    output, lse = problem.reference(kv_cache=cache)
    assert output.isfinite().all()
    assert lse.isfinite().all()

    # Zero wherever there was poison.
    clean = torch.where(cache.float().isnan(), torch.zeros(()), cache.float()).to(cache.dtype)
    torch.testing.assert_close(problem.reference(kv_cache=clean), (output, lse), rtol=0, atol=0)

    # The blocks change places, and the tables with them.
    blocks_at = 0 if layout in (FLASHINFER_NHD, FLASHINFER_HND) else 1
    order = torch.randperm(cache.shape[blocks_at], generator=torch.Generator().manual_seed(seed))
    moved = torch.empty_like(cache)
    moved.view(torch.uint8).transpose(0, blocks_at)[order] = cache.view(torch.uint8).transpose(0, blocks_at)
    got = paged_reference(
        problem.query,
        moved,
        layout,
        order[problem.block_table],
        problem.query_start_loc,
        problem.seq_lens,
        config,
        problem.scale,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
    )
    torch.testing.assert_close(got, (output, lse), rtol=0, atol=0)


def test_blocks_outside_the_window_are_not_looked_up() -> None:
    """As with an engine that frees the blocks a window has left: their table entries are gone."""
    config = AttentionConfig(**SIZES, sliding_window=5)
    problem = random_problem(12, config, FLASH_ATTN_NHD, requests=[(2, 40), (1, 33)], block_size=8)
    expected = problem.reference()
    tables = problem.block_table.clone()
    tables[0, :4] = -1  # rows at 38 and 39 see 34 to 39, all in block 4
    tables[1, :3] = -1  # the row at 32 sees 28 to 32, in blocks 3 and 4
    cache = problem.written_cache()
    fixed = (problem.query_start_loc, problem.seq_lens, config, problem.scale)
    got = paged_reference(problem.query, cache, FLASH_ATTN_NHD, tables, *fixed)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    tables[1, 3] = -1
    with pytest.raises(ValueError, match="slot -4 is outside the cache"):
        paged_reference(problem.query, cache, FLASH_ATTN_NHD, tables, *fixed)


def test_slot_mapping() -> None:
    table = torch.tensor([[7, 2, 9], [4, 0, 1]], dtype=torch.int32)
    positions = torch.tensor([0, 3, 4, 11, 8, -1, 5])
    slots = slot_mapping_reference(table, positions, 4, torch.tensor([0, 4, 6]))
    assert slots.dtype == torch.int64
    assert slots.tolist() == [28, 31, 8, 39, 4, -1, -1]  # the last token belongs to no request
    assert slot_mapping_reference(table[0], torch.tensor([5, 2]), 1 + 2).tolist() == [8, 23]
    pool = torch.tensor([12, 5, 30])  # token-level: block size 1
    assert slot_mapping_reference(pool, torch.tensor([2, 0]), 1).tolist() == [30, 12]
