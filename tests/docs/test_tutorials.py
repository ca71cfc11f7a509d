"""The tutorials: every file that they give is written, and every command that they show is run, in order.

Each section, a heading of second order, is run in a folder of its own. A fence ```` ```python title="layer.py" ```` is
a file. In a fence ```` ```console ```` each line that begins with a prompt is a command; where lines follow, they are
its output, or ``exit 1`` where it fails on purpose. A fence ```` ```sh ```` installs, which tests/packaging does.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FENCE = re.compile(r'(?ms)^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$')
SECTIONS = [
    (path, title, text)
    for path in TUTORIALS
    for title, text in re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", path.read_text("utf-8"))
]
SLOW = {
    "Let times of your machine choose": "test_bench, test_tune, test_survey",
    "Bring a kernel": "test_conformance",
}


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command with the output shown for it."""
    for part in re.split(r"(?m)^\$ ", block)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


@pytest.mark.parametrize(
    ("path", "text"),
    [
        pytest.param(path, text, id=title, marks=pytest.mark.slow(guard=SLOW[title]) if title in SLOW else ())
        for path, title, text in SECTIONS
    ],
)
def test_a_section_works(path: Path, text: str, tmp_path: Path) -> None:
    (tmp_path / "attn-select").symlink_to(ROOT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ATTN_SELECT")}
    environment |= {
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "NO_COLOR": "1",
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    bin_folder = tmp_path / "bin"  # the name `python` may be missing, and the command is this tree's
    bin_folder.mkdir()
    for name, words in (("python", '"$@"'), ("attn-select", '-m attn_select "$@"')):
        (bin_folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}\n')
        (bin_folder / name).chmod(0o755)
    ran = 0
    for language, title, block in FENCE.findall(text):
        if title:
            (tmp_path / title).write_text(block)
            continue
        assert language == "console", f"a block of {language} in {path.name} is neither a file nor run"
        for command, shown in commands(block):
            done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
            said = done.stdout + done.stderr
            assert done.returncode == (1 if shown == "exit 1\n" else 0), f"{command}\n{said}"
            if shown not in ("", "exit 1\n"):
                assert said == shown, command
            ran += 1
    assert ran


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_each_begins_with_its_installation(path: Path) -> None:
    begin = path.read_text("utf-8").partition("\n## ")[0]
    ((language, _, block),) = FENCE.findall(begin)
    assert language == "sh"
    assert "Install this first" in begin
    for line in block.splitlines():
        for word in shlex.split(line)[2:] if line.startswith("pip install ") else ():
            if word.startswith("."):
                assert list(ROOT.glob(f"{word.partition('[')[0].rstrip('/')}/pyproject.toml")), word


def test_there_is_one_for_each_reader() -> None:
    assert {path.stem for path in TUTORIALS} == {"author", "operator"}
    assert set(SLOW) <= {title for _, title, _ in SECTIONS}
