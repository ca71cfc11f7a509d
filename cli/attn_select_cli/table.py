"""Tables, and the blocks that a command's output is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_select.decide.lines import Line
from attn_select.errors import printable

Row = Sequence[str]
GAP = "  "
"""Between two columns of a table."""


@dataclass(slots=True)
class Table:
    """Rows of text under a header, aligned in columns; a terminal that is too narrow changes its form."""

    header: Row
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        self.header, *self.rows = [[printable(cell) for cell in row] for row in (self.header, *self.rows)]

    def lines(self, widths: Sequence[int] | None = None) -> list[Line]:
        """Return the aligned rows. The last column is not padded; ``widths`` are of the widest cells."""
        columns = widths or self.widths()
        return [
            [(GAP.join([*(cell.ljust(width) for cell, width in zip(row[:-1], columns, strict=False)), row[-1]]), style)]
            for row, style in [(self.header, "title"), *((row, "") for row in self.rows)]
        ]

    def widths(self) -> list[int]:
        """Return the width of each column's widest cell."""
        return [max(len(row[i]) for row in (self.header, *self.rows)) for i in range(len(self.header))]


Block = Line | Table


def plugin_table(plugins: Sequence[Mapping[str, Any]]) -> Block:
    """Return the table of plugins (``Plugin.to_dict``), or the line that says that there is none."""
    if not plugins:
        return [("no plugin is installed", "warning")]
    rows = [[p["name"], f"{p['distribution']} {p['version']}", p["error"] or ", ".join(p["backends"])] for p in plugins]
    return Table(["plugin", "distribution", "backends, or why it failed"], rows)
