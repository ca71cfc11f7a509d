"""Which state layers a config.json describes, with their sizes; and what is said of those that nothing describes."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select import ConfigError, configs_from_model
from attn_select.layer.models import LayerKinds
from attn_select.layer.state import StateConfig

ATTENTION = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}


def states(found: LayerKinds) -> list[tuple[int, StateConfig]]:
    return [(kind.count, kind.config) for kind in found.kinds if isinstance(kind.config, StateConfig)]


def read(model_type: str, **fields: Any) -> LayerKinds:
    return configs_from_model({"model_type": model_type, **ATTENTION, **fields})


CASES: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    (
        "qwen3_next",
        {"linear_num_value_heads": 48, "linear_key_head_dim": 64, "mamba_ssm_dtype": "bfloat16"},
        3,
        {
            "recurrence": "gated_delta_net",
            "num_heads": 16,
            "num_v_heads": 48,
            "head_size": 64,
            "v_head_size": 128,
            "state_dtype": "bfloat16",
            "conv_kernel_size": 4,
        },
    ),
    (
        "kimi_linear",
        {
            "linear_attn_config": {
                "num_heads": 6,
                "head_dim": 64,
                "short_conv_kernel_size": 3,
                "full_attn_layers": [4],
            },
            "kv_lora_rank": 128,
        },
        3,
        {"recurrence": "kda", "num_heads": 6, "num_v_heads": 6, "head_size": 64, "conv_kernel_size": 3},
    ),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "MM*-E", "num_hidden_layers": 5, "mamba_num_heads": 32, "n_groups": 4},
        2,
        {
            "recurrence": "mamba2",
            "num_heads": 4,
            "num_v_heads": 32,
            "head_size": 128,
            "v_head_size": 64,
            "chunk_size": 128,
        },
    ),
    (
        "bamba",
        {"attn_layer_indices": [1], "mamba_n_heads": 16, "mamba_d_head": "auto", "mamba_d_state": 64},
        3,
        {"recurrence": "mamba2", "num_heads": 1, "num_v_heads": 16, "head_size": 64, "v_head_size": 32},
    ),
    (
        "falcon_h1",
        {"mamba_d_ssm": 512, "mamba_n_heads": 16},
        4,
        {"recurrence": "mamba2", "num_v_heads": 16, "v_head_size": 32},
    ),
    (
        "minimax",
        {"attn_type_list": [0, 0, 0, 1], "head_dim": 48},
        3,
        {"recurrence": "lightning", "num_heads": 8, "head_size": 48, "conv_kernel_size": 0, "chunk_size": 256},
    ),
]


@pytest.mark.parametrize(("model_type", "fields", "count", "expected"), CASES, ids=[case[0] for case in CASES])
def test_families(model_type: str, fields: dict[str, Any], count: int, expected: dict[str, Any]) -> None:
    ((found, config),) = states(read(model_type, **fields))
    assert found == count
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("model_type", "fields", "words"),
    [
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, "2 linear_attention, which are Mamba-1"),
        ("recurrent_gemma", {"block_types": ["recurrent", "attention"]}, "2 linear_attention, which are RG-LRU"),
        ("lfm2", {"full_attn_idxs": [0]}, "3 conv, which are short convolutions without a recurrence"),
    ],
)
def test_what_nothing_describes_is_named(model_type: str, fields: dict[str, Any], words: str) -> None:
    found = read(model_type, **fields)
    assert states(found) == []
    assert any(words in warning and "left out" in warning for warning in found.warnings)


def test_tensor_parallelism_shares_value_heads() -> None:
    config = {"model_type": "qwen3_next", **ATTENTION}
    ((_, half),) = states(configs_from_model(config, tensor_parallel=2))
    assert (half.num_heads, half.num_v_heads) == (8, 16)
    mamba = {"model_type": "bamba", **ATTENTION, "attn_layer_indices": [1], "mamba_n_groups": 2}
    ((_, eighth),) = states(configs_from_model(mamba, tensor_parallel=8))
    assert (eighth.num_heads, eighth.num_v_heads) == (1, 16)


def test_ranks_that_do_not_divide_are_refused() -> None:
    config = {"model_type": "kimi_linear", **ATTENTION, "linear_attn_config": {"num_heads": 6}}
    with pytest.raises(
        ConfigError, match="does not divide the 6 value heads and 6 key heads of its kda layers"
    ) as found:
        configs_from_model(config, tensor_parallel=4)
    assert found.value.hint == "valid: 1, 2, 3, 6"


def test_flags_beat_the_model_where_they_are_no_sizes() -> None:
    flags = {"state_dtype": "bfloat16", "num_speculative_tokens": 2, "num_heads": 4, "num_kv_heads": 2}
    found = configs_from_model({"model_type": "qwen3_next", **ATTENTION}, overrides=flags)
    ((_, config),) = states(found)
    assert (config.state_dtype, config.num_speculative_tokens, config.num_heads) == ("bfloat16", 2, 16)
    assert found.attention_configs[0].num_heads == 4
