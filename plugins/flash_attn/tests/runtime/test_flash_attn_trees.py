"""Trees of drafts on FlashAttention, which takes no mask: the context by the kernel, the drafts beside it, merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from attn_select.errors import ConfigError
from attn_select.runtime import AttentionGroup, Capacity, attention_group
from attn_select.testing import gqa_layer
from attn_select.testing.running import check_result, common_of, problem_for, run_problem
from attn_select.testing.toolkit import codes_of, plan_of, selection_of
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN

TREES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "block_size": 16}
TREES |= {"num_speculative_tokens": 3, "draft_tree": True}
REQUESTS = ((1, 40), (4, 60), (3, 3), (4, 4), (4, 17), (2, 30), (4, 0), (20, 50), (5, 9))
BESIDE: list[dict[str, Any]] = [
    {},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"sinks": True},
    {"logits_soft_cap": 5.0},
    {"kv_cache_dtype": "fp8_e4m3", "per_head_quant_scales": True},
    {"v_head_size": 16},
]


def group_for(**fields: Any) -> Any:
    selection = selection_of(FLASH_ATTN, gqa_layer(**TREES, **fields), "h100", options={"provider": "vllm"})
    return attention_group(selection, "cpu", Capacity(16, 1024, 1024))


@pytest.mark.parametrize("fields", BESIDE, ids=lambda fields: "-".join(fields) or "plain")
def test_trees_are_those_of_the_oracle(fields: dict[str, Any], emulate: Callable[[str], Any]) -> None:
    emulate("vllm")
    group = group_for(**fields)
    for seed, requests in enumerate((REQUESTS, REQUESTS[:6], REQUESTS[2:4], REQUESTS[-2:])):
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


@pytest.mark.parametrize("options", [{"cuda_graphs": True}, {"dispatch": "measured"}])
def test_steps_in_two_parts_are_neither_captured_nor_dispatched(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="neither captured nor dispatched"):
        attention_group(selection_of(FLASH_ATTN, gqa_layer(**TREES), "h100"), "cpu", **options)


def test_the_gate_says_what_two_parts_lack() -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(**TREES), "h100", "decode")
    assert (plan.trees_in_two_parts, plan.cuda_graph) == (True, "NEVER")
    chains = plan_of(FLASH_ATTN, gqa_layer(**{**TREES, "draft_tree": False}), "h100", "decode")
    assert (chains.trees_in_two_parts, chains.cuda_graph) == (False, "ALWAYS")
    for fields in ({"sliding_window": 8}, {"batch_invariant": True}):
        assert codes_of(FLASH_ATTN, gqa_layer(**TREES, **fields), "h100", "decode") == {"draft-tree-in-two-parts"}
