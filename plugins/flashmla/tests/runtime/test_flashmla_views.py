"""Layers read the cache that they are given, though its view is made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attn_select.runtime import Outputs

pytest.importorskip("torch")

import torch
from flashmla_layers import group_of, layer_config

from attn_select.reference.running import common_of, layer_of, problem_for

Emulate = Callable[[str], list[str]]


@pytest.mark.parametrize("fields", [{}, {"sparse_top_k": 64}, {"sparse_top_k": 64, "kv_cache_dtype": "fp8_ds_mla"}])
def test_a_layer_reads_the_cache_that_it_is_given(emulate: Emulate, fields: dict[str, object]) -> None:
    emulate("vllm")
    group = group_of(layer_config(**fields))
    problem = problem_for(group, [(1, 9), (1, 70)])
    layer = layer_of(group, problem)
    impl, query = layer.impls["decode"], torch.randn(2, 4, 576).bfloat16()
    caches = [problem.written_cache(), problem.written_cache().zero_()]
    outputs = []
    for cache in (*caches, caches[0]):
        metadata = group.build(common_of(problem)).parts[0].metadata
        output = torch.empty(2, 4, 512, dtype=torch.bfloat16)
        impl.forward_mqa(query, cache, metadata, Outputs(output), topk_indices=problem.topk_indices)
        outputs.append(output)
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], torch.zeros_like(outputs[1]))
    assert not torch.equal(outputs[0], outputs[1])
