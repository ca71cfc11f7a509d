"""The demonstration runs real attention and notices when it is wrong."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from attn_select.config import AttentionConfig
from attn_select.errors import ConfigError, ModelError
from attn_select_torch import demo

GQA: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_size": 32}
MLA: dict[str, Any] = {
    "num_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}

needs_torch = pytest.mark.usefixtures("torch")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="the demonstration runs torch, which is not installed")


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("asked", [GQA, MLA, GQA | {"sliding_window": 5}, GQA | {"v_head_size": 40}])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 50])
def test_errors_stay_within_bound(asked: dict[str, Any], dtype: str, num_tokens: int) -> None:
    ran = demo.run_layer(AttentionConfig(**asked, dtype=dtype), num_tokens=num_tokens, seed=num_tokens)
    assert ran["ok"]
    assert 0 < ran["max_abs_error"] <= ran["error_bound"] < 0.1
    assert ran["tokens"] == num_tokens + 1


def test_cache_bytes(torch: Any) -> None:
    ran = demo.run_layer(AttentionConfig(**GQA), num_tokens=16, seed=0)
    # K and V, twice the 2 blocks of 16 tokens needed, 2 KV heads of 32 elements, 2 bytes each.
    assert ran["cache_bytes"] == 2 * 4 * 16 * 2 * 32 * 2


def test_a_wrong_kernel_is_noticed(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.nn.functional.scaled_dot_product_attention

    def forgets_the_mask(*tensors: Any, attn_mask: Any, **rest: Any) -> Any:
        return right(*tensors, attn_mask=torch.ones_like(attn_mask), **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", forgets_the_mask)
    assert not demo.run_layer(AttentionConfig(**GQA), num_tokens=20, seed=0)["ok"]


def test_reference_of_one_key_is_its_value(torch: Any) -> None:
    q, k, v = torch.ones(3, 2, 4), torch.ones(3, 1, 4), torch.arange(3.0).reshape(3, 1, 1)
    # Equal scores: each query averages the values that it sees.
    assert demo.reference(torch, q, k, v, None)[:, 0, 0].tolist() == [0.0, 0.5, 1.0]
    assert demo.reference(torch, q, k, v, 1)[:, 1, 0].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "asked",
    [
        {"alibi": True},
        {"sinks": True},
        {"logits_soft_cap": 30.0},
        {"attn_type": "encoder_only"},
        {"kv_cache_dtype": "fp8"},
        {"mm_prefix": True},
    ],
)
def test_other_layers_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"not {next(iter(asked))}"):
        demo.run_layer(AttentionConfig(**(GQA | asked)), num_tokens=4, seed=0)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 tokens"):
        demo.run_layer(AttentionConfig(**GQA), num_tokens=0, seed=0)


def test_says_that_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="needs torch") as caught:
        demo.run_layer(AttentionConfig(**GQA), num_tokens=4, seed=0)
    assert caught.value.hint == "pip install torch"


class Models:
    """Stands in for ``attn_select.models``: the demonstration wants one config of a named model."""

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config

    def load(self, name: str) -> Any:
        if name != "small":
            raise ModelError(f"unknown model {name!r}")
        kinds = SimpleNamespace(kinds=[SimpleNamespace(config=self.config)])
        return SimpleNamespace(layer_kinds=lambda **options: kinds)


@needs_torch
def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "attn_select.models", Models(AttentionConfig(**GQA)))
    assert demo.main(["--model", "small", "--tokens", "20"]) == 0
    printed = capsys.readouterr().out
    assert "6 query and 2 KV heads" in printed
    assert "within the bound" in printed
    monkeypatch.setitem(demo.SLACK, "bfloat16", 0)
    assert demo.main(["--model", "small", "--tokens", "20"]) == 1
    assert "ABOVE" in capsys.readouterr().out


def test_command_line_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "attn_select.models", Models(AttentionConfig(**GQA, alibi=True)))
    assert demo.main(["--model", "large"]) == 2
    assert "unknown model" in capsys.readouterr().err
    assert demo.main(["--model", "small"]) == 2
    assert "not alibi" in capsys.readouterr().err
