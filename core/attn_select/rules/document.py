"""One rules file: bytes → rules and option tables, every problem collected with its line."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attn_select.errors import UnknownNameError, shorten, show
from attn_select.rules.lines import header_lines
from attn_select.rules.rule import Rule, RuleError, parse_rule

VERSION = 1
MAX_BYTES = 1 << 18
MAX_RULES = 1000
MAX_DOTS = 100
"""Dots in one line: tomllib's time for a dotted key grows with the square of its parts, 5 s for 16,000."""
MAX_DEPTH = 8
MOST_PROBLEMS = 100
_KEYS = ("version", "rules", "backends")

Problem = tuple[str, int | None, str]
"""File, line from 1 (None where it concerns the file as a whole), message."""
Report = Callable[[str, int | None], None]


@dataclass(slots=True)
class Options:
    """One ``[backends.NAME]`` table of a file."""

    values: dict[str, Any]
    file: str
    line: int | None


@dataclass(slots=True)
class Document:
    """What one file says; empty where it could not be understood."""

    rules: list[Rule] = field(default_factory=list)
    options: dict[str, Options] = field(default_factory=dict)


class _Unreadable(Exception):
    """The file as a whole is no use. Arguments: what is wrong, the line or None."""


def read_document(content: bytes, file: str, layer: int, problems: list[Problem]) -> Document:
    """Read one file and append what is wrong with it to ``problems``. Never raises."""

    def report(text: str, line: int | None) -> None:
        problems.append((file, line, text))

    try:
        text, document = _parse(content)
    except _Unreadable as error:
        report(*error.args)
        return Document()
    headers = header_lines(text)
    lines: dict[tuple[str, ...], int] = {}
    for header in headers:  # the first header of a table, or of one in it
        lines.setdefault(header.key[:1], header.line)
        lines.setdefault(header.key[:2], header.line)
    for key in [key for key in document if key not in _KEYS][:MOST_PROBLEMS]:
        report(f"unknown key {show(key)}; {UnknownNameError('key', key, _KEYS).hint}", lines.get((key,)))
    tables = document.get("rules", [])
    rule_lines = [header.line for header in headers if header.is_array and header.key == ("rules",)]
    if isinstance(tables, list) and len(tables) == len(rule_lines):
        rules = _rules(tables, rule_lines, file, layer, report)
    else:
        report("rules must be written as [[rules]] tables", lines.get(("rules",)))
        rules = []
    return Document(rules, _options(document.get("backends", {}), lines, file, report))


def _parse(content: bytes) -> tuple[str, dict[str, Any]]:
    """Return the file as text and as TOML of the one version that we know."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte, line = error.object[error.start], error.object.count(b"\n", 0, error.start) + 1
        raise _Unreadable(f"is not UTF-8 (byte 0x{byte:02x}): save it as UTF-8", line) from None
    for number, each in enumerate(text.split("\n"), 1):
        if each.count(".") > MAX_DOTS:
            raise _Unreadable(f"more than {MAX_DOTS} dots in one line: a key this deep is not read", number)
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


def _rules(tables: list[Any], lines: list[int], file: str, layer: int, report: Report) -> list[Rule]:
    if len(tables) > MAX_RULES:
        report(f"has {len(tables)} rules; at most {MAX_RULES} are read", None)
        return []
    rules: dict[str, Rule] = {}
    errors = 0
    for table, line in zip(tables, lines, strict=True):
        try:
            rule = parse_rule(table, file=file, line=line, layer=layer)
            if rule.name in rules:
                raise RuleError(f"rule {rule.name!r} is already defined at line {rules[rule.name].line} of this file")
        except RuleError as error:
            report(str(error), line)
            if (errors := errors + 1) >= MOST_PROBLEMS:
                break
        else:
            rules[rule.name] = rule
    return list(rules.values())


def _options(tables: object, lines: dict[tuple[str, ...], int], file: str, report: Report) -> dict[str, Options]:
    if not isinstance(tables, dict):
        report("backends must be written as [backends.NAME] tables", lines.get(("backends",)))
        return {}
    options: dict[str, Options] = {}
    for backend, values in tables.items():
        line = lines.get(("backends", backend)) or lines.get(("backends",))
        if not isinstance(values, dict):
            report(f"backends.{shorten(backend)} = {show(values)}: expected a table of options", line)
        elif wrong := [key for key, value in values.items() if not _is_plain(value)]:
            accepted = f"strings, numbers, booleans, and arrays and tables of them up to {MAX_DEPTH} deep"
            key = f"backends.{shorten(backend)}.{shorten(wrong[0])}"
            report(f"{key} = {show(values[wrong[0]])}: expected {accepted}", line)
        else:
            options[backend] = Options(values, file, line)
    return options


def _is_plain(value: object, depth: int = 1) -> bool:
    """Whether JSON can say it: no dates, no infinities, no integers that take more than 64 bits."""
    if isinstance(value, (list, dict)):
        inner = value.values() if isinstance(value, dict) else value
        return depth < MAX_DEPTH and all(_is_plain(item, depth + 1) for item in inner)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str) or (isinstance(value, int) and -(2**63) <= value < 2**63)
