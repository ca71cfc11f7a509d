"""StateConfig: strict values, contradictions that name their fields, and the sizes that follow."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.errors import ConfigError
from attn_select.layer.layouts import STATE_KV, STATE_LAYOUTS, STATE_VK, bytes_per_request, state_shape
from attn_select.layer.state import OF_RECURRENCE, RECURRENCES, StateConfig

QWEN3_NEXT: dict[str, Any] = {
    "recurrence": "gated_delta_net",
    "num_heads": 16,
    "num_v_heads": 32,
    "head_size": 128,
    "conv_kernel_size": 4,
}


def test_sizes() -> None:
    config = StateConfig(**QWEN3_NEXT)
    assert config.conv_dim == 2 * 16 * 128 + 32 * 128
    assert state_shape(STATE_KV, config) == ["num_slots", 32, 128, 128]
    state, window = 32 * 128 * 128 * 4, 3 * config.conv_dim * 2
    assert bytes_per_request(config) == state + window
    drafting = config.model_copy(update={"num_speculative_tokens": 3})
    assert bytes_per_request(drafting) == 4 * (state + window)
    wide = StateConfig(recurrence="mamba2", num_heads=1, num_v_heads=2, head_size=16, v_head_size=64)
    assert [state_shape(layout, wide)[2:] for layout in STATE_LAYOUTS] == [[16, 64], [64, 16]]
    with pytest.raises(ValueError, match="STATE_KV, STATE_VK"):
        state_shape("MLA", wide)
    assert STATE_VK in STATE_LAYOUTS


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_every_recurrence_is_described(recurrence: Any) -> None:
    rule = OF_RECURRENCE[recurrence]
    assert sorted(rule.channels) == ["key", "query", "value"]
    assert "arXiv" in rule.source


@pytest.mark.parametrize(
    ("changes", "fields", "accepted"),
    [
        ({"recurrence": "rwkv"}, ["recurrence"], "'kda', 'mamba2' or 'lightning'"),
        ({"num_v_heads": 24}, ["num_v_heads", "num_heads"], "16 must divide num_v_heads 24"),
        ({"recurrence": "kda"}, ["num_v_heads", "recurrence"], "accepted: 16"),
        ({"conv_kernel_size": 1}, ["conv_kernel_size"], "from 2 to 64"),
        ({"conv_kernel_size": 65}, ["conv_kernel_size"], "less than or equal to 64"),
        ({"state_dtype": "fp8"}, ["state_dtype"], "'bfloat16', 'float16' or 'float32'"),
        ({"head_size": 0}, ["head_size"], "greater than or equal to 1"),
        ({"num_heads": "16"}, ["num_heads"], "valid integer"),
        ({"sliding_window": 5}, ["sliding_window"], "unknown field"),
        ({"chunk_size": 0}, ["chunk_size"], "greater than or equal to 1"),
    ],
)
def test_refused(changes: dict[str, Any], fields: list[str], accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StateConfig(**{**QWEN3_NEXT, **changes})
    assert list(caught.value.fields) == fields
    assert accepted in caught.value.message


def test_copies_are_checked_and_dumps_make_the_same_layer() -> None:
    config = StateConfig(**QWEN3_NEXT)
    assert StateConfig(**config.model_dump()) == config
    assert hash(StateConfig(**config.model_dump(exclude_defaults=True))) == hash(config)
    assert "dtype" not in config.model_dump(exclude_defaults=True)
    with pytest.raises(ConfigError, match="num_v_heads"):
        config.model_copy(update={"num_v_heads": 5})
