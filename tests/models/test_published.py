"""Configs as published: every layer kind with its count, looked up in the model's own card and code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_select.layer.models import LayerKinds, layer_kinds, load

MLA_512 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_kv_heads": 1, "head_size": 576}
SINKS = {"num_heads": 64, "num_kv_heads": 8, "head_size": 64, "sinks": True}
GEMMA2 = {"num_heads": 16, "num_kv_heads": 8, "head_size": 256, "logits_soft_cap": 50.0}
GEMMA3 = {"num_heads": 32, "num_kv_heads": 16, "head_size": 128, "mm_prefix": True}
SCOUT = {"num_heads": 40, "num_kv_heads": 8, "head_size": 128, "sliding_window": None}
SCOUT_CHUNKS = {**SCOUT, "attention_chunk_size": 8192}
MODERN = {"num_heads": 12, "num_kv_heads": 12, "head_size": 64, "attn_type": "encoder_only", "dtype": "float16"}
GDN = {"num_heads": 16, "num_v_heads": 32, "head_size": 128, "v_head_size": 128, "conv_kernel_size": 4}
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
    "llama-4-scout-17b-16e": [("chunked_attention", 36, SCOUT_CHUNKS), ("full_attention", 12, SCOUT)],
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
    "qwen3-next-80b-a3b-thinking": [("gated_delta_net", 36, GDN), ("full_attention", 12, heads(16, 2, 256))],
    "qwen3.5-35b-a3b": [("gated_delta_net", 30, GDN), ("full_attention", 10, heads(16, 2, 256))],
    "t5-small": [
        (kind, count, {**fields, "position_bias": kind != "cross_attention"})
        for kind, count, fields in pair(8, 64, 6, "bfloat16")
    ],
    "whisper-large-v3": pair(20, 64, 32, "float16"),
}
SAID = {
    "glm-5-fp8": ["index_topk = 2048"],
    "deepseek-r1": ["num_nextn_predict_layers = 1"],
    "devstral-small-2-24b": ["vision_config"],
    "gemma-2-9b": ["float32 weights"],
    "gemma-3-27b-it": ["vision_config", "image tokens attend to each other in both directions (--no-mm-prefix"],
    "llama-4-scout-17b-16e": ["vision_config"],
    "llava-v1.5-7b": ["mm_vision_tower"],
    "qwen2.5-vl-7b": ["vision_config"],
    "qwen3.5-35b-a3b": ["vision_config", "mtp_num_hidden_layers = 1"],
    "t5-small": ["float32 weights"],
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
    found = layer_kinds(load(str(published)))
    assert seen(found, expected) == expected


def test_what_is_said(published: Path) -> None:
    warnings = layer_kinds(load(str(published))).warnings
    said = SAID.get(published.name, [])
    assert len(warnings) == len(said)
    assert all(text in warning for text, warning in zip(said, warnings, strict=True))


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
