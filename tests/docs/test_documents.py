"""The documentation says what the program does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from attn_select.machine import variables

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("console_blocks", Path(__file__).with_name("console_blocks.py"))
assert _spec is not None
assert _spec.loader is not None
console_blocks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(console_blocks)


@pytest.mark.parametrize("path", console_blocks.documents(), ids=lambda p: p.name)
def test_shown_output_is_what_the_commands_print(path: Path) -> None:
    text = path.read_text("utf-8")
    assert console_blocks.rewritten(text) == text, "run `make docs` to write the present output into the documents"


def test_readme_lists_the_environment_variables() -> None:
    rows = re.findall(r"(?m)^\| `(ATTN_SELECT_\w+)` \| (.*) \|$", (ROOT / "README.md").read_text("utf-8"))
    assert dict(rows) == variables.EFFECTS


def test_every_variable_that_is_read_is_listed() -> None:
    sources = [file for folder in ("core", "cli", "plugins") for file in (ROOT / folder).rglob("*.py")]
    named = {name for file in sources for name in re.findall(r'"(ATTN_SELECT_\w+)"', file.read_text("utf-8"))}
    assert named == set(variables.EFFECTS)


def test_readme_shows_real_output() -> None:
    assert "$ attn-select explain" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("path", console_blocks.documents(), ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"


@pytest.mark.parametrize("path", console_blocks.documents(), ids=lambda p: p.name)
def test_lines_have_up_to_100_columns(path: Path) -> None:
    """But for tables, headings and blocks of code, and whatever a command's length is."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text("utf-8"))
    lines = [re.sub("`[^`]+`", "``", line) for line in text.splitlines() if not line.startswith(("|", "#"))]
    assert [line for line in lines if len(line) > 100] == []
