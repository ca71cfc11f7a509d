"""A measurement as a line of a file: what is written, what is read back, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from attn_select.errors import MeasurementError
from attn_select.times.measurement import Measurement

FULL = Measurement(
    gpu="NVIDIA H200",
    compute_capability="9.0",
    driver="580.159.04",
    libraries={"torch": "2.11.0", "vllm": "0.26.0"},
    backend="FLASH_ATTN",
    kernel={"decode": "fa3"},
    config={"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"},
    block_size=16,
    batch="64q1s4k",
    time_us=263.25,
    spread_us=(262.0, 264.5),
    rounds=20,
    method="graph",
    error=2.1e-3,
    date="2026-11-22T12:00:00+00:00",
)
LEAST = Measurement(
    gpu="NVIDIA A100-SXM4-80GB",
    compute_capability="8.0",
    backend="FLASHINFER",
    kernel={"prefill": "native-fa2"},
    config={"num_heads": 32},
    batch="4k",
    time_us=1000.0,
    method="table",
    source="aiconfigurator-core 0.12.0 vllm 0.11.0",
)


@pytest.mark.parametrize("measurement", [FULL, LEAST])
def test_a_line_gives_the_measurement_back(measurement: Measurement) -> None:
    line = measurement.to_line()
    assert "\n" not in line
    assert Measurement.from_line(line) == measurement
    assert Measurement.from_line(f"  {line}\r") == measurement


def test_a_line_says_its_version_first_and_leaves_out_what_is_not_known() -> None:
    assert json.loads(LEAST.to_line()) == {
        "v": 1,
        "gpu": "NVIDIA A100-SXM4-80GB",
        "compute_capability": "8.0",
        "backend": "FLASHINFER",
        "kernel": {"prefill": "native-fa2"},
        "config": {"num_heads": 32},
        "batch": "4k",
        "time_us": 1000.0,
        "method": "table",
        "source": "aiconfigurator-core 0.12.0 vllm 0.11.0",
    }
    assert next(iter(json.loads(FULL.to_line()))) == "v"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not a line of JSON: ''"),
        ('{"v": 1', "not a line of JSON"),
        ("[" * 100000, "not a line of JSON"),
        ("[1]", "accepted is a JSON object, got [1]"),
        ("{}", "v = None: accepted is 1"),
        ('{"v": 2}', "v = 2: accepted is 1"),
        ('{"v": true}', "v = True: accepted is 1"),
        ('{"v": 1, "gpu": "NVIDIA H200"}', "compute_capability is missing: accepted is a compute capability"),
    ],
)
def test_a_line_that_is_none_is_refused(line: str, message: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        Measurement.from_line(line)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("gpu", "", "the full name of the GPU"),
        ("compute_capability", 9.0, "a compute capability"),
        ("driver", 580, "the driver's version, or null"),
        ("libraries", {"torch": 2}, "an object of versions by distribution"),
        ("backend", None, "the name of a backend"),
        ("kernel", {}, "an object of kernel names by phase (prefill, decode)"),
        ("kernel", {"mixed": "fa3"}, "an object of kernel names by phase"),
        ("kernel", "fa3", "an object of kernel names by phase"),
        ("config", {}, "an object with the layer's fields"),
        ("block_size", 0, "an integer from 1, or null"),
        ("block_size", True, "an integer from 1, or null"),
        ("batch", "", "a batch shape"),
        ("time_us", 0, "a number of microseconds, 0.001 to 1e+10"),
        ("time_us", 1e300, "a number of microseconds, 0.001 to 1e+10"),
        ("time_us", 1e-300, "a number of microseconds, 0.001 to 1e+10"),
        ("time_us", float("nan"), "a number of microseconds"),
        ("time_us", float("inf"), "a number of microseconds"),
        ("time_us", True, "a number of microseconds"),
        ("time_us", "12", "a number of microseconds"),
        ("spread_us", [2.0, 1.0], "the smaller first, or null"),
        ("spread_us", [1.0], "the smaller first, or null"),
        ("spread_us", 3.0, "the smaller first, or null"),
        ("rounds", -1, "an integer from 0"),
        ("rounds", 1.0, "an integer from 0"),
        ("method", "guess", "graph or eager or table"),
        ("source", "", "'measured', or a table's name"),
        ("error", -1.0, "a number from 0, or null"),
        ("error", float("nan"), "a number from 0, or null"),
        ("date", None, "a date in ISO 8601"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(field: str, value: Any, accepted: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        Measurement.from_dict({**dataclasses.asdict(FULL), field: value})
    assert caught.value.message.startswith(f"{field} = ")
    assert accepted in caught.value.message


def test_an_unknown_field_is_named_with_the_nearest() -> None:
    with pytest.raises(MeasurementError, match="unknown field 'time_ms'") as caught:
        Measurement.from_line('{"v": 1, "time_ms": 1.0}')
    assert caught.value.hint == "did you mean time_us?"
