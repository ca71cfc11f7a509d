"""Which distribution brings a backend, and the commands that install it; tests/packaging runs those."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_select.backends import distributions
from attn_select.backends.registry import load_plugins

ROOT = Path(__file__).resolve().parents[2]


def test_the_packaged_rules_list_what_the_plugins_register() -> None:
    assert distributions.known_backends() == load_plugins().owners


def test_in_a_clone_it_names_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert distributions.install_command("attn-select-flash-attn") == "pip install ./plugins/flash_attn"
    monkeypatch.chdir(tmp_path)
    assert distributions.install_command("attn-select-flash-attn") == f"pip install {ROOT / 'plugins/flash_attn'}"


def test_elsewhere_it_names_the_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        distributions, "__file__", str(tmp_path / "site-packages" / "attn_select" / "backends" / "distributions.py")
    )
    assert distributions.install_command("attn-select-flash-attn") == "pip install attn-select-flash-attn"
    assert distributions.folder_in_clone("attn-select-flash-attn") is None
