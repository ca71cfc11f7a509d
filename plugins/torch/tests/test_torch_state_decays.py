"""Prefills are as right as decodes where tokens forget much, or everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_select.layer.state import RECURRENCES, RecurrenceName, StateConfig
from attn_select.reference.oracle_state import state_reference
from attn_select.runtime import prepare_batch
from attn_select.runtime.states import Gates, LinearAttention, StateGroup, StatePool
from attn_select.testing.toolkit import selection_of
from attn_select_torch.facts.torch_state import TORCH_STATE

DECAYS = st.one_of(
    st.sampled_from([0.0, -0.01, -1.0, -10.0, -100.0, -1e3, -1e4, -1e6, -1e30, -torch.inf]),
    st.floats(min_value=-200.0, max_value=0.0, width=32),
)


def served(config: StateConfig, layout: str, lens: list[int], channels: Any, gates: Gates) -> tuple[Any, Any]:
    """Return the outputs of one request whose tokens come in such steps, and its state behind them."""
    group = StateGroup(selection_of(TORCH_STATE, config, "cpu", layout=layout))
    layer, cache, pool = LinearAttention(group), group.allocate(2), StatePool(2)
    cache.state.fill_(torch.nan)
    pool.add("a")
    outputs, seen = [], 0
    for tokens in lens:
        slots = pool.step({"a": tokens})
        metadata = group.build(prepare_batch([tokens], [seen + tokens]), slots)
        rows = slice(seen, seen + tokens)
        outputs.append(layer(channels[rows], gates.rows(rows), cache, metadata))
        seen += tokens
    state = cache.state[slots.write[0][-1]]
    return torch.cat(outputs), state.mT if layout == "STATE_VK" else state


@settings(max_examples=60, deadline=None)
@given(data=st.data(), recurrence=st.sampled_from(RECURRENCES), layout=st.sampled_from(["STATE_KV", "STATE_VK"]))
def test_any_decays_give_what_float64_gives(data: st.DataObject, recurrence: RecurrenceName, layout: str) -> None:
    config = StateConfig(recurrence=recurrence, num_heads=2, head_size=8, v_head_size=8, dtype="float32", chunk_size=16)
    lens = data.draw(st.lists(st.sampled_from([1, 2, 17, 40]), min_size=1, max_size=3))
    count, channel = sum(lens), config.rule.decay == "channel"
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    log_decay = -torch.rand(count, 2, *([8] if channel else []), generator=draw)
    for token in data.draw(st.lists(st.integers(0, count - 1), max_size=6)):
        log_decay[token].view(-1)[data.draw(st.integers(0, 1)) :: data.draw(st.integers(1, 2))] = data.draw(DECAYS)
    channels = torch.randn(count, config.width, generator=draw)
    strength = torch.rand(count, 2, generator=draw) if config.rule.writes else None
    found, state = served(config, layout, lens, channels, Gates(log_decay, strength))
    split = dict(zip(config.rule.channels, channels.view(count, 3, 2, 8).unbind(1), strict=True))
    wanted, states = state_reference(config, split["query"], split["key"], split["value"], log_decay, strength, None)
    for seen, right in ((found, wanted), (state, states[-1])):
        assert seen.isfinite().all()
        assert float((seen - right).norm()) <= 1e-5 * float(wanted.norm() + states[-1].norm())


@pytest.mark.parametrize("recurrence", RECURRENCES)
@pytest.mark.parametrize("large", [-1e2, -1e4, -1e6, -torch.inf])
def test_a_chunk_goes_on_behind_a_token_that_forgets(recurrence: RecurrenceName, large: float) -> None:
    config = StateConfig(recurrence=recurrence, num_heads=1, head_size=8, dtype="float32")
    log_decay = torch.full((16, 1, 8) if config.rule.decay == "channel" else (16, 1), -0.1)
    log_decay[3] = large
    channels = torch.randn(16, config.width)
    gates = Gates(log_decay, torch.rand(16, 1) if config.rule.writes else None)
    decodes, prefill = (served(config, "STATE_KV", lens, channels, gates)[0] for lens in ([1] * 16, [16]))
    torch.testing.assert_close(prefill, decodes, atol=1e-5, rtol=1e-5)
