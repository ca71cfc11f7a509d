"""``select`` and the command line with a workload, on the real facts."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from attn_select import AttentionConfig, ConfigError, clear_cache, select, select_model
from attn_select.errors import UnknownNameError
from attn_select.times.workload import Workload, parse_workload

GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
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
        return select(GQA, "h100", rules, workload=workload).selected["decode"]

    assert decode("64q1s1k") == "TRITON_ATTN"
    assert decode(None) == decode("64q1s2k") == decode("64q1s1k,64q1s2k") == decode("q1k") == "FLASH_ATTN"


def test_selections_are_cached_by_workload() -> None:
    workload = parse_workload("64q1s1k")
    first = select(GQA, "h100", workload=workload)
    assert first.workload is workload
    assert select(GQA, "h100", workload=workload) is first
    assert select(GQA, "h100", workload="64q1s1024") is first
    assert select(GQA, "h100", workload="64q1s2k") is not first
    without = select(GQA, "h100")
    assert without is not first
    assert without.workload is None
    assert select(GQA, "h100", workload=workload) is first
    assert pickle.loads(pickle.dumps(first)).workload == workload


def test_a_file_is_read_once_per_process(tmp_path: Path) -> None:
    path = tmp_path / "night.toml"
    path.write_text('[[shapes]]\nbatch = "q1"\n')
    shapes = []
    for text in ("q1", "q2"):
        path.write_text(f'[[shapes]]\nbatch = "{text}"\n')
        given = select(GQA, "h100", workload=path).workload
        assert isinstance(given, Workload)
        shapes.append(str(given))
    assert shapes == ["q1", "q1"]
    clear_cache()
    assert str(select(GQA, "h100", workload=path).workload) == "q2"


def test_kinds_of_one_pool_see_the_workload(rules: Path) -> None:
    window = GQA.model_copy(update={"sliding_window": 128})
    for selection in select_model([GQA, window], "h100", rules, workload="64q1s1k"):
        assert selection.selected["decode"] == "TRITON_ATTN"
        assert str(selection.workload) == "64q1s1k"


def test_a_workload_that_cannot_be_read_is_an_error() -> None:
    for wrong in ([], 7, ["q1"]):
        with pytest.raises(ConfigError, match="expected shapes, a profile or a file"):
            select(GQA, "h100", workload=wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown workload 'chatt'"):
        select_model([GQA], "h100", workload="chatt")


def test_json_and_text_show_the_workload() -> None:
    selection = select(GQA, "h100", workload="chat")
    layer = {"kind": "full_attention", "count": 1, **selection.to_dict()}
    jsonschema.validate(layer, {**DEFINITIONS["layer"], "$defs": DEFINITIONS})
    assert layer["workload"]["name"] == "chat"
    assert sum(shape["share"] for shape in layer["workload"]["shapes"]) == pytest.approx(1)
    assert "Workload   chat (64q1s2k*0.55," in selection.explain()
    assert "Workload   64q1s4k\n" in select(GQA, "h100", workload="64q1s4k").explain()
    assert "Workload" not in select(GQA, "h100").explain()
    assert select(GQA, "h100").to_dict()["workload"] is None


def test_without_a_workload_nothing_of_times_is_imported() -> None:
    program = (
        "import sys; from attn_select import AttentionConfig, select;"
        "select(AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128), 'h100').to_dict();"
        "print([name for name in sys.modules if name.startswith('attn_select.times')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
