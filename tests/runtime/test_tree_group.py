"""Trees of drafts in two parts: on a kernel that takes no mask, eagerly and with the metadata of a capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_select.backends.draft_trees import in_two_parts
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.reference.problems import TREE_BATCHES, TREE_REQUESTS
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
from attn_select.runtime import Capacity, attention_group
from attn_select.runtime.cuda_graph import StaticBatch, check_level
from attn_select.runtime.tree_group import DraftTreeGroup

LAYER: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "block_size": 16, "dtype": "float32"}
MakeTrees = Callable[..., DraftTreeGroup]


@pytest.fixture
def make_trees(make_toy: Any, choose: Any) -> MakeTrees:
    """Return ``make(level="ALWAYS", cuda_graphs=False, **fields)``: a group of layers on the toy kernel."""

    def make(level: str = "ALWAYS", *, options: Any = None, **fields: Any) -> DraftTreeGroup:
        toy = make_toy(level=level)
        plain = toy.spec.plan

        def plan(config: AttentionConfig, *asked: Any) -> Any:
            return in_two_parts(plain(config, *asked), config)

        config = AttentionConfig(**{**LAYER, "num_speculative_tokens": 3, "draft_tree": True, **fields})
        selection = choose(config, replace(toy, spec=replace(toy.spec, plan=plan)))
        group = attention_group(selection, "cpu", Capacity(16, 64, 512), **options or {})
        assert isinstance(group, DraftTreeGroup)
        return group

    return make


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("fields", [{}, {"sinks": True}, {"logits_soft_cap": 5.0}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_trees_are_those_of_the_oracle(fields: dict[str, Any], graphs: bool, make_trees: MakeTrees) -> None:
    group = make_trees(options={"cuda_graphs": graphs}, **fields)
    for seed, requests in enumerate(TREE_BATCHES):
        problem = problem_for(group, requests, seed)
        found = run_problem(group, problem)
        check_result(group, problem, found)
        if len(requests) > 4:
            chain = group.build(replace(common_of(problem), tree_mask=None))
            assert not torch.equal(run_problem(group, problem, metadata=chain).output, found.output)


@pytest.mark.parametrize("fields", [{}, {"sinks": True}], ids=str)
def test_captured_metadata_serves_other_trees_and_contexts(fields: dict[str, Any], make_trees: MakeTrees) -> None:
    """What a graph does, without one: the metadata of the capture, tensors of another step at the same addresses."""
    group = make_trees(options={"cuda_graphs": True}, **fields)
    static = StaticBatch(group, 4)
    captured = group.build_for_cudagraph_capture(static.dummy(4))
    steps = [((4, 70), (4, 20), (4, 33)), ((4, 4), (4, 4)), ((4, 4), (4, 300), (4, 5), (4, 90))]
    for seed, requests in enumerate(steps):
        problem = problem_for(group, requests, seed)
        common = common_of(problem)
        group.build(static.load(common, 4))
        cache, tokens = kernel_cache(group, problem), common.num_actual_tokens
        layer = layer_of(group, problem)
        given = [inputs_of(problem)[name] for name in ("query", "key", "value")]
        given = [torch.cat([rows[:tokens], rows.new_zeros(16 - tokens, *rows.shape[1:])]) for rows in given]
        output, lse = torch.full_like(given[0], torch.nan), torch.full((16, 4), torch.nan)
        layer.forward(*given, cache, captured, output, lse)
        check_result(group, problem, Result(output[:tokens], lse[:tokens], cache))
        group.build(common_of(problem_for(group, TREE_REQUESTS, seed)))  # an eager step comes between


@pytest.mark.parametrize("graphs", [False, True])
def test_first_steps_have_no_context_unless_they_may_be_captured(graphs: bool, make_trees: MakeTrees) -> None:
    group = make_trees(options={"cuda_graphs": graphs})
    first, later = (common_of(problem_for(group, requests)) for requests in ([(3, 3), (4, 4)], [(3, 3), (4, 5)]))
    assert (group.build(first).context is not None) == graphs
    assert group.build(later).context is not None


@pytest.mark.parametrize(
    ("level", "here"),
    [
        ("ALWAYS", "UNIFORM_BATCH"),
        ("UNIFORM_BATCH", "UNIFORM_BATCH"),
        ("UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("NEVER", "NEVER"),
    ],
)
def test_mixed_steps_are_not_captured(level: str, here: str, make_trees: MakeTrees) -> None:
    group = make_trees(level)
    assert {plan.cuda_graph for plan in group.selection.plans.values()} == {here}
    assert group.cudagraph_support == here
    with pytest.raises(ConfigError, match="CUDA graphs of mixed batches need level ALWAYS"):
        check_level(group, mixed=True)
