"""The cache as the kernels want it, one view per cache instead of one per call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor


class CacheView:
    """A view of the cache that was seen last; it does not keep it alive.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make = make
        self._seen: Callable[[], Tensor | None] = lambda: None
        self._address = 0
        self._view: Tensor | None = None

    def __call__(self, kv_cache: Tensor) -> Tensor:
        """Return the view."""
        view = self._view
        if view is not None and self._seen() is kv_cache and self._address == kv_cache.data_ptr():
            return view
        # Of an alias: a view's base would stay alive with it, and this cache is the engine's to free.
        view = self._view = self._make(kv_cache.data)
        self._seen, self._address = weakref.ref(kv_cache, self._forget), kv_cache.data_ptr()
        return view

    def _forget(self, _: Any) -> None:
        self._view = None
