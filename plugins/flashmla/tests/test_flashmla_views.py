"""A cache's view: made once, and without a hold on the engine's memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import flashmla_layers as layers
import torch

from attn_select_flashmla.views import CacheView

Emulate = Callable[[str], list[str]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_it_is_made_once_and_keeps_no_cache_alive(mode: type[torch.no_grad]) -> None:
    view = CacheView(lambda kv_cache: kv_cache.unsqueeze(2))
    with mode():
        cache = torch.zeros(3, 64, 576)
        first = view(cache)
        assert (first.shape, first.data_ptr()) == ((3, 64, 1, 576), cache.data_ptr())
        assert view(cache) is first
        gone, memory = weakref.ref(cache), weakref.ref(first)
        del cache, first
        gc.collect()
        assert gone() is None
        assert memory() is None


def test_another_cache_and_other_memory_are_seen() -> None:
    view = CacheView(lambda kv_cache: kv_cache.unsqueeze(2))
    first, second = torch.zeros(3, 64, 576), torch.zeros(5, 64, 576)
    assert view(first).shape[0] == 3
    assert view(second).shape[0] == 5
    first.data = torch.ones(4, 64, 576)
    assert view(first).shape[0] == 4
    assert view(first).data_ptr() == first.data_ptr()


@pytest.mark.parametrize("fields", [{}, {"sparse_top_k": 64}, {"sparse_top_k": 64, "kv_cache_dtype": "fp8_ds_mla"}])
def test_a_layer_reads_the_cache_that_it_is_given(emulate: Emulate, fields: dict[str, object]) -> None:
    emulate("vllm")
    group = layers.make_group(layers.layer_config(**fields))
    problem = layers.problem_for(group, [(1, 9), (1, 70)])
    layer, step = layers.make_layer(group, problem), problem.step
    impl, query = layer.impls["decode"], torch.randn(2, 4, 576).bfloat16()
    caches = [step.written_cache(), step.written_cache().zero_()]
    outputs = []
    for cache in (*caches, caches[0]):
        metadata = group.build(layers.common_of(problem)).parts[0].metadata
        output = torch.empty(2, 4, 512, dtype=torch.bfloat16)
        impl.forward_mqa(layer, query, cache, metadata, output, topk_indices=step.topk_indices)
        outputs.append(output)
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], torch.zeros_like(outputs[1]))
    assert not torch.equal(outputs[0], outputs[1])
