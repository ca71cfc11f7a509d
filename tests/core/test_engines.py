"""Adapters take part in the releases that they were run with, and say so where they do not."""

from __future__ import annotations

import pytest

from attn_select.engines.adapter import Adapter
from attn_select.machine.variables import ANY_VERSION


def adapter(version: str, said: list[str]) -> Adapter:
    return Adapter("attn-select-acme", "Acme", version, ("0.26", "0.32.1"), said.append)


@pytest.mark.parametrize("version", ["0.26", "0.26.0", "0.26.3", "0.26.0+cu130", "0.32.1"])
def test_a_listed_release(version: str) -> None:
    said: list[str] = []
    assert adapter(version, said).takes_part()
    assert said == []


@pytest.mark.parametrize("version", ["0.2", "0.260.0", "0.32.10", "0.32.0", "0.27.0", "1.0"])
def test_another_release(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert not adapter(version, said).takes_part()
    assert said == [
        f"attn-select-acme takes no part in Acme {version}, which chooses attention by itself: it was run with 0.26 "
        "and 0.32.1 alone. ATTN_SELECT_ANY_VERSION=1 in the environment lets it take part"
    ]
    monkeypatch.setenv(ANY_VERSION, "1")
    assert adapter(version, said).takes_part()
    assert len(said) == 1
