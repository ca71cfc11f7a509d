"""Line numbers of a TOML file's headers.

Neither tomllib nor tomlkit gives line numbers. Headers stand at the start of a line, outside strings and arrays,
so one pass over strings, comments and brackets finds them all.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, NamedTuple

# Runs of characters are possessive (`++`), so that no second try goes through a long string. Groups are not: possessive
# ones match wrongly before Python 3.11.4 (python/cpython#101955).
# Up to two quotes may stand before the closing three of a multi-line string.
_TOKEN = re.compile(
    r'"""(?:[^"\\]++|\\.|"{1,2}(?!"))*"{3,5}'  # multi-line basic string
    r"|'''(?:[^']++|'{1,2}(?!'))*'{3,5}"  # multi-line literal string
    r'|"(?:[^"\\\n]++|\\.)*"'  # basic string
    r"|'[^'\n]*+'"  # literal string
    r"|#[^\n]*+"  # comment
    r"|[\[\]{}]",
    re.DOTALL,
)
_BARE_HEADER = re.compile(r"\[(\[)?[ \t]*([A-Za-z0-9_.-]+)[ \t]*\]")


class Header(NamedTuple):
    """One ``[table]`` or ``[[array of tables]]`` header: its line from 1, its key, and which of the two it is."""

    line: int
    key: tuple[str, ...]
    is_array: bool


def header_lines(text: str) -> list[Header]:
    """Return every header of ``text``, which must be valid TOML, in order."""
    headers: list[Header] = []
    depth = position = counted = 0
    line = 1
    while token := _TOKEN.search(text, position):
        start, position = token.span()
        kind = text[start]
        if kind == "[" and depth == 0 and not text[text.rfind("\n", 0, start) + 1 : start].strip(" \t"):
            line += text.count("\n", counted, start)
            counted = start
            end = text.find("\n", start)
            position = len(text) if end < 0 else end
            headers.append(_header(line, text[start:position].rstrip("\r")))
        elif kind in "[{":
            depth += 1
        elif kind in "]}":
            depth -= 1
    return headers


def _header(line: int, text: str) -> Header:
    if (bare := _BARE_HEADER.match(text)) is not None:
        return Header(line, tuple(bare[2].split(".")), bare[1] is not None)
    # Quoted, spaced or escaped keys are tomllib's business: a header alone is a document of one empty table.
    node: Any = tomllib.loads(text)
    key: list[str] = []
    while isinstance(node, dict) and node:
        ((part, node),) = node.items()
        key.append(part)
    return Header(line, tuple(key), isinstance(node, list))
