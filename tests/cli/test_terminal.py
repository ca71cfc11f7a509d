"""Output on terminals of several widths, and that a pipe is never wrapped."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.decide.lines import HANG
from attn_select_cli.table import Table
from attn_select_cli.terminal import fitted, wrapped

EXPLAIN = ("explain", "--model", "deepseek-v3", "--gpu", "h100", "--kv-cache-dtype", "fp8")
TABLE = Table(["model", "layers", "h100"], [["llama-3-8b", "full attention of 32", "FLASH_ATTN"]])


def text_of(lines: Any) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", [EXPLAIN, (*EXPLAIN, "--full"), ("matrix",), ("gpus",)])
def test_no_line_is_wider_than_the_terminal(
    run_on_terminal: Any, run: Any, width: int, command: tuple[str, ...]
) -> None:
    shown = run_on_terminal(width, *command).out
    assert max(map(len, shown.splitlines())) <= width
    # The words of the pipe are all there, but for the first head of a table that became blocks of lines.
    assert set(run(*command).out.split()) - set(shown.split()) <= {"model"}


def test_colours_only_where_they_are_welcome(run_on_terminal: Any) -> None:
    assert "\x1b[" in run_on_terminal(60, *EXPLAIN).err
    plain = run_on_terminal(60, *EXPLAIN, NO_COLOR="1")
    assert "\x1b[" not in plain.err
    assert max(map(len, plain.out.splitlines())) <= 60


def test_continuation_lines_begin_under_the_text() -> None:
    line = [("  decode  ", ""), HANG, ("one two three four five six seven eight nine ten", "")]
    assert text_of(wrapped(line, 46)) == ["  decode  one two three four five six seven", "          eight nine ten"]
    # Too little room beside it: further to the left.
    assert text_of(wrapped(line, 30)) == [
        "  decode  one two three four",
        "        five six seven eight",
        "        nine ten",
    ]


def test_a_remedy_stays_in_one_piece_and_a_long_word_is_not_cut() -> None:
    line = [("because of this", ""), ("; try ", "dim"), ("pip install some-package", "remedy")]
    assert text_of(wrapped(line, 40)) == ["because of this; try", "  pip install some-package"]
    path = "/a/" + "long/" * 20
    assert path in text_of(wrapped([("see ", ""), (path, "")], 40))[-1]


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (60, ["model       layers                h100", "llama-3-8b  full attention of 32  FLASH_ATTN"]),
        (40, ["model       layers            h100", "llama-3-8b  full attention    FLASH_ATTN", "            of 32"]),
        (25, ["llama-3-8b", "  layers  full attention", "        of 32", "  h100    FLASH_ATTN"]),
    ],
)
def test_a_table_changes_its_form_with_the_width(width: int, expected: list[str]) -> None:
    assert text_of(fitted([TABLE], width)) == expected
