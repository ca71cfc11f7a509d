"""The kernels that vLLM's steps launch are those that were compiled when it had laid out its cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM itself is installed")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_steps_launch_what_is_compiled(capability: int) -> None:
    """Drawn layers in drawn layouts of vLLM's caches; the drawn steps are none of those that are compiled for."""
    script = Path(__file__).with_name("compiled_ahead.py")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(capability), "8", "123"]
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 8
    for layer, compiled, launched, lacked in found:
        assert not lacked, layer
        assert compiled >= launched >= 3, layer
    assert sum(launched for _, _, launched, _ in found) > 0.85 * sum(compiled for _, compiled, _, _ in found)
