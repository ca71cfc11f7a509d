"""``attn-select report``: what its page holds. ``tests/browser`` opens it in a browser."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from attn_select import AttentionConfig
from attn_select.decide.lines import byte_text, us_text
from attn_select.machine.device import lookup
from attn_select.times import prediction
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.prediction import load_survey

PAIR = ("--model", "llama-3-8b", "--model", "gpt-oss-20b", "--gpu", "h100", "--gpu", "h200")


@pytest.fixture(autouse=True)
def _nothing_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "user_path", lambda device: None)


def opened(page: str) -> dict[str, str]:
    """Return what each key of a cell opens."""
    match = re.search(r'id="pieces">([^<]*)<', page)
    assert match is not None
    packed = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return {key: "".join(packed["parts"][piece] for piece in pieces) for key, pieces in packed["cells"].items()}


def written(run: Any, *arguments: str) -> str:
    result = run("report", *arguments)
    assert result.code == 0, result.err
    return Path("attn-select-report.html").read_text()


def test_every_cell_opens_its_explanation(run: Any) -> None:
    page = written(run, *PAIR, "--workload", "chat")
    found = opened(page)
    keys = re.findall(r'data-cell="([^"]+)"', page)
    assert set(keys) == set(found)
    assert len(keys) == 6  # gpt-oss has two kinds of layers
    text = found["gpt-oss-20b on h200"]
    explained = run("explain", "--model", "gpt-oss-20b", "--gpu", "h200", "--workload", "chat", "--json").json
    for layer in explained["layers"]:
        assert f"{layer['kind']} × {layer['count']}" in text
        assert layer["plan"]["kv_layout"] in text
        for candidate in layer["candidates"]:
            assert candidate["backend"] in text
        for rule in layer["rules"]:
            assert f"{rule['name']}</strong>" in text
            assert f":{rule['line']}</code>" in text
    assert "128 query heads" not in text
    assert "nearest measured workloads" in text


def test_layers_that_keep_a_state_are_shown(run: Any) -> None:
    page = written(run, "--model", "qwen3-next-80b-a3b", "--gpu", "h200", "--workload", "chat")
    text = opened(page)["qwen3-next-80b-a3b on h200"]
    assert "gated_delta_net × 36" in page
    assert "TRITON_STATE" in text
    assert "<dt>State</dt>" in text
    assert "STATE_VK (num_slots, 32, 128, 128) float32" in text
    assert "MiB per request and layer" in text
    assert "None" not in text


def test_the_page_is_one_file_that_asks_for_nothing(run: Any) -> None:
    page = written(run, *PAIR)
    assert len(page.encode()) < 3e6
    assert not re.search(r"https?://", page)
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|@import|url\((?!#)", page)
    assert "default-src 'none'" in page


def test_a_cache_is_summed_over_the_layers_that_own_one(run: Any) -> None:
    trial = Path(__file__).parents[2] / "tests" / "models" / "data" / "trial"
    (text,) = opened(written(run, "--model", str(trial / "g3n.json"), "--gpu", "h100")).values()
    assert "2 KiB per token and layer, 32 KiB for the 16 of 24 that own one" in text
    (sparse,) = opened(written(run, "--model", "deepseek-v3.2", "--gpu", "h100")).values()
    layer = run("explain", "--model", "deepseek-v3.2", "--gpu", "h100", "--json").json["layers"][0]
    plan = layer["plan"]
    total = plan["bytes_per_token"] * layer["cache_count"] + plan["indexer_bytes_per_token"] * layer["indexer_count"]
    assert f"{byte_text(total)} for all 61" in sparse


def rows_of(text: str) -> list[list[str]]:
    """Return a cell's table of times by batch, its header first."""
    (table,) = re.findall(r'<table class="figures">(.*?)</table>', text, re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]


def test_each_batch_of_the_workload_has_its_times(run: Any) -> None:
    found = opened(
        written(run, "--model", "llama-3-8b", "--gpu", "h200", "--gpu", "a100", "--workload", "16q1s4k,q512")
    )
    header, decode, prefill = rows_of(found["llama-3-8b on h200"])
    assert (header[0], header[-1]) == ("Batch", "Roofline")
    assert (decode[0], prefill[0]) == ("16q1s4k", "q512")
    survey, place = load_survey(lookup("h200")), header.index("FLASH_ATTN")
    assert survey is not None
    config = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
    for row in (decode, prefill):
        assert row[place] == us_text(survey.predict(config, parse_batch_shape(row[0]))["FLASH_ATTN"])
    assert "figures" not in found["llama-3-8b on a100"]  # nobody surveyed it


def test_a_time_stands_where_its_backend_is_valid(run: Any, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text('version = 1\n[[rules]]\nname = "mine"\ndeny = ["TRITON_ATTN"]\n')
    for rules, shown in (((), True), (("--rules", "rules.toml"), False)):
        header = rows_of(opened(written(run, "--model", "llama-3-8b", "--gpu", "h200", *rules))["llama-3-8b on h200"])[
            0
        ]
        assert "FLASH_ATTN" in header
        assert ("TRITON_ATTN" in header) is shown
    mla = opened(written(run, "--model", "deepseek-v3", "--gpu", "h200"))["deepseek-v3 on h200"]
    times = {row[0]: row[rows_of(mla)[0].index("FLASHMLA")] for row in rows_of(mla)}
    assert (times["q1k"], bool(times["64q1s2k"])) == ("", True)  # it decodes, and does not prefill


def test_without_times_no_batch_has_one(run: Any) -> None:
    (text,) = opened(written(run, "--model", "llama-3-8b", "--gpu", "h200", "--no-times")).values()
    assert "figures" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--times", "bad.json"), "bad.json: no survey that can be read"),
        (("--output", "bad.json"), "bad.json exists and is no report"),
        (("--output", "bad.json/where.html"), "bad.json takes no files"),
        (("--model", "lama"), "lama"),
    ],
)
def test_wrong_input(run: Any, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "bad.json").write_text('{"schema_version": 1}')
    result = run("report", *arguments)
    assert result.code == 2
    assert said in result.err
    assert (tmp_path / "bad.json").read_text() == '{"schema_version": 1}'
    assert not (tmp_path / "attn-select-report.html").exists()


def test_a_report_is_replaced_and_no_other_file(run: Any, tmp_path: Path) -> None:
    arguments = ("report", "--model", "bert-base", "--gpu", "a100", "--output", "page.html")
    assert run(*arguments).code == 0
    assert run(*arguments).code == 0
    (tmp_path / "page.html").write_text("a diary")
    assert run(*arguments).code == 2
    assert (tmp_path / "page.html").read_text() == "a diary"


def test_a_name_from_outside_is_text_not_markup(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "<script>x"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    page = written(run, "--model", str(folder), "--gpu", "h200")
    assert "<script>x" not in page
    assert "&lt;script&gt;x" in page
    assert all("<script>" not in text for text in opened(page).values())


def test_an_engines_answers_stand_in_the_cell(run: Any) -> None:
    page = written(run, "--model", "deepseek-v3", "--gpu", "mi300x", "--engine", "vllm", "--no-times")
    text = opened(page)["deepseek-v3 on mi300x"]
    assert "AMD Instinct MI300X, gfx942, 192 GiB" in text
    assert "vllm 0.33.0 by itself: FLASH_ATTN / TRITON_MLA" in text
    assert "ROCM_AITER_MLA" in text
