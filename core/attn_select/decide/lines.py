"""What texts for people are made of: lines of styled pieces, numbers of bytes and times.

A line is a list of ``(text, style)``; style is "", or one of ``STYLES``. The piece ``HANG`` marks the column where
continuation lines begin when a terminal wraps the line. ``plain`` joins the pieces; the command line colours and wraps
them on a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from attn_select.errors import printable

Line = list[tuple[str, str]]
STYLES = {
    "title": "bold",
    "selected": "bold green",
    "valid": "green",
    "rejected": "red",
    "dim": "dim",
    "remedy": "cyan",
    "warning": "yellow",
}
HANG = ("", "hang")
MARGIN = 19
"""Column of the text beside ``prefill``, ``decode`` and ``KV cache``."""


def row(label: str, *pieces: tuple[str, str], style: str = "") -> Line:
    """Return a line whose text stands beside a label, or without one under the text of the line before."""
    return [(f"  {label}".ljust(MARGIN), style), HANG, *pieces]


def plain(lines: Iterable[Line]) -> str:
    """Return the lines without styles, trailing white space removed; what is not printable is replaced."""
    return "\n".join(printable("".join(text for text, _ in line).rstrip()) for line in lines)


def byte_text(count: int) -> str:
    """Return a number of bytes in the largest binary unit that it fills."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def us_text(time_us: float) -> str:
    """Return a time with three significant digits, all of them before the point."""
    digits = max(0, 2 - math.floor(math.log10(time_us)))
    return f"{time_us:.{digits}f} us"
