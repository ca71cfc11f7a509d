"""Imports of modules that need torch, inside the bodies of commands."""

from __future__ import annotations

import importlib
from typing import Any


def torch_module(name: str, what: str) -> Any:
    """Return a module that imports torch and numpy, with oneDNN kept from AMX that traps; ``what`` needs it."""
    from attn_select.errors import RuntimeMissingError
    from attn_select.machine.amx import avoid_trapping_amx

    avoid_trapping_amx()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name not in ("numpy", "torch"):
            raise
        text = f"{what} needs {error.name}, which is not installed"
        raise RuntimeMissingError(text, hint="pip install torch numpy") from None
