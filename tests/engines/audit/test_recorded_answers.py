"""What ``flags`` says now, held against what the engines' own code did with the drawn commands (``make audit``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drawn_commands import Drawn
from said_and_done import WRONG, Said, said, verdict

from attn_select.engines.names import engine_table

HERE = Path(__file__).parent
RECORDED = sorted(path.stem.removeprefix("answers_") for path in HERE.glob("answers_*.json"))
MOST_UNASKED = 0.05
"""The share of recorded commands that may have changed since; with more, `make audit ARGS=--record` asks anew."""


def recorded(name: str) -> tuple[dict[str, Any], dict[Drawn, tuple[str, dict[str, Any]]]]:
    head, *rows = json.loads((HERE / f"answers_{name}.json").read_text("utf-8"))
    return head, {Drawn(*row[:-2]): (row[-2], row[-1]) for row in rows}


@pytest.mark.parametrize("name", RECORDED)
def test_the_engine_does_what_flags_says(name: str, tmp_path: Path) -> None:
    head, rows = recorded(name)
    engine = head["engine"]
    assert head["release"] == engine_table(engine).release
    wrong, changed = [], 0
    for drawn, (digest, answer) in rows.items():
        ours = said(engine, drawn, tmp_path)
        if ours.digest != digest:
            changed += 1
        elif (word := verdict(ours, answer)[0]) in WRONG:
            wrong.append((word, drawn, answer))
    assert wrong == []
    assert changed <= MOST_UNASKED * len(rows), "`make audit ARGS=--record` asks the engine anew"
    assert sum("unasked" in answer for _, answer in rows.values()) <= 50


@pytest.mark.parametrize(
    ("refused", "starts", "said_of", "answer", "word"),
    [
        ("", False, ["A"], {"names": {"mla_attention": ["A"]}}, "agreed"),
        ("", False, [None], {"names": {"mla_attention": ["A"]}}, "agreed"),  # its default is not named
        ("", False, ["A"], {"names": {"mla_attention": ["B"]}}, "other backend"),
        ("", False, ["A"], {"names": {"mla_attention": ["A", "B"]}}, "other backend"),
        ("", False, ["A"], {"refused": "no"}, "refused"),
        ("no", False, [None], {"refused": "no"}, "both refuse"),
        ("no", False, [None], {"names": {"mla_attention": ["A"]}}, "it runs what we refuse"),
        ("wrong", True, [None], {"names": {"mla_attention": ["A"]}}, "starts, known wrong"),
        ("", False, ["A"], {"unasked": "no GPU"}, "could not be asked"),
    ],
)
def test_what_is_said_is_held_against_what_is_done(
    refused: str, starts: bool, said_of: list[str | None], answer: dict[str, Any], word: str
) -> None:
    ours = Said(refused, starts, [], {}, {"mla_attention": said_of})
    assert verdict(ours, answer)[0] == word
    assert (word in WRONG) is (word in ("other backend", "refused", "it runs what we refuse"))
