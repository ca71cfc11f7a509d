"""Trees of drafts on FLASHINFER: native kernels attend to the context, the drafts are merged to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from attn_select.reference.problems import TREE_BATCHES
from attn_select.reference.running import check_result, problem_for, run_problem
from attn_select.runtime import Capacity, attention_group
from attn_select.testing import gqa_layer
from attn_select.testing.toolkit import selection_of
from attn_select_flashinfer.facts.mha import FLASHINFER

TREES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "block_size": 16}
TREES |= {"num_speculative_tokens": 3, "draft_tree": True}
GPUS = {"h100": (9, 0), "b200": (10, 0), "a100": (8, 0), "rtx5090": (12, 0)}


@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"logits_soft_cap": 5.0}], ids=str)
@pytest.mark.parametrize("gpu", GPUS)
def test_trees_are_those_of_the_oracle(gpu: str, fields: dict[str, Any], emulate: Callable[..., Any]) -> None:
    emulate(GPUS[gpu])
    selection = selection_of(FLASHINFER, gqa_layer(**TREES, **fields), gpu)
    group = attention_group(selection, "cpu", Capacity(16, 1024, 1024))
    for seed, requests in enumerate(TREE_BATCHES):
        problem = problem_for(group, requests, seed)
        check_result(group, problem, run_problem(group, problem))
