"""A CPU that lists AMX and traps: simulated by a cpuinfo that lists it and a child that dies of the signal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_select.machine import amx
from attn_select.machine.amx import VARIABLE, WITHOUT_AMX, avoid_trapping_amx

pytest.importorskip("torch")
SaidAndState = Callable[..., tuple[list[str], str]]
TRAP = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
NEVER = "import time; time.sleep(60)"
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder without an answer, and no variable."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A cpuinfo that lists AMX."""
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\n")
    return path


@pytest.fixture
def said_and_state(monkeypatch: pytest.MonkeyPatch) -> SaidAndState:
    def outcome(cpuinfo: Path, product: str, *, seconds: float = 600.0, try_it: bool = True) -> tuple[list[str], str]:
        for name, value in (("CPUINFO", cpuinfo), ("PRODUCT", product), ("SECONDS", seconds)):
            monkeypatch.setattr(amx, name, value)
        said: list[str] = []
        return said, avoid_trapping_amx(said.append, try_it=try_it)

    return outcome


@linux
def test_a_child_that_dies_sets_the_variable_and_says_so(said_and_state: SaidAndState, listed: Path) -> None:
    said, state = said_and_state(listed, TRAP)
    assert state == "traps"
    assert os.environ[VARIABLE] == WITHOUT_AMX
    assert len(said) == 1
    assert f"{VARIABLE}={WITHOUT_AMX} is set" in said[0]


@linux
def test_the_answer_is_kept_until_the_next_boot(
    said_and_state: SaidAndState, listed: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert said_and_state(listed, TRAP)[1] == "traps"
    monkeypatch.delenv(VARIABLE)
    said, state = said_and_state(listed, "pass")
    assert (state, len(said)) == ("traps", 1)
    monkeypatch.delenv(VARIABLE)
    (tmp_path / "boot_id").write_text("another boot\n")
    monkeypatch.setattr(amx, "BOOT_ID", tmp_path / "boot_id")
    assert said_and_state(listed, "pass") == ([], "works")
    assert [path.name for path in (empty_cache / "attn-select" / "amx").iterdir()] == ["another boot"]
    assert said_and_state(listed, TRAP) == ([], "works")
    assert VARIABLE not in os.environ


@linux
def test_a_child_without_an_answer_is_no_answer(said_and_state: SaidAndState, listed: Path, empty_cache: Path) -> None:
    for product in (NEVER, "raise SystemExit(3)"):
        said, state = said_and_state(listed, product, seconds=0.2)
        assert state == "unknown"
        assert VARIABLE not in os.environ
        assert f"set {VARIABLE}={WITHOUT_AMX}" in said[0]
    assert not (empty_cache / "attn-select" / "amx").exists()


@linux
def test_what_needs_no_child_runs_none(
    said_and_state: SaidAndState, listed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert said_and_state(listed, TRAP, try_it=False) == ([], "untried")
    (tmp_path / "without").write_text("flags\t\t: fpu avx512f avx512_bf16\n")
    assert said_and_state(tmp_path / "without", TRAP) == ([], "not-listed")
    assert said_and_state(tmp_path / "missing", TRAP) == ([], "not-listed")
    monkeypatch.setenv(VARIABLE, "AVX2")
    assert said_and_state(listed, TRAP) == ([], "variable-set")
    assert os.environ[VARIABLE] == "AVX2"


def test_doctor_shows_a_line() -> None:
    from attn_select_cli.doctor import examine

    assert examine(do_import=False)["amx"] in ("not-listed", "variable-set", "untried", "works", "traps")
