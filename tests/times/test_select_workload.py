"""``select`` with a workload and measured times, on the real facts."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from attn_select import AttentionConfig, ConfigError, clear_cache, select, select_model
from attn_select.errors import MeasurementError, UnknownNameError
from attn_select.rules.plugins import load_plugins
from attn_select.testing import plan_of
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.measurement import Measurement
from attn_select.times.store import append_measurements
from attn_select.times.timed_layer import timed_layer
from attn_select.times.workload import Workload, parse_workload
from attn_select_measure.fitting.keeping import fit_file
from attn_select_measure.measured_lines import measured_files, measured_lines

GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
UNTIMED = AttentionConfig(num_heads=40, num_kv_heads=8, head_size=128)
"""Of this kind no time is packaged, of any GPU."""
DEFINITIONS = json.loads((Path(__file__).parents[2] / "docs" / "explain.schema.json").read_text("utf-8"))["$defs"]
RULE = """version = 1
[[rules]]
name = "short-decodes"
phase = "decode"
when = { batch = ">=32", seq_len = "<=1024" }
prefer = ["TRITON_ATTN"]
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(RULE, encoding="utf-8")
    return path


def test_rules_about_batches_match_with_a_workload_alone(rules: Path) -> None:
    def decode(workload: str | None) -> str | None:
        return select(UNTIMED, "h100", rules, workload=workload).selected["decode"]

    assert decode("64q1s1k") == "TRITON_ATTN"
    assert decode(None) == decode("64q1s2k") == decode("64q1s1k,64q1s2k") == decode("q1k") == "FLASH_ATTN"


def test_selections_are_cached_by_workload() -> None:
    workload = parse_workload("64q1s1k")
    first = select(UNTIMED, "h100", workload=workload)
    assert first.workload is workload
    assert select(UNTIMED, "h100", workload=workload) == first
    assert select(UNTIMED, "h100", workload="64q1s1024") == first
    assert select(UNTIMED, "h100", workload="64q1s2k") is not first
    without = select(UNTIMED, "h100")
    assert without != first
    assert without.workload is None
    assert select(UNTIMED, "h100", workload=workload) == first
    assert pickle.loads(pickle.dumps(first)).workload == workload


def test_a_file_is_read_once_per_process(tmp_path: Path) -> None:
    path = tmp_path / "night.toml"
    path.write_text('[[shapes]]\nbatch = "q1"\n')
    shapes = []
    for text in ("q1", "q2"):
        path.write_text(f'[[shapes]]\nbatch = "{text}"\n')
        given = select(UNTIMED, "h100", workload=path).workload
        assert isinstance(given, Workload)
        shapes.append(str(given))
    assert shapes == ["q1", "q1"]
    clear_cache()
    assert str(select(UNTIMED, "h100", workload=path).workload) == "q2"


def test_kinds_of_one_pool_see_the_workload(rules: Path) -> None:
    window = GQA.model_copy(update={"sliding_window": 128})
    for selection in select_model([UNTIMED, window], "h100", rules, workload="64q1s1k"):
        assert selection.selected["decode"] == "TRITON_ATTN"
        assert str(selection.workload) == "64q1s1k"


