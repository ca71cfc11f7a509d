"""``BatchShape``: what is written, what it means, and what is refused."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.errors import ConfigError
from attn_select.times.batch_shape import BatchShape, RequestGroup, parse_batch_shape

LENGTHS = st.one_of(st.integers(1, 5000), st.sampled_from([1024, 2048, 131072]))
GROUPS = st.builds(
    lambda count, query, past: RequestGroup(count, query, query + past),
    st.integers(1, 300),
    LENGTHS,
    st.one_of(st.just(0), LENGTHS),
)


@pytest.mark.parametrize(
    ("text", "groups", "canonical"),
    [
        ("q1", [(1, 1, 1)], "q1"),
        ("64q1s4k", [(64, 1, 4096)], "64q1s4k"),
        ("8q8s1m", [(8, 8, 1024**2)], "8q8s1024k"),
        ("q2k", [(1, 2048, 2048)], "q2k"),
        ("2q512s8k_32q1s2k", [(2, 512, 8192), (32, 1, 2048)], "2q512s8k_32q1s2k"),
        ("32q1s2k_2q512s8k", [(2, 512, 8192), (32, 1, 2048)], "2q512s8k_32q1s2k"),
        ("3q1s100_q1s100", [(4, 1, 100)], "4q1s100"),
        ("1q1024s1024", [(1, 1024, 1024)], "q1k"),
        (" 8Q1S1000 ", [(8, 1, 1000)], "8q1s1000"),
        ("q1s8k_q1s16k", [(1, 1, 16384), (1, 1, 8192)], "q1s16k_q1s8k"),
    ],
)
def test_a_batch_is_read_and_written(text: str, groups: list[tuple[int, int, int]], canonical: str) -> None:
    batch = parse_batch_shape(text)
    assert [(group.count, group.query_len, group.seq_len) for group in batch.groups] == groups
    assert str(batch) == canonical


@given(st.lists(GROUPS, min_size=1, max_size=6))
def test_the_text_of_a_batch_means_the_same_batch(groups: list[RequestGroup]) -> None:
    batch = BatchShape(tuple(groups))
    assert parse_batch_shape(str(batch)) == batch
    assert BatchShape(tuple(reversed(groups))) == batch
    assert batch.num_requests == sum(group.count for group in groups)
    assert batch.num_tokens == sum(group.count * group.query_len for group in groups)
    assert batch.max_query_len == max(group.query_len for group in groups)
    assert batch.max_seq_len == max(group.seq_len for group in groups)
    assert pickle.loads(pickle.dumps(batch)) == batch


@pytest.mark.parametrize(
    "text",
    [
        "",
        "64",
        "q",
        "q1s",
        "64q1s4g",
        "q1k2",
        "q1_",
        "q1 s2",
        "q1s1.5k",
        "-1q1",
        "q+1",
        "s4k",
        "q\u0661",
        None,
        7,
    ],
)
def test_what_is_no_batch_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"batch = .*expected groups such as 64q1s4k") as caught:
        parse_batch_shape(text)
    assert caught.value.fields == ("batch",)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0q1s4", "count = 0: expected an integer from 1"),
        ("q0s4", "query_len = 0: expected an integer from 1"),
        ("q8s4", "seq_len = 4 is less than query_len = 8"),
        ("q1s9999999999k", "expected an integer from 1 to 2147483647"),
    ],
)
def test_lengths_that_cannot_be_are_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        parse_batch_shape(text)
    assert f"batch = {text!r}" in str(caught.value)


def test_tokens_and_pairs_are_those_of_all_requests() -> None:
    batch = parse_batch_shape("2q512s8k_32q1s2k")
    assert batch.num_kv_tokens == 2 * 8192 + 32 * 2048
    assert batch.num_pairs == 2 * 512 * 8192 + 32 * 2048


def test_unequal_requests_count_as_fewer_long_ones() -> None:
    assert parse_batch_shape("64q1s4k").effective_requests == 64
    assert parse_batch_shape("q1s4k_63q1s64").effective_requests == pytest.approx(1 + 63 / 64)
