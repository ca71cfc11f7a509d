"""Fixtures that run commands, on a machine whose rates are known."""

from __future__ import annotations

import pytest
from command_line import run, run_on_terminal

from attn_select_measure.bench_machine import Machine, Rates

__all__ = ["known_machine", "run", "run_on_terminal"]


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `bench` and `tune` do around each measurement takes no time: the machine's rates, and freeing memory."""
    monkeypatch.setattr(Machine, "measure_rates", lambda self: Rates(1e10, 1e11))
    monkeypatch.setattr(Machine, "free_memory", lambda self: None)
