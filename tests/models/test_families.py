"""What sets each family of models apart, on configs of as few fields as it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attn_select import AttentionConfig
from attn_select.layer.models import LayerKinds

MLA_512 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_kv_heads": 1, "head_size": 576}


def heads(q: int, kv: int, size: int, **more: Any) -> dict[str, Any]:
    return {"num_heads": q, "num_kv_heads": kv, "head_size": size, **more}


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
                    "use_bidirectional_attention": "vision",
                    "attention_k_eq_v": True,
                    "num_global_key_value_heads": 2,
                },
            },
            [
                ("sliding_attention", 5, heads(8, 4, 256, mm_prefix=True)),
                ("full_attention", 1, heads(8, 2, 512, mm_prefix=True)),
            ],
        ),
        (
            {"model_type": "glm5_next", "text_config": {"num_hidden_layers": 8}},
            [("sparse_mla", 2, {"qk_rope_head_dim": 0, "head_size": 512, "sparse_top_k": 2048})],
        ),
        (
            {
                "model_type": "minimax_m3_vl",
                "text_config": {
                    "num_hidden_layers": 4,
                    "sparse_attention_config": {"sparse_attention_freq": [0, 0, 1, 1]},
                },
            },
            [("full_attention", 2, heads(64, 4, 128))],
        ),
        (
            {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "attn_config": {"alibi": True}},
            [("full_attention", 32, heads(32, 32, 128, alibi=True))],
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
        (
            {"model_type": "t5", "architectures": ["T5EncoderModel"]},
            [("encoder_only", 6, heads(8, 8, 64, attn_type="encoder_only"))],
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
            {"model_type": "brandnew", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
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
        ({"model_type": "longcat_flash", "num_layers": 28}, [("mla", 56, {"num_heads": 64, **MLA_512})]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_family(
    kinds: Callable[..., LayerKinds], config: dict[str, Any], expected: list[tuple[str, int, dict[str, Any]]]
) -> None:
    attention = [kind for kind in kinds(config).kinds if isinstance(kind.config, AttentionConfig)]
    found = [
        (kind.kind, kind.count, {field: getattr(kind.config, field) for field in fields})
        for kind, (_, _, fields) in zip(attention, expected, strict=True)
    ]
    assert found == expected
