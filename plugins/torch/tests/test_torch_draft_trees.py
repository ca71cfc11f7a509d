"""Drafts that form a tree: ``TORCH_SDPA`` and ``TORCH_MLA`` mask as the oracle does, among other requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attn_select.reference.running import check_result, common_of, problem_for, run_problem
from attn_select.runtime import Capacity, attention_group
from attn_select.testing import gqa_layer, mla_layer
from attn_select.testing.toolkit import selection_of
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA

pytestmark = pytest.mark.usefixtures("one_thread")
REQUESTS = ((1, 40), (4, 60), (3, 3), (4, 4), (4, 17), (20, 50), (2, 30), (5, 9))
TREES: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_speculative_tokens": 3, "draft_tree": True}
GQA = {**TREES, "num_heads": 4, "num_kv_heads": 2, "head_size": 32}
LATENT = {**TREES, "num_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
BESIDE: list[dict[str, Any]] = [
    {},
    {"sliding_window": 7},
    {"mm_prefix": True, "sliding_window": 5},
    {"alibi": True},
    {"sinks": True, "logits_soft_cap": 5.0},
    {"batch_invariant": True},
]


def group_for(spec: Any, **fields: Any) -> Any:
    config = mla_layer(**LATENT, **fields) if spec is TORCH_MLA else gqa_layer(**GQA, **fields)
    return attention_group(selection_of(spec, config, "cpu"), "cpu", Capacity(16, 1024, 1024))


def check(group: Any, seed: int) -> None:
    problem = problem_for(group, REQUESTS, seed)
    found = run_problem(group, problem)
    check_result(group, problem, found)
    chain = group.build(dataclasses.replace(common_of(problem), tree_mask=None))
    assert not torch.equal(run_problem(group, problem, metadata=chain).output, found.output), "the mask was not read"


@pytest.mark.parametrize("fields", BESIDE, ids=lambda fields: "-".join(fields) or "plain")
@pytest.mark.parametrize("spec", [TORCH_SDPA, TORCH_MLA], ids=lambda spec: spec.name)
def test_trees_and_other_masks(spec: Any, fields: dict[str, Any]) -> None:
    group = group_for(spec, **fields)
    for seed in range(3):
        check(group, seed)


def test_trees_behind_a_shared_prefix() -> None:
    """Cascade attention: the tree is part of the suffix."""
    from attn_select.reference.running import shared_prefix

    group = group_for(TORCH_SDPA)
    problem = shared_prefix(problem_for(group, [(4, 300 + 7 * i) for i in range(8)]), 18)
    whole = run_problem(group, problem)
    in_two = run_problem(group, problem, common_prefix_len=288)
    torch.testing.assert_close(in_two.output, whole.output)
    assert group.build(common_of(problem), 288).parts[0].metadata.prefix is not None
