"""Features of batches, against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_select.layer.config import AttentionConfig
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.terms import TERMS, Schedule, coordinates, dealt_out, phase_work

LAYER = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SM_COUNT = 100
KEY = 8 * 2 * 128 * 2
"""Bytes of K and V of one key."""
TOKEN = 2 * 32 * 128 * 2 + 2 * KEY
"""Bytes of a new token: its query and output, its K and V, read and written into the cache."""
PAIR = 2 * 32 * 2 * 128
"""FLOPs of a query and a key that it sees."""


def features(text: str, decode: bool, l2_bytes: float = 0.0, schedule: Schedule | None = None) -> dict[str, float]:
    found = phase_work(LAYER, decode, SM_COUNT).features(parse_batch_shape(text).groups, l2_bytes, schedule)
    return dict(zip(TERMS, found, strict=True))


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
        "makespan": 0.0,
        "parts": 0.0,
        "last": 0.0,
        "context": 0.0,
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
        "makespan": 0.0,
        "parts": 0.0,
        "last": 0.0,
        "context": 0.0,
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
    assert coordinates(parse_batch_shape("8q1s1k").groups, 0.5) == (3.0, 10.0, 5.0, 2.5, 0.0)
    assert coordinates(parse_batch_shape("q1s2k_3q1s512").groups, 0.0)[4] == log2(2048 / 896)
    assert coordinates(parse_batch_shape("2q64s1k_2q192s3k").groups, 0.0) == (2.0, 11.0, 2.0, 0.0, log2(1.5))


def test_requests_lie_by_the_keys_that_a_window_leaves() -> None:
    work = phase_work(replace(LAYER, sliding_window=128), True, SM_COUNT)
    near, far = (work.coordinates(parse_batch_shape(text).groups, 0.0) for text in ("8q1s1k", "8q1s64k"))
    assert near == far == (3.0, 7.0, 3.5, 0.0, 0.0)
    assert work.coordinates(parse_batch_shape("8q1s64").groups, 0.0)[1] == 6.0
    prefill = phase_work(replace(LAYER, sliding_window=128), False, SM_COUNT)
    assert prefill.coordinates(parse_batch_shape("q385s4k").groups, 0.0)[1] == 9.0  # 385 + 127
    chunks = phase_work(replace(LAYER, attention_chunk_size=256), True, SM_COUNT)
    assert chunks.coordinates(parse_batch_shape("q1s1k").groups, 0.0)[1] == 8.0
    assert chunks.coordinates(parse_batch_shape("q1s1k").groups, 0.0, whole=True)[1] == 10.0
    assert [each.hides_keys for each in (work, chunks, phase_work(LAYER, True, SM_COUNT))] == [True, True, False]
    plain = phase_work(LAYER, True, SM_COUNT)
    assert plain.coordinates(parse_batch_shape("8q1s1k").groups, 0.5) == (3.0, 10.0, 5.0, 2.5, 0.0)


@pytest.mark.parametrize(
    ("parts", "slots", "most"),
    [
        ([(10, 3)], 4, 10),
        ([(10, 4)], 4, 10),
        ([(10, 5)], 4, 20),
        ([(10, 803)], 4, 2010),
        ([(1, 4), (9, 1)], 2, 9),  # the long one first
        ([(3, 2), (2, 3)], 2, 7),  # 3 + 3 and 2 + 2 + 2 would be 6: longest first is no optimum
    ],
)
def test_parts_are_dealt_out_longest_first(parts: list[tuple[int, int]], slots: int, most: int) -> None:
    assert dealt_out(parts, slots) == most


@settings(max_examples=50)
@given(
    parts=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=5), slots=st.integers(1, 12)
)
def test_parts_are_dealt_out_as_one_by_one(parts: list[tuple[int, int]], slots: int) -> None:
    loads = [0] * slots
    for size in sorted((size for size, count in parts for _ in range(count)), reverse=True):
        loads[loads.index(min(loads))] += size
    assert dealt_out(parts, slots) == max(loads)


@pytest.mark.parametrize(
    ("text", "schedule", "keys"),
    [
        # 8 KV heads: 8 thread blocks a request and part, 100 multiprocessors.
        ("4q1s1k", ("equal", 1), -(-1024 // 3)),  # 32 blocks: three parts each fit at once
        ("12q1s1k", ("equal", 1), 1024),  # 96 blocks: whole requests
        ("13q1s1k", ("equal", 1), 2048),  # 104: four of them run alone in a second round
        ("q1s32k", ("fair", 1), 22 * 128),  # a share of 23 of the 256 blocks of 128 keys: 12 parts of 22 or fewer
        ("q1s8k", ("filled", 1), 683 + 2 * 256),  # 12 parts, which fill one round
        ("13q1s1k", ("filled", 1), 2 * (1024 + 256)),
        ("64q1s128_q1s64k", ("equal", 1), 65536),
        ("4q1s1k", ("rounded", 2), 2 * 512),  # 32 blocks: 2.25 parts each fill three quarters
        ("2q1s1k", ("rounded", 2), 2 * 205),  # 4.5
        ("13q1s1k", ("rounded", 2), 2 * 1024),
    ],
)
def test_the_busiest_multiprocessor_reads_what_the_schedule_gives_it(text: str, schedule: Schedule, keys: int) -> None:
    assert features(text, decode=True, schedule=schedule)["makespan"] == keys


@pytest.mark.parametrize(
    ("text", "schedule", "parts"),
    [
        ("4q1s1k", ("equal", 1), 3),
        ("13q1s1k", ("equal", 1), 1),
        ("q1s32k", ("fair", 1), 12),
        ("q1s32k_q1s1k", ("fair", 1), 11),  # of the longest
        ("q1s8k", ("filled", 1), 12),
        ("13q1s1k", ("filled", 1), 1),
        ("4q1s1k", ("rounded", 2), 2),
        ("2q1s1k", ("rounded", 2), 5),
    ],
)
def test_the_longest_request_has_the_parts_of_the_schedule(text: str, schedule: Schedule, parts: int) -> None:
    assert features(text, decode=True, schedule=schedule)["parts"] == parts


def test_a_fair_share_is_of_whole_lengths_whatever_a_window_leaves_of_them() -> None:
    windowed = LAYER.model_copy(update={"sliding_window": 1024})
    groups = parse_batch_shape("q1s64k_q1s1k").groups
    found = dict(zip(TERMS, phase_work(windowed, True, SM_COUNT).features(groups, 0.0, ("fair", 1)), strict=True))
    assert (found["makespan"], found["parts"]) == (1024, 12)  # a share of 46 blocks leaves the short request whole


@pytest.mark.parametrize(
    ("heads", "text", "keys", "parts"),
    [
        # A share of 5, 16, 32, 64 and 65 keys of 100 multiprocessors; the plan counts a tile as 128 keys more.
        (16, "q1s500", 32 + 128, 16),
        (16, "q1s1600", 64 + 128, 25),
        (16, "q1s3200", 128 + 128, 25),
        (16, "q1s6400", 192 + 128, 34),
        (16, "q1s6401", 256 + 128, 26),
        (16, "50q1s1000", 512 + 128, 2),
        (16, "60q1s1000", (768 + 128) + (232 + 128), 2),  # in order: a long part behind a short one
        (16, "2q1s1000_q1s250", 128 + 128, 8),
        (128, "10q1s1000", 256 + 256, 4),  # pairs of thread blocks
    ],
)
def test_planned_parts_go_in_order_to_the_one_that_has_least(heads: int, text: str, keys: int, parts: int) -> None:
    work = phase_work(AttentionConfig(num_heads=heads, **MLA), True, SM_COUNT)
    assert ("planned", 1) in work.schedules
    found = dict(zip(TERMS, work.features(parse_batch_shape(text).groups, 0.0, ("planned", 1)), strict=True))
    assert (found["makespan"], found["parts"]) == (keys, parts)


@pytest.mark.parametrize(
    ("text", "resident", "keys"),
    [
        ("q100", 1, 100),  # 32 tiles, one for each head
        ("q128", 2, 2 * 128),
        ("q512s1k", 1, 640 + 768),  # 128 tiles of 640 to 1024 keys: the short ones come last
        ("q64_q8k", 1, 85376),  # about a hundredth of all: 512 tiles each of four sizes
    ],
)
def test_the_tiles_of_prefills_read_what_their_rows_see(text: str, resident: int, keys: int) -> None:
    found = features(text, decode=False, schedule=("tiles", resident))
    assert (found["makespan"], found["parts"]) == (keys, 0)


def test_tiles_read_no_more_than_their_window() -> None:
    work = phase_work(replace(LAYER, sliding_window=100), False, SM_COUNT)
    found = dict(zip(TERMS, work.features(parse_batch_shape("q512s1k").groups, 0.0, ("tiles", 1)), strict=True))
    assert found["makespan"] == 2 * (100 + 127)


def test_a_schedule_of_more_blocks_per_multiprocessor_shares_its_time() -> None:
    assert features("13q1s1k", decode=True, schedule=("equal", 4))["makespan"] == 4 * -(-1024 // 3)
