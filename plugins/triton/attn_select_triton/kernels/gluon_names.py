"""What Gluon's releases call differently, under the newest one's names (3.9); a release counts by what it offers.

3.7 renamed ``thread_barrier``, 3.8 both ``async_copy_global_to_shared``, 3.9 ``_reinterpret``. An old name may stay, of
a function that raises: the new one is asked for first.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _first(room: Any, *names: str) -> Any:
    """Return the first of these that a module or class has."""
    return next(getattr(room, name) for name in names if hasattr(room, name))


barrier = _first(gl, "barrier", "thread_barrier")
reinterpret = _first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
tma_load = _first(tma, "async_load", "async_copy_global_to_shared")
async_load = _first(async_copy, "async_load", "async_copy_global_to_shared")
