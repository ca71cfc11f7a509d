"""Trees of drafts on FlashAttention, which takes no mask: the context by the kernel, the drafts beside it, merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from attn_select.errors import ConfigError
from attn_select.reference.problems import TREE_BATCHES
from attn_select.reference.running import (
    Result,
    check_result,
    common_of,
    inputs_of,
    kernel_cache,
    layer_of,
    problem_for,
    run_problem,
)
from attn_select.runtime import AttentionGroup, Capacity, attention_group
from attn_select.runtime.cuda_graph import StaticBatch
from attn_select.testing import gqa_layer
from attn_select.testing.toolkit import selection_of
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN

TREES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "block_size": 16}
TREES |= {"num_speculative_tokens": 3, "draft_tree": True}
BESIDE: list[dict[str, Any]] = [
    {},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"sinks": True},
    {"logits_soft_cap": 5.0},
    {"kv_cache_dtype": "fp8_e4m3", "per_head_quant_scales": True},
    {"v_head_size": 16},
]


def group_for(*, options: Any = None, **fields: Any) -> Any:
    selection = selection_of(FLASH_ATTN, gqa_layer(**TREES, **fields), "h100", options={"provider": "vllm"})
    return attention_group(selection, "cpu", Capacity(16, 1024, 1024), **options or {})


@pytest.mark.parametrize("fields", BESIDE, ids=lambda fields: "-".join(fields) or "plain")
def test_trees_are_those_of_the_oracle(fields: dict[str, Any], emulate: Callable[[str], Any]) -> None:
    emulate("vllm")
    group = group_for(**fields)
    for seed, requests in enumerate(TREE_BATCHES):
        problem = problem_for(group, requests, seed)
        found = run_problem(group, problem)
        check_result(group, problem, found)
        if len(requests) > 4:
            chain = group.build(dataclasses.replace(common_of(problem), tree_mask=None))
            assert not torch.equal(run_problem(group, problem, metadata=chain).output, found.output)


def test_a_plain_group_is_refused(emulate: Callable[[str], Any]) -> None:
    emulate("vllm")
    with pytest.raises(ConfigError, match="takes no mask"):
        AttentionGroup(selection_of(FLASH_ATTN, gqa_layer(**TREES), "h100"), "cpu")


@pytest.mark.parametrize("fields", BESIDE, ids=lambda fields: "-".join(fields) or "plain")
def test_captured_metadata_serves_other_trees_and_contexts(
    fields: dict[str, Any], emulate: Callable[[str], Any]
) -> None:
    """What a graph does, without one: the metadata of the capture, tensors of another step at the same addresses."""
    emulate("vllm")
    group = group_for(options={"cuda_graphs": True}, **fields)
    static = StaticBatch(group, 4)
    captured = group.build_for_cudagraph_capture(static.dummy(3))
    for seed, requests in enumerate((((4, 700), (4, 20)), ((4, 4), (4, 90), (4, 33)), ((4, 4),))):
        problem = problem_for(group, requests, seed)
        common = common_of(problem)
        group.build(static.load(common, 3))
        cache, tokens = kernel_cache(group, problem), common.num_actual_tokens
        given = [inputs_of(problem)[name][:tokens] for name in ("query", "key", "value")]
        given = [torch.cat([rows, rows.new_zeros(12 - tokens, *rows.shape[1:])]) for rows in given]
        output, lse = given[0].new_full((12, 4, given[2].shape[2]), torch.nan), torch.full((12, 4), torch.nan)
        layer_of(group, problem).forward(*given, cache, captured, output, lse)
        check_result(group, problem, Result(output[:tokens], lse[:tokens], cache))
