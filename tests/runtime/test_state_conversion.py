"""States of one side become the other's, and the layer goes on with them as with its own."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("attn_select_torch")

from attn_select import ConfigError  # noqa: E402
from attn_select.layer.cache_format import StateFormat  # noqa: E402
from attn_select.layer.state import StateConfig  # noqa: E402
from attn_select.runtime import prepare_batch  # noqa: E402
from attn_select.runtime.states import Gates, LinearAttention, StateCache, StateGroup, StatePool, convert_states  # noqa: E402
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
)


def test_a_request_goes_on_on_the_other_side() -> None:
    """Its prefill ran where states lie by key, its decodes run where they lie by value."""
    weight = torch.randn(CONFIG.conv_dim, 4)
    channels, decay, strength = torch.randn(9, CONFIG.width), -torch.rand(9, 4), torch.rand(9, 4)

    def side(layout: str) -> tuple[StateGroup, LinearAttention, StateCache, StatePool]:
        group, pool = StateGroup(selection_of(TORCH_STATE, CONFIG, "cpu", layout=layout)), StatePool(3)
        pool.add("a")
        return group, LinearAttention(group, weight), group.allocate(3), pool

    def run(made: Any, first: int, last: int) -> Any:
        group, layer, cache, pool = made
        metadata = group.build(prepare_batch([last - first], [last]), pool.step({"a": last - first}))
        rows = slice(first, last)
        return layer(channels[rows], Gates(decay[rows], strength[rows]), cache, metadata)

    whole, prefill, decode = side("STATE_KV"), side("STATE_KV"), side("STATE_VK")
    expected = run(whole, 0, 9)
    run(prefill, 0, 8)
    (slot,) = prefill[3].slots_of("a")
    sent = StateCache(prefill[2].state[slot : slot + 1], prefill[2].conv[slot : slot + 1])
    received = convert_states(sent, StateFormat(CONFIG, "STATE_KV"), StateFormat(CONFIG, "STATE_VK"))
    slots = decode[3].step({"a": 8})
    decode[3].commit(slots)
    for kept, given in ((decode[2].state, received.state), (decode[2].conv, received.conv)):
        kept[slots.write[0]] = given
    torch.testing.assert_close(run(decode, 8, 9), expected[8:])


@pytest.mark.parametrize("layouts", [("STATE_KV", "STATE_KV"), ("STATE_KV", "STATE_VK"), ("STATE_VK", "STATE_KV")])
@pytest.mark.parametrize("changes", [{}, {"state_dtype": "bfloat16"}, {"dtype": "float16"}, {"conv_kernel_size": 0}])
def test_numbers_are_kept_or_rounded_once(layouts: tuple[str, str], changes: dict[str, Any]) -> None:
    there = CONFIG.model_copy(update=changes)
    here = CONFIG.model_copy(update={"conv_kernel_size": there.conv_kernel_size})
    shape = (5, 4, 8, 16) if layouts[0] == "STATE_KV" else (5, 4, 16, 8)
    window = torch.randn(5, 3, here.conv_dim) if here.conv_kernel_size else None
    states = StateCache(torch.randn(shape), window)
    made = convert_states(states, StateFormat(here, layouts[0]), StateFormat(there, layouts[1]))
    wanted = states.state if layouts[0] == layouts[1] else states.state.mT
    assert made.state.is_contiguous()
    assert torch.equal(made.state, wanted.to(made.state.dtype))
    assert str(made.state.dtype) == f"torch.{there.state_dtype}"
    assert (made.conv is None) is (window is None)
    if window is not None:
        assert made.conv is not None
        assert torch.equal(made.conv, window.to(made.conv.dtype))
    made.state.zero_()
    assert states.state.any()  # a copy


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (
            StateCache(torch.zeros(2, 4, 16, 8), torch.zeros(2, 3, 96)),
            r"state is torch.float32 \(num_slots, 4, 16",
        ),
        (StateCache(torch.zeros(2, 4, 8, 16).half(), torch.zeros(2, 3, 96)), "states.state is torch.float16"),
        (StateCache(torch.zeros(2, 4, 8, 16), None), "states.conv is None: the source stores torch.float32"),
        (
            StateCache(torch.zeros(2, 4, 8, 16), torch.zeros(2, 4, 96)),
            r"conv is torch.float32 \(num_slots, 4, 96",
        ),
    ],
)
def test_states_of_another_format_are_named(states: StateCache, text: str) -> None:
    own = StateFormat(CONFIG, "STATE_KV")
    with pytest.raises(ConfigError, match=text):
        convert_states(states, own, own)
