"""Without torch or numpy the runtime says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_the_missing_extra_is_named(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; import attn_select.runtime"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: attn_select.runtime needs {name}, which is not installed")
    assert "pip install 'attn-select[runtime]'" in last
