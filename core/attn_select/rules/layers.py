"""Finds, reads and merges rules files: packaged defaults, the user's, the working directory's, the environment's, ``--rules``."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_select.errors import RulesError, UnknownNameError, shorten
from attn_select.rules.lines import header_lines
from attn_select.rules.rule import Rule, RuleError, parse_rule

FILE_NAME = "selector_rules.toml"
VARIABLE = "ATTN_SELECT_RULES"
MAX_BYTES = 1 << 20
VERSION = 1


@dataclass(slots=True)
class Layer:
    """One place where rules are looked for.

    Attributes:
        kind: ``packaged``, ``user``, ``working directory``, ``ATTN_SELECT_RULES`` or ``--rules``.
        path: the file.
        state: ``read``, ``not found``, or why it was skipped.
    """

    kind: str
    path: Path
    state: str


@dataclass(slots=True)
class BackendOptionsTable:
    """A ``[backends.NAME]`` table merged over the layers, with the file and line of each key."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, tuple[str, int | None]] = field(default_factory=dict)


@dataclass(slots=True)
class RuleSet:
    """The effective rules.

    Attributes:
        rules: enabled rules, first layer to last, top-down within one.
        options: option tables by backend name.
        layers: every file that was looked for.
    """

    rules: list[Rule] = field(default_factory=list)
    options: dict[str, BackendOptionsTable] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)


def packaged_rules_path() -> Path:
    """Return the path of the default rules that come with the package."""
    return Path(__file__).parent.parent / FILE_NAME


def candidate_layers(extra: Sequence[str | os.PathLike[str]] = ()) -> list[Layer]:
    """Return every place where rules are looked for, first to last, with ``state`` still empty.

    ``extra`` are the files of ``--rules`` (or ``select(rules=…)``), in order.
    """
    layers = [Layer("packaged", packaged_rules_path(), "")]
    if user := _user_path():
        layers.append(Layer("user", user, ""))
    layers.append(Layer("working directory", Path(FILE_NAME), ""))
    for path in os.environ.get(VARIABLE, "").split(os.pathsep):
        if path:
            layers.append(Layer(VARIABLE, Path(path), ""))
    layers += (Layer("--rules", Path(path), "") for path in extra)
    return layers


def _user_path() -> Path | None:
    import platformdirs

    try:
        return platformdirs.user_config_path("attn-select", appauthor=False) / FILE_NAME
    except (OSError, RuntimeError):  # no home directory
        return None


def load_rules(extra: Sequence[str | os.PathLike[str]] = ()) -> RuleSet:
    """Read and merge every layer.

    Raises:
        RulesError: a file that was asked for is missing, or a file cannot be read or breaks the format. All problems of
            all files are collected in ``problems``.
    """
    rule_set = RuleSet(layers=candidate_layers(extra))
    problems: list[tuple[str, int | None, str]] = []
    by_name: dict[str, Rule] = {}
    packaged = b""
    for index, layer in enumerate(rule_set.layers):
        try:
            content = _read(layer)
        except RuleError as error:
            problems.append((str(layer.path), None, str(error)))
            continue
        if content is None:
            continue
        layer.state = _usable(layer, content, packaged)
        if layer.state != "read":
            continue
        if layer.kind == "packaged":
            packaged = content
        rules, options = _parse(content, str(layer.path), index, problems)
        for rule in rules:
            by_name.pop(rule.name, None)
            if rule.enabled:
                by_name[rule.name] = rule
        for backend, table in options.items():
            merged = rule_set.options.setdefault(backend, BackendOptionsTable())
            merged.values.update(table.values)
            merged.origins.update(table.origins)
    if problems:
        raise _error(problems)
    rule_set.rules = list(by_name.values())
    return rule_set


def inspect_layers(extra: Sequence[str | os.PathLike[str]] = ()) -> list[Layer]:
    """Return every layer with its state (``read``, ``not found``, skipped or the error) without judging the contents."""
    layers = candidate_layers(extra)
    packaged = b""
    for layer in layers:
        try:
            content = _read(layer)
        except RuleError as error:
            layer.state = str(error)
            continue
        if content is not None:
            layer.state = _usable(layer, content, packaged)
        if layer.kind == "packaged":
            packaged = content or b""
    return layers


