"""What ``flags`` says now, held against what the engines' own code did with the drawn commands (``make audit``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drawn_commands import Drawn
from said_and_done import WRONG, said, verdict

from attn_select.engines.names import engine_table

HERE = Path(__file__).parent
ENGINES = ("vllm", "sglang")
MOST_UNASKED = 0.1
"""The share of recorded commands that may have changed since; with more, `make audit ARGS=--record` asks anew."""


def recorded(engine: str) -> tuple[dict[str, Any], dict[Drawn, tuple[str, dict[str, Any]]]]:
    head, *rows = json.loads((HERE / f"answers_{engine}.json").read_text("utf-8"))
    return head, {Drawn(*row[:-2]): (row[-2], row[-1]) for row in rows}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_does_what_flags_says(engine: str, tmp_path: Path) -> None:
    head, rows = recorded(engine)
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
