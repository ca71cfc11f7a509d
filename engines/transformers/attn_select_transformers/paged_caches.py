"""The caches of continuous batching, one class per family of releases, each one layer's ``paged.Cache``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GroupedLayer:
    """A layer of the cache of transformers 5.17: layer j of every group shares one tensor of keys and one of values."""

    def __init__(self, cache: Any, layer_idx: int) -> None:
        self._cache, self._layer = cache, layer_idx
        _join(cache)
        self.index, self._tensor = cache.layer_index_to_group_indices[layer_idx]
        self.page: int = cache.block_size
        window = cache.sliding_windows[layer_idx]
        self.window: int | None = None if window == 1 else window

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return keys and values."""
        return self._cache.key_cache[self._tensor], self._cache.value_cache[self._tensor]

    def gathered(self, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Write and gather, as the engine does."""
        keys, values = self._cache.update(
            key_states=key,
            value_states=value,
            layer_idx=self._layer,
            read_index=options["read_index"],
            write_index=options["write_index"],
        )
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


def _join(cache: Any) -> None:
    """Put the keys and values of each layer into one storage, before the first step writes to it."""
    # Each pair is given back before its successor is made, so that no memory beyond one pair is needed.
    for index, keys in enumerate(cache.key_cache):
        if keys.untyped_storage().data_ptr() == cache.value_cache[index].untyped_storage().data_ptr():
            return
        shape, dtype, device = keys.shape, keys.dtype, keys.device
        del keys
        cache.key_cache[index] = cache.value_cache[index] = None
        both = torch.zeros((2, *shape), dtype=dtype, device=device)
        torch._dynamo.mark_static_address(both)
        cache.key_cache[index], cache.value_cache[index] = both.unbind(0)


class AllocatorLayer:
    """A layer of the cache of transformers 5.19 and later: an allocator per attention type, layers' pages in turn."""

    def __init__(self, cache: Any, layer_idx: int) -> None:
        self._cache, self._layer = cache, layer_idx
        self._allocator = cache.layer_to_allocator[layer_idx]
        self.index: int = self._allocator.index
        self.page: int = self._allocator.tokens_per_page
        self.window: int | None = getattr(self._allocator, "sliding_window", None)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return keys and values: views of one tensor, a page apart."""
        keys, values = self._allocator._kv_token_views[self._layer]
        return keys, values

    def gathered(self, key: Tensor, value: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Write and gather, as the engine does."""
        keys, values = self._cache.update(
            key_states=key, value_states=value, layer_idx=self._layer, kwargs=dict(options)
        )
        return keys, values
