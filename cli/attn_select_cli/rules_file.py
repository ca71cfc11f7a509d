"""A rules file as text: rules are added and replaced, all else stays. Written at once, with a way back.

A rule is a mapping with the keys of a ``[[rules]]`` table.
"""

from __future__ import annotations

import codecs
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from attn_select.errors import RulesError
from attn_select.machine.files import replace_file
from attn_select.rules.document import read_file
from attn_select.rules.lines import header_lines

HEAD = """\
# Rules of your own for attn-select. They stand above the packaged ones.
# `attn-select rules show` prints the effective rules, `attn-select rules check` looks for mistakes.
# `attn-select rules prefer`, `avoid` and `deny` add rules, `attn-select rules undo` takes the last change back.

version = 1
"""
EXAMPLE = """
# [[rules]]
# name = "h20-decode"
# phase = "decode"
# when = { mla = false, gpu = "h20" }
# prefer = ["FLASHINFER"]
# because = "measured on our H20 nodes"
"""


def rule_text(rule: Mapping[str, Any]) -> str:
    """Return a rule as a ``[[rules]]`` table."""
    lines = ["[[rules]]"]
    for key, value in rule.items():
        text = tomlkit.item(value).as_string()
        if key == "when":
            pairs = [f"{tomlkit.key(at).as_string()} = {tomlkit.item(leaf).as_string()}" for at, leaf in _leaves(value)]
            text = f"{{ {', '.join(pairs)} }}"
        lines.append(f"{key} = {text}")
    return "\n".join([*lines, ""])


def _leaves(table: Mapping[str, Any], *path: str) -> list[tuple[list[str], Any]]:
    found: list[tuple[list[str], Any]] = []
    for key, value in table.items():
        found += _leaves(value, *path, key) if isinstance(value, Mapping) else [([*path, key], value)]
    return found


def rules_in(text: str) -> list[dict[str, Any]]:
    """Return the rules of a file's text, which must be valid; "" has none."""
    rules: list[dict[str, Any]] = tomllib.loads(text).get("rules", [])
    return rules


def with_rule(text: str, rule: Mapping[str, Any]) -> str:
    """Return the text with the rule in the place of the one of its name, whose comments stay, else at the end."""
    for lines, begin, end, name in _blocks(text):
        if name == rule["name"]:
            document = tomlkit.parse("\n".join(lines[begin:end]))
            _update(document["rules"][0], rule)
            return "\n".join([*lines[:begin], *document.as_string().rstrip("\n").split("\n"), *lines[end:]])
    return f"{text.rstrip() or HEAD.rstrip()}\n\n{rule_text(rule)}"


def _blocks(text: str) -> list[tuple[list[str], int, int, str]]:
    """Return for every rule the text's lines, its first one, the one after its last key, and its name."""
    lines = text.split("\n")
    starts = [header for header in header_lines(text) if header.is_array or header.key[0] != "rules"]
    ends = [*(header.line - 1 for header in starts[1:]), len(lines)]
    rules = [(h.line - 1, end) for h, end in zip(starts, ends, strict=False) if h.is_array and h.key == ("rules",)]
    blocks = []
    for (begin, end), rule in zip(rules, rules_in(text), strict=True):
        while not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#"):
            end -= 1
        blocks.append((lines, begin, end, rule["name"].strip()))
    return blocks


def _update(table: Any, wanted: Mapping[str, Any]) -> None:
    """Make a tomlkit table say ``wanted``; what says it already is not touched."""
    for key in [key for key in table if key not in wanted]:
        del table[key]
    for key, value in wanted.items():
        present = table.get(key)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            _update(present, value)
        elif present != value:
            table[key] = value


def read_text(path: Path) -> str:
    """Return a rules file's text; "" where there is no file."""
    try:
        return read_file(path).removeprefix(codecs.BOM_UTF8).decode()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnicodeDecodeError as error:
        raise RulesError(f"{path}: is not UTF-8 (byte 0x{error.object[error.start]:02x}): save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise RulesError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def previous_file(path: Path) -> Path:
    """Return where the text before the last change is kept; an empty file there says that there was no file."""
    target = Path(os.path.realpath(path))
    return target.with_name(f"{target.name}.previous")


def write(path: Path, text: str) -> None:
    """Replace a file's text in one step, and keep the text before; "" removes the file."""
    target = Path(os.path.realpath(path))  # a link to a file elsewhere stays one
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(previous_file(path), read_text(target).encode())
        if text:
            replace_file(target, text.encode())
        else:
            target.unlink(missing_ok=True)
    except OSError as error:
        raise RulesError(f"{path}: cannot be written: {error.strerror or error}") from None
