"""``tests/steps.py``, which runs what a change must pass: every step is run and counted, whatever another one does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("steps.py")


def steps(*arguments: str) -> tuple[int, str, dict[str, str]]:
    """Return the exit code, what is printed before the table, and the result of each step in it."""
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False)
    said, _, table = done.stdout.partition("step ")
    rows = [re.fullmatch(r"(\S.*?) {2,}(\d*) *(.*)", line) for line in table.splitlines()[1:]]
    return done.returncode, said, {row[1]: row[3] if row[2] else f"{row[3]}, no seconds" for row in rows if row}


def test_a_step_that_fails_does_not_hide_the_later_ones() -> None:
    code, said, results = steps("make: true", "beside &: echo from beside; exit 3", "first: exit 2", "last: echo done")
    assert code == 1
    assert results == {
        "make": "",
        "beside &": "failed with exit code 3",
        "first": "failed with exit code 2",
        "last": "",
        "all": "",
    }
    assert "done" in said.splitlines()
    assert "from beside" in said.splitlines()


def test_without_what_the_first_step_makes_nothing_is_run() -> None:
    code, said, results = steps("make: exit 4", "beside &: echo beside", "last: echo done")
    assert code == 1
    assert results == {
        "make": "failed with exit code 4",
        "beside &": "not run, no seconds",
        "last": "not run, no seconds",
        "all": "",
    }
    assert "done" not in said.splitlines()


def test_all_steps_pass(tmp_path: Path) -> None:
    """One beside the others runs while these do: it waits for what a later one writes."""
    file = tmp_path / "written"
    waiting = f"while [ ! -e {file} ]; do sleep 0.05; done"
    code, _, results = steps("make: true", f"beside &: {waiting}", f"last: touch {file}")
    assert (code, set(results.values())) == (0, {""})
