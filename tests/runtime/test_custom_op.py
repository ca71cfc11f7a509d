"""The layer as one opaque operator: under ``torch.compile``, by its schema, and with the metadata from around it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_select.layer.config import AttentionConfig
from attn_select.reference.running import common_of
from attn_select.runtime import Attention, BatchError, forward_context
from attn_select.testing import random_problem, relative_error, same_bits

Factory = Callable[..., Any]
CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
FLASH = "FLASH_ATTN_NHD"


class Model(nn.Module):
    """Two layers with something to compile around them; the second reads the first one's cache."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.first = Attention(group)
        self.second = Attention(group, kv_sharing_target=self.first)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> Tensor:
        hidden = self.first(query, key * 1.0, value + 0.0, cache)
        return self.second(torch.sin(hidden) + query, None, None, cache) * 2


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Compile anew, and leave nothing behind."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counter:
    """A backend of ``torch.compile`` that counts the graphs it gets, and the attention calls in them."""

    def __init__(self, backend: str) -> None:
        self.backend, self.graphs, self.calls = backend, 0, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        self.calls += sum("attn_select.attention" in str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow(guard="aot_eager"),
            pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
        ],
    ),
]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_with_the_same_result(make_toy: Factory, make_group: Factory, backend: str) -> None:
    toy = make_toy()
    group = make_group(CONFIG, toy)
    model, counter = Model(group), Counter(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    # Other batches of as many tokens are other metadata, not other graphs.
    for seed, requests in ((1, [(1, 20), (3, 33), (5, 5)]), (2, [(9, 50)])):
        problem = random_problem(seed, CONFIG, FLASH, requests=requests)
        assert problem.kv_cache is not None
        eager_cache = torch.zeros(2, 40, 16, 2, 32)
        eager_cache[:, : problem.kv_cache.shape[1]] = problem.kv_cache
        compiled_cache = eager_cache.clone()
        arguments = (problem.query, problem.key, problem.value)
        metadata = group.build(common_of(problem))
        with torch.no_grad(), forward_context({group: metadata}):
            expected = model(*arguments, eager_cache)
            toy.calls.clear()
            found = compiled(*arguments, compiled_cache)
        assert toy.calls == ["update", "forward", "forward"]
        assert relative_error(found, expected).row < 1e-6
        assert same_bits(compiled_cache, eager_cache)
        assert same_bits(compiled_cache[:, : problem.kv_cache.shape[1]], problem.written_cache())
    assert (counter.graphs, counter.calls) == (1, 2)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("extra", ["attn_metadata", "output_lse"])
def test_what_a_compiled_call_cannot_take(make_group: Factory, extra: str) -> None:
    group, problem = make_group(CONFIG), random_problem(1, CONFIG, FLASH)
    layer, metadata = Attention(group), group.build(common_of(problem))
    given = {extra: metadata if extra == "attn_metadata" else torch.zeros(len(problem.query), 4)}

    def model(query: Tensor) -> Tensor:
        result: Tensor = layer(query, problem.key, problem.value, problem.kv_cache, **given)
        return result

    compiled = torch.compile(model, backend="aot_eager")
    with (
        torch.no_grad(),
        forward_context({group: metadata}),
        pytest.raises(BatchError, match=r"under torch\.compile attn_metadata"),
    ):
        compiled(problem.query)


@pytest.mark.parametrize("new_keys", [True, False])
def test_schema_and_fake_implementation_agree_with_the_real_one(make_group: Factory, new_keys: bool) -> None:
    group, problem = make_group(CONFIG), random_problem(3, CONFIG, FLASH)
    layer = Attention(group, caller_writes=not new_keys)
    key, value = (problem.key, problem.value) if new_keys else (None, None)
    if not new_keys:
        problem.kv_cache.copy_(problem.written_cache())  # type: ignore[union-attr]
    arguments = (problem.query, key, value, problem.kv_cache, torch.zeros_like(problem.query), layer.layer_name)
    with forward_context({group: group.build(common_of(problem))}):
        results = torch.library.opcheck(torch.ops.attn_select.attention.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_contexts_nest_and_end_with_an_error(make_group: Factory) -> None:
    one, two = make_group(CONFIG), make_group(CONFIG)
    problem = random_problem(4, CONFIG, FLASH)
    layer = Attention(one)
    arguments = (problem.query, problem.key, problem.value, problem.kv_cache)
    metadata = one.build(common_of(problem))
    with contextlib.suppress(ZeroDivisionError), forward_context({one: metadata}):
        layer(*arguments)
        raise ZeroDivisionError
    with pytest.raises(BatchError, match="no attn_metadata was given"):
        layer(*arguments)
    with forward_context({two: metadata}), pytest.raises(BatchError, match="no attn_metadata was given"):
        layer(*arguments)
