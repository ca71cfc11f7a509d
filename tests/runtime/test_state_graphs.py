"""Decodes of layers that keep a state are captured once and replayed with other slots."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("attn_select_torch")

from attn_select.backends.spec import BackendPlan  # noqa: E402
from attn_select.layer.state import StateConfig  # noqa: E402
from attn_select.reference.state_serving import StateServing, state_bound  # noqa: E402
from attn_select.runtime import BatchError, prepare_batch  # noqa: E402
from attn_select.runtime.states import Gates, LinearAttention, StateGroup, StatePool, StaticStates  # noqa: E402
from attn_select.testing.toolkit import selection_of  # noqa: E402
from attn_select_torch.facts.torch_state import TORCH_STATE  # noqa: E402

CONFIG = StateConfig(
    recurrence="gated_delta_net",
    num_heads=2,
    num_v_heads=4,
    head_size=8,
    v_head_size=16,
    dtype="float32",
    conv_kernel_size=4,
    num_speculative_tokens=2,
)


def capturable(level: str) -> Any:
    """TORCH_STATE, as if its decodes could be captured."""

    def plan(*given: Any) -> Any:
        made = TORCH_STATE.plan(*given)
        assert isinstance(made, BackendPlan)
        return replace(made, cuda_graph=level)

    return selection_of(replace(TORCH_STATE, plan=plan), CONFIG, "cpu")


@pytest.mark.parametrize("seed", range(6))
def test_replays_give_what_the_recurrence_gives(seed: int) -> None:
    rng, bound = random.Random(seed), state_bound(CONFIG)
    serving = StateServing(capturable("UNIFORM_BATCH"), 30, seed, cuda_graphs=True)
    for name in range(4):
        serving.add(name)
    serving.step({0: 5, 1: 20, 2: 7})  # request 3 has no state yet: it decodes from zero
    for _ in range(8):
        chosen = rng.sample(range(4), rng.randint(1, 4))
        error = serving.step(dict.fromkeys(chosen, rng.choice((1, 3))))
        assert error.norm <= bound.norm
        assert error.row <= bound.row
        for name in chosen:
            if (kept := serving.drafts_of(name)) > 1:
                serving.accept(name, rng.randint(1, kept))
    assert serving.replays == 8


@pytest.mark.parametrize("each", [1, 3])
def test_padding_changes_no_slot(each: int) -> None:
    group = StateGroup(capturable("UNIFORM_BATCH"), cuda_graphs=True)
    layer, cache = LinearAttention(group, torch.randn(group.config.conv_dim, 4)), group.allocate(6)
    assert cache.conv is not None
    cache.state.fill_(7.0)
    cache.conv.fill_(7.0)
    static = StaticStates(group, each, 4)
    pool = StatePool(6, 2)
    pool.add("a")
    pool.add("b")
    pool.commit(pool.step({"a": 9}))
    slots = pool.step({"a": each, "b": each})  # the second request is new: it keeps its last state alone
    assert [len(writes) for writes in slots.write] == [each, 1]
    static.load(prepare_batch([each, each], [9 + each, each]), slots, 4)
    rows = 4 * each
    channels = torch.randn(rows, group.config.conv_dim)
    found = layer(channels, Gates(-torch.rand(rows, 4), torch.rand(rows, 4)), cache, static.metadata(4))
    assert found[: 2 * each].isfinite().all()
    written = {slot for writes in slots.write for slot in writes}
    for slot in range(6):
        for states in (cache.state, cache.conv):
            assert bool((states[slot] == 7.0).all()) is (slot not in written)


def test_what_static_states_refuse() -> None:
    group = StateGroup(capturable("UNIFORM_BATCH"), cuda_graphs=True)
    group.allocate(6)
    static, pool = StaticStates(group, 1, 4), StatePool(6)
    pool.add("a")
    pool.add("b")
    with pytest.raises(BatchError, match="request 1 has a query of 3 tokens: these graphs were captured for uniform"):
        static.load(prepare_batch([1, 3], [3, 3]), pool.step({"a": 1, "b": 3}), 4)
