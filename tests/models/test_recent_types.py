"""Model types of 2026: what their config says by the fields that there are, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attn_select.errors import ModelError
from attn_select.layer.models import LayerKinds

Kinds = Callable[..., LayerKinds]


def heads(q: int, kv: int, size: int, **more: Any) -> dict[str, Any]:
    return {"num_heads": q, "num_kv_heads": kv, "head_size": size, **more}


# Sizes and kinds as the classes or the engine's model files have them; each row's source is in defaults.json.
EXPECTED: list[tuple[dict[str, Any], list[tuple[str, tuple[int, ...], dict[str, Any]]]]] = [
    (  # vLLM 0.33.0 bailing_moe_v3.py: KDA in groups of 4, and what is left over behind them attends
        {"model_type": "bailing_moe_v3", "num_hidden_layers": 6, "layer_group_size": 4, "num_attention_heads": 32},
        [("kda", (0, 1, 2), {"head_size": 128}), ("mla", (3, 4, 5), {"num_heads": 32, "kv_lora_rank": 512})],
    ),
    (
        {"model_type": "step3_vl", "text_config": {"num_hidden_layers": 2, "share_q_dim": 2048}},
        [("full_attention", (0, 1), heads(64, 1, 256))],
    ),
    (  # vLLM 0.33.0 models/step5/nvidia/model.py: even layers slide, with heads of their own
        {
            "model_type": "step5_vl",
            "text_config": {
                "model_type": "step5",
                "num_hidden_layers": 4,
                "head_dim": 128,
                "sliding_window": 512,
                "swa_num_attention_heads": 48,
            },
        },
        [
            ("sliding_attention", (0, 2), heads(48, 8, 128, sliding_window=512)),
            ("full_attention", (1, 3), heads(40, 8, 128, sliding_window=None)),
        ],
    ),
    (
        {"model_type": "sarvam_mla", "num_hidden_layers": 2},
        [("mla", (0, 1), {"num_heads": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128})],
    ),
    (
        {"model_type": "lfm3_vl", "text_config": {"model_type": "lfm3", "num_hidden_layers": 7}},
        [
            ("full_attention", (2, 6), heads(16, 4, 128, sliding_window=None)),
            ("sliding_attention", (4,), heads(16, 4, 128, sliding_window=256)),
        ],
    ),
    (
        {"model_type": "zaya", "num_hidden_layers": 3, "sliding_window": 64}
        | {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"]},
        [
            ("full_attention", (0, 2), heads(8, 2, 128, sliding_window=None)),
            ("sliding_attention", (1,), heads(8, 2, 128, sliding_window=64)),
        ],
    ),
    (  # Dots3NoteTextConfig: sliding layers have another latent
        {"model_type": "dots3_note", "num_hidden_layers": 6},
        [
            ("sparse_mla", (0, 1, 5), {"num_heads": 128, "kv_lora_rank": 512, "sparse_top_k": 2048}),
            ("mla_sliding", (2, 3, 4), {"num_heads": 64, "kv_lora_rank": 1024, "sliding_window": 512}),
        ],
    ),
    (
        {"model_type": "flint", "num_hidden_layers": 5},
        [
            ("full_attention", (0, 1, 4), heads(32, 4, 128, sinks=True)),
            ("sliding_attention", (2, 3), heads(32, 4, 128, sinks=True, sliding_window=513)),
        ],
    ),
    (
        {"model_type": "embedding_gemma2", "text_config": {"num_hidden_layers": 2}},
        [
            ("encoder_only_sliding", (0,), heads(4, 2, 256, sliding_window=513)),
            ("encoder_only", (1,), heads(4, 1, 512)),
        ],
    ),
    (
        {"model_type": "inkling2", "text_config": {"num_hidden_layers": 6, "swa_num_key_value_heads": 16}},
        [
            ("sliding_attention", (0, 1, 2, 3, 4), heads(48, 16, 128, position_bias=True)),
            ("full_attention", (5,), heads(48, 8, 128, position_bias=True)),
        ],
    ),
]


@pytest.mark.parametrize(("config", "expected"), EXPECTED, ids=[row[0]["model_type"] for row in EXPECTED])
def test_layers(kinds: Kinds, config: dict[str, Any], expected: list[tuple[str, tuple[int, ...], Any]]) -> None:
    found = kinds(config)
    assert found.type_known
    seen = [
        (kind.kind, kind.layers, {field: getattr(kind.config, field) for field in fields})
        for kind, (_, _, fields) in zip(found.kinds, expected, strict=True)
    ]
    assert seen == expected


def test_full_layers_of_step5_that_an_indexer_chooses_for(kinds: Kinds) -> None:
    config = {"model_type": "step5", "num_hidden_layers": 4, "head_dim": 128, "sliding_window": 512}
    found = kinds({**config, "sparse_config": {"attention_impl": "sparse_gqa"}})
    assert [(kind.kind, kind.layers) for kind in found.kinds] == [("sliding_attention", (0, 2))]
    assert [(each.kind, each.layers) for each in found.unserved] == [("indexed_attention", (1, 3))]
    assert kinds({**config, "sparse_config": {"enabled": False}}).unserved == ()


@pytest.mark.parametrize(
    "model_type",
    ["gemma4_assistant", "gemma4_unified_assistant", "dory", "hrm_text", "inkling2_loop", "jetmoe", "doge", "blt"],
)
def test_what_no_field_says_is_refused_by_name(kinds: Kinds, model_type: str) -> None:
    with pytest.raises(ModelError, match=f"model type '{model_type}'"):
        kinds({"model_type": model_type, "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512})
