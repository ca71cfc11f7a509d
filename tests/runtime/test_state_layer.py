"""Groups and layers of states refuse what they cannot run, before anything is written."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attn_select import ConfigError, select  # noqa: E402
from attn_select.layer.state import StateConfig  # noqa: E402
from attn_select.runtime import BatchError, prepare_batch  # noqa: E402
from attn_select.runtime.states import Gates, LinearAttention, StateGroup, StatePool  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CONFIG = StateConfig(
    recurrence="gated_delta_net", num_heads=2, num_v_heads=4, head_size=8, v_head_size=16, dtype="float32"
)
WIDTH = 2 * 2 * 8 + 4 * 16


def group(**changes: Any) -> StateGroup:
    return StateGroup(select(CONFIG.model_copy(update=changes), "cpu"))


def inputs(tokens: int) -> tuple[Any, Any, Any]:
    return torch.randn(tokens, WIDTH), -torch.rand(tokens, 4), torch.rand(tokens, 4)


def test_values_are_added_to_the_output() -> None:
    made = group()
    skip = torch.tensor([0.0, 1.0, -2.0, 0.5])
    plain, skipping, cache = LinearAttention(made), LinearAttention(made, skip=skip), made.allocate(1)
    pool = StatePool(1)
    pool.add("a")
    metadata = made.build(prepare_batch([3], [3]), pool.step({"a": 3}))
    channels, *numbers = inputs(3)
    gates = Gates(*numbers)
    values = channels[:, 2 * 2 * 8 :].view(3, 4, 16)
    expected = plain(channels, gates, cache, metadata) + skip[:, None] * values
    torch.testing.assert_close(skipping(channels, gates, cache, metadata), expected)


def test_a_copied_layer_stays_in_its_group() -> None:
    made = group()
    layer, cache, pool = LinearAttention(made), made.allocate(1), StatePool(1)
    pool.add("a")
    metadata = made.build(prepare_batch([3], [3]), pool.step({"a": 3}))
    channels, *numbers = inputs(3)
    found = copy.deepcopy(layer)(channels, Gates(*numbers), cache, metadata)
    assert torch.equal(found, layer(channels, Gates(*numbers), cache, metadata))


@pytest.mark.parametrize(
    ("position", "wrong", "text"),
    [
        (0, torch.zeros(3, WIDTH + 1), f"channels is torch.float32 (3, {WIDTH + 1}) on cpu: accepted is"),
        (0, torch.zeros(3, WIDTH, device="meta"), "on meta: accepted is"),
        (0, [[0.0]], "channels is a list: accepted is a tensor"),
        (1, torch.zeros(3, 4, device="meta"), "log_decay is on meta: accepted is cpu"),
        (2, [[0.0]], "write_strength is a list: accepted is torch.float32 (3, 4)"),
        (0, torch.zeros(3, WIDTH, dtype=torch.bfloat16), "channels is torch.bfloat16"),
        (0, torch.zeros(2, WIDTH), "channels has 2 rows, and the step has 3 tokens"),
        (1, torch.zeros(3, 4, 8), "log_decay is torch.float32 (3, 4, 8): accepted is torch.float32 (3, 4)"),
        (1, torch.zeros(3, 4, dtype=torch.float64), "log_decay is torch.float64"),
        (2, torch.zeros(3, 2), "write_strength is torch.float32 (3, 2)"),
        (2, None, "write_strength is None with recurrence gated_delta_net"),
    ],
)
def test_wrong_tensors_are_named(position: int, wrong: Any, text: str) -> None:
    made = group()
    layer, cache = LinearAttention(made), made.allocate(1)
    cache.state.fill_(5.0)
    pool = StatePool(1)
    pool.add("a")
    metadata = made.build(prepare_batch([3], [3]), pool.step({"a": 3}))
    given: list[Any] = list(inputs(3))
    given[position] = wrong
    with pytest.raises(BatchError) as caught:
        layer(given[0], Gates(*given[1:]), cache, metadata)
    assert text in caught.value.message
    assert (cache.state == 5).all()


@pytest.mark.parametrize(
    ("pool", "num_tokens", "text"),
    [
        (StatePool(3), {"a": 1}, "slots of 1 requests, of a batch of 2"),
        (StatePool(3), {"a": 1, "b": 3}, "request 1 has 4 tokens in the batch, and 3 by the pool's step"),
        (StatePool(4), {"a": 1, "b": 4}, "the slots are of a pool of 4: the group's layers have 3 slots"),
        (StatePool(3, 2), {"a": 1, "b": 4}, "the slots are of a pool with num_speculative_tokens = 2"),
    ],
)
def test_slots_of_another_step_or_pool_are_named(pool: StatePool, num_tokens: dict[str, int], text: str) -> None:
    made = group()
    made.allocate(3)
    for name in num_tokens:
        pool.add(name)
    with pytest.raises(BatchError) as caught:
        made.build(prepare_batch([1, 4], [1, 4]), pool.step(num_tokens))
    assert text in caught.value.message


def test_the_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("state_layer", ROOT / "examples" / "state_layer.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.main()
    shown = (ROOT / "docs" / "runtime.md").read_text("utf-8")
    assert f"$ python examples/state_layer.py\n{capsys.readouterr().out}```" in shown


def test_the_weights_of_the_convolution_are_checked() -> None:
    with_conv, without = group(conv_kernel_size=4), group()
    with pytest.raises(ConfigError, match="conv_weight is missing with conv_kernel_size = 4"):
        LinearAttention(with_conv)
    with pytest.raises(ConfigError, match=r"conv_weight is given with conv_kernel_size = 0 \(accepted: None\)"):
        LinearAttention(without, torch.zeros(WIDTH, 4))
    with pytest.raises(ConfigError, match=rf"conv_weight has shape \(4, {WIDTH}\)"):
        LinearAttention(with_conv, torch.zeros(4, WIDTH))
    with pytest.raises(ConfigError, match="conv_bias has shape"):
        LinearAttention(with_conv, torch.zeros(WIDTH, 4), torch.zeros(4))
    with pytest.raises(ConfigError, match="skip has shape"):
        LinearAttention(without, skip=torch.zeros(2))
