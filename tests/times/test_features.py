"""Features of batches, against counts by hand."""

from __future__ import annotations

import pytest

from attn_select.config import AttentionConfig
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.features import FEATURES, coordinates, phase_work

LAYER = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
SM_COUNT = 100
KEY = 8 * 2 * 128 * 2
"""Bytes of K and V of one key."""
TOKEN = 2 * 32 * 128 * 2 + 2 * KEY
"""Bytes of a new token: its query and output, its K and V, read and written into the cache."""
PAIR = 2 * 32 * 2 * 128
"""FLOPs of a query and a key that it sees."""


def features(text: str, decode: bool, l2_bytes: float = 0.0) -> dict[str, float]:
    found = phase_work(LAYER, decode, SM_COUNT).features(parse_batch_shape(text).groups, l2_bytes)
    return dict(zip(FEATURES, found, strict=True))


def test_decodes_that_leave_multiprocessors_over_share_their_keys() -> None:
    assert features("4q1s1k", decode=True) == {
        "start": 1.0,
        "bytes": 4 * (1024 * KEY + TOKEN),
        "flops": 4 * 1024 * PAIR,
        "tiles": 4 * 8,  # four query heads of a KV head fill 4 of 64 rows
        "waves": 1.0,
        "tokens": 4.0,
        "longest": 1024.0,
        "serial": 1024 / (SM_COUNT / 32),
        "cold_bytes": 0.0,
    }


def test_unequal_decodes_are_summed_and_the_longest_counts() -> None:
    assert features("64q1s1k_q1s8k", decode=True) == {
        "start": 1.0,
        "bytes": (64 * 1024 + 8192) * KEY + 65 * TOKEN,
        "flops": (64 * 1024 + 8192) * PAIR,
        "tiles": 65 * 8,
        "waves": 6.0,  # 520 by 100
        "tokens": 65.0,
        "longest": 8192.0,
        "serial": 8192.0,
        "cold_bytes": 0.0,
    }


def test_prefills_have_a_tile_for_each_head_and_128_tokens() -> None:
    found = features("2q300s1k", decode=False)
    assert found["tiles"] == 2 * 32 * 3
    assert (found["waves"], found["tokens"], found["serial"]) == (2.0, 600.0, 1024.0)
    assert found["flops"] == 2 * sum(range(1024 - 300 + 1, 1024 + 1)) * PAIR
    assert features("2q256s1k", decode=False)["tiles"] == 2 * 32 * 2


def test_bytes_are_cold_beyond_the_cache() -> None:
    moved = features("4q1s1k", decode=True)["bytes"]
    assert features("4q1s1k", decode=True, l2_bytes=moved)["cold_bytes"] == moved / 2
    assert features("4q1s1k", decode=True, l2_bytes=moved / 4)["cold_bytes"] == pytest.approx(moved, rel=1e-3)
    assert features("4q1s1k", decode=True, l2_bytes=moved * 4)["cold_bytes"] < 1e-3 * moved


def test_coordinates_are_logarithms_of_means() -> None:
    assert coordinates(parse_batch_shape("8q1s1k").groups, 0.5) == (3.0, 10.0, 5.0, 2.5)
    assert coordinates(parse_batch_shape("2q64s1k_2q192s3k").groups, 0.0) == (2.0, 11.0, 2.0, 0.0)
