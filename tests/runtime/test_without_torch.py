"""Without torch the runtime says what to install."""

from __future__ import annotations

import subprocess
import sys


def test_the_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['torch'] = None; import attn_select.runtime"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: attn_select.runtime needs torch, which is not installed")
    assert "pip install 'attn-select[runtime]'" in last
