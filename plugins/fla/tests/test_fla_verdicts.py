"""What FLA takes, by which of fla-core's functions: the file of ``golden``."""

from __future__ import annotations

from pathlib import Path

from attn_select.testing.verdicts import check_verdicts
from attn_select_fla.plugin import attn_select_register_backends


def test_verdicts() -> None:
    (spec,) = attn_select_register_backends()
    check_verdicts(spec, Path(__file__).parent / "golden", [{"installed": {"torch": "2.11.0"}}])
