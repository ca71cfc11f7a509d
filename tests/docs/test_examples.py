"""The excerpts in documents stand in the programs that they name."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXCERPT = re.compile(r"```python\n# (examples/\S+)\n(.*?)```", re.DOTALL)


def test_excerpts_are_what_the_programs_say() -> None:
    excerpts = EXCERPT.findall((ROOT / "docs" / "runtime.md").read_text("utf-8"))
    assert len(excerpts) >= 7
    for program, excerpt in excerpts:
        lines = (ROOT / program).read_text("utf-8").splitlines()
        wanted = excerpt.splitlines()
        windows = ("\n".join(lines[at : at + len(wanted)]) for at in range(len(lines)))
        assert any(textwrap.dedent(window) == "\n".join(wanted) for window in windows), excerpt