def test_a_workload_that_cannot_be_read_is_an_error() -> None:
    for wrong in ([], 7, ["q1"]):
        with pytest.raises(ConfigError, match="expected shapes, a profile or a file"):
            select(UNTIMED, "h100", workload=wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown workload 'chatt'"):
        select_model([UNTIMED], "h100", workload="chatt")


def test_json_and_text_show_the_workload() -> None:
    selection = select(UNTIMED, "h100", workload="chat")
    layer = {"kind": "full_attention", "count": 1, **selection.to_dict()}
    jsonschema.validate(layer, {**DEFINITIONS["layer"], "$defs": DEFINITIONS})
    assert layer["workload"]["name"] == "chat"
    assert sum(shape["share"] for shape in layer["workload"]["shapes"]) == pytest.approx(1)
    assert "Workload   chat (64q1s2k*0.55," in selection.explain()
    assert "Workload   64q1s4k\n" in select(UNTIMED, "h100", workload="64q1s4k").explain()
    assert "Workload" not in select(UNTIMED, "h100").explain()
    assert select(UNTIMED, "h100").to_dict()["workload"] is None


def test_without_a_workload_nothing_of_times_is_imported() -> None:
    program = (
        "import sys; from attn_select import AttentionConfig, select;"
        "select(AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128), 'h100').to_dict();"
        "print([name for name in sys.modules if name.startswith('attn_select.times')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def times(tmp_path: Path) -> Path:
    """Return a file by which FLASHINFER decodes 64q1s1k on an H100 faster than FLASH_ATTN."""
    path = tmp_path / "h100.jsonl"
    rows = []
    for backend, time_us in (("FLASH_ATTN", 125.0), ("FLASHINFER", 113.0), ("TRITON_ATTN", 181.0)):
        plan = plan_of(load_plugins().specs[backend], UNTIMED, "h100")
        assert plan.kernel_name is not None
        rows.append(
            Measurement(
                gpu="NVIDIA H100 80GB HBM3",
                compute_capability="9.0",
                libraries={"torch": "2.9.0"},
                backend=backend,
                kernel={"decode": plan.kernel_name},
                config=timed_layer(UNTIMED).to_dict(),
                batch="64q1s1k",
                time_us=time_us,
                spread_us=(time_us * 0.999, time_us * 1.001),
                rounds=20,
                method="graph",
                date="2026-11-22",
            )
        )
    append_measurements(path, rows)
    return path


def test_measured_times_choose_and_are_shown(times: Path) -> None:
    selection = select(UNTIMED, "h100", workload="64q1s1k", measurements=times)
    assert selection.selected == {"prefill": "FLASH_ATTN", "decode": "FLASHINFER"}
    assert select(UNTIMED, "h100", workload="64q1s1k", measurements=[times]) == selection
    assert select(GQA, "h200", workload="64q1s1k", measurements=times).selected["decode"] == "TRITON_ATTN"
    text = selection.explain()
    assert "  Time             decode 113 us (100 % of the steps), one layer; measured itself\n" in text
    assert "  Times for decode  100 % of the steps; ordered by time where times compare\n" in text
    for rank, backend, time, behind in (("1", "FLASHINFER", 113, "1.00"), ("2", "FLASH_ATTN", 125, "1.11")):
        line = f"  {rank:>4}  {backend:<22}           {time} us ± 0.1 %   × {behind}  h100.jsonl, measured itself\n"
        assert line in text
    layer = {"kind": "full_attention", "count": 1, **selection.to_dict()}
    jsonschema.validate(layer, {**DEFINITIONS["layer"], "$defs": DEFINITIONS})
    decode = {each["backend"]: each["phases"]["decode"] for each in layer["candidates"]}
    assert decode["FLASH_ATTN"]["behind"] == pytest.approx(125 / 113)
    assert decode["FLASH_ATTN"]["timing"]["libraries"] == {"torch": "2.9.0"}
    assert decode["PAGED_ATTENTION"]["timing"]["kind"] == "roofline estimate"
    assert layer["evidence"]["files"] == [str(times)]


def test_measurements_are_one_snapshot_per_process(times: Path) -> None:
    first = select(UNTIMED, "h100", workload="64q1s1k", measurements=times)
    times.write_text("")
    assert select(UNTIMED, "h100", workload="64q1s1k", measurements=times) == first
    clear_cache()
    again = select(UNTIMED, "h100", workload="64q1s1k", measurements=times)
    assert again.selected["decode"] == "FLASH_ATTN"
    assert "Time             not known for decode: backends are ranked by rules" in again.explain()


def test_measurements_of_the_variable_and_the_cache_folder_count(times: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kind() -> str | None:
        clear_cache()
        selection = select(UNTIMED, "h100", workload="64q1s1k")
        timing = next(c for c in selection.candidates if c.backend == "FLASHINFER").phases["decode"].timing
        return timing.kind if timing is not None else None

    monkeypatch.setenv("XDG_CACHE_HOME", str(times.parent / "cache"))
    assert kind() == "roofline estimate"
    folder = times.parent / "cache" / "attn-select" / "measurements"
    folder.mkdir(parents=True)
    (folder / "h100.jsonl").write_bytes(times.read_bytes())
    assert kind() == "measured here"
    monkeypatch.setenv("ATTN_SELECT_MEASUREMENTS", str(times))
    assert kind() == "named file"
    clear_cache()


@pytest.fixture
def few_decodes() -> list[dict[str, Any]]:
    """Packaged times of an H200 of eight batches of decodes, 1 % longer."""
    (path,) = measured_files()
    every = [json.loads(row.measurement.to_line()) for row in measured_lines(path).measurements]
    rows = [row for row in every if row["config"] == timed_layer(GQA).to_dict()]
    decodes = [row for row in rows if parse_batch_shape(row["batch"]).max_query_len == 1]
    batches = [*dict.fromkeys(row["batch"] for row in decodes)][:30:4]
    return [row | {"time_us": row["time_us"] * 1.01} for row in decodes if row["batch"] in batches]


def test_a_few_times_of_ones_own_do_not_stand_for_all_batches(
    tmp_path: Path, few_decodes: list[dict[str, Any]]
) -> None:
    """They count for their batches; of others the packaged times of the same GPU know more."""
    own, batches = tmp_path / "own.jsonl", [*dict.fromkeys(row["batch"] for row in few_decodes)]
    own.write_text("".join(f"{json.dumps(row)}\n" for row in few_decodes), "utf-8")
    fit_file(own)

    def decided(batch: str, *files: Path) -> tuple[str | None, set[str]]:
        selection = select(GQA, "h200", workload=batch, measurements=files)
        timings = [candidate.phases["decode"].timing for candidate in selection.candidates]
        return selection.selected["decode"], {timing.kind for timing in timings if timing is not None and timing.margin}

    assert len(batches) == 8
    assert "named file" in decided(batches[0], own)[1]
    for batch in ("q1s77777", "3q1s50000_90q1s300", "200q1s700"):
        assert decided(batch, own) == decided(batch)
        assert decided(batch, own)[1] == {"packaged"}
        selection = select(GQA, "h200", workload=batch, measurements=own)
        assert selection.evidence is not None
        (behind,) = selection.evidence.phases["decode"].behind
        assert (behind.kind, behind.files) == ("named file", (str(own),))
        told = "own.jsonl, predicted within the layer: counts after the others, its margins are more than 1.25 times"
        assert told in selection.explain()
    assert "counts after the others" not in select(GQA, "h200", workload=batches[0], measurements=own).explain()


def test_a_backend_that_only_the_few_times_know_keeps_its_time(
    tmp_path: Path, few_decodes: list[dict[str, Any]]
) -> None:
    own = tmp_path / "own.jsonl"
    slow = {"backend": "FLEX_ATTENTION", "kernel": {"decode": "flex-triton"}}
    slower = [row | slow | {"time_us": 5 * row["time_us"]} for row in few_decodes if row["backend"] == "FLASH_ATTN"]
    own.write_text("".join(f"{json.dumps(row)}\n" for row in few_decodes + slower), "utf-8")
    fit_file(own)
    selection = select(GQA, "h200", workload="200q1s700", measurements=own)
    decodes = {candidate.backend: candidate.phases["decode"] for candidate in selection.candidates}
    timing = decodes["FLEX_ATTENTION"].timing
    assert timing is not None
    assert (timing.kind, decodes["FLEX_ATTENTION"].behind) == ("named file", None)
    assert selection.selected == select(GQA, "h200", workload="200q1s700").selected


def test_a_corrupt_line_is_named_and_skipped(times: Path) -> None:
    text = times.read_text("utf-8")
    times.write_text(text + '{"v":1,"gpu":"NVIDIA H100 80GB HBM3"}\n', "utf-8")
    selection = select(UNTIMED, "h100", workload="64q1s1k", measurements=times)
    assert selection.selected["decode"] == "FLASHINFER"
    assert [w for w in selection.warnings if w.startswith(f"measurement skipped: {times}:4: ")]


def test_lines_are_of_a_layer_however_they_spell_it(times: Path) -> None:
    lines = [json.loads(line) for line in times.read_text("utf-8").splitlines()]
    lines += [line | {"config": line["config"] | {"num_heads": 64}, "time_us": 1.0} for line in lines[:1]]
    for line in lines:
        line["config"] = dict(reversed(line["config"].items()))
    times.write_text(
        "".join(json.dumps(line, indent=None, separators=(" , ", " : ")) + "\n" for line in lines), "utf-8"
    )
    selection = select(UNTIMED, "h100", workload="64q1s1k", measurements=times)
    assert selection.selected["decode"] == "FLASHINFER"
    times.write_text(times.read_text("utf-8").replace('"head_size" : 128', '"head_size" : 128.5', 1), "utf-8")
    clear_cache()
    assert "× 1.11" not in select(UNTIMED, "h100", workload="64q1s1k", measurements=times).explain()


def test_a_named_file_without_measurements_is_told(times: Path) -> None:
    times.write_text("{}\n", "utf-8")
    (warning,) = select(UNTIMED, "h100", workload="64q1s1k", measurements=times).warnings
    assert warning == f"measurement skipped: {times}: no line of it is a measurement"


def test_measurements_without_a_workload_or_a_file_are_errors(times: Path) -> None:
    with pytest.raises(ConfigError, match="without a workload"):
        select(UNTIMED, "h100", measurements=times)
    with pytest.raises(MeasurementError, match="there is no such file"):
        select(UNTIMED, "h100", workload="64q1s1k", measurements=times.parent / "none.jsonl")


def test_times_of_another_dtype_are_a_near_miss(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    layer = {**timed_layer(UNTIMED).to_dict(), "dtype": "float32"}
    line = {
        "v": 1,
        "gpu": "NVIDIA H100 SXM 80 GB",
        "compute_capability": "9.0",
        "backend": "TRITON_ATTN",
        "config": layer,
    }
    line |= {"kernel": {"decode": "split-kv"}, "batch": "64q1s1k", "time_us": 10.0, "method": "graph"}
    path.write_text(json.dumps(line) + "\n")
    (warning,) = select(UNTIMED, "h100", workload="64q1s1k", measurements=path).warnings
    assert "this file has times of such layers with dtype float32, and none with dtype bfloat16" in warning
    assert str(path) in warning
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({**line, "config": {**layer, "num_heads": 99, "num_kv_heads": 99}}) + "\n")
    assert not select(UNTIMED, "h100", workload="64q1s1k", measurements=other).warnings


def test_host_time_of_each_new_shape_counts_where_prefills_are_ordered(tmp_path: Path) -> None:
    """cuDNN builds a graph for each shape: its kernel's time alone would put it first."""
    path = tmp_path / "h100.jsonl"
    line: dict[str, Any] = {"v": 1, "gpu": "NVIDIA H100 SXM 80 GB", "compute_capability": "9.0", "method": "graph"}
    line |= {"config": timed_layer(UNTIMED).to_dict(), "spread_us": [99.0, 101.0], "rounds": 9}
    rows = [
        {**line, "backend": backend, "kernel": {phase: kernel}, "batch": batch, "time_us": time_us}
        for backend, phase, kernel, batch, time_us in (
            ("FLASH_ATTN", "prefill", "fa3", "q2k", 200.0),
            ("CUDNN_ATTN", "prefill", "cudnn", "q2k", 100.0),
            ("FLASH_ATTN", "decode", "fa3", "64q1s1k", 200.0),
            ("CUDNN_ATTN", "decode", "cudnn", "64q1s1k", 100.0),
        )
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prefill = select(UNTIMED, "h100", workload="q2k", measurements=path)
    assert prefill.selected["prefill"] == "FLASH_ATTN"
    assert "40100 us" in prefill.explain()
    assert "40000 us of it host time for each new shape" in prefill.explain()
    # Decodes have few shapes, which an engine warms up.
    decode = select(UNTIMED, "h100", workload="64q1s1k", measurements=path)
    (timing,) = [each.phases["decode"].timing for each in decode.candidates if each.backend == "CUDNN_ATTN"]
    assert timing is not None
    assert (timing.time_us, timing.host_us) == (100.0, 0.0)
