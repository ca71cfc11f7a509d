"""Fits lines and tables into the width of a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from attn_select.decide.lines import HANG, Line
from attn_select.errors import printable
from attn_select_cli.table import GAP, Block, Table

ROOM = 36
"""Columns that wrapped text should have; with fewer, continuation lines begin further left."""
NARROW_INDENT = 8


def fitted(blocks: Sequence[Block], width: int, styles: Mapping[str, str]) -> Iterator[Text]:
    """Yield the lines of all blocks, none wider than ``width`` unless one of its words is."""
    for block in blocks:
        for line in _fitted_table(block, width) if isinstance(block, Table) else [block]:
            yield from wrapped(line, width, styles)


def wrapped(line: Line, width: int, styles: Mapping[str, str] = MappingProxyType({})) -> list[Text]:
    """Break a line between words.

    Continuation lines begin in the column of ``HANG``, or two columns behind the line's own indentation; further left
    where a single word would not fit there.
    """
    pieces = [(printable(text), styles.get(style, "")) for text, style in line if (text, style) != HANG]
    whole = Text.assemble(*pieces)
    if cell_len(whole.plain.rstrip()) <= width:
        return [whole]
    lead = len(whole.plain) - len(whole.plain.lstrip())
    indent = sum(cell_len(text) for text, _ in line[: line.index(HANG)]) if HANG in line else lead + 2
    if width - indent < ROOM:
        indent = min(indent, NARROW_INDENT)
        whole = whole[max(0, lead - indent) :]  # what stood below the text of the line before follows it to the left
    lines, end = list[Text](), 0
    kept: Any = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    for number, found in enumerate(textwrap.wrap(whole.plain, width, subsequent_indent=" " * indent, **kept)):
        words = found.lstrip() if number else found
        start = whole.plain.index(words, end)
        end = start + len(words)
        lines.append(Text(" " * indent if number else "") + whole[start:end])
    return lines


def _fitted_table(table: Table, width: int) -> list[Line]:
    """Return a table as it is where it fits, with wrapped cells where words fit, else one block of lines per row."""
    widths = table.widths()
    cells_by_column = list(zip(table.header, *table.rows, strict=True))
    least = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in cells_by_column]
    room = width - len(GAP) * (len(widths) - 1)
    if sum(widths) <= room:
        return table.lines()
    if sum(least) > room:
        return _records(table)
    while sum(widths) > room:
        _, widest = max((w, i) for i, w in enumerate(widths) if w > least[i])
        widths[widest] -= 1
    lines: list[Line] = []
    for index, row in enumerate((table.header, *table.rows)):
        columns = [
            [text.plain.rstrip() for text in wrapped([("", ""), HANG, (cell, "")], w)]
            for cell, w in zip(row, widths, strict=True)
        ]
        height = max(map(len, columns))
        rows = [[column[i] if i < len(column) else "" for column in columns] for i in range(height)]
        lines += [
            [(line[0][0].rstrip(), "title" if index == 0 else "")] for line in Table(rows[0], rows[1:]).lines(widths)
        ]
    return lines


def _records(table: Table) -> list[Line]:
    lines: list[Line] = []
    label = max(len(name) for name in table.header[1:])
    for row in table.rows:
        lines.append([(row[0], "title")])
        indent = " " * (len(row[0]) - len(row[0].lstrip()) + 2)
        for name, cell in zip(table.header[1:], row[1:], strict=True):
            if cell:
                lines.append([(f"{indent}{name.ljust(label)}  ", "dim"), HANG, (cell, "")])
    return lines
