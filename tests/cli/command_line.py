"""Runs commands in this process, or on a terminal of a given width, and gives their exit code and output."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attn_select import clear_cache
from attn_select_cli.main import run as run_command


@dataclass
class Result:
    """What a command did: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Yield ``run("explain", "--gpu", "h100")``.

    The working directory is empty, caches are cleared before every call, and behind the last one for other tests.
    """
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Result:
        clear_cache()
        code = run_command(list(arguments))
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    yield call
    clear_cache()


@pytest.fixture
def run_on_terminal(tmp_path: Path) -> Run:
    """Return ``run_on_terminal(60, "explain", "--gpu", "h100")``; the output has its control sequences removed.

    ``typed`` is what the user types; the child reads nothing otherwise.
    """

    def call(width: int, *arguments: str, typed: str = "", **variables: str) -> Result:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        code = "from attn_select_cli.main import main; main()"
        environment = {**os.environ, "TERM": "xterm-256color", **variables}
        child = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=theirs if typed else None,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            cwd=tmp_path,
        )
        os.close(theirs)
        os.write(ours, typed.encode())
        read = b""
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            read += chunk
        os.close(ours)
        text = read.decode().replace("\r\n", "\n")
        return Result(child.wait(), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text), text)

    return call