def _usable(layer: Layer, content: bytes, packaged: bytes) -> str:
    if layer.kind == "working directory" and content == packaged:
        return "skipped: identical to the packaged rules"
    return "read"


def _error(problems: list[tuple[str, int | None, str]]) -> RulesError:
    lines = [f"{file}:{line}: {text}" if line else f"{file}: {text}" for file, line, text in problems]
    shown = lines[0] if len(lines) == 1 else f"{len(lines)} errors in rules files\n  " + "\n  ".join(lines[:20])
    return RulesError(shown, problems=problems, hint="`attn-select rules check` lists all problems; `attn-select rules path` lists the files")


def _read(layer: Layer) -> bytes | None:
    try:
        if not layer.path.exists():
            layer.state = "not found"
            if layer.kind in (VARIABLE, "--rules", "packaged"):
                raise RuleError(f"no such file (named by {layer.kind})")
            return None
        if not layer.path.is_file():
            raise RuleError("is not a regular file")
        with open(layer.path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise RuleError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_BYTES:
        raise RuleError(f"is larger than {MAX_BYTES} bytes, the most that a rules file may have")
    return content


def _parse(
    content: bytes, file: str, layer: int, problems: list[tuple[str, int | None, str]]
) -> tuple[list[Rule], dict[str, BackendOptionsTable]]:
    def problem(text: str, line: int | None = None) -> None:
        problems.append((file, line, text))

    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        problem(f"is not UTF-8 (byte {error.start} is 0x{content[error.start]:02x})")
        return [], {}
    except RecursionError:
        problem("is nested too deeply to be read")
        return [], {}
    except ValueError as error:  # TOMLDecodeError, or an integer of too many digits
        problem(f"is not valid TOML: {shorten(error, 200)}")
        return [], {}
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        seen = "is missing" if version is None else f"{shorten(repr(version))} is not supported"
        problem(f"version {seen}: expected version = {VERSION} at the top of the file")
        return [], {}
    for key in document:
        if key not in ("version", "rules", "backends"):
            problem(f"unknown key {shorten(repr(key))}; {UnknownNameError('key', key, ('version', 'rules', 'backends')).hint}")
    headers = header_lines(text)
    return _rules(document.get("rules", []), headers, file, layer, problem), _options(document.get("backends", {}), headers, file, problem)


def _rules(tables: object, headers: list[tuple[int, str]], file: str, layer: int, problem: Any) -> list[Rule]:
    lines = [line for line, header in headers if header == "[[rules]]"]
    if not isinstance(tables, list) or len(lines) != len(tables) or not all(isinstance(t, dict) for t in tables):
        problem("rules must be written as [[rules]] tables")
        return []
    rules: list[Rule] = []
    first_line: dict[str, int] = {}
    for table, line in zip(tables, lines, strict=True):
        try:
            rule = parse_rule(table, file=file, line=line, layer=layer)
        except RuleError as error:
            problem(str(error), line)
            continue
        if rule.name in first_line:
            problem(f"rule {shorten(rule.name)!r} is already defined at line {first_line[rule.name]} of this file", line)
            continue
        first_line[rule.name] = line
        rules.append(rule)
    return rules


def _options(tables: object, headers: list[tuple[int, str]], file: str, problem: Any) -> dict[str, BackendOptionsTable]:
    if not isinstance(tables, dict):
        problem("backends must be written as [backends.NAME] tables")
        return {}
    lines = {header: line for line, header in headers}
    options: dict[str, BackendOptionsTable] = {}
    for backend, values in tables.items():
        line = lines.get(f"[backends.{backend}]", lines.get("[backends]"))
        if not isinstance(values, dict):
            problem(f"backends.{shorten(backend)} = {shorten(repr(values))}: expected a table of options", line)
            continue
        options[backend] = BackendOptionsTable(dict(values), {key: (file, line) for key in values})
    return options
