"""docs/decisions.md counts where our decisions differ from vLLM's, and every difference has been looked into."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))

import compare_vllm
from vllm_questions import config_of, questions

from attn_select.engines.names import engine_table
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device, lookup


@pytest.fixture(scope="module")
def found() -> list[compare_vllm.Compared]:
    return [*compare_vllm.decisions(compare_vllm.read())]


def test_the_page_has_the_counts(found: list[compare_vllm.Compared]) -> None:
    """``python tests/decision/compare_vllm.py --write`` renews it."""
    page = compare_vllm.PAGE.read_text("utf-8")
    assert compare_vllm.with_tables(page, compare_vllm.tables(found)) == page


def test_every_difference_has_a_class(found: list[compare_vllm.Compared]) -> None:
    unknown = [each for *_, each in found if each is not None and compare_vllm.class_of(each) is None]
    assert not unknown


def test_what_is_left_out_is_served_by_another_backend(found: list[compare_vllm.Compared]) -> None:
    for *_, each in found:
        if each is not None and (named := compare_vllm.class_of(each)) is not None and named.verdict == "left out":
            assert each.ours is not None, each


def test_every_class_is_seen(found: list[compare_vllm.Compared]) -> None:
    seen = {each.name for *_, one in found if one is not None and (each := compare_vllm.class_of(one)) is not None}
    assert seen == {each.name for each in compare_vllm.CLASSES}


def test_what_flags_takes_for_vllms_default_is_what_it_takes() -> None:
    """Wherever the table names a default that vLLM accepts, it is the first that vLLM accepts."""
    table, told = engine_table("vllm"), Counter[str]()
    found = compare_vllm.read()
    for capability, answers in found["answers"].items():
        device = lookup(capability)
        for question, answer in zip(found["questions"], answers, strict=True):
            try:
                selection = selection_on(device, config_of(question))
            except ConfigError:  # what vLLM can be asked, and no layer has
                continue
            default = table.default(selection.config, selection.device, "attention", "")
            if default is not None and default.name in answer["accepted"]:
                assert answer["accepted"][0] == default.name, (capability, question, answer["accepted"])
                told[default.name] += 1
    by_itself = [row for row in table.defaults if row.argument == "attention" and not row.setting]
    of_nvidia = [row for row in by_itself if "arch" not in [condition.field for condition in row.when]]
    assert set(told) >= {row.name or row.order[0] for row in of_nvidia}
    assert min(told.values()) >= 5


def selection_on(device: Device, config: AttentionConfig) -> Any:
    """Return as much of a selection as the table's conditions read."""
    return SimpleNamespace(device=device, config=config)


def test_the_answers_are_to_these_questions() -> None:
    asked = compare_vllm.read()["questions"]
    assert [{**one, "dims": list(one["dims"])} if "dims" in one else one for one in questions()] == asked
