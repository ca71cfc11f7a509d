"""Fits lines and tables into the width of a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from attn_select.decide.lines import HANG, Line
from attn_select_cli.table import GAP, Block, Table

ROOM = 36
"""Columns that wrapped text should have; with fewer, continuation lines begin further left."""
NARROW_INDENT = 8


def fitted(blocks: Sequence[Block], width: int) -> Iterator[Line]:
    """Yield the lines of all blocks, none wider than ``width`` unless one of its words is."""
    for block in blocks:
        for line in _fitted_table(block, width) if isinstance(block, Table) else [block]:
            yield from wrapped(line, width)


def wrapped(line: Line, width: int) -> list[Line]:
    """Break a line between words; a remedy stays in one piece where it fits.

    Continuation lines begin in the column of ``HANG``, or two columns behind the line's own indentation; further left
    where a single word would not fit there.
    """
    pieces = [piece for piece in line if piece != HANG]
    whole = "".join(text for text, _ in pieces)
    if cells(whole.rstrip()) <= width:
        return [pieces]
    if HANG in line:
        indent = sum(cells(text) for text, _ in line[: line.index(HANG)])
    else:
        indent = len(whole) - len(whole.lstrip()) + 2
    if width - indent < ROOM:
        indent = min(indent, NARROW_INDENT)
        lead = len(pieces[0][0]) if pieces and not pieces[0][0].strip() else 0
        if lead > indent:  # what stood below the text of the line before follows it to the left
            pieces = [(" " * indent, ""), *pieces[1:]]
    lines: list[Line] = [[]]
    column = 0
    empty = True
    for space, word in _words(pieces, width - indent):
        size = sum(cells(text) for text, _ in word)
        if column + len(space) + size > width and not empty:
            lines.append([])
            column, space = 0, " " * max(0, min(indent, width - size))
        lines[-1] += [(space, ""), *word]
        column += len(space) + size
        empty = False
    return lines


def _words(pieces: Line, room: int) -> Iterator[tuple[str, Line]]:
    """Yield each word, which may cross pieces, with the white space before it."""
    space, word = "", []
    for text, style in pieces:
        whole = style == "remedy" and cells(text) <= room
        for run in [text] if whole else re.findall(r"\s+|\S+", text):
            if not run.isspace():
                word.append((run, style))
                continue
            if word:
                yield space, word
                space, word = "", []
            space += run
    if word:
        yield space, word


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
        columns = [_filled(cell, w) for cell, w in zip(row, widths, strict=True)]
        height = max(map(len, columns))
        rows = [[column[i] if i < len(column) else "" for column in columns] for i in range(height)]
        lines += [
            [(line[0][0].rstrip(), "title" if index == 0 else "")] for line in Table(rows[0], rows[1:]).lines(widths)
        ]
    return lines


def _filled(cell: str, width: int) -> list[str]:
    """Return a cell's text in lines of at most ``width``; spaces that lead stay."""
    lines = [["".join(text for text, _ in line)] for line in wrapped([("", ""), HANG, (cell, "")], width)]
    return [line[0].rstrip() for line in lines]


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


def cells(text: str) -> int:
    """Return the columns that text takes on a terminal."""
    from rich.cells import cell_len

    return cell_len(text)
