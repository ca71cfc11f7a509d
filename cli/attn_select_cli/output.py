"""How commands print: plain text into pipes and files, colours and wrapped lines on a terminal, JSON on request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from attn_select.render import STYLES, Line, plain

Row = Sequence[str]
GAP = "  "
"""Between two columns of a table."""


@dataclass(slots=True)
class Table:
    """Rows of text under a header, aligned in columns; a terminal that is too narrow changes its form."""

    header: Row
    rows: Sequence[Row]

    def lines(self, widths: Sequence[int] | None = None) -> list[Line]:
        """Return the aligned rows. The last column is not padded; ``widths`` are those of the widest cells."""
        columns = widths or self.widths()
        return [
            [(GAP.join([*(cell.ljust(width) for cell, width in zip(row[:-1], columns, strict=False)), row[-1]]), style)]
            for row, style in [(self.header, "title"), *((row, "") for row in self.rows)]
        ]

    def widths(self) -> list[int]:
        """Return the width of each column's widest cell."""
        return [max(len(row[i]) for row in (self.header, *self.rows)) for i in range(len(self.header))]


Block = Line | Table


def print_lines(blocks: Sequence[Block]) -> None:
    """Print styled lines and tables: as plain text, or on a terminal wrapped to its width and coloured through rich.

    ``NO_COLOR`` (https://no-color.org) and ``TERM=dumb`` leave the colours out.
    """
    if not sys.stdout.isatty():
        click.echo(plain(line for block in blocks for line in (block.lines() if isinstance(block, Table) else [block])))
        return
    from rich.console import Console
    from rich.text import Text

    from attn_select_cli.terminal import fitted

    colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    console = Console(highlight=False, color_system="auto" if colours else None)
    for line in fitted(blocks, console.width):
        pieces = ((text, STYLES.get(style, "") if colours else "") for text, style in line)
        console.print(Text.assemble(*pieces), soft_wrap=True)


def print_json(data: Any) -> None:
    """Print data as indented JSON with stable key order."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def plugin_table(plugins: Sequence[Mapping[str, Any]]) -> Block:
    """Return the table of plugins (``Plugin.to_dict``), or the line that says that there is none."""
    if not plugins:
        return [("no plugin is installed", "warning")]
    rows = [[p["name"], f"{p['distribution']} {p['version']}", p["error"] or ", ".join(p["backends"])] for p in plugins]
    return Table(["plugin", "distribution", "backends, or why it failed"], rows)


def markdown_table(header: Row, rows: Sequence[Row]) -> str:
    """Return a GitHub-flavoured Markdown table, aligned in the source too."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "| " + " | ".join("-" * w for w in widths) + " |")
    return "\n".join(lines)
