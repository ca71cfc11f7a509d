"""The rooms of core stand in an order, each importing only those before it, and no file lies between them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core" / "attn_select"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
ROOMS = re.findall(r"(?m)^\| `core/attn_select/(\w+)` \|", PAGE)
"""As docs/architecture.md lists them: a room may import those above it."""


def imported_rooms(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the room of each import of core, those in functions and under ``TYPE_CHECKING`` included."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} is a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "attn_select" and len(parts) > 1 and parts[1] in ROOMS:
                yield node.lineno, parts[1]


def test_the_page_lists_every_room() -> None:
    folders = {path.parent.name for path in CORE.glob("*/__init__.py")}
    assert sorted(ROOMS) == sorted(folders)


def test_no_file_lies_between_the_rooms() -> None:
    loose = {path.name for path in CORE.iterdir() if not path.is_dir()}
    assert loose == {"__init__.py", "__main__.py", "errors.py", "py.typed", "selector_rules.toml"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    later = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in sorted((CORE / room).rglob("*.py"))
        for line, name in imported_rooms(file)
        if name not in allowed
    ]
    assert not later


def test_errors_stand_before_all_rooms() -> None:
    assert not [*imported_rooms(CORE / "errors.py")]


@pytest.mark.parametrize("room", ROOMS)
def test_names_of_files_are_unique_in_a_room(room: str) -> None:
    names = [path.name for path in (CORE / room).rglob("*.py") if path.name != "__init__.py"]
    assert len(names) == len(set(names))
