"""How commands print: plain text into pipes and files, colours and wrapped lines on a terminal, JSON on request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from attn_select.decide.lines import STYLES, plain
from attn_select.decide.text import warning_lines
from attn_select.errors import printable
from attn_select_cli.table import Block, Table


def print_lines(blocks: Sequence[Block], err: bool = False) -> None:
    """Print styled lines and tables: as plain text, or on a terminal wrapped to its width and coloured through rich.

    ``NO_COLOR`` (https://no-color.org) and ``TERM=dumb`` leave the colours out. They go to stdout, or with ``err`` to
    stderr.
    """
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        lines = (line for block in blocks for line in (block.lines() if isinstance(block, Table) else [block]))
        click.echo(plain(lines), err=err)
        return
    from rich.console import Console
    from rich.text import Text

    from attn_select_cli.terminal import fitted

    colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    console = Console(file=stream, highlight=False, color_system="auto" if colours else None)
    for line in fitted(blocks, console.width):
        pieces = ((printable(text), STYLES.get(style, "") if colours else "") for text, style in line)
        console.print(Text.assemble(*pieces), soft_wrap=True)


def print_warnings(warnings: Sequence[str]) -> None:
    """Print warnings to stderr, behind what stdout has; so a pipe gets the answer alone, and JSON can be read."""
    if warnings:
        sys.stdout.flush()
        print_lines(warning_lines(warnings)[1:], err=True)


def print_line(text: str) -> None:
    """Print one line that may hold foreign text, such as a path."""
    click.echo(printable(text))


def require_writable(path: Path, option: str) -> None:
    """Refuse, before the work is done, a file of ``option`` that cannot be written; missing folders are made later."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written: {folder} takes no files", param_hint=option)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 file``, ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_json(data: Any) -> None:
    """Print data as indented JSON with stable key order."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))
