"""Ids of states: equal where states can be copied byte by byte, and the same in every release."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.layer.cache_format import StateFormat
from attn_select.layer.state import StateConfig

GDN: dict[str, Any] = {"recurrence": "gated_delta_net", "num_heads": 16, "num_v_heads": 32, "head_size": 128}
IDS = {
    "st1-e1966d0f5856": ("STATE_KV", {**GDN, "conv_kernel_size": 4}),
    "st1-ff3254d8dd41": ("STATE_VK", {**GDN, "conv_kernel_size": 4}),
}
"""Ids that peers of other releases have: where one of them changes, ``StateFormat.prefix`` must too."""


def form(layout: str = "STATE_KV", **changes: Any) -> StateFormat:
    return StateFormat(StateConfig(**{**GDN, "conv_kernel_size": 4, **changes}), layout)


@pytest.mark.parametrize("known", IDS)
def test_ids_stay(known: str) -> None:
    layout, fields = IDS[known]
    assert StateFormat(StateConfig(**fields), layout).fingerprint == known


@pytest.mark.parametrize(
    "changes",
    [
        {"cuda_graph": "UNIFORM_BATCH"},
        {"num_speculative_tokens": 3},
        {"chunk_size": 128},
        {"recurrence": "kda", "num_heads": 32, "num_v_heads": 32},
    ],
    ids=str,
)
def test_what_moves_no_byte_of_a_state_does_not_count(changes: dict[str, Any]) -> None:
    here, there = form(conv_kernel_size=0), form(conv_kernel_size=0, **changes)
    assert here.fingerprint == there.fingerprint
    assert here.differences(there) == {}


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"state_dtype": "bfloat16"}, ["state_dtype"]),
        ({"dtype": "float16"}, ["conv_dtype"]),
        ({"conv_kernel_size": 3}, ["conv_kernel_size"]),
        ({"conv_kernel_size": 0}, ["conv_kernel_size", "conv_channels", "conv_dtype"]),
        ({"num_heads": 8}, ["conv_channels"]),
        ({"num_heads": 8, "num_v_heads": 16}, ["num_v_heads", "conv_channels"]),
        ({"v_head_size": 64}, ["v_head_size", "conv_channels"]),
        ({"recurrence": "mamba2"}, ["conv_channels"]),
    ],
    ids=str,
)
def test_what_differs_is_named(changes: dict[str, Any], facts: list[str]) -> None:
    here, there = form(), form(**changes)
    assert [*here.differences(there)] == facts
    assert here.fingerprint != there.fingerprint
    assert [*form().differences(form("STATE_VK"))] == ["state_layout"]
