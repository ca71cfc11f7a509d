"""docs/architecture.md names what is there, and a plugin of our own is named where it says and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
PLUGINS = sorted(file.parent.name for file in ROOT.glob("plugins/*/pyproject.toml"))


def test_the_files_named_exist() -> None:
    named = set(re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?|[\w-]+\.toml)`", PAGE)) - {"plugins/NAME", "engines/NAME"}
    assert len(named) > 40
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_changes_name_their_files() -> None:
    rows = re.findall(r"(?ms)^- \*\*.*?(?=^- |^$)", PAGE.partition("## Where a change goes")[2])
    assert len(rows) > 10
    assert [row for row in rows if not re.search(r"`[\w./-]+\.(?:py|json|toml)`", row)] == []


def test_a_plugin_is_named_in_its_folder_the_lists_and_the_rules_alone() -> None:
    names = "|".join(rf"attn_select_{name}|attn-select-{name.replace('_', '-')}|plugins/{name}" for name in PLUGINS)
    pattern = re.compile(rf"\b(?:{names})\b")
    files = [ROOT / "Makefile", *ROOT.glob(".ci/*"), *ROOT.glob("core/**/*.py"), *ROOT.glob("cli/**/*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if pattern.search(file.read_text("utf-8"))}
    assert found == set()


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_is_in_the_lists(plugin: str) -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    distribution = f"attn-select-{plugin.replace('_', '-')}"
    assert f'"{distribution}>=' in project
    assert f'"$MYPY_CONFIG_FILE_DIR/plugins/{plugin}"' in project
    assert re.search(rf"(?m)^{distribution} = \[", (ROOT / "selector_rules.toml").read_text("utf-8"))
