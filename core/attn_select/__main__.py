"""``python -m attn_select``: the command line, for where the script ``attn-select`` is not on ``PATH``."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any


def command_line() -> Callable[[], Any]:
    """Return the function behind the script ``attn-select``; core knows it by its entry point alone."""
    for entry_point in importlib.metadata.entry_points(group="console_scripts", name="attn-select"):
        main: Callable[[], Any] = entry_point.load()
        return main
    sys.exit(
        "error: the command line is not installed: no distribution has the script attn-select\n"
        "  hint: install the distribution attn-select with pip; a folder on PYTHONPATH is not enough"
    )


if __name__ == "__main__":
    command_line()()
