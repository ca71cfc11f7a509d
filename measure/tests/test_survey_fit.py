"""A fit of made-up times: what it predicts between them, with more of them, and what it takes."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("scipy", reason="a fit needs scipy")

from attn_select.backends.registry import load_plugins
from attn_select.decide.selector import environment_for
from attn_select.layer.layer_config import layer_of
from attn_select.layer.state import StateConfig
from attn_select.machine.device import lookup
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.evidence import known_stale
from attn_select.times.features import Rates
from attn_select.times.prediction import Survey, features_of
from attn_select_measure.survey_draw import FIRST_STATE, draw, kind_of
from attn_select_measure.survey_fit import extended, fit_survey
from attn_select_measure.survey_records import Record, checked, packaged_times

RATES = Rates(4.19e6, 7.81e8, 132)


def times_of(config: Any, batch: Any) -> dict[str, float]:
    """Return times of two backends: one is better at few tiles, the other at many."""
    features = features_of(config, batch, RATES)
    lean = 0.1 * features.values["fill"] if isinstance(config, StateConfig) else 0.1 * (features.values["tiles"] - 7)
    return {"A": features.floor_us * math.exp(0.3 - lean), "B": features.floor_us * math.exp(0.3 + lean)}


def record(number: int, seed: int = 0) -> Record:
    """Return workload ``number`` of the plain decodes of a seed."""
    drawn = draw(seed, number)
    timed = [
        {
            "backend": name,
            "failure": None,
            "fingerprint": {name: {"acme": "1.0"}},
            "date": "2026-11-28T00:00:00+00:00",
            "time_us": time_us,
            "compile_s": 1.5,
            "eager": {"host_us": 40.0, "reserved_bytes": 0, "peak_bytes": 1 << 20},
        }
        for name, time_us in times_of(drawn.config, drawn.batch).items()
    ]
    return {
        "seed": seed,
        "number": number,
        "kind": kind_of(drawn.config),
        "config": drawn.config.model_dump(exclude_defaults=True),
        "batch": str(drawn.batch),
        "gpu": "NVIDIA H200",
        "gpu_name": "h200",
        "rates": {"copy_gbps": 4190.0, "tflops": 781.0},
        "timed": timed,
    }


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [each for number in range(120) if (each := record(number))["config"].get("kv_lora_rank") is None]


@pytest.fixture(scope="module")
def fitted(records: list[Record]) -> dict[str, Any]:
    return fit_survey(records)


def test_it_chooses_between_what_was_measured(fitted: dict[str, Any]) -> None:
    survey, right, errors = Survey(fitted, "made up"), 0, []
    others = [each for n in range(60) if (each := record(n, seed=1))["config"].get("kv_lora_rank") is None]
    for each in others:
        config, batch = layer_of(each["config"]), parse_batch_shape(each["batch"])
        found, times = survey.predict(config, batch), times_of(config, batch)
        right += (found["A"] < found["B"]) == (times["A"] < times["B"])
        errors.append(abs(math.log(found["A"] / times["A"])))
    assert right >= 0.9 * len(others)
    assert sorted(errors)[len(errors) // 2] < 0.1
    assert 1 < survey.margin < 1.6


def test_a_file_says_what_it_is_of(fitted: dict[str, Any], records: list[Record]) -> None:
    assert (fitted["gpu"], fitted["workloads"]) == ("NVIDIA H200", len(records))
    assert fitted["backends"]["A"] == {
        "fingerprint": {"acme": "1.0"},
        "date": "2026-11-28T00:00:00+00:00",
        "times": len(records),
    }
    assert [*fitted["families"]] == ["attention"]


def test_more_times_change_what_lies_near_them(fitted: dict[str, Any]) -> None:
    new = record(3, seed=7)
    for timed in new["timed"]:
        timed["time_us"] *= 3.0 if timed["backend"] == "A" else 1.0
    config, batch = layer_of(new["config"]), parse_batch_shape(new["batch"])
    before = Survey(fitted, "made up").predict(config, batch)
    more = extended(fitted, [new])
    after = Survey(more, "made up").predict(config, batch)
    assert after["A"] > 2 * before["A"]
    assert after["B"] == pytest.approx(times_of(config, batch)["B"], rel=0.1)
    assert more["workloads"] == fitted["workloads"] + 1


def test_layers_that_keep_a_state_are_a_family(records: list[Record]) -> None:
    states = [record(FIRST_STATE + number) for number in range(80)]
    fitted = fit_survey([*records[:30], *states])
    assert [*fitted["families"]] == ["attention", "state"]
    survey, right = Survey(fitted, "made up"), 0
    for other in (record(FIRST_STATE + number, seed=1) for number in range(30)):
        config, batch = layer_of(other["config"]), parse_batch_shape(other["batch"])
        found, times = survey.predict(config, batch), times_of(config, batch)
        right += (found["A"] < found["B"]) == (times["A"] < times["B"])
    assert right >= 27


def test_packaged_times_are_of_the_kernels_that_are_here() -> None:
    found = checked(packaged_times(), load_plugins(), environment_for(lookup("cpu")))
    assert {each.backend for each in found} >= {"TRITON_ATTN", "TRITON_MLA", "FLASH_ATTN"}
    stale = {each.backend for each in found if each.stale}
    assert stale == set(known_stale())  # with a reason each, and few of them
    assert len(stale) <= 3
