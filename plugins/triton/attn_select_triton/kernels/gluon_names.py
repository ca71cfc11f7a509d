"""Functions of Gluon that releases of Triton name differently, under their names in 3.9.

3.7 renamed ``thread_barrier``, 3.8 both ``async_copy_global_to_shared``, 3.9 ``_reinterpret``. A release may keep the
old name for a function that raises, so the new name is tried first. No release is asked for its version.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _first(room: Any, *names: str) -> Any:
    """Return the attribute of a module or class that has one of these names, the first of them that exists."""
    return next(getattr(room, name) for name in names if hasattr(room, name))


barrier = _first(gl, "barrier", "thread_barrier")
reinterpret = _first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
tma_load = _first(tma, "async_load", "async_copy_global_to_shared")
async_load = _first(async_copy, "async_load", "async_copy_global_to_shared")
