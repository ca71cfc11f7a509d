"""``MLAAttention`` as one operator of a compiled graph, and its copies."""

from __future__ import annotations

import copy

import pytest
import torch
from mla_steps import MIXED, SMALL, layer_of, run
from torch import Tensor

from attn_select import AttentionConfig, select
from attn_select.layer.layouts import MLA
from attn_select.reference.running import common_of
from attn_select.runtime import (
    MLAAttentionGroup,
    forward_context,
)
from attn_select.testing import (
    random_problem,
    relative_error,
    same_bits,
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph(backend: str) -> None:
    """The graph holds the layer as one operator, and takes the next step's metadata without being made anew."""
    from torch._dynamo.testing import CompileCounterWithBackend

    config = AttentionConfig(**SMALL, dtype="float32")
    first = random_problem(0, config, requests=MIXED)
    group = MLAAttentionGroup(select(config, device="cpu", backend="TORCH_MLA"), workspace_tokens=30)
    layer = layer_of(group, first)

    def model(query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor) -> Tensor:
        output: Tensor = layer(2 * query, kv_c, k_pe, kv_cache)
        return output + 1

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed in range(2):
        problem = random_problem(seed, config, requests=MIXED)
        assert problem.kv_cache is not None
        common = common_of(problem)
        given = (problem.query / 2, problem.key, problem.value)
        with forward_context({group: group.build(common)}), torch.no_grad():
            caches = problem.kv_cache.clone(), problem.kv_cache.clone()
            outputs = compiled(*given, caches[0]), model(*given, caches[1])
        assert same_bits(*outputs)
        assert same_bits(*caches)
        if seed == 0:  # the weight is this problem's
            assert relative_error(outputs[0] - 1, first.reference()[0]).norm < 1e-5
    torch._dynamo.reset()
    assert counter.frame_count == 1


def test_a_copied_layer_runs_its_own_weights() -> None:
    """A compiled graph finds its layer by name: the copy's name must not lead to the original."""
    problem = random_problem(3, AttentionConfig(**SMALL, dtype="float32"), MLA)
    ran = run(problem, common_of(problem))
    twin = copy.deepcopy(ran.layer)
    assert twin.layer_name != ran.layer.layer_name
    assert twin.group is ran.group
    twin.kv_b_proj.mul_(2.0)
    given = (problem.query, problem.key, problem.value, ran.kv_cache)
    outputs = []
    for layer in (ran.layer, twin):
        compiled, eager = torch.zeros(2, *ran.output[: ran.tokens].shape)
        with forward_context({ran.group: ran.metadata}):
            torch.ops.attn_select.mla_attention(*given[:3], None, given[3], compiled, layer.layer_name)
        layer(*given, ran.metadata, eager)
        assert same_bits(compiled, eager)
        outputs.append(compiled)
    assert not torch.equal(*outputs)
