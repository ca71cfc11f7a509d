"""Published tables: what their rows become, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from attn_select.errors import MeasurementError
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import known_gpus, lookup
from attn_select.rules.plugins import load_plugins
from attn_select.testing import ask
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.measurement import Measurement
from attn_select.times.timed_layer import layer_from_dict, timed_layer
from attn_select_measure import published_tables as tables

H100 = "NVIDIA H100 80GB HBM3"
ROW: dict[str, Any] = {
    "device": H100,
    "kernel_source": "vllm_flash_attn_fa3",
    "batch_size": 64,
    "isl": 1,
    "step": 4095,
    "num_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "window_size": 0,
    "latency": 0.3536,
}


def columns(*rows: dict[str, Any]) -> dict[str, list[Any]]:
    """Columns of rows that differ from ``ROW`` in what is given."""
    return {name: [{**ROW, **row}[name] for row in rows] for name in ROW}


def read(*rows: dict[str, Any], framework: str = "vllm") -> tables.Table:
    return tables.from_columns(columns(*rows), framework, "0.24.0", "0.12.0")


def test_a_row_becomes_a_measurement() -> None:
    (found,) = read({}).measurements
    assert found == Measurement(
        gpu=H100,
        compute_capability="9.0",
        libraries={"vllm": "0.24.0"},
        backend="FLASH_ATTN",
        kernel={"decode": "fa3"},
        config=timed_layer(AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)).to_dict(),
        batch="64q1s4k",
        time_us=353.6,
        method="table",
        source="aiconfigurator-core 0.12.0 vllm 0.24.0",
    )
    assert Measurement.from_line(found.to_line()) == found


def test_prefills_windows_and_quantised_caches() -> None:
    found = read({"isl": 2048, "step": 0}, {"window_size": 128, "kv_cache_dtype": "fp8"}).measurements
    assert (found[0].batch, dict(found[0].kernel)) == ("64q2k", {"prefill": "fa3"})
    layer = layer_from_dict(found[1].config).config
    assert (layer.sliding_window, layer.kv_cache_dtype) == (128, "fp8_e4m3")


@pytest.mark.parametrize("window", [0, None, float("nan"), -1])
def test_rows_without_a_window(window: float | None) -> None:
    (found,) = read({"window_size": window}).measurements
    assert layer_from_dict(found.config).config.sliding_window is None


def test_tables_without_the_column_of_windows() -> None:
    given = columns({})
    del given["window_size"]
    assert tables.from_columns(given, "vllm", "0.24.0", "0.12.0").measurements == read({}).measurements


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"kernel_source": "vllm_triton_attn"}, "vLLM's own Triton kernel"),
        ({"kernel_source": "vllm_flash_attn_fa4"}, "FlashAttention 4"),
        ({"kernel_source": "vllm_new"}, "vllm's label vllm_new has no meaning here"),
        ({"device": "NVIDIA Z1"}, "NVIDIA Z1 is no known GPU"),
        ({"attn_dtype": "fp8"}, "attn_dtype fp8"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype int3 is unknown"),
        ({"num_key_value_heads": 5}, "num_kv_heads 5 must divide num_heads 32"),
        ({"latency": 0.0}, "not a positive number"),
        ({"latency": float("nan")}, "not a positive number"),
        ({"latency": None}, "not a positive number"),
    ],
    ids=str,
)
def test_rows_that_are_left_out(row: dict[str, Any], reason: str) -> None:
    table = read({}, row)
    assert len(table.measurements) == 1
    ((said, count),) = table.left_out.items()
    assert reason in said
    assert count == 1


def test_a_batch_that_is_repeated_counts_once() -> None:
    table = read({}, {"latency": 0.5}, {"batch_size": 32, "latency": 0.2})
    assert [found.time_us for found in table.measurements] == [353.6, 200.0]
    assert table.left_out == {"it repeats a batch": 1}


def plan_kernels(names: Sequence[str]) -> dict[str, set[str]]:
    """Names of the kernels that backends plan, over layers and GPUs of the tables."""
    layers = [
        AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128),
        AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="fp8_e4m3"),
    ]
    specs = load_plugins().specs
    found: dict[str, set[str]] = {name: set() for name in names}
    for name in names:
        for gpu in ("a100", "l40s", "h100", "b200", "rtx-pro-6000"):
            for layer in layers:
                for phase in layer.phases:
                    plan = ask(specs[name], layer, lookup(gpu), phase=phase)
                    if not isinstance(plan, list):
                        found[name].add(plan.kernel.name)
    return found


def test_every_label_has_a_kernel_or_a_reason() -> None:
    rows = tables.labels()
    for row in rows:
        assert bool(row.backend) == bool(row.kernel) == bool(row.source) != bool(row.excluded), row
    assert len({(row.framework, row.label, row.capability) for row in rows}) == len(rows)
    kernels = plan_kernels(sorted({row.backend for row in rows if row.backend}))
    for row in rows:
        if row.backend and (row.label, row.capability) != ("flash_attention", "8."):  # with sglang-kernel alone
            assert row.kernel in kernels[row.backend], row


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    with pytest.raises(MeasurementError, match="aiconfigurator-core is not installed") as caught:
        tables.installed()
    assert caught.value.hint == "pip install 'attn-select-measure[tables]'"


@pytest.mark.parametrize("complete", [True, False])
def test_the_folder_and_the_version_of_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    folder = tmp_path / "aiconfigurator_core" / "systems" / "data"
    (folder if complete else folder.parent).mkdir(parents=True)
    (tmp_path / "aiconfigurator_core" / "__init__.py").touch()
    info = tmp_path / "aiconfigurator_core-0.12.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiconfigurator-core\nVersion: 0.12.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    if complete:
        assert tables.installed() == (folder, "0.12.0")
        return
    with pytest.raises(MeasurementError, match=r"data does not exist: this release of aiconfigurator-core is laid out"):
        tables.installed()


def write(path: Path, *rows: dict[str, Any], without: str | None = None) -> Path:
    """Write a small table as the package has it."""
    pyarrow = pytest.importorskip("pyarrow", reason="tables are parquet files, which pyarrow reads")
    parquet = pytest.importorskip("pyarrow.parquet", reason="tables are parquet files, which pyarrow reads")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({k: v for k, v in columns(*rows).items() if k != without}), path)
    return path


def test_a_parquet_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "h100_sxm/attention/vllm/0.24.0/generation_attention_perf.parquet"
    write(path, {}, {"batch_size": 32})
    write(path.parent.parent.parent.parent / "mla/vllm/0.24.0/mla_context_module_perf.parquet", {})
    ((framework, version, found),) = tables.table_files(tmp_path)
    assert (framework, version, found) == ("vllm", "0.24.0", path)
    assert tables.gpu_of(path) == lookup("h100")
    assert tables.read_table(path, framework, version, "0.12.0") == read({}, {"batch_size": 32})


def test_a_parquet_file_without_a_column(tmp_path: Path) -> None:
    path = write(tmp_path / "generation_attention_perf.parquet", {}, without="latency")
    with pytest.raises(MeasurementError, match=r"generation_attention_perf\.parquet lacks the column latency"):
        tables.read_table(path, "vllm", "0.24.0", "0.12.0")


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed")
def test_the_real_package() -> None:
    folder, version = tables.installed()
    read_files, unknown = 0, set()
    for framework, engine_version, path in tables.table_files(folder, framework="sglang"):
        gpu = tables.gpu_of(path)
        if gpu is None or gpu.name != "a100":
            continue
        table = tables.read_table(path, framework, engine_version, version)
        read_files += 1
        unknown |= {reason for reason in table.left_out if "no meaning" in reason or "no known GPU" in reason}
        for found in table.measurements[::500]:
            parse_batch_shape(found.batch)
            assert found.gpu in {known_gpus()["a100"].full_name, "NVIDIA A100-SXM4-80GB"}
            assert timed_layer(layer_from_dict(found.config).config).to_dict() == found.config
        assert table.measurements
    assert read_files == 2
    assert not unknown
