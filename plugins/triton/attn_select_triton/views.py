"""Strided views of K and V in a paged cache, made once per cache instead of in every call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from attn_select import layouts
from attn_select.config import AttentionConfig

Views = tuple[Tensor, Tensor]


def key_value_halves(kv_cache: Tensor, layout: str, config: AttentionConfig) -> Views:
    """Return K ``(num_blocks, block_size, num_kv_heads, head_size)`` and V, as ``kv_cache.key_value_views`` unchecked.

    The layer has checked the cache.
    """
    if layout == layouts.FLASHINFER_HND:
        kv_cache = kv_cache.transpose(2, 3)
    key, value = kv_cache.unbind(0 if layout == layouts.FLASH_ATTN_NHD else 1)
    if config.v_head_size is not None:  # both have room for the wider one
        return key[..., : config.head_size], value[..., : config.value_head_size]
    return key, value


class CacheViews:
    """The views of the cache that was seen last; they do not keep it alive.

    Args:
        make: makes them.
    """

    def __init__(self, make: Callable[[Tensor], Views]) -> None:
        self._make = make
        self._seen: Callable[[], Tensor | None] = lambda: None
        self._address = 0
        self._views: Views | None = None

    def __call__(self, kv_cache: Tensor) -> Views:
        """Return K and V."""
        views = self._views
        if views is not None and self._seen() is kv_cache and self._address == kv_cache.data_ptr():
            return views
        # Of an alias: a view's base would stay alive with it, and this cache is the engine's to free.
        views = self._views = self._make(kv_cache.data)
        self._seen, self._address = weakref.ref(kv_cache, self._forget), kv_cache.data_ptr()
        return views

    def _forget(self, _: Any) -> None:
        self._views = None
