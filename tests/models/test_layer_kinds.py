"""Flags over the model, tensor parallelism, and the dtype on each device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_select.errors import ConfigError
from attn_select.layer.models import LayerKinds, layer_kinds, load
from attn_select.machine.device import CPU, Device

Kinds = Callable[..., LayerKinds]
H100, A100, T4 = (Device(f"sm{a}{b}", (a, b)) for a, b in ((9, 0), (8, 0), (7, 5)))
V100, M60 = Device("sm70", (7, 0)), Device("sm52", (5, 2))


def summary(found: LayerKinds, *fields: str) -> list[tuple[Any, ...]]:
    return [(kind.kind, kind.count, *(getattr(kind.config, field) for field in fields)) for kind in found.kinds]


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("llama-3-8b", 1, (32, 8)),
        ("llama-3-8b", 4, (8, 2)),
        ("llama-3-8b", 16, (2, 1)),  # eight KV heads on sixteen ranks: each twice
        ("falcon-7b", 71, (1, 1)),
        ("qwen2.5-7b", 4, (7, 1)),
        ("deepseek-v3", 8, (16, 1)),
        ("whisper-large-v3", 5, (4, 4)),
    ],
)
def test_tensor_parallelism(name: str, ranks: int, expected: tuple[int, int]) -> None:
    found = layer_kinds(load(name), tensor_parallel_size=ranks)
    assert {(kind.config.num_heads, kind.config.num_kv_heads) for kind in found.kinds} == {expected}
    alone = layer_kinds(load(name))
    assert summary(found, "head_size") == summary(alone, "head_size")


@pytest.mark.parametrize(
    ("name", "ranks", "said", "hint"),
    [
        ("llama-3-8b", 3, "tensor_parallel_size = 3 does not divide num_heads = 32", "valid: 1, 2, 4, 8, 16, 32"),
        ("qwen2.5-7b", 7, "neither divides nor is a multiple of num_kv_heads = 4", "valid: 1, 2, 4, 28"),
    ],
)
def test_heads_that_do_not_divide(name: str, ranks: int, said: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layer_kinds(load(name), tensor_parallel_size=ranks)
    assert said in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(hint)
    assert "tensor_parallel_size" in caught.value.fields


@pytest.mark.parametrize(
    ("name", "device", "dtype", "said"),
    [
        ("llama-3-8b", None, "bfloat16", None),
        ("llama-3-8b", CPU, "bfloat16", None),
        ("llama-3-8b", T4, "float16", "sm75 (7.5) has no bfloat16: float16 instead of the model's bfloat16"),
        ("llama-3-8b", M60, "float32", "has no bfloat16: float32"),
        ("phi-2", T4, "float16", None),
        ("gemma-2-27b", T4, "float32", "has no bfloat16: float32 instead"),
        ("gemma-2-9b", A100, "bfloat16", "float32 weights are computed in bfloat16"),
        ("bart-large", T4, "float16", "float32 weights are computed in float16"),
        ("bert-base", A100, "float16", "float32 weights are computed in float16"),
        ("bert-base", M60, "float32", None),
    ],
)
def test_dtype(name: str, device: Device | None, dtype: str, said: str | None) -> None:
    found = layer_kinds(load(name), device=device)
    assert {kind.config.dtype for kind in found.kinds} == {dtype}
    about_dtype = [warning for warning in found.warnings if "float" in warning]
    assert len(about_dtype) == (said is not None)
    assert said is None or said in about_dtype[0]


@pytest.mark.parametrize(
    ("config", "dtype", "said"),
    [
        ({"torch_dtype": "float16"}, "float16", None),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16", None),
        ({}, "bfloat16", "the config states no dtype"),
        ({"torch_dtype": "float8_e4m3fn"}, "bfloat16", "'float8_e4m3fn' is no compute dtype"),
        ({"torch_dtype": 16}, "bfloat16", "dtype 16 is no compute dtype"),
        ({"model_type": "glm4", "torch_dtype": "float16"}, "bfloat16", "glm4 is unstable in float16"),
        ({"model_type": "llava", "text_config": {"model_type": "llama", "torch_dtype": "float16"}}, "float16", None),
        (
            {"model_type": "llava", "dtype": "float16", "text_config": {"model_type": "llama", "dtype": "bfloat16"}},
            "float16",
            None,
        ),
    ],
)
def test_where_a_config_states_its_dtype(kinds: Kinds, config: dict[str, Any], dtype: str, said: str | None) -> None:
    found = kinds({"model_type": "llama", **config})
    assert {kind.config.dtype for kind in found.kinds} == {dtype}
    assert said is None or any(said in warning for warning in found.warnings)


def test_flags_beat_the_model_in_every_kind() -> None:
    overrides = {"kv_cache_dtype": "fp8", "block_size": 64, "head_size": 96, "num_heads": 48, "num_kv_heads": 12}
    found = layer_kinds(load("gpt-oss-20b"), tensor_parallel_size=4, overrides=overrides)
    fields = ("num_heads", "num_kv_heads", "head_size", "kv_cache_dtype", "block_size", "sliding_window", "sinks")
    assert summary(found, *fields) == [
        ("sliding_attention", 12, 12, 3, 96, "fp8_e4m3", 64, 128, True),
        ("full_attention", 12, 12, 3, 96, "fp8_e4m3", 64, None, True),
    ]


def test_kinds_that_flags_make_equal_are_one() -> None:
    found = layer_kinds(load("gpt-oss-20b"), overrides={"sliding_window": 512, "sinks": False})
    assert summary(found, "sliding_window", "sinks") == [("sliding_attention", 24, 512, False)]
    found = layer_kinds(load("gpt-oss-20b"), overrides={"sliding_window": 0})
    assert summary(found, "sliding_window", "sinks") == [("full_attention", 24, None, True)]
    found = layer_kinds(load("gemma-2-9b"), overrides={"logits_soft_cap": 0})
    assert {kind.config.logits_soft_cap for kind in found.kinds} == {None}
    found = layer_kinds(load("deepseek-v3.2"), overrides={"sparse_top_k": 0})
    assert summary(found) == [("mla", 61)]
    found = layer_kinds(load("deepseek-v3"), overrides={"sparse_top_k": 2048})
    assert summary(found, "sparse_top_k") == [("sparse_mla", 61, 2048)]


def test_flags_that_not_every_kind_takes() -> None:
    """An encoder has no cache, and a window is about a token's own past."""
    overrides = {"kv_cache_dtype": "fp8", "num_speculative_tokens": 3, "sliding_window": 100, "block_size": 32}
    found = layer_kinds(load("whisper-large-v3"), overrides=overrides)
    fields = ("kv_cache_dtype", "num_speculative_tokens", "sliding_window", "block_size")
    assert summary(found, *fields) == [
        ("encoder", 32, "auto", 0, None, None),
        ("sliding_attention", 32, "fp8_e4m3", 3, 100, 32),
        ("cross_attention", 32, "fp8_e4m3", 3, None, 32),
    ]
    assert found.warnings == ()


