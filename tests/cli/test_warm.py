"""``attn-select warm``: every kind of layers is run once here, and what was done is said."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

BOUNDS = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "128")


@pytest.mark.parametrize(
    "model", ["gpt-oss-20b", "deepseek-v2-lite", "bloom", "whisper-large-v3", "qwen3-next-80b-a3b"]
)
def test_every_kind_of_layers_is_warmed(run: Any, model: str) -> None:
    explained = run("explain", "--model", model, "--json").json["layers"]
    result = run("warm", "--model", model, *BOUNDS, "--json")
    assert result.code == 0
    layers = result.json["layers"]
    assert [(one["kind"], one["count"], one["selected"]) for one in layers] == [
        (one["kind"], one["count"], one["selected"]) for one in explained
    ]
    assert all(one["steps"] > 0 and one["seconds"] > 0 for one in layers)


def test_one_kind_as_a_table(run: Any) -> None:
    result = run("warm", "--model", "gpt-oss-20b", "--layer", "sliding_attention", *BOUNDS)
    assert result.code == 0
    assert "layers                  backends    kernels compiled  steps  seconds" in result.out
    assert "sliding_attention × 12" in result.out
    assert "full_attention" not in result.out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--layer", "ful_attention"), 2, "unknown layer kind 'ful_attention'"),
        (("--backend", "FLASH_ATTN"), 1, "no backend for prefill and decode"),
        (("--max-num-seqs", "0"), 2, "0 is not in the range x>=1"),
    ],
)
def test_wrong_use_is_named(run: Any, arguments: tuple[str, ...], code: int, said: str) -> None:
    result = run("warm", "--model", "llama-3-8b", *arguments)
    assert result.code == code
    assert said in result.err
