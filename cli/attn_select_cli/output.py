"""How commands print: plain text into pipes and files, colours on a terminal, JSON on request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from attn_select.render import STYLES, Line, plain

Row = Sequence[str]


def is_terminal() -> bool:
    """Whether stdout is a terminal on which colours are welcome (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_lines(lines: Sequence[Line]) -> None:
    """Print styled lines: with colours through rich on a terminal, else as plain text."""
    if not is_terminal():
        click.echo(plain(lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        console.print(Text.assemble(*((text, STYLES.get(style, "")) for text, style in line)), soft_wrap=True)


def print_json(data: Any) -> None:
    """Print data as indented JSON with stable key order."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def table_lines(header: Row, rows: Sequence[Row]) -> list[Line]:
    """Return an aligned table. The last column is not padded."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Row, style: str) -> Line:
        padded = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        return [("  ".join([*padded, row[-1]]), style)]

    return [line(header, "title"), *(line(row, "") for row in rows)]


def plugin_lines(plugins: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return the table of plugins (``Plugin.to_dict``), or the line that says that there is none."""
    if not plugins:
        return [[("no plugin is installed", "warning")]]
    rows = [[p["name"], f"{p['distribution']} {p['version']}", p["error"] or ", ".join(p["backends"])] for p in plugins]
    return table_lines(["plugin", "distribution", "backends, or why it failed"], rows)


def markdown_table(header: Row, rows: Sequence[Row]) -> str:
    """Return a GitHub-flavoured Markdown table, aligned in the source too."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "| " + " | ".join("-" * w for w in widths) + " |")
    return "\n".join(lines)
