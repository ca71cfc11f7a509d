"""What of a layer that keeps a state a time is predicted by."""

from __future__ import annotations

import pytest

from attn_select.layer.layouts import bytes_per_slot
from attn_select.layer.state import StateConfig
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.features import LAUNCH_US, Rates, StepFeatures
from attn_select.times.prediction import family_of, features_of

H200 = Rates(4.19e6, 7.81e8, 132)
QWEN3_NEXT = StateConfig(recurrence="gated_delta_net", num_heads=16, num_v_heads=32, head_size=128, conv_kernel_size=4)


def features(batch: str, config: StateConfig = QWEN3_NEXT) -> StepFeatures:
    return features_of(config, parse_batch_shape(batch), H200)


def test_decodes_move_their_states_whatever_their_length() -> None:
    assert family_of(QWEN3_NEXT) == "state"
    few = features("64q1s4k")
    assert few == features("64q1s128k")
    states = 64 * 2 * bytes_per_slot(QWEN3_NEXT) / 4.19e6
    assert few.floor_us == pytest.approx(LAUNCH_US + states, rel=0.02)  # queries, keys, values and outputs are small
    assert few.values["fill"] == 3  # 2,048 states on 132 multiprocessors
    assert features("q1s4k").values["fill"] == pytest.approx(-2.04, abs=0.01)


def test_prefills_are_told_apart_from_decodes_and_by_their_chunks() -> None:
    whole, chunk, mixed = features("q1k").values, features("q1ks8k").values, features("q1k_8q1s4k").values
    assert (whole["has_prefills"], whole["has_decodes"], whole["has_states"]) == (1, 0, 0)
    assert (chunk["has_prefills"], chunk["has_states"]) == (1, 1)
    assert (mixed["has_prefills"], mixed["has_decodes"], mixed["has_states"]) == (1, 1, pytest.approx(8 / 9))
    assert whole["chunks"] == pytest.approx(4.09, abs=0.01)  # 16 of 64 tokens
    drafts = StateConfig(recurrence="kda", num_heads=4, head_size=128, num_speculative_tokens=3, state_dtype="bfloat16")
    assert features("2q4s1k", drafts).values["has_prefills"] == 0
    assert features("2q4s1k", drafts).values["state_bits"] == 4
