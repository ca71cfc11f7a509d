"""FLASH_ATTN_MLA_SPARSE's calls: chosen slots are pages, and only as many keys are split as the kernel can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attn_select.reference.running import impl_of
from attn_select.runtime import Outputs

pytest.importorskip("torch")

import flash_attn_layers as layers
import torch

from attn_select.reference.running import check_result, problem_for, random_batch, run_problem
from attn_select.runtime import Capacity
from attn_select.testing import mla_layer, selection_of
from attn_select_flash_attn.facts.flash_attn_mla_sparse import FLASH_ATTN_MLA_SPARSE

Emulate = Callable[[str], list[dict[str, Any]]]
REQUESTS = ((1, 60), (1, 7), (5, 40))


_KVCACHE_NAMES = ("k_cache", "v_cache", "page_table", "cache_seqlens")


def made(provider: str, tokens: int = 64, **fields: Any) -> Any:
    config = mla_layer(num_heads=8, sparse_top_k=16, **fields)
    selection = selection_of(FLASH_ATTN_MLA_SPARSE, config, options={"provider": provider})
    return layers.group_of(selection, capacity=Capacity(8, tokens, 1024))


@pytest.mark.parametrize("provider", ["vllm", "flash-attn-3", "sglang-kernel", "sgl-kernel"])
def test_slots_are_pages_of_one_token(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = made(provider)
    problem = problem_for(group, REQUESTS)
    check_result(group, problem, run_problem(group, problem))
    call = calls[-1]
    names = ("k", "v", "block_table", "seqused_k") if provider == "vllm" else _KVCACHE_NAMES
    key, value, table, lens = (call[name] for name in names)
    assert (key.shape[1:], value.shape[1:]) == ((1, 1, 64), (1, 1, 512))
    assert key.data_ptr() == value.data_ptr() + 512 * value.element_size()
    assert torch.equal(table, problem.topk_indices)
    assert lens.tolist() == [16, 7, 16, 16, 16, 16, 16]
    assert call["max_seqlen_q"] == 1
    assert call["num_splits"] == 0


@pytest.mark.parametrize("provider", ["vllm", "sgl-kernel"])
def test_padding_may_stand_between_slots(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = made(provider)
    problem = problem_for(group, REQUESTS)
    chosen = problem.topk_indices
    chosen[:, ::3] = -1
    check_result(group, problem, run_problem(group, problem))
    name = "block_table" if provider == "vllm" else "page_table"
    assert torch.equal(*((calls[-1][name] < 0).sort(1).values, calls[-1][name] < 0))


def test_padding_of_a_graph_has_no_keys(emulate: Emulate) -> None:
    emulate("vllm")
    group = made("vllm")
    problem = problem_for(group, [(1, 20), (1, 0)])
    result = run_problem(group, problem)
    assert not result.output[1].any()
    assert result.lse is not None
    assert result.lse[1].isneginf().all()


@pytest.mark.parametrize(
    ("fields", "tokens", "splits"), [({"batch_invariant": True}, 3, 1), ({}, 993, 1), ({}, 992, 0)], ids=str
)
def test_where_keys_are_split(fields: dict[str, Any], tokens: int, splits: int, emulate: Emulate) -> None:
    """Batch invariance forbids it, and FA3 splits in batches of up to 992 requests alone."""
    emulate("vllm")
    group = made("vllm", tokens=tokens, **fields)
    common, _ = random_batch(group, [tokens], [tokens])
    assert group.backends["prefill"].builder.build(0, common).num_splits == splits


def test_rows_are_those_of_the_cache_that_is_given(emulate: Emulate) -> None:
    """A warm-up runs on a cache of one block, and serving on another."""
    calls = emulate("vllm with FA4")
    selection = selection_of(FLASH_ATTN_MLA_SPARSE, mla_layer(num_heads=8, sparse_top_k=128), "b200")
    group = layers.group_of(selection, capacity=Capacity(8, 64, 1024))
    served, (common, _) = group.backends["decode"], random_batch(group, [1, 1], [9, 9])
    impl, query = impl_of(served, scale=1.0), torch.randn(2, 8, 576).bfloat16()
    for blocks in (1, 4):
        cache = torch.randn(blocks, 64, 576).bfloat16()
        slots = torch.full((2, 128), -1, dtype=torch.int32)
        slots[:, 0] = blocks * 64 - 1
        output = torch.empty(2, 8, 512).bfloat16()
        impl.forward_mqa(query, cache, served.builder.build(0, common), Outputs(output), slots)
        assert calls[-1]["seqused_k"].tolist() == [blocks * 64] * 2
        torch.testing.assert_close(output, cache[-1, -1, :512].expand_as(output))