def test_mla_keeps_the_dims_of_a_model_that_has_it() -> None:
    found = layer_kinds(load("minicpm3-4b"), overrides={"mla": True})
    assert (found.configs, found.unused) == (layer_kinds(load("minicpm3-4b")).configs, ("mla",))
    by_hand = layer_kinds(load("llama-2-7b"), overrides={"mla": True, "v_head_dim": 64})
    (config,) = by_hand.attention_configs
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim, by_hand.unused) == (512, 64, 64, ())


@pytest.mark.parametrize(
    ("name", "overrides", "field"),
    [
        ("bert-base", {"non_causal": True}, "non_causal"),
        ("llama-3-8b", {"sparse_top_k": 64}, "sparse_top_k"),
        ("llama-3-8b", {"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype"),
        ("llama-3-8b", {"num_kv_heads": 5}, "num_kv_heads"),
        ("llama-3-8b", {"num_heads": "32"}, "num_heads"),
        ("llama-3-8b", {"sliding_window": -4}, "sliding_window"),
        ("llama-3-8b", {"attn_type": "sideways"}, "attn_type"),
        ("deepseek-v3", {"num_kv_heads": 8}, "num_kv_heads"),
        ("deepseek-v3", {"v_head_size": 128}, "v_head_size"),
    ],
)
def test_flags_that_contradict_the_model(name: str, overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layer_kinds(load(name), overrides=overrides)
    assert field in caught.value.fields


def test_one_kv_head_per_query_head_stays_so() -> None:
    found = layer_kinds(load("llama-2-7b"), overrides={"num_heads": 40})
    assert summary(found, "num_heads", "num_kv_heads") == [("full_attention", 32, 40, 40)]
    found = layer_kinds(load("llama-3-8b"), overrides={"num_heads": 64})
    assert summary(found, "num_heads", "num_kv_heads") == [("full_attention", 32, 64, 8)]


def test_mla_dims_by_flags() -> None:
    dims = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    found = layer_kinds(load("deepseek-v3"), overrides={"kv_lora_rank": 256})
    assert summary(found, "head_size", "v_head_dim") == [("mla", 61, 320, 128)]
    found = layer_kinds(load("llama-3-8b"), overrides=dims, tensor_parallel_size=8)
    assert summary(found, "num_heads", "num_kv_heads", "head_size") == [("mla", 32, 4, 1, 288)]


def test_a_layer_by_flags_alone() -> None:
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
    found = layer_kinds(None, overrides=shape, tensor_parallel_size=4, device=T4)
    assert summary(found, "num_heads", "num_kv_heads", "head_size", "dtype") == [
        ("full_attention", 1, 8, 2, 128, "float16")
    ]
    assert found.warnings == ()
    assert summary(layer_kinds(None, overrides={"num_heads": 4, "head_size": 64}), "num_kv_heads") == [
        ("full_attention", 1, 4)
    ]
    dims = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    found = layer_kinds(None, overrides={"num_heads": 128, **dims}, tensor_parallel_size=8)
    assert summary(found, "num_heads", "num_kv_heads", "head_size") == [("mla", 1, 16, 1, 576)]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({}, "num_heads"),
        ({"num_heads": 8}, "head_size"),
        ({"head_size": 8}, "num_heads"),
        ({"num_heads": 8, "head_size": 64, "attn_type": "encoder", "kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ],
)
def test_a_layer_by_flags_that_do_not_do(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layer_kinds(None, overrides=overrides)
    assert field in caught.value.fields


def test_a_class_default_that_shapes_attention_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32}')
    kinds = layer_kinds(load(str(path)))
    assert kinds.kinds[0].config.sliding_window == 4096
    assert any("class defaults of mistral" in w and "sliding_window = 4096" in w for w in kinds.warnings)
