"""Fixtures that run commands, on a machine whose rates are known."""

from __future__ import annotations

import pytest
from command_line import run, run_on_terminal

from attn_select_measure import benching

__all__ = ["known_machine", "run", "run_on_terminal"]


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `bench` and `tune` do around each measurement takes no time: the machine's rates, and freeing memory."""
    monkeypatch.setattr(benching.Bench, "_measure_rates", lambda self: benching.Rates(1e10, 1e11))
    monkeypatch.setattr(benching.Bench, "_free_memory", lambda self: None)
