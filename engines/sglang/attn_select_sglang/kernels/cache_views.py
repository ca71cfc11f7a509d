"""SGLang's KV cache of a layer in a layout of attn-select, as a view, and the pools that it may be in."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.layer.layouts import FLASH_ATTN_NHD

LAYOUT = FLASH_ATTN_NHD
"""SGLang keeps a layer's keys and values as halves of one allocation (``MHATokenToKVPool`` in mem_cache/memory_pool.py
0.5.23)."""


def pools_of(pool: Any) -> list[Any]:
    """Return the pools that hold keys and values: two where layers with windows have one of their own."""
    # That is ``SWAKVPool``. A subclass of it counts as a pool itself: what it keeps elsewhere is not known here.
    return [pool.full_kv_pool, pool.swa_kv_pool] if type(pool).__name__ == "SWAKVPool" else [pool]


def in_window_pool(pool: Any, layer_id: int) -> bool:
    """Whether a layer's keys and values are in the pool of layers with windows, which has token slots of its own."""
    return len(pools_of(pool)) == 2 and bool(pool.layers_mapping[layer_id][1])


def own_view(key: Tensor, value: Tensor, page_size: int) -> Tensor:
    """Return a layer's cache in ``LAYOUT``, strided; ConfigError unless its halves are of one allocation."""
    # ``(2, num_pages, page_size, num_kv_heads, head_size)``, of the pool's buffers ``(slots, num_kv_heads,
    # head_size)``.
    apart = value.data_ptr() - key.data_ptr()
    one = key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    if not one or apart <= 0 or key.shape != value.shape or not key.is_contiguous():
        raise ConfigError(
            f"the pool keeps keys {tuple(key.shape)} and values {tuple(value.shape)} apart: accepted are halves of one "
            "allocation of one size",
            fields=["kv_cache_layout"],
            hint="leave --attention-backend out, and attn-select chooses among SGLang's own backends",
        )
    slots, heads, size = key.shape
    row = heads * size
    shape = (2, slots // page_size, page_size, heads, size)
    return key.as_strided(shape, (apart // key.itemsize, page_size * row, row, size, 1))
