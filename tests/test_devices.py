"""The table of GPUs, and what a user may call a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attn_select.errors import ConfigError, UnknownNameError
from attn_select.machine.device import find_gpu, known_gpus, lookup

DATA = Path(__file__).resolve().parent.parent / "core" / "attn_select" / "machine" / "gpus.json"
ROWS: list[dict[str, Any]] = json.loads(DATA.read_text("utf-8"))["gpus"]

REAL_CAPABILITIES = {
    *((7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0)),
    *((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_row(row: dict[str, Any]) -> None:
    amd = row["full_name"].startswith("AMD ")
    assert list(row) == [
        *("name", "aliases", "full_name", "compute_capability", *(["arch"] if amd else [])),
        *("sm_count", "memory_gib", "bandwidth_gbps", "bf16_tflops", "fp8_tflops", "source"),
    ]
    assert row["name"] == row["name"].lower().strip()
    assert " " not in row["name"]
    if amd:
        assert row["compute_capability"] is None
        assert lookup(row["arch"]).arch == row["arch"]
    else:
        assert row["full_name"].startswith("NVIDIA ")
        assert tuple(row["compute_capability"]) in REAL_CAPABILITIES
    assert row["source"]
    # Wide enough for every GPU there is, narrow enough to catch MB for GiB or TB/s for GB/s.
    assert row["sm_count"] is None or 8 <= row["sm_count"] <= (400 if amd else 200)
    assert row["memory_gib"] is None or 8 <= row["memory_gib"] <= 300
    assert row["bandwidth_gbps"] is None or 100 <= row["bandwidth_gbps"] <= 10_000
    assert row["bf16_tflops"] is None or 50 <= row["bf16_tflops"] <= 5_000
    assert row["fp8_tflops"] is None or 1.9 <= row["fp8_tflops"] / row["bf16_tflops"] <= 2.1  # dense, as is 16 bit


def test_no_spelling_means_two_gpus() -> None:
    for row in ROWS:
        for spelling in (row["name"], row["full_name"], *row["aliases"]):
            found = find_gpu(spelling)
            assert found is not None, spelling
            assert found.name == row["name"], f"{spelling!r} of {row['name']} means {found.name}"
    assert len({row["name"] for row in ROWS}) == len(ROWS)


# As the driver spells them. Figures: what nvidia-smi and torch show of these GPUs.
@pytest.mark.parametrize(
    ("spelling", "name", "capability", "sm_count", "memory_gib"),
    [
        ("Tesla T4", "t4", "7.5", 40, 15),
        ("NVIDIA A100-SXM4-80GB", "a100", "8.0", 108, 80),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb", "8.0", 108, 40),
        ("NVIDIA L40S", "l40s", "8.9", 142, 45),
        ("NVIDIA H100 80GB HBM3", "h100", "9.0", 132, 79.6),
        ("NVIDIA H200", "h200", "9.0", 132, 140.4),
        ("NVIDIA B300 SXM6 AC", "b300", "10.3", 148, 268.6),
        ("NVIDIA GeForce RTX 5090", "rtx5090", "12.0", 170, 31.8),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server", "12.0", 188, 95.6),
        ("NVIDIA GB10", "gb10", "12.1", 48, 128),
    ],
)
def test_driver_names(spelling: str, name: str, capability: str, sm_count: int, memory_gib: float) -> None:
    device = lookup(spelling)
    assert (device.name, device.capability_text) == (name, capability)
    assert device.sm_count == sm_count
    assert device.memory_gib == pytest.approx(memory_gib, abs=0.05)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        (" H100 ", "h100"),
        ("h100_pcie", "h100-pcie"),
        ("a100 40gb", "a100-40gb"),
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        ("GeForce RTX 5090", "rtx5090"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("DGX Spark", "gb10"),
        ("AMD_Instinct_MI300X", "mi300x"),
        ("Radeon RX 7900 XTX", "rx7900xtx"),
        ("GFX1201", "gfx1201"),
        ("cpu", "cpu"),
    ],
)
def test_what_users_type(spelling: str, name: str) -> None:
    assert lookup(spelling).name == name


@pytest.mark.parametrize(
    ("spelling", "name", "capability"),
    [
        ("sm90", "sm90", (9, 0)),
        ("SM_90a", "sm90", (9, 0)),
        ("9.0", "sm90", (9, 0)),
        ("sm75", "sm75", (7, 5)),
        ("sm_100f", "sm100", (10, 0)),
        ("10.3", "sm103", (10, 3)),
    ],
)
def test_compute_capabilities(spelling: str, name: str, capability: tuple[int, int]) -> None:
    device = lookup(spelling)
    assert (device.name, device.compute_capability) == (name, capability)
    assert (device.sm_count, device.memory_gib, device.bandwidth_gbps) == (None, None, None)
    assert not device.local


@pytest.mark.parametrize("spelling", ["sm44", "sm00", "9.1", "sm_95", "99.9", "11.5", "13.0"])
def test_a_capability_that_no_gpu_has(spelling: str) -> None:
    with pytest.raises(ConfigError, match="no CUDA GPU has compute capability") as caught:
        lookup(spelling)
    assert caught.value.fields == ("gpu",)
    assert spelling in caught.value.message
    assert "9.0, 10.0" in caught.value.message  # what is accepted, in numeric order


@pytest.mark.parametrize(
    ("spelling", "near"),
    [
        ("h1000", "h100"),
        ("rtx 4099", "rtx4090"),
        ("rtx6000", "rtx-6000-ada"),  # four GPUs are called that
        ("xyz", None),
        ("\N{ARABIC-INDIC DIGIT NINE}.0", None),  # a digit to Python, not to users
        ("", None),
    ],
)
def test_an_unknown_name(spelling: str, near: str | None) -> None:
    with pytest.raises(UnknownNameError) as caught:
        lookup(spelling)
    error = caught.value
    assert repr(spelling) in error.message
    assert "attn-select gpus" in str(error.hint)
    if near is None:
        assert error.nearest == []
        assert "did you mean" not in str(error.hint)
    else:
        assert near in error.nearest
        assert f"did you mean {' or '.join(error.nearest)}?" in str(error.hint)


@given(st.text() | st.from_regex(r"(sm[_-]?)?[0-9]{1,4}(\.[0-9]{1,2})?[af]?") | st.sampled_from(list(known_gpus())))
@example("\N{SUPERSCRIPT TWO}.0")
@example("\N{ARABIC-INDIC DIGIT NINE}.0")
@example("sm" + "9" * 5000)
@example("\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}" * 200)
def test_any_text_is_a_device_or_a_documented_error(text: str) -> None:
    error: UnknownNameError | ConfigError | None = None
    try:
        device = lookup(text)
    except (UnknownNameError, ConfigError) as raised:
        error = raised
    if error is None:
        assert lookup(device.name) == device
    else:
        assert "\n" not in error.message
        assert len(error.message) < 300
        assert error.hint
