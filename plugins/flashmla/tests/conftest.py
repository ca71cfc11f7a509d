"""Fixtures for the facts of the FlashMLA plugin."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.environment import Environment
from attn_select_flashmla.providers import LIBRARIES

MODULES = {library.distribution: library.module for group in LIBRARIES for library in group}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes an environment in which only these distributions (with versions) are installed."""

    def make(**versions: str) -> Environment:
        there = {"torch": "2.11.0", **{name.replace("_", "-"): version for name, version in versions.items()}}
        monkeypatch.setattr("attn_select.environment.installed_version", there.get)
        monkeypatch.setattr("attn_select.environment.has_module", {MODULES[name] for name in there}.__contains__)
        return Environment()

    return make
