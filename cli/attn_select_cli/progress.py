"""Progress of long work, on stderr: a bar with the time left on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

EVERY = 5.0
"""Seconds between two lines where there is no terminal; what takes less is silent there."""


class Progress:
    """How far work is."""

    def __init__(self, show: Callable[[str, float, float | None], None], total: float | None) -> None:
        self._show, self._done, self._text = show, 0.0, ""
        self.total = total

    def advance(self, done: float = 1.0, text: str = "") -> None:
        """Say that so much more is done; ``text`` says what is done next, in place of the title."""
        self._done += done
        self._text = text or self._text
        self._show(self._text, self._done, self.total)


@contextmanager
def progress(title: str, total: float | None = None, shown: bool = True) -> Iterator[Progress]:
    """Show how far work is until the context ends."""
    if not shown:
        yield Progress(lambda text, done, total: None, total)
    elif not sys.stderr.isatty():
        yield Progress(_lines(title), total)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Bar(*columns, TextColumn("left"), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)

            def update(text: str, done: float, total: float | None) -> None:
                bar.update(task, description=text or title, completed=done, total=total)

            yield Progress(update, total)


def _lines(title: str) -> Callable[[str, float, float | None], None]:
    """Return what writes a line where the last one is long ago."""
    began = last = time.monotonic()

    def show(text: str, done: float, total: float | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < EVERY:
            return
        last, spent = now, now - began
        parts = [f"{spent:.0f} s"]
        if total and done:
            left = spent * (total - done) / done
            parts = [f"{math.floor(done / total * 100)} %", *parts, f"about {max(0.0, left):.0f} s left"]
        click.echo(f"{text or title}: {', '.join(parts)}", err=True)

    return show
