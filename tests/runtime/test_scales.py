"""Scales on device and host."""

from __future__ import annotations

import pytest
import torch

from attn_select.errors import ConfigError
from attn_select.runtime import Scales


def test_nothing_given_is_1() -> None:
    scales = Scales.make("cpu")
    assert (float(scales.q), float(scales.k), float(scales.v)) == (1, 1, 1)
    assert (scales.q_float, scales.k_float, scales.v_float) == (1, 1, 1)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_one_scale_per_kv_head(heads: int) -> None:
    k = torch.arange(1.0, heads + 1)
    scales = Scales.make("cpu", torch.tensor([0.25]), k, 7.0, num_kv_heads=heads)
    assert scales.q.shape == ()
    assert torch.equal(scales.k, k)
    assert scales.v.tolist() == [7.0] * heads
    assert scales.v.is_contiguous()
    assert (scales.q_float, scales.k_float, scales.v_float) == (0.25, heads, 7.0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e-60])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_numbers_that_are_no_scales(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name}_scale = .*: accepted are finite numbers above 0") as caught:
        Scales.make("cpu", **{name: value})  # type: ignore[arg-type]
    assert caught.value.fields == (f"{name}_scale",)


@pytest.mark.parametrize(
    ("name", "shape", "heads", "accepted"),
    [
        ("q", (2,), 2, r"\(\) or \(1,\)$"),
        ("k", (2,), 0, r"\(\) or \(1,\)$"),
        ("k", (3,), 2, r"\(\) or \(1,\) or \(2,\)$"),
        ("v", (2, 1), 2, r"\(\) or \(1,\) or \(2,\)$"),
        ("v", (0,), 2, r"\(\) or \(1,\) or \(2,\)$"),
    ],
)
def test_wrong_shapes(name: str, shape: tuple[int, ...], heads: int, accepted: str) -> None:
    seen = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=rf"{name}_scale of shape {seen}: accepted is {accepted}"):
        Scales.make("cpu", num_kv_heads=heads, **{name: torch.ones(shape)})  # type: ignore[arg-type]
