"""docs/decisions.md counts where our decisions differ from vLLM's, and every difference has been looked into."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import compare_vllm
from vllm_questions import questions


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


def test_the_answers_are_to_these_questions() -> None:
    asked = compare_vllm.read()["questions"]
    assert [{**one, "dims": list(one["dims"])} if "dims" in one else one for one in questions()] == asked
