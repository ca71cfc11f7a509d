"""Times of one GPU on another with the same multiprocessors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select import AttentionConfig, select
from attn_select.decide.selection import Selection
from attn_select.machine.device import lookup
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.measurement import Measurement
from attn_select.times.roofline import step_work
from attn_select.times.scaled import SCALED_MARGIN, can_scale, scaled_us
from attn_select.times.store import append_measurements
from attn_select.times.timed_layer import timed_layer
from attn_select_measure.fitting.keeping import fit_file

LAYER = AttentionConfig(num_heads=48, num_kv_heads=6, head_size=128)
"""Of this kind no time is packaged."""
H200, H100 = lookup("h200"), lookup("h100")


@pytest.mark.parametrize(
    ("measured", "other", "scales"),
    [
        ("h200", "h100", True),
        ("h100", "h200", True),
        ("h200", "gh200", True),
        ("h200", "h200", False),  # nothing to scale
        ("h200", "h20", False),  # 78 multiprocessors
        ("h200", "h100-pcie", False),  # 114, at another clock
        ("h200", "h100-nvl", False),  # its matmul rate is not known
        ("h200", "b200", False),
        ("b200", "gb200", False),
        ("h200", "sm90", False),
        ("h200", "cpu", False),
    ],
)
def test_which_gpus_scale_to_each_other(measured: str, other: str, scales: bool) -> None:
    assert can_scale(lookup(measured), lookup(other)) == scales


def test_a_time_that_the_memory_does_not_take_stays() -> None:
    assert scaled_us(100.0, 0, H200, H100) == 100.0


def test_a_time_that_the_memory_takes_whole_grows_as_the_bandwidth_falls() -> None:
    assert scaled_us(100.0, 1e12, H200, H100) == pytest.approx(100 * 4800 / 3350)


@given(
    st.floats(min_value=2, max_value=1e5), st.floats(min_value=2, max_value=1e5), st.floats(min_value=0, max_value=1e11)
)
def test_the_faster_of_two_kernels_stays_the_faster_one(one: float, other: float, moved: float) -> None:
    low, high = sorted([one, other])
    assert scaled_us(low, moved, H200, H100) <= scaled_us(high, moved, H200, H100) * (1 + 1e-12)


@given(st.floats(min_value=2, max_value=1e5), st.floats(min_value=0, max_value=1e11))
def test_more_bandwidth_never_takes_longer(time_us: float, moved: float) -> None:
    slower = scaled_us(time_us, moved, H200, H100)
    assert time_us <= slower <= time_us * 4800 / 3350 * (1 + 1e-12)
    assert scaled_us(time_us, moved, H100, H200) <= time_us


def decided(
    folder: Path, times: Mapping[str, float], batches: Mapping[str, float], gpu: str = "h100", method: str = "graph"
) -> Selection:
    """Return the decision about 64q1s4k on a GPU with these times of decodes on an H200; ``batches`` multiply them."""
    config = timed_layer(LAYER).to_dict()
    kernels = {"FLASH_ATTN": "fa3", "FLASHINFER": "xqa"}
    append_measurements(
        folder / "h200.jsonl",
        [
            Measurement(
                gpu="NVIDIA H200",
                compute_capability="9.0",
                backend=backend,
                kernel={"decode": kernels[backend]},
                config=config,
                batch=batch,
                time_us=time_us * factor,
                spread_us=(time_us * factor * 0.999, time_us * factor * 1.001),
                rounds=20,
                method=method,  # type: ignore[arg-type]
            )
            for backend, time_us in times.items()
            for batch, factor in batches.items()
        ],
    )
    fit_file(folder / "h200.jsonl")
    return select(LAYER, gpu, workload="64q1s4k", measurements=[folder / "h200.jsonl"])


def test_an_h200s_times_decide_on_an_h100_as_scaled_ones(tmp_path: Path) -> None:
    selection = decided(tmp_path, {"FLASH_ATTN": 120, "FLASHINFER": 90}, {"64q1s4k": 1.0})
    assert selection.selected["decode"] == "FLASHINFER"
    timing = next(c for c in selection.candidates if c.backend == "FLASHINFER").phases["decode"].timing
    assert timing is not None
    assert (timing.kind, timing.source, timing.measured_shapes) == ("scaled", "scaled from NVIDIA H200", 1)
    moved = step_work(LAYER, parse_batch_shape("64q1s4k")).bytes
    assert timing.time_us == pytest.approx(scaled_us(90, moved, H200, H100))
    assert timing.margin == pytest.approx(SCALED_MARGIN, rel=0.01)
    assert "one layer; scaled from NVIDIA H200" in selection.explain()


def test_batches_that_an_h200_was_not_measured_at_are_predicted_first(tmp_path: Path) -> None:
    batches = {f"{count}q1s{4096 * count // 64}": 0.2 + 0.8 * count / 64 for count in (8, 16, 32, 48, 96, 128)}
    selection = decided(tmp_path, {"FLASH_ATTN": 120, "FLASHINFER": 90}, batches)
    timing = next(c for c in selection.candidates if c.backend == "FLASHINFER").phases["decode"].timing
    assert timing is not None
    assert (timing.kind, timing.measured_shapes) == ("scaled", 0)
    assert timing.margin > SCALED_MARGIN


@pytest.mark.parametrize(("gpu", "method"), [("h20", "graph"), ("h100", "table")])
def test_nothing_is_scaled_to_other_multiprocessors_or_from_tables(tmp_path: Path, gpu: str, method: str) -> None:
    selection = decided(tmp_path, {"FLASH_ATTN": 120, "FLASHINFER": 90}, {"64q1s4k": 1.0}, gpu, method)
    kinds = {t.kind for c in selection.candidates if (t := c.phases["decode"].timing) is not None}
    assert kinds == {"roofline estimate"}


def test_own_times_count_before_scaled_ones(tmp_path: Path) -> None:
    decided(tmp_path, {"FLASH_ATTN": 120, "FLASHINFER": 90}, {"64q1s4k": 1.0})
    scaled = (tmp_path / "h200.jsonl").read_text()
    own = scaled.replace('"NVIDIA H200"', '"NVIDIA H100 80GB HBM3"').replace('"time_us":120', '"time_us":60')
    (tmp_path / "both.jsonl").write_text(scaled + own)
    selection = select(LAYER, "h100", workload="64q1s4k", measurements=[tmp_path / "both.jsonl"])
    assert selection.selected["decode"] == "FLASH_ATTN"
    timing = next(c for c in selection.candidates if c.backend == "FLASH_ATTN").phases["decode"].timing
    assert timing is not None
    assert (timing.kind, timing.time_us) == ("named file", 60)
