"""``attn-select measurements``: what it lists, checks, fits and imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import lookup
from attn_select.times import store
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.measurement import Measurement
from attn_select.times.roofline import roofline_us
from attn_select.times.timed_layer import timed_layer
from attn_select_measure import measured_lines
from attn_select_measure import published_tables as tables

CONFIG = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
LAYER = ("--num-heads", "32", "--num-kv-heads", "8", "--head-size", "128")
H100 = "NVIDIA H100 80GB HBM3"
BATCHES = [f"{count}q1s{length}" for count in (1, 4, 16, 64) for length in ("1k", "4k", "16k")]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's folder of measurements; none that packaged models were fitted to."""
    monkeypatch.setattr(store, "user_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(measured_lines, "FOLDER", tmp_path / "packaged")
    monkeypatch.delenv("ATTN_SELECT_MEASUREMENTS", raising=False)
    return tmp_path / "cache"


def measurement(batch: str, **changes: Any) -> Measurement:
    least = roofline_us(CONFIG, parse_batch_shape(batch), lookup("h100"))
    assert least is not None
    fields: dict[str, Any] = {
        "gpu": H100,
        "compute_capability": "9.0",
        "backend": "FLASH_ATTN",
        "kernel": {"decode": "fa3"},
        "config": timed_layer(CONFIG).to_dict(),
        "batch": batch,
        "time_us": 8 + 1.3 * least,
        "method": "graph",
        "date": "2026-11-22T10:00:00+00:00",
        **changes,
    }
    return Measurement(**fields)


@pytest.fixture
def measured(folder: Path) -> Path:
    """A file of the user's with twelve batches of one kernel."""
    path = folder / "h100.jsonl"
    store.append_measurements(path, [measurement(batch) for batch in BATCHES])
    return path


def test_list(run: Any, measured: Path) -> None:
    result = run("measurements", "list")
    assert result.code == 0
    heading, header, row, *_ = result.out.splitlines()
    assert heading == f"{measured} (user)"
    assert header.split() == ["GPU", "kernel", "layers", "batches", "times", "source", "last"]
    assert row.split("  ")[0] == H100
    assert row.split()[-7:] == ["FLASH_ATTN", "fa3", "1", "12", "12", "measured", "2026-11-22"]
    (listed,) = run("measurements", "list", "--gpu", "h100", "--json").json["measurements"]
    assert listed == {
        "file": str(measured),
        "kind": "user",
        "gpu": H100,
        "backend": "FLASH_ATTN",
        "kernel": "fa3",
        "method": "graph",
        "source": "measured",
        "layers": 1,
        "batches": 12,
        "measurements": 12,
        "last": "2026-11-22T10:00:00+00:00",
    }


def test_nothing_to_list(run: Any, measured: Path) -> None:
    assert run("measurements", "list", "--gpu", "b200").out.startswith("no measurements on b200")
    assert run("measurements", "fit", "--gpu", "b200").out.startswith("no measurements on b200")


def test_check_names_file_line_and_why(run: Any, measured: Path) -> None:
    assert run("measurements", "check").out == "1 file, 12 measurements, 0 problems\n"
    with measured.open("a", encoding="utf-8") as file:
        file.write("no json\n")
    store.append_measurements(
        measured,
        [
            measurement("64q1s4k").__class__.from_dict({**_plain(measurement("64q1s4k")), "batch": "64x1"}),
            measurement("64q1s4k", config={"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16}),
        ],
    )
    result = run("measurements", "check", str(measured))
    assert result.code == 1
    no_json, batch, config, total = result.out.splitlines()
    assert no_json == f"{measured}:13: not a line of JSON: 'no json'"
    assert batch.startswith(f"{measured}:14: batch = '64x1'")
    assert config.startswith(f"{measured}:15: config = ")
    assert "block_size" not in config.split("accepted is")[1]
    assert total == "1 file, 14 measurements, 3 problems"
    assert [each["line"] for each in run("measurements", "check", "--json").json["problems"]] == [13, 14, 15]


def _plain(one: Measurement) -> dict[str, Any]:
    names = ("gpu", "compute_capability", "backend", "kernel", "config", "batch", "time_us", "method")
    return {name: getattr(one, name) for name in names}


def test_a_corrupt_line_is_skipped_with_a_word(run: Any, measured: Path) -> None:
    with measured.open("a", encoding="utf-8") as file:
        file.write("no json\n")
    for command in ("list", "fit"):
        result = run("measurements", command)
        assert result.code == 0
        assert "1 line skipped: `attn-select measurements check` names them" in result.err
    assert [each["line"] for each in run("measurements", "fit", "--json").json["problems"]] == [13]
    assert "12 measurements, 1 problem\n" in run("measurements", "check").out


def test_fit_says_how_well_it_does(run: Any, measured: Path) -> None:
    (fit,) = run("measurements", "fit", "--json").json["fits"]
    assert (fit["backend"], fit["kernel"], fit["phase"], fit["batches"]) == ("FLASH_ATTN", "fa3", "decode", 12)
    assert fit["config"] == {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
    assert 0 <= fit["median_error"] <= fit["p90_error"] < 0.2
    text = run("measurements", "fit").out
    assert "32 query heads, 8 KV heads, head size 128" in text
    assert text.endswith("1 model kept for decisions that read the same files\n")


def test_fit_of_too_few_batches(run: Any, folder: Path) -> None:
    store.append_measurements(folder / "h100.jsonl", [measurement(batch) for batch in BATCHES[:4]])
    (fit,) = run("measurements", "fit", "--json").json["fits"]
    assert (fit["batches"], fit["median_error"], fit["p90_error"]) == (4, None, None)


def test_a_file_that_is_not_there(run: Any) -> None:
    for name in ("list", "check", "fit"):
        result = run("measurements", name, "none.jsonl")
        assert result.code == 2
        assert "FILE = 'none.jsonl': there is no such file" in result.err
        assert "FILE = '.': it is a folder" in run("measurements", name, ".").err


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package with two tables: of vLLM and of SGLang, on an H100."""

    def read_table(path: Path, framework: str, version: str, package_version: str) -> tables.Table:
        rows = [measurement(batch, method="table", source=f"table {framework}", date="") for batch in BATCHES]
        other = measurement(
            "q1k",
            config={"num_heads": 8, "head_size": 64},
            kernel={"prefill": "fa3"},
            method="table",
            source=f"table {framework}",
        )
        return tables.Table([*rows, other], {"triton: another's kernel": 5})

    paths = [("vllm", "0.24.0", tmp_path / "vllm"), ("sglang", "0.5.14", tmp_path / "sglang")]
    monkeypatch.setattr(tables, "installed", lambda: (tmp_path, "0.12.0"))
    monkeypatch.setattr(tables, "table_files", lambda folder: iter(paths))
    monkeypatch.setattr(tables, "gpu_of", lambda path: lookup("h100"))
    monkeypatch.setattr(tables, "read_table", read_table)
    return tmp_path


def test_import_appends_a_models_layers_once(run: Any, published: Path, folder: Path) -> None:
    first = run("measurements", "import", *LAYER, "--gpu", "h100", "--json")
    assert first.code == 0
    assert first.json["file"] == str(folder / "h100-tables.jsonl")
    assert (first.json["appended"], first.json["already_there"]) == (24, 0)
    assert first.json["sources"] == ["table sglang", "table vllm"]
    assert first.json["left_out"] == {"triton: another's kernel": 10}
    again = run("measurements", "import", *LAYER, "--gpu", "h100")
    assert again.out.startswith(f"0 times appended to {folder / 'h100-tables.jsonl'}, 24 were there already\n")
    assert "10 triton: another's kernel" in again.out
    (listed, other) = run("measurements", "list", "--json").json["measurements"]
    assert (listed["batches"], other["batches"]) == (12, 12)


def test_import_keeps_the_batches_that_lie_farthest_apart(run: Any, published: Path) -> None:
    result = run("measurements", "import", *LAYER, "--gpu", "h100", "--points", "4", "--output", "mine.jsonl", "--json")
    assert (result.json["file"], result.json["appended"]) == ("mine.jsonl", 8)
    everything = run("measurements", "import", "--all", "--gpu", "h100", "--points", "0", "--json").json
    assert everything["appended"] == 26


def test_import_of_layers_that_the_tables_lack(run: Any, published: Path, folder: Path) -> None:
    result = run("measurements", "import", "--model", "deepseek-v3", "--gpu", "h100")
    assert result.code == 1
    assert result.out.startswith("the tables have no usable times of these layers on h100\n")
    assert not (folder / "h100-tables.jsonl").exists()


def test_import_for_a_gpu_that_the_tables_lack(run: Any, published: Path) -> None:
    result = run("measurements", "import", *LAYER, "--gpu", "h20")
    assert result.code == 2
    assert "--gpu h20: the tables of aiconfigurator-core 0.12.0 have no such GPU" in result.err
    assert "they have h100" in result.err


def test_import_without_a_layer(run: Any, published: Path) -> None:
    result = run("measurements", "import", "--gpu", "h100")
    assert result.code == 2
    assert "which layers?" in result.err


def test_import_of_all_layers_takes_no_model(run: Any) -> None:
    for one in (("--model", "llama-3-8b"), ("--num-heads", "8", "--head-size", "64")):
        result = run("measurements", "import", "--all", *one)
        assert result.code == 2
        assert "--all takes every layer of the tables" in result.err


def test_labels_are_printed_without_the_package(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    text = run("measurements", "import", "--labels").out
    assert "vllm_flash_attn_fa3" in text
    data = run("measurements", "import", "--labels", "--json").json
    assert {"mla", "sparse_attention"} <= set(data["excluded_folders"])
    (fa4,) = [each for each in data["labels"] if each["label"] == "vllm_flash_attn_fa4"]
    assert (fa4["backend"], bool(fa4["excluded"])) == (None, True)
    assert run("measurements", "import", *LAYER, "--gpu", "h100").code == 2


def test_a_file_is_listed_by_the_option_that_other_commands_have(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    line = {"v": 1, "gpu": "NVIDIA H100", "compute_capability": "9.0", "backend": "A", "config": {"num_heads": 4}}
    path.write_text(json.dumps({**line, "kernel": {"decode": "k"}, "batch": "q1s9", "time_us": 3, "method": "eager"}))
    assert run("measurements", "list", "--measurements", str(path)).out == run("measurements", "list", str(path)).out
