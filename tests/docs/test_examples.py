"""The first Python block of docs/runtime.md is a program: it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "runtime.md"


def test_the_engine_of_the_runtime_document_runs() -> None:
    torch = pytest.importorskip("torch")
    program = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(program, str(DOCUMENT), "exec"), names)
    output = names["step"]([1, 1], [102, 32])
    assert output.shape == (2, 8, 64)
    assert torch.isfinite(output).all()
    assert names["pool"].blocks(0)
