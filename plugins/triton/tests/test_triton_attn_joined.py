"""Small steps of TRITON_ATTN: prefills and decodes in one launch of the decode kernel."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
import triton_attn_layers as layers

from attn_select.reference.running import common_of
from attn_select_triton import tuning
from attn_select_triton.runtime import schedule
from attn_select_triton.tuning import Gpu

pytestmark = pytest.mark.long

H100 = Gpu((9, 0), 132)
SMALL = ((1, 40), (1, 1), (30, 70), (17, 17), (2, 50))


def parts_of(group: Any, problem: Any) -> list[Any]:
    parts: list[Any] = group.build(common_of(problem)).parts[0].metadata.parts
    return parts


@pytest.mark.parametrize(
    ("fields", "requests"),
    [
        ({}, SMALL),
        ({"num_heads": 7, "num_kv_heads": 1, "sliding_window": 20, "sinks": True}, SMALL),
        ({"logits_soft_cap": 5.0, "num_speculative_tokens": 2}, ((2, 50), (3, 40), (30, 70), (17, 17))),
        layers.slow({"kv_cache_dtype": "fp8_e4m3"}, SMALL),
        layers.slow({"mm_prefix": True, "sliding_window": 9}, SMALL),
        ({}, ((1, 700), (40, 600), (3, 3))),
        ({"sliding_window": 300}, ((1, 700), (90, 900))),
        ({}, ((40, 40), (9, 60))),
    ],
    ids=str,
)
def test_a_small_step_is_one_launch(fields: dict[str, Any], requests: Any, device: torch.device) -> None:
    group = layers.many_sms(layers.made(device, layers.layer_config(**fields)))
    problem = layers.problem_of(group, requests)
    (part,) = parts_of(group, problem)
    assert part.decode is not None
    layers.check(group, problem)


def test_keys_are_split_by_what_a_program_sees(device: torch.device) -> None:
    """A prompt's rows see few keys each where there is a window, however long the prompt is."""
    group = layers.many_sms(layers.made(device, layers.layer_config(sliding_window=40)))
    problem = layers.problem_of(group, ((1, 700), (600, 700)))
    (part,) = parts_of(group, problem)
    assert layers.pieces_of(part) == [1, 1]
    layers.check(group, problem)


@pytest.mark.parametrize(
    ("fields", "requests"),
    [
        ({}, ((1, 1500), (3, 3))),  # a decode sees too many keys
        ({}, ((40, 500), (30, 30))),  # so does a chunk where no launch is spared
        ({"num_heads": 64, "num_kv_heads": 32}, ((1, 9), (400, 400))),  # more programs than places
        ({"batch_invariant": True}, SMALL),
    ],
    ids=str,
)
def test_other_steps_have_launches_of_their_own(fields: dict[str, Any], requests: Any, device: torch.device) -> None:
    group = layers.many_sms(layers.made(device, layers.layer_config(**fields)), 50)
    parts = parts_of(group, layers.problem_of(group, requests))
    assert [part.decode is not None for part in parts][-1] is False


def test_bounds_on_paper() -> None:
    by = tuning.joined()
    assert schedule.few_keys(by.keys, 128, True)
    assert not schedule.few_keys(by.keys, 128, False)
    assert schedule.few_keys(by.alone, 64, False)
    assert schedule.few_keys(by.keys // 2, 256, True)
    assert not schedule.few_keys(by.keys // 2 + 1, 256, True)
    assert schedule.few_programs(264, H100)
    assert not schedule.few_programs(265, H100)
