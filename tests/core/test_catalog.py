"""The install commands of plugins in a clone; tests/packaging runs them, in a clone and from wheels."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_select import catalog

ROOT = Path(__file__).resolve().parents[2]


def test_in_a_clone_it_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert catalog.install_command("attn-select-flash-attn") == "pip install ./plugins/flash_attn"
    monkeypatch.chdir(tmp_path)
    assert catalog.install_command("attn-select-flash-attn") == f"pip install {ROOT / 'plugins/flash_attn'}"


def test_elsewhere_it_names_the_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(catalog, "__file__", str(tmp_path / "site-packages" / "attn_select" / "catalog.py"))
    assert catalog.install_command("attn-select-flash-attn") == "pip install attn-select-flash-attn"
    assert catalog.folder_in_clone("attn-select-flash-attn") is None


def test_a_folder_with_spaces_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plugin = tmp_path / "my clone" / "plugins" / "torch"
    plugin.mkdir(parents=True)
    (plugin / "pyproject.toml").touch()
    monkeypatch.setattr(catalog, "__file__", str(tmp_path / "my clone" / "core" / "attn_select" / "catalog.py"))
    assert catalog.install_command("attn-select-torch") == f"pip install '{plugin}'"
