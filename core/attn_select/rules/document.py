"""One rules file: bytes → rules and option tables, every problem collected with the line of its key."""

from __future__ import annotations

import codecs
import math
import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from attn_select.errors import UnknownNameError, shorten, show
from attn_select.machine.files import read_bounded
from attn_select.rules.lines import header_lines, key_lines
from attn_select.rules.rule import Rule, RuleError, parse_rule

VERSION = 1
MAX_BYTES = 1 << 18
MAX_RULES = 1000
MAX_DOTS = 100
"""Dots in one line: tomllib's time for a dotted key grows with the square of its parts, 5 s for 16,000."""
MAX_DEPTH = 8
MOST_PROBLEMS = 100
_KEYS = ("version", "distributions", "distributions_of_states", "rules", "backends")

Problem = tuple[str, int | None, str]
"""File, line from 1 (None where it concerns the file as a whole), message."""
Named = tuple[str, int | None, str, str]
"""File, line, the rule in words, and a backend that it names."""
Report = Callable[[str, int | None], None]


@dataclass(slots=True)
class OptionsTable:
    """A ``[backends.NAME]`` table, of one file or merged over the layers."""

    values: dict[str, Any]  # option values by key
    origin: tuple[str, int | None]  # file and line (None where unknown) of the table, in the last file that has one
    origins: dict[str, tuple[str, int | None]]  # file and line that each key comes from


@dataclass(slots=True)
class Document:
    """What one file says; empty where it could not be understood."""

    rules: list[Rule] = field(default_factory=list)
    options: dict[str, OptionsTable] = field(default_factory=dict)
    # per backend that a broken rule names: file, line, the rule in words, the name
    named: list[Named] = field(default_factory=list)


def problem_text(problem: Problem) -> str:
    """Return a problem as one line, ``file:line: message``."""
    file, line, text = problem
    return f"{file}:{line}: {text}" if line else f"{file}: {text}"


class _Unreadable(Exception):
    """Nothing in the file can be used. Arguments: what is wrong, the line or None."""


LineOf = Callable[..., int | None]
"""The line of a key by its path, or of the innermost table around it that has one."""


def _line_of(text: str) -> LineOf:
    by_path = cache(lambda: key_lines(text))  # looked for when the first one is asked for

    def line(*path: str | int) -> int | None:
        return next((by_path()[path[:end]] for end in range(len(path), 0, -1) if path[:end] in by_path()), None)

    return line


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a rules file."""
    return read_bounded(path, MAX_BYTES)


def read_document(content: bytes, file: str, layer: int, problems: list[Problem]) -> Document:
    """Read one file and append what is wrong with it to ``problems``. Never raises."""

    def report(text: str, line: int | None) -> None:
        problems.append((file, line, text))

    try:
        text, document = _parse(content)
    except _Unreadable as error:
        report(*error.args)
        return Document()
    line_of = _line_of(text)
    for key in [key for key in document if key not in _KEYS][:MOST_PROBLEMS]:
        report(f"unknown key {show(key)}; {UnknownNameError('key', key, _KEYS).hint}", line_of(key))
    tables = document.get("rules", [])
    rule_lines = [header.line for header in header_lines(text) if header.is_array and header.key == ("rules",)]
    if isinstance(tables, list) and len(tables) == len(rule_lines):
        rules, named = _rules(tables, rule_lines, line_of, file, layer, report)
    else:
        report("rules must be written as [[rules]] tables", line_of("rules"))
        rules, named = [], []
    return Document(rules, _options(document.get("backends", {}), line_of, file, report), named)


def _parse(content: bytes) -> tuple[str, dict[str, Any]]:
    """Return the file as text and as TOML of the one version that we know."""
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        byte, line = error.object[error.start], error.object.count(b"\n", 0, error.start) + 1
        raise _Unreadable(f"is not UTF-8 (byte 0x{byte:02x}): save it as UTF-8", line) from None
    for number, each in enumerate(text.split("\n"), 1):
        if each.count(".") > MAX_DOTS:
            raise _Unreadable(f"more than {MAX_DOTS} dots in one line: keys nested so deeply are not read", number)
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise _Unreadable("is nested too deeply to be read", None) from None
    except ValueError as error:  # TOMLDecodeError, or an integer of too many digits
        place = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
        at = int(place[1] or text.count("\n") + 1) if place else None
        raise _Unreadable(f"is not valid TOML: {shorten(error, 200)}", at) from None
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        seen = "is missing" if version is None else f"= {show(version)} is not supported"
        raise _Unreadable(f"version {seen}: expected version = {VERSION} at the top of the file", None)
    return text, document


def _rules(
    tables: list[Any], headers: list[int], line_of: LineOf, file: str, layer: int, report: Report
) -> tuple[list[Rule], list[Named]]:
    """Return the sound rules, and what the broken ones name."""
    if len(tables) > MAX_RULES:
        report(f"has {len(tables)} rules; at most {MAX_RULES} are read", None)
        return [], []
    rules: list[Rule] = []
    named: list[Named] = []
    defined: dict[str, int] = {}
    errors = 0
    for index, (table, line) in enumerate(zip(tables, headers, strict=True)):
        problems: list[tuple[tuple[str, ...], str]] = []
        name = table.get("name") if isinstance(table, dict) else None
        if isinstance(name, str) and (first := defined.setdefault(name.strip(), line)) != line:
            problems.append((("name",), f"rule {name.strip()!r} is already defined at line {first} of this file"))
        try:
            rule = parse_rule(table, file=file, line=line, layer=layer)
        except RuleError as error:
            problems += error.problems
            what = f"rule {name.strip()!r}:" if isinstance(name, str) else "the rule has the"
            named += [(file, line, what, backend) for backend in error.backends]
        else:
            rules += [] if problems else [rule]
        for key, text in problems:
            report(text, line_of("rules", index, *key))
        if (errors := errors + len(problems)) >= MOST_PROBLEMS:
            break
    return rules, named


def _options(tables: object, line_of: LineOf, file: str, report: Report) -> dict[str, OptionsTable]:
    if not isinstance(tables, dict):
        report("backends must be written as [backends.NAME] tables", line_of("backends"))
        return {}
    options: dict[str, OptionsTable] = {}
    for backend, values in tables.items():
        line = line_of("backends", backend)
        if not isinstance(values, dict):
            report(f"backends.{shorten(backend)} = {show(values)}: expected a table of options", line)
            continue
        wrong = [key for key, value in values.items() if not _is_plain(value)]
        for key in wrong[:MOST_PROBLEMS]:
            accepted = f"strings, numbers, booleans, and arrays and tables of them up to {MAX_DEPTH} deep"
            text = f"backends.{shorten(backend)}.{shorten(key)} = {show(values[key])}: expected {accepted}"
            report(text, line_of("backends", backend, key))
        if not wrong:
            places = {key: (file, line_of("backends", backend, key)) for key in values}
            options[backend] = OptionsTable(values, (file, line), places)
    return options


def _is_plain(value: object, depth: int = 1) -> bool:
    """Whether JSON can say it: no dates, no infinities, no integers that take more than 64 bits."""
    if isinstance(value, (list, dict)):
        inner = value.values() if isinstance(value, dict) else value
        return depth < MAX_DEPTH and all(_is_plain(item, depth + 1) for item in inner)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str) or (isinstance(value, int) and -(2**63) <= value < 2**63)
