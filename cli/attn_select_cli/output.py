"""How commands print: plain text into pipes and files, colours and wrapped lines on a terminal, JSON on request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from attn_select.decide.lines import STYLES, plain
from attn_select.decide.text import warning_lines
from attn_select.errors import printable
from attn_select_cli.table import Block, Table
from attn_select_cli.terminal import fitted


def print_lines(blocks: Sequence[Block], err: bool = False) -> None:
    """Print styled lines and tables: as plain text, or on a terminal wrapped to its width and coloured.

    ``NO_COLOR`` (https://no-color.org) and ``TERM=dumb`` leave the colours out. They go to stdout, or with ``err`` to
    stderr.
    """
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        lines = (line for block in blocks for line in (block.lines() if isinstance(block, Table) else [block]))
        click.echo(plain(lines), err=err)
        return
    colours = {} if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else STYLES
    for line in fitted(blocks, columns(stream)):
        pieces = ((printable(text), colours.get(style)) for text, style in line)
        click.echo("".join(f"\x1b[{code}m{text}\x1b[0m" if code and text else text for text, code in pieces), err=err)


def columns(stream: TextIO) -> int:
    """Return the width of a terminal; 80 where it does not say."""
    return os.get_terminal_size(stream.fileno()).columns or 80


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
