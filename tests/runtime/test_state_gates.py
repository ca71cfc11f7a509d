"""Gates: numbers, or what they are made of."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attn_select import select  # noqa: E402
from attn_select.layer.state import StateConfig  # noqa: E402
from attn_select.runtime import BatchError, prepare_batch  # noqa: E402
from attn_select.runtime.states import (  # noqa: E402
    Gates,
    LinearAttention,
    RawGates,
    StateBackend,
    StateGroup,
    StateImpl,
    StatePool,
)

CONFIG = StateConfig(recurrence="gated_delta_net", num_heads=2, num_v_heads=4, head_size=8, dtype="float32")


def config(**changes: Any) -> StateConfig:
    return CONFIG.model_copy(update=changes)


def drawn(layer: StateConfig, tokens: int = 3) -> RawGates:
    width = (layer.head_size,) if layer.recurrence == "kda" else ()
    heads = layer.num_v_heads
    return RawGates(
        A_log=torch.randn(heads),
        a=torch.randn(tokens, heads, *width),
        dt_bias=torch.randn(heads, *width),
        b=None if layer.recurrence == "mamba2" else torch.randn(tokens, heads),
    )


@pytest.mark.parametrize("recurrence", ["gated_delta_net", "kda", "mamba2"])
def test_raw_gates_are_activated_as_the_papers_say(recurrence: str) -> None:
    layer = config(recurrence=recurrence, num_heads=4)
    raw = drawn(layer)
    gates = Gates(raw=raw)
    gates.check(layer, 3, torch.device("cpu"))
    for token in range(3):
        for head in range(4):
            rate, row, bias = math.exp(raw.A_log[head]), raw.a[token, head], raw.dt_bias[head]
            steps = [math.log1p(math.exp(x)) for x in (row + bias).reshape(-1).tolist()]
            wanted = torch.tensor([-rate * step for step in steps])
            torch.testing.assert_close(gates.log_decay[token, head].reshape(-1), wanted)
            strength = steps[0] if raw.b is None else 1 / (1 + math.exp(-raw.b[token, head]))
            assert gates.write_strength is not None
            assert float(gates.write_strength[token, head]) == pytest.approx(strength, rel=1e-5)


def test_a_layer_computes_the_same_of_either() -> None:
    group = StateGroup(select(CONFIG, "cpu"))
    layer, raw, channels = LinearAttention(group), drawn(CONFIG, 5), torch.randn(5, CONFIG.width)
    numbers = Gates(raw=raw)
    outputs = []
    for gates in (Gates(raw=raw), Gates(numbers.log_decay, numbers.write_strength)):
        pool = StatePool(2)
        pool.add("long")
        pool.add("short")
        cache, lens = group.allocate(2), {"short": 1, "long": 4}
        metadata = group.build(prepare_batch([1, 4], [1, 4]), pool.step(lens))
        outputs.append(layer(channels, gates, cache, metadata))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    ("recurrence", "changes", "text"),
    [
        ("gated_delta_net", {"a": torch.zeros(3, 2)}, "a is torch.float32 (3, 2): accepted is torch.float32 (3, 4)"),
        ("gated_delta_net", {"a": torch.zeros(3, 4).half()}, "a is torch.float16 (3, 4): accepted is torch.float32"),
        ("gated_delta_net", {"b": None}, "b is None with recurrence gated_delta_net (accepted: torch.float32 (3, 4))"),
        ("mamba2", {"b": torch.zeros(3, 4)}, "b is a tensor with recurrence mamba2 (accepted: None)"),
        ("kda", {"dt_bias": torch.zeros(4)}, "dt_bias is torch.float32 (4,): accepted is torch.float32 (4, 8)"),
        ("lightning", {}, "raw gates with recurrence lightning: accepted is log_decay"),
    ],
)
def test_wrong_raw_gates_are_named(recurrence: str, changes: dict[str, Any], text: str) -> None:
    layer = config(recurrence=recurrence, num_heads=4)
    raw = drawn(layer)
    given = {name: changes.get(name, getattr(raw, name)) for name in ("A_log", "a", "dt_bias")}
    with pytest.raises(BatchError) as caught:
        Gates(raw=RawGates(**given, b=changes.get("b", raw.b))).check(layer, 3, torch.device("cpu"))
    assert text in caught.value.message


def test_gates_are_numbers_or_raw() -> None:
    with pytest.raises(BatchError, match="log_decay and raw are None: accepted are log_decay and write_strength, or"):
        Gates()
    with pytest.raises(BatchError, match="numbers are given beside raw"):
        Gates(torch.zeros(3, 4), raw=drawn(CONFIG))


class Activating(StateImpl):
    """Its kernel would activate the gates of decodes."""

    raw_gates = ("decode",)

    def forward(self, *arguments: Any) -> None:
        raise AssertionError("not to be reached")


class ActivatingBackend(StateBackend):
    impl_cls = Activating
    reads_zeros = True


def test_a_kernel_that_activates_gates_refuses_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    selection = select(CONFIG, "cpu")
    spec = selection.backends["decode"]
    assert spec is not None
    monkeypatch.setattr(type(spec), "get_class", lambda _: ActivatingBackend)
    group = StateGroup(selection)
    layer, cache, pool = LinearAttention(group), group.allocate(2), StatePool(2)
    pool.add("a")
    metadata = group.build(prepare_batch([1], [1]), pool.step({"a": 1}))
    gates = Gates(-torch.rand(1, 4), torch.rand(1, 4))
    with pytest.raises(
        BatchError, match="gates are numbers, and TORCH_STATE activates them itself in decode: accepted"
    ):
        layer(torch.randn(1, CONFIG.width), gates, cache, metadata)
