"""Line numbers of a TOML file's headers and keys, which tomllib does not give.

``header_lines`` is quick and runs for every file: headers stand at the start of a line, outside strings and arrays, so
one pass over strings, comments and brackets finds them all. ``key_lines`` looks at every key and runs only where an
error or an option needs its line.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, NamedTuple

# Runs of characters are possessive (`++`), so that no second try goes through a long string. Groups are not: possessive
# ones match wrongly before Python 3.11.4 (python/cpython#101955).
# Up to two quotes may stand before the closing three of a multi-line string.
_STRING_OR_COMMENT = (
    r'"""(?:[^"\\]++|\\.|"{1,2}(?!"))*"{3,5}'  # multi-line basic string
    r"|'''(?:[^']++|'{1,2}(?!'))*'{3,5}"  # multi-line literal string
    r'|"(?:[^"\\\n]++|\\.)*"'  # basic string
    r"|'[^'\n]*+'"  # literal string
    r"|#[^\n]*+"  # comment
)
_TOKEN = re.compile(_STRING_OR_COMMENT + r"|[\[\]{}]", re.DOTALL)
_KEY_TOKEN = _STRING_OR_COMMENT + r"|[\[\]{},=\n]|[^\s\[\]{},=#\"']++"  # compiled when the first key is looked for
_BARE_KEY = re.compile(r"[A-Za-z0-9_.-]+")
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


KeyPath = tuple[str | int, ...]
"""A key below its tables; the members of arrays are counted from 0."""


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line of every table and key of ``text``, which must be valid TOML."""
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}  # members of each [[array of tables]] so far
    open_values: list[tuple[KeyPath, int | None]] = []  # arrays with their current index, inline tables with None
    table: KeyPath = ()
    value: KeyPath = ()
    key_start: int | None = None
    in_key = True
    line, counted, position = 1, 0, 0
    key_token = re.compile(_KEY_TOKEN, re.DOTALL)
    while token := key_token.search(text, position):
        start, position = token.span()
        kind = text[start]
        if kind == "#":
            continue
        if kind == "\n":
            if not open_values:
                in_key, key_start = True, None
        elif in_key and kind == "[" and key_start is None and not open_values:
            line += text.count("\n", counted, start)
            counted = start
            end = text.find("\n", start)
            position = len(text) if end < 0 else end
            table = _table_path(_header(line, text[start:position].rstrip("\r")), counts)
            _note(lines, table, line)
        elif in_key and kind == "=" and key_start is not None:
            line += text.count("\n", counted, key_start)
            counted = key_start
            value = (*(open_values[-1][0] if open_values else table), *_key(text[key_start:start].strip()))
            _note(lines, value, line)
            in_key = False
        elif in_key and kind != "}":
            key_start = start if key_start is None else key_start
        elif kind in "[{":
            open_values.append((value, 0 if kind == "[" else None))
            in_key, key_start = kind == "{", None
            value = (*value, 0) if kind == "[" else value
        elif kind == ",":
            path, index = open_values.pop()
            index = None if index is None else index + 1
            open_values.append((path, index))
            in_key, key_start = index is None, None
            value = path if index is None else (*path, index)
        elif kind in "]}":
            open_values.pop()
            in_key = False
    return lines


def _note(lines: dict[KeyPath, int], path: KeyPath, line: int) -> None:
    for end in range(1, len(path) + 1):
        lines.setdefault(path[:end], line)


def _table_path(header: Header, counts: dict[KeyPath, int]) -> KeyPath:
    """Return the path of a header's table; a name that stands for an array of tables means its last member."""
    path: KeyPath = ()
    for part in header.key[:-1]:
        path = (*path, part)
        if path in counts:
            path = (*path, counts[path] - 1)
    path = (*path, *header.key[-1:])
    if not header.is_array:
        return path
    counts[path] = counts.get(path, 0) + 1
    return (*path, counts[path] - 1)


def _key(text: str) -> tuple[str, ...]:
    """Return the parts of a dotted key."""
    return tuple(text.split(".")) if _BARE_KEY.fullmatch(text) else _nested_keys(tomllib.loads(f"{text} = 0"))


def _nested_keys(node: Any) -> tuple[str, ...]:
    """Return the keys from the outer to the inner of tables that have one key each."""
    keys: list[str] = []
    while isinstance(node, dict) and node:
        ((part, node),) = node.items()
        keys.append(part)
    return tuple(keys)


def _header(line: int, text: str) -> Header:
    if (bare := _BARE_HEADER.match(text)) is not None:
        return Header(line, tuple(bare[2].split(".")), bare[1] is not None)
    # tomllib reads quoted, spaced and escaped keys: a header alone is a document of one empty table.
    return Header(line, _nested_keys(tomllib.loads(text)), text.startswith("[["))
