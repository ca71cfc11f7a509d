"""``python -m attn_select`` is the command line."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from attn_select.__main__ import command_line


def test_the_module_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attn_select", "gpus", "--json"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert '"h100"' in done.stdout


def test_without_the_command_line_the_module_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    with pytest.raises(SystemExit, match="no distribution has the script attn-select"):
        command_line()
