"""Attention inside chunks through kernels that have no mask for it: each chunk becomes a request of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_select.layer.config import AttentionConfig
from attn_select.reference.running import common_of, reblocked
from attn_select.runtime import Attention, AttentionGroup, Capacity, split_decodes_and_prefills
from attn_select.runtime.metadata import Split
from attn_select.testing import lse_error, random_problem, relative_error

Factory = Callable[..., Any]
SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32"}
MIXED = ((1, 40), (1, 33), (1, 32), (5, 35), (30, 30), (48, 96), (40, 95), (3, 64))
"""Decodes first; the others begin or end before, at and behind multiples of 16 and 32."""


def chunked(size: int, **fields: Any) -> AttentionConfig:
    return AttentionConfig(**SMALL, attention_chunk_size=size, **fields)


def assert_solved(group: AttentionGroup, seed: int, requests: Any, block_size: int = 16) -> None:
    """Draw a step, run it through one layer and compare output and LSE with the oracle."""
    problem = random_problem(seed, group.config, group.kv_layout, requests=requests, block_size=block_size)
    assert problem.kv_cache is not None
    assert group.kernel_block_size is not None
    cache = reblocked(problem.kv_cache, group.kv_layout or "", group.config, group.kernel_block_size)
    lse = torch.full(problem.query.shape[:2], torch.nan)
    layer = Attention(group, sinks=problem.sinks, alibi_slopes=problem.alibi_slopes)
    metadata = group.build(common_of(problem))
    output = layer(problem.query, problem.key, problem.value, cache, metadata, output_lse=lse)
    expected, expected_lse = problem.reference()
    assert relative_error(output, expected).row < 1e-5
    assert lse_error(lse, expected_lse) < 1e-5


@pytest.mark.parametrize("layout", ["FLASH_ATTN_NHD", "FLASHINFER_HND", "PAGED_ATTENTION"])
@pytest.mark.parametrize("size", [16, 32, 64, 1024])
@pytest.mark.parametrize("reorder", [None, 1])
def test_every_chunk_is_a_request(
    make_toy: Factory, make_group: Factory, layout: str, size: int, reorder: int | None
) -> None:
    toy = make_toy(layouts=(layout,), reorder=reorder)
    assert_solved(make_group(chunked(size), toy), size, MIXED)
    (built,) = toy.builds
    assert int(built.common.seq_lens_cpu.max()) <= size
    assert built.common.max_seq_len <= size


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=6), st.sampled_from([4, 8, 20]))
def test_any_batch(make_toy: Factory, make_group: Factory, requests: list[tuple[int, int]], size: int) -> None:
    """Requests without queries, without keys, and with more queries than keys (padding of graphs) among them."""
    queries = sum(query for query, _ in requests)
    if queries:
        toy = make_toy(kernel_block_sizes=(4,))
        group = make_group(chunked(size, block_size=4), toy, capacity=Capacity(len(requests), queries, 40))
        assert_solved(group, queries, requests, block_size=4)
        assert toy.builds[0].common.num_reqs <= group.distinct[0].context.max_num_seqs


def test_two_backends_share_a_batch(make_toy: Factory, make_group: Factory) -> None:
    decode = make_toy("DECODER", phases=("decode",))
    prefill = make_toy("PREFILLER", phases=("prefill",), reorder=1)
    assert_solved(make_group(chunked(32), decode, prefill), 7, MIXED)
    assert decode.builds[0].common.query_lens_cpu.tolist() == [1, 1, 1]
    assert decode.builds[0].common.seq_lens_cpu.tolist() == [8, 1, 32]
    # Of (5, 35) two tokens end one chunk and three begin the next, and so on.
    assert prefill.builds[0].common.query_lens_cpu.tolist() == [2, 3, 30, 16, 32, 9, 31, 3]
    assert split_decodes_and_prefills(prefill.builds[0].common, 4).num_decodes == 0


def test_a_short_end_of_a_prefill_is_no_decode(make_toy: Factory, make_group: Factory) -> None:
    """The one token of the second chunk stands behind a prefill, where no decode may stand."""
    toy = make_toy(reorder=1)
    group = make_group(chunked(16), toy)
    assert_solved(group, 2, ((1, 20), (17, 17), (2, 9)))
    common = toy.builds[0].common
    assert common.query_lens_cpu.tolist() == [1, 16, 1, 2]
    assert split_decodes_and_prefills(common, 1) == Split(1, 3, 1, 19)
    assert split_decodes_and_prefills(common.requests(2, 4), 1) == Split(0, 2, 0, 3)


def test_drafts_that_cross_a_border_stay_decodes(make_toy: Factory, make_group: Factory) -> None:
    toy = make_toy(reorder=4)
    assert_solved(make_group(chunked(16, num_speculative_tokens=3), toy), 3, ((4, 34), (4, 16), (20, 20)))
    common = toy.builds[0].common
    assert common.query_lens_cpu.tolist() == [2, 2, 4, 16, 4]
    assert split_decodes_and_prefills(common, 4) == Split(3, 2, 8, 20)
