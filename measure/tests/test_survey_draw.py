"""What a survey draws: the same for a seed and a number, of every kind and phase, and within its limits."""

from __future__ import annotations

from collections import Counter

import pytest

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import bytes_per_slot
from attn_select.layer.state import StateConfig
from attn_select.machine.device import lookup
from attn_select.times.roofline import roofline_us
from attn_select.times.workload import phases_of
from attn_select_measure.survey_draw import (
    FAMILIES,
    FIRST_STATE,
    MOST_CACHE_BYTES,
    MOST_US,
    PHASES,
    SPACE,
    STATE_FAMILIES,
    STATE_PHASES,
    Work,
    draw,
    kind_of,
)

ALL = len(FAMILIES) * len(PHASES)


@pytest.fixture(scope="module")
def drawn() -> list[Work]:
    return [draw(3, number) for number in range(ALL)]


def layer(each: Work) -> AttentionConfig:
    assert isinstance(each.config, AttentionConfig)
    return each.config


def test_a_workload_depends_on_its_seed_and_number_alone(drawn: list[Work]) -> None:
    assert [draw(3, number) for number in (ALL - 1, 7)] == [drawn[ALL - 1], drawn[7]]
    assert [draw(4, number) for number in range(20)] != drawn[:20]


def test_every_family_comes_in_every_phase(drawn: list[Work]) -> None:
    pairs = Counter((each.row["family"], each.row["phase"]) for each in drawn)
    assert len(pairs) == len(set(FAMILIES)) * len(set(PHASES))
    for each in drawn:
        phases = {"decode", "prefill"} if each.row["phase"] == "mixed" else {"prefill"}
        wanted = phases if each.row["phase"] in ("mixed", "prefill", "chunk") else {"decode"}
        assert set(phases_of(each.batch, each.config)) == wanted, each


def test_steps_and_caches_are_bounded(drawn: list[Work]) -> None:
    for each in drawn:
        floor = roofline_us(each.config, each.batch, lookup("h100"))
        assert floor is not None
        assert floor <= MOST_US
        assert each.batch.num_requests <= SPACE.requests
        assert each.batch.max_seq_len <= SPACE.contexts[1]
        config = layer(each)
        per_token = 1 if config.cache_dtype.startswith("fp8") else 2
        per_token *= config.head_size if config.mla else 2 * config.num_kv_heads * config.head_size
        assert each.batch.num_kv_tokens * per_token <= MOST_CACHE_BYTES


def test_the_space_is_wide(drawn: list[Work]) -> None:
    layers = [layer(each) for each in drawn]
    attention = [each for each in layers if not each.mla]
    assert {each.num_heads // each.num_kv_heads for each in attention} >= {1, 2, 4, 8, 16}
    assert {each.head_size for each in attention} >= {64, 80, 96, 112, 128, 192, 256, 512}
    assert {each.num_speculative_tokens for each in layers} >= {0, 1, 3, 7}
    assert {each.num_heads for each in layers if each.mla} >= {8, 16, 32, 64, 128}
    assert max(each.num_heads for each in layers) <= 128
    assert any(each.sinks and each.sliding_window for each in layers)
    assert any(each.logits_soft_cap for each in layers)
    assert any(each.sparse and each.kv_cache_dtype == "fp8_e4m3" for each in layers)
    assert len({kind_of(each) for each in layers}) > ALL / 2
    lengths = sorted(each.batch.max_seq_len for each in drawn)
    assert lengths[ALL // 10] < 1024
    assert lengths[-ALL // 10] > 1 << 16


def test_layers_that_keep_a_state_have_numbers_of_their_own() -> None:
    count = len(STATE_FAMILIES) * len(STATE_PHASES)
    drawn = [draw(3, FIRST_STATE + number) for number in range(count)]
    pairs = {(each.row["family"], each.row["phase"]) for each in drawn}
    assert len(pairs) == len(set(STATE_FAMILIES)) * len(set(STATE_PHASES))
    for each in drawn:
        config = each.config
        assert isinstance(config, StateConfig)
        assert kind_of(config).split(" ")[0] == config.recurrence == each.row["family"]
        states = each.batch.num_requests * (1 + config.max_decode_query_len) * bytes_per_slot(config)
        assert states <= MOST_CACHE_BYTES
        phases = {"decode", "prefill"} if each.row["phase"] == "mixed" else {"prefill"}
        wanted = phases if each.row["phase"] in ("mixed", "prefill", "chunk") else {"decode"}
        assert set(phases_of(each.batch, config)) == wanted, each
