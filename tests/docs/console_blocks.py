"""Runs the commands shown in README.md and docs/ and compares, or rewrites, what stands below them.

A block is a fence ```` ```console ```` whose lines starting with ``$ attn-select`` are commands; what follows each is
its output, stdout and stderr as a terminal shows them. ``python tests/docs/console_blocks.py --write`` (``make docs``)
replaces the outputs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"(?ms)^```console\n(.*?)^```$")
PROMPT = "$ attn-select"


def documents() -> list[Path]:
    """Return every Markdown file that may hold blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(command: str) -> str:
    """Run one command line in an empty folder, away from the user's own rules, and return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("ATTN_SELECT", "VLLM", "SGLANG", "CUDA"))
        }
        environment |= {
            "XDG_CONFIG_HOME": folder,
            "NO_COLOR": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        code = "from attn_select_cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *shlex.split(command)[1:]],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    return done.stdout


def rewritten(text: str) -> str:
    """Return a document with the output below every command as it is now."""

    def block(match: re.Match[str]) -> str:
        lines = [line for line in match.group(1).splitlines() if line.startswith(PROMPT)]
        if not lines:
            return match.group()
        return "```console\n" + "\n".join(f"{line}\n{run(line.removeprefix('$ '))}" for line in lines) + "```"

    return FENCE.sub(block, text)


def main() -> None:
    for path in documents():
        text = path.read_text("utf-8")
        new = rewritten(text)
        if new != text and "--write" in sys.argv[1:]:
            path.write_text(new, "utf-8")
        outcome = "unchanged" if new == text else "rewritten" if "--write" in sys.argv else "differs"
        print(f"{path.relative_to(ROOT)}: {outcome}")


if __name__ == "__main__":
    main()
