"""Runs commands in this process and gives their exit code and output."""

from __future__ import annotations

import json
from collections.abc import Callable
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
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Return ``run("explain", "--gpu", "h100")``.

    The working directory is empty, caches are cleared before every call.
    """
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Result:
        clear_cache()
        code = run_command(list(arguments))
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return call
