"""Test processes that run side by side take the GPUs in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("worker", "named", "seen"),
    [("gw3", "0,1", "1"), ("gw2", "5,7", "5"), ("gw3", "6", "6"), ("gw3", None, "None"), (None, "0,1", "0,1")],
)
def test_a_process_sees_its_gpu_and_hides_none_that_nobody_named(
    worker: str | None, named: str | None, seen: str
) -> None:
    given = {"PYTEST_XDIST_WORKER": worker, "CUDA_VISIBLE_DEVICES": named}
    environment = {name: value for name, value in os.environ.items() if name not in given}
    environment |= {name: value for name, value in given.items() if value is not None}
    program = "import os, conftest; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == seen
