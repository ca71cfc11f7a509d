"""What CUDNN_ATTN takes: the file of ``golden``."""

from __future__ import annotations

from pathlib import Path

from attn_select.testing.verdicts import Situation, check_verdicts
from attn_select_cudnn.plugin import attn_select_register_backends

SITUATIONS: list[Situation] = [
    {"layers": [{"dtype": "float16", "sliding_window": 128, "block_size": 24}]},
    {"installed": {"torch": "2.11.0"}},
]


def test_verdicts() -> None:
    (spec,) = attn_select_register_backends()
    check_verdicts(spec, Path(__file__).parents[1] / "golden", SITUATIONS)
