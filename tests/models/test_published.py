"""Configs as published: every layer kind with its count, looked up in the model's own card and code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_select.models import LayerKinds, load

MLA_512 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_kv_heads": 1, "head_size": 576}
SINKS = {"num_heads": 64, "num_kv_heads": 8, "head_size": 64, "sinks": True}
GEMMA2 = {"num_heads": 16, "num_kv_heads": 8, "head_size": 256, "logits_soft_cap": 50.0}
GEMMA3 = {"num_heads": 32, "num_kv_heads": 16, "head_size": 128, "mm_prefix": True}
SCOUT = {"num_heads": 40, "num_kv_heads": 8, "head_size": 128, "sliding_window": None}
MODERN = {"num_heads": 12, "num_kv_heads": 12, "head_size": 64, "attn_type": "encoder_only", "dtype": "float16"}
EXAONE = {"num_heads": 40, "num_kv_heads": 8, "head_size": 128}


def heads(q: int, kv: int, size: int, **more: Any) -> dict[str, Any]:
    return {"num_heads": q, "num_kv_heads": kv, "head_size": size, **more}


def pair(q: int, size: int, count: int, dtype: str) -> list[tuple[str, int, dict[str, Any]]]:
    same = heads(q, q, size, dtype=dtype)
    return [
        ("encoder", count, {**same, "attn_type": "encoder"}),
        ("full_attention", count, {**same, "attn_type": "decoder"}),
        ("cross_attention", count, {**same, "attn_type": "encoder_decoder"}),
    ]


EXPECTED: dict[str, list[tuple[str, int, dict[str, Any]]]] = {
    "bart-large-cnn": pair(16, 64, 12, "bfloat16"),
    "bert-base-uncased": [("encoder_only", 12, heads(12, 12, 64, attn_type="encoder_only", dtype="float16"))],
    "bloom-3b": [("full_attention", 30, heads(32, 32, 80, alibi=True))],
    "deepseek-r1": [("mla", 61, {"num_heads": 128, "qk_nope_head_dim": 128, "v_head_dim": 128, **MLA_512})],
    "deepseek-v2-lite": [("mla", 27, {"num_heads": 16, "qk_nope_head_dim": 128, "v_head_dim": 128, **MLA_512})],
    "devstral-small-2-24b": [("full_attention", 40, heads(32, 8, 128, mm_prefix=False))],
    "e5-mistral-7b": [("sliding_attention", 32, heads(32, 8, 128, sliding_window=4096, dtype="float16"))],
    "exaone-4.0-32b": [
        ("sliding_attention", 48, {**EXAONE, "sliding_window": 4096}),
        ("full_attention", 16, {**EXAONE, "sliding_window": None}),
    ],
    "gemma-2-9b": [
        ("sliding_attention", 21, {**GEMMA2, "sliding_window": 4096}),
        ("full_attention", 21, {**GEMMA2, "sliding_window": None}),
    ],
    "gemma-3-27b-it": [
        ("sliding_attention", 52, {**GEMMA3, "sliding_window": 1024}),
        ("full_attention", 10, {**GEMMA3, "sliding_window": None}),
    ],
    "glm-5-fp8": [
        (
            "sparse_mla",
            78,
            {"num_heads": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "sparse_top_k": 2048, **MLA_512},
        )
    ],
    "gpt-oss-120b": [
        ("sliding_attention", 18, {**SINKS, "sliding_window": 128}),
        ("full_attention", 18, {**SINKS, "sliding_window": None}),
    ],
    "kimi-k2-instruct": [("mla", 61, {"num_heads": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, **MLA_512})],
    "llama-3.1-8b-instruct": [("full_attention", 32, heads(32, 8, 128, dtype="bfloat16"))],
    "llama-4-scout-17b-16e": [("chunked_attention", 36, SCOUT), ("full_attention", 12, SCOUT)],
    "llava-v1.5-7b": [("full_attention", 32, heads(32, 32, 128, dtype="float16"))],
    "minicpm3-4b": [("mla", 62, {"num_heads": 40, "head_size": 288, "qk_nope_head_dim": 64, "v_head_dim": 64})],
    "modernbert-base-classifier": [
        ("encoder_only", 8, {**MODERN, "sliding_window": None}),
        ("encoder_only_sliding", 14, {**MODERN, "sliding_window": 65}),
    ],
    "phi-2": [("full_attention", 32, heads(32, 32, 80, dtype="float16"))],
    "phi-4": [("full_attention", 40, heads(40, 10, 128, sliding_window=None))],
    "qwen2.5-7b-instruct": [("full_attention", 28, heads(28, 4, 128, sliding_window=None))],
    "qwen2.5-vl-7b": [("full_attention", 28, heads(28, 4, 128, sliding_window=None))],
    "qwen3-32b": [("full_attention", 64, heads(64, 8, 128, sliding_window=None))],
    "qwen3-next-80b-a3b-thinking": [("full_attention", 12, heads(16, 2, 256))],
    "qwen3.5-35b-a3b": [("full_attention", 10, heads(16, 2, 256))],
    "t5-small": pair(8, 64, 6, "bfloat16"),
    "whisper-large-v3": pair(20, 64, 32, "float16"),
}
SAID = {
    "devstral-small-2-24b": ["vision_config"],
    "gemma-2-9b": ["float32 weights"],
    "gemma-3-27b-it": ["vision_config", "image tokens attend to each other in both directions (--no-mm-prefix"],
    "llama-4-scout-17b-16e": ["vision_config", "36 layers attend inside chunks of 8192 tokens"],
    "llava-v1.5-7b": ["mm_vision_tower"],
    "qwen2.5-vl-7b": ["vision_config"],
    "qwen3-next-80b-a3b-thinking": ["36 of 48 layers are left out"],
    "qwen3.5-35b-a3b": ["vision_config", "30 of 40 layers are left out"],
    "t5-small": ["relative position biases", "float32 weights"],
    "bart-large-cnn": ["float32 weights"],
    "bert-base-uncased": ["float32 weights"],
    "bloom-3b": ["float32 weights"],
    "modernbert-base-classifier": ["float32 weights"],
}


def seen(found: LayerKinds, expected: list[tuple[str, int, dict[str, Any]]]) -> list[tuple[str, int, dict[str, Any]]]:
    """Return what was found, as far as it is expected."""
    return [
        (kind.kind, kind.count, {field: getattr(kind.config, field) for field in fields})
        for kind, (_, _, fields) in zip(found.kinds, expected, strict=True)
    ]


def test_every_layer_kind(published: Path) -> None:
    expected = EXPECTED[published.name]
    found = load(str(published)).layer_kinds()
    assert seen(found, expected) == expected


def test_what_is_said(published: Path) -> None:
    warnings = load(str(published)).layer_kinds().warnings
    said = SAID.get(published.name, [])
    assert len(warnings) == len(said)
    assert all(text in warning for text, warning in zip(said, warnings, strict=True))


def test_source(published: Path) -> None:
    source = load(str(published))
    assert source.name == str(published)
    assert source.source == str(published / "config.json")
    assert source.model_type == source.raw["model_type"]
    assert source.architecture == source.raw["architectures"][0]
    assert load(str(published / "config.json")).raw == source.raw


def test_origin(published: Path, origins: dict[str, dict[str, Any]]) -> None:
    """Each file has its origin written down, and is as long as it was there."""
    origin = origins[published.name]
    assert len((published / "config.json").read_text(encoding="utf-8")) == origin["characters"]
    assert all(origin[key] for key in ("model", "repository", "path"))
    assert len(origin["commit"]) == 40


def test_tables_are_complete(configs: Path, origins: dict[str, dict[str, Any]]) -> None:
    names = {folder.name for folder in configs.iterdir() if folder.is_dir()}
    assert names == EXPECTED.keys() == origins.keys()
    architectures = {load(str(configs / name)).architecture for name in names}
    assert len(architectures) >= 24


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model_type": "mimo_v2_flash", "num_hidden_layers": 12, "sliding_window_size": 128, "dtype": "bfloat16"},
            [
                ("full_attention", 3, heads(64, 4, 192, v_head_size=128, sinks=False, sliding_window=None)),
                ("sliding_attention", 9, heads(64, 8, 192, v_head_size=128, sinks=True, sliding_window=129)),
            ],
        ),
        (
            {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "num_hidden_layers": 6}},
            [
                ("sliding_attention", 5, heads(8, 4, 256, sliding_window=512, mm_prefix=False)),
                ("full_attention", 1, heads(8, 4, 512, sliding_window=None)),
            ],
        ),
        (
            {
                "model_type": "gemma4",
                "text_config": {
                    "model_type": "gemma4_text",
                    "num_hidden_layers": 6,
                    "attention_k_eq_v": True,
                    "num_global_key_value_heads": 2,
                    "use_bidirectional_attention": "vision",
                },
            },
            [
                ("sliding_attention", 5, heads(8, 4, 256, mm_prefix=True)),
                ("full_attention", 1, heads(8, 2, 512, mm_prefix=True)),
            ],
        ),
        (
            {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "attn_config": {"alibi": True}},
            [("full_attention", 32, heads(32, 32, 128, alibi=True))],
        ),
        (
            {"model_type": "mpt", "attn_config": {"alibi": False, "attn_type": "multiquery_attention"}},
            [("full_attention", 24, heads(16, 1, 128, alibi=False))],
        ),
        (
            {"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60},
            [("full_attention", 60, heads(128, 8, 64))],
        ),
        (
            {"model_type": "falcon", "hidden_size": 4544, "alibi": True, "new_decoder_architecture": False},
            [("full_attention", 32, heads(71, 1, 64, alibi=True))],
        ),
        (
            {"model_type": "baichuan", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40},
            [("full_attention", 40, heads(40, 40, 128, alibi=True))],
        ),
        (
            {"model_type": "baichuan", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
            [("full_attention", 32, heads(32, 32, 128, alibi=False))],
        ),
        (
            {"model_type": "chatglm", "num_layers": 40, "multi_query_attention": True, "multi_query_group_num": 2},
            [("full_attention", 40, heads(32, 2, 128))],
        ),
        (
            {"model_type": "deepseek_v2", "kv_lora_rank": None, "hidden_size": 1280, "num_attention_heads": 10},
            [("full_attention", 32, heads(10, 10, 128, kv_lora_rank=None, v_head_size=None))],
        ),
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 12, "use_bidirectional_attention": True},
            [
                ("encoder_only_sliding", 10, heads(8, 4, 256, sliding_window=2049)),
                ("encoder_only", 2, heads(8, 4, 256, sliding_window=None)),
            ],
        ),
        (
            {"model_type": "qwen2", "is_causal": False, "num_hidden_layers": 2},
            [("encoder_only", 2, {"attn_type": "encoder_only"})],
        ),
        ({"model_type": "bert", "is_decoder": True}, [("full_attention", 12, {"attn_type": "decoder"})]),
        (
            {"model_type": "t5", "architectures": ["T5EncoderModel"]},
            [("encoder_only", 6, heads(8, 8, 64, attn_type="encoder_only"))],
        ),
        ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, [("full_attention", 12, heads(16, 16, 64))]),
        (
            {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {"num_hidden_layers": 4}}},
            [("full_attention", 4, heads(28, 4, 128))],
        ),
        (
            {"model_type": "internvl_chat", "llm_config": {"model_type": "qwen3", "num_hidden_layers": 3}},
            [("full_attention", 3, heads(32, 32, 128))],
        ),
        (
            {"model_type": "kimi_vl", "text_config": {"num_attention_heads": 16, "num_hidden_layers": 27}},
            [("mla", 27, {"num_heads": 16, **MLA_512})],
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 20, "num_hidden_layers": 32},
            [("full_attention", 20, heads(32, 32, 128)), ("sliding_attention", 12, {"sliding_window": 4096})],
        ),
        (
            {
                "model_type": "kimi_linear",
                "num_hidden_layers": 27,
                "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": []},
            },
            [("mla", 7, MLA_512)],
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-ME*", "num_hidden_layers": 8},
            [("full_attention", 2, heads(32, 8, 128))],
        ),
        (
            {"model_type": "minimax_text_01", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
            | {"layer_types": ["linear_attention", "full_attention"] * 2},
            [("full_attention", 2, heads(4, 4, 16))],
        ),
        (
            {"model_type": "mllama", "text_config": {"num_hidden_layers": 10, "cross_attention_layers": [3, 8]}},
            [("full_attention", 8, {"attn_type": "decoder"}), ("cross_attention", 2, {"attn_type": "encoder_decoder"})],
        ),
        (
            {
                "model_type": "step3p5",
                "num_hidden_layers": 4,
                "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
                "num_nextn_predict_layers": 1,
                "sliding_window": 512,
                "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
            },
            [
                ("full_attention", 1, heads(64, 8, 128)),
                ("sliding_attention", 3, heads(96, 8, 128, sliding_window=512)),
            ],
        ),
        (
            {"model_type": "laguna", "num_hidden_layers": 3, "num_attention_heads_per_layer": [48, 64, 48]},
            [("full_attention", 2, heads(48, 8, 128)), ("full_attention", 1, heads(64, 8, 128))],
        ),
        (
            {
                "model_type": "nemotron-nas",
                "hidden_size": 8192,
                "num_attention_heads": 64,
                "block_configs": [
                    {"attention": {"n_heads_in_group": 8, "no_op": False}},
                    {"attention": {"n_heads_in_group": None, "no_op": True}},
                    {"attention": {"n_heads_in_group": 16, "no_op": False}},
                ],
            },
            [("full_attention", 1, heads(64, 8, 128)), ("full_attention", 1, heads(64, 4, 128))],
        ),
        (
            {"model_type": "zamba2", "hidden_size": 3584, "attention_head_dim": 224, "kv_channels": 112}
            | {"num_hidden_layers": 81, "hybrid_layer_ids": [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77]},
            [("full_attention", 13, heads(32, 32, 224))],
        ),
        (
            {"model_type": "gpt_neo", "num_layers": 4, "attention_types": [[["global", "local"], 2]]},
            [("full_attention", 2, heads(16, 16, 128)), ("sliding_attention", 2, {"sliding_window": 256})],
        ),
        (
            {"model_type": "minimax", "num_hidden_layers": 4, "attn_type_list": [0, 0, 0, 1]},
            [("full_attention", 1, heads(32, 8, 128))],
        ),
        ({"model_type": "bamba", "attn_layer_indices": [9, 18, 27]}, [("full_attention", 3, heads(32, 8, 128))]),
        ({"model_type": "longcat_flash", "num_layers": 28}, [("mla", 56, {"num_heads": 64, **MLA_512})]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_family(
    kinds: Callable[..., LayerKinds], config: dict[str, Any], expected: list[tuple[str, int, dict[str, Any]]]
) -> None:
    """What sets a family apart, on as few fields as it takes."""
    assert seen(kinds(config), expected) == expected


def test_quantised_kv_cache_of_a_checkpoint_is_said(kinds: Callable[..., LayerKinds]) -> None:
    """The layers stay at ``auto``: whether the scales are used is the engine's choice."""
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}, "quant_method": "modelopt"}
    for quantization in (scheme, {"kv_cache_quant_algo": "FP8"}):
        found = kinds({"model_type": "llama", "quantization_config": quantization})
        assert found.kinds[0].config.kv_cache_dtype == "auto"
        assert "the checkpoint has a quantised KV cache" in found.warnings[0]
    assert (
        not kinds({"model_type": "llama", "quantization_config": {"kv_cache_scheme": None}})
        .warnings[0]
        .startswith("the c")
    )
