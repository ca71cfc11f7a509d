"""Texts of quantities."""

from __future__ import annotations

import pytest

from attn_select import select
from attn_select.config import AttentionConfig
from attn_select.render import (
    STYLES,
    brief_lines,
    byte_text,
    config_text,
    device_lines,
    layer_lines,
    plain,
    plan_lines,
    selection_text,
    warning_lines,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1 MiB"),
        (1 << 30, "1 GiB"),
        (5 << 40, "5120 GiB"),
    ],
)
def test_bytes_are_in_the_largest_unit_that_they_fill(count: int, text: str) -> None:
    assert byte_text(count) == text


def test_a_layer_is_one_line() -> None:
    plain = AttentionConfig(num_heads=32, num_kv_heads=1, head_size=128)
    assert config_text(plain) == "32 query heads, 1 KV head, head size 128, bfloat16, KV cache auto"
    rich = AttentionConfig(
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        v_head_size=64,
        block_size=32,
        kv_cache_dtype="fp8",
        sliding_window=128,
        logits_soft_cap=30.0,
        sinks=True,
        decode_context_parallel_size=2,
        num_speculative_tokens=3,
        cuda_graph="UNIFORM_BATCH",
    )
    parts = [
        "32 query heads, 8 KV heads, head size 128, V head size 64, bfloat16, KV cache fp8_e4m3, block size 32",
        "window 128, soft cap 30, sinks",
        "DCP 2",
        "3 speculative tokens",
        "CUDA graphs UNIFORM_BATCH",
    ]
    for part in parts:
        assert part in config_text(rich)


def test_where_plugins_come_from_is_said_only_where_one_is_missing() -> None:
    rejected = select(AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="fp8"), "a100")
    assert any(verdict.reasons for each in rejected.candidates for verdict in each.phases.values())
    assert "note: " not in selection_text(rejected)


def test_brief_folds_only_backends_that_never_serve_such_a_layer() -> None:
    config = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="fp8")
    text = plain(brief_lines(select(config, "t4")))
    (folded,) = [line for line in text.splitlines() if " others " in line]
    assert "serve" in folded
    assert "MLA" in folded
    for backend in ("FLASH_ATTN:", "FLASHINFER:"):
        assert any(backend in line.split() for line in text.splitlines()), text


def test_every_style_is_a_known_one() -> None:
    rejected = select(AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="fp8"), "a100")
    lines = [*device_lines(rejected), *layer_lines(rejected), *plan_lines(rejected), *warning_lines(["beware"])]
    used = {style for line in lines for _, style in line}
    assert used - {"", "hang"} == set(STYLES)


def test_the_cache_is_one_line() -> None:
    text = selection_text(select(AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128), "h100"))
    (line,) = [line.split() for line in text.splitlines() if line.strip().startswith("KV cache")]
    assert " ".join(line) == (
        "KV cache FLASH_ATTN_NHD (2, num_blocks, 16, 8, 128) bfloat16, block size 16, 4096 bytes per token and layer"
    )
