"""The words of a plan (``path``, ``because``, ``notes``) are for people: nothing that runs reads an attribute so named.

Rendering, JSON and the gate's messages read them, in ``core/attn_select`` outside ``runtime``; a plugin's facts make
them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = {"path", "because", "notes"}
FOLDERS = (
    "core/attn_select/runtime",
    "plugins/*/attn_select_*/runtime",
    "plugins/*/attn_select_*/kernels",
    "engines/*/attn_select_*",
)


def reads_of_words(source: str) -> Iterator[int]:
    """Yield the line of each place that reads such an attribute, ``os.path`` and ``sys.path`` left out."""
    for node in ast.walk(ast.parse(source)):
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Call) else ""
        if isinstance(node, ast.Attribute):
            found = node.attr in WORDS and text not in ("os.path", "sys.path")
        else:
            found = text.startswith("getattr(") and any(f"'{word}'" in text for word in WORDS)
        if found:
            yield node.lineno  # type: ignore[attr-defined]


def test_nothing_that_runs_reads_the_words_of_a_plan() -> None:
    files = [file for folder in FOLDERS for file in sorted(ROOT.glob(f"{folder}/**/*.py"))]
    assert len(files) > 60
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in reads_of_words(file.read_text("utf-8"))]
    assert not found, f"read the plan's kernel instead of its words: {', '.join(found)}"


def test_a_planted_read_is_found() -> None:
    planted = 'import os\nif "fa3" in plan.path:\n    x = os.path.join(getattr(plan, "notes"), plan.kernel)\n'
    assert list(reads_of_words(planted)) == [2, 3]
