"""``attn-select report``: what its page holds. ``tests/browser`` opens it in a browser."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attn_select import AttentionConfig
from attn_select.backends.registry import load_plugins
from attn_select.decide.lines import byte_text
from attn_select.machine.device import lookup
from attn_select.times import prediction
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.prediction import load_survey
from attn_select_measure import charts
from attn_select_measure.charts import looks

DRAWN = r'<svg role="img"'
"""How a chart begins."""
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
    text = found["gpt-oss-20b h200"]
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
    text = opened(page)["qwen3-next-80b-a3b h200"]
    assert "gated_delta_net × 36" in page
    assert "TRITON_STATE" in text
    assert "<dt>State</dt>" in text
    assert "STATE_VK (num_slots, 32, 128, 128) float32" in text
    assert "MiB per request and layer" in text
    assert "None" not in text


def test_the_page_is_one_file_that_asks_for_nothing(run: Any) -> None:
    page = written(run, *PAIR)
    assert len(page.encode()) < 3e6
    addresses = set(re.findall(r"https?://[^\"'<> ]+", page))
    assert all("www.w3.org" in address for address in addresses)  # names of XML, which nothing fetches
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


def test_times_of_the_layers_asked_for_are_drawn(run: Any) -> None:
    page = written(run, "--model", "llama-3-8b", "--model", "deepseek-v3", "--gpu", "h200", "--gpu", "a100")
    survey = load_survey(lookup("h200"))
    assert survey is not None
    assert "llama-3-8b full_attention, h200" in page
    assert "deepseek-v3 mla, h200" in page
    assert f"Predicted by a survey of NVIDIA H200: {survey.workloads} workloads" in page
    charts = re.findall(DRAWN + ".*?</svg>", page, re.DOTALL)
    assert len(charts) == 6  # of each layer decodes by number and by length, and prefills
    for chart in charts:
        ElementTree.fromstring(chart.replace("xlink:href", "href"))
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))
    config, batch = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128), parse_batch_shape("16q1s4k")
    assert f"<td>{survey.predict(config, batch)['FLASH_ATTN']:.4g}</td>" in page
    assert "No charts of a100: there is no survey of them, so rules alone decide." in page


def test_backends_that_are_not_valid_are_not_drawn(run: Any, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text('version = 1\n[[rules]]\nname = "mine"\ndeny = ["TRITON_ATTN"]\n')
    for rules, drawn in (((), True), (("--rules", "rules.toml"), False)):
        page = written(run, "--model", "llama-3-8b", "--gpu", "h200", *rules)
        header = re.findall(r"<th[^>]*>([A-Z_]+) \(us\)</th>", page)
        assert "FLASH_ATTN" in header
        assert ("TRITON_ATTN" in header) is drawn


def test_without_times_there_are_no_charts(run: Any) -> None:
    page = written(run, "--model", "llama-3-8b", "--gpu", "h200", "--no-times")
    assert not re.findall(DRAWN, page)
    assert "No charts: --no-times leaves surveys out." in page


def test_no_two_backends_of_one_sort_look_alike() -> None:
    specs = load_plugins().specs
    found = looks(specs)
    assert set(found) == set(specs)
    by_sort: dict[str, list[int]] = {}
    for name, index in found.items():
        for sort in {each.sort for each in specs[name].capabilities.values()}:
            by_sort.setdefault(sort, []).append(index)
    assert all(len(set(each)) == len(each) for each in by_sort.values())
    assert max(found.values()) < len(charts.COLOURS) == len(charts.SIGNS)


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
    text = opened(page)["deepseek-v3 mi300x"]
    assert "AMD Instinct MI300X, gfx942, 192 GiB" in text
    assert "vllm 0.33.0 by itself: FLASH_ATTN / TRITON_MLA" in text
    assert "ROCM_AITER_MLA" in text
