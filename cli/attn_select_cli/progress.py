"""Progress of long work, on stderr: on a terminal one line that changes, elsewhere a line now and then."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from attn_select_cli.output import columns

EVERY = 5.0
"""Seconds between two lines where there is no terminal; what takes less is silent there."""
ON_TERMINAL = 0.2
"""Seconds between two forms of a terminal's line."""


class Progress:
    """How far work is."""

    def __init__(self, title: str, total: float | None, shown: bool) -> None:
        self._text, self.total, self._shown, self._done = title, total, shown, 0.0
        self._began = self._last = time.monotonic()
        self._on_terminal = sys.stderr.isatty()

    def advance(self, done: float = 1.0, text: str = "") -> None:
        """Say that so much more is done; ``text`` says what is done next, in place of the title."""
        self._done += done
        self._text = text or self._text
        now = time.monotonic()
        if not self._shown or now - self._last < (ON_TERMINAL if self._on_terminal else EVERY):
            return
        self._last, spent = now, now - self._began
        parts = [f"{spent:.0f} s"]
        if self.total and self._done:
            left = spent * (self.total - self._done) / self._done
            parts = [f"{math.floor(self._done / self.total * 100)} %", *parts, f"about {max(0.0, left):.0f} s left"]
        self._write(f"{self._text}: {', '.join(parts)}")

    def _write(self, line: str) -> None:
        if self._on_terminal:
            click.echo(f"\r\x1b[K{line[: columns(sys.stderr) - 1]}", err=True, nl=False)
        else:
            click.echo(line, err=True)

    def close(self) -> None:
        """Take a terminal's line away."""
        if self._shown and self._on_terminal:
            self._write("")


@contextmanager
def progress(title: str, total: float | None = None, shown: bool = True) -> Iterator[Progress]:
    """Show how far work is until the context ends."""
    told = Progress(title, total, shown)
    try:
        yield told
    finally:
        told.close()
