"""Which configs share times."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layer_config import layer_of
from attn_select_measure.timed_fields import timed_fields

GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
MLA = AttentionConfig(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


@pytest.mark.parametrize(
    "same",
    [{"block_size": 16}, {"cuda_graph": "ALWAYS"}, {"kv_cache_dtype": "bfloat16"}, {"v_head_size": 128}],
    ids=str,
)
def test_what_moves_no_time_is_left_out(same: dict[str, Any]) -> None:
    assert timed_fields(GQA.model_copy(update=same)) == timed_fields(GQA)


@pytest.mark.parametrize(
    "other",
    [
        {"num_heads": 64},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"sliding_window": 128},
        {"sinks": True},
        {"logits_soft_cap": 30.0},
        {"v_head_size": 64},
        {"num_speculative_tokens": 3},
        {"decode_context_parallel_size": 2},
    ],
    ids=str,
)
def test_what_moves_times_tells_layers_apart(other: dict[str, Any]) -> None:
    assert timed_fields(GQA.model_copy(update=other)) != timed_fields(GQA)


@pytest.mark.parametrize(
    "config", [GQA, MLA, GQA.model_copy(update={"logits_soft_cap": 50.0, "block_size": 64})], ids=["gqa", "mla", "cap"]
)
def test_through_a_file(config: AttentionConfig) -> None:
    assert timed_fields(layer_of(timed_fields(config))) == timed_fields(config)
