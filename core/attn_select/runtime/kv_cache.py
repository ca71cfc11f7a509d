"""Paged KV caches as tensors: allocation, and strided views that cost no conversion.

A cache is allocated in the kernel's blocks: an allocator's block of ``r`` kernel blocks is ``r`` of them in a row,
block ``b`` holding kernel blocks ``b * r .. b * r + r - 1``. So one physical cache serves an allocator of large blocks
and a kernel of small ones in every layout, and only the block tables are converted (``kernel_block_table``).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from attn_select.decide.lines import byte_text
from attn_select.errors import ConfigError, show
from attn_select.layer import layouts
from attn_select.layer.config import AttentionConfig
from attn_select.runtime.integers import integer
from attn_select.runtime.torch_dtypes import storage_dtype

T = TypeVar("T")


def kv_cache_shape(layout: str, config: AttentionConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """Return the shape of one layer's cache in elements of ``storage_dtype`` (``attn_select.layer.layouts``)."""
    shape = layouts.cache_shape(layout, config, block_size)
    return tuple(num_blocks if extent == "num_blocks" else int(extent) for extent in shape)


def num_blocks_for(budget_bytes: int, bytes_per_token: Sequence[int], block_size: int) -> int:
    """Return how many blocks a byte budget holds.

    Args:
        budget_bytes: device memory for all layers' caches.
        bytes_per_token: one number for each layer that shares the block table (``Selection.bytes_per_token``).
        block_size: tokens per block of the allocator.

    Raises:
        ConfigError: ``bytes_per_token`` is no sequence of positive numbers, or the budget is no integer or does not
            hold one block.
    """
    if not isinstance(bytes_per_token, Sequence):
        text = f"bytes_per_token = {bytes_per_token!r}: accepted is a sequence with one number per layer"
        raise ConfigError(text, fields=["bytes_per_token"], hint="for equal layers: [bytes_per_token] * num_layers")
    block = sum(bytes_per_token) * block_size
    if block <= 0:
        text = f"bytes_per_token = {list(bytes_per_token)}, block_size = {block_size}: accepted are positive numbers"
        raise ConfigError(text, fields=["bytes_per_token", "block_size"])
    if integer(budget_bytes) is None:
        raise ConfigError(f"budget_bytes = {show(budget_bytes)}: accepted is an integer", fields=["budget_bytes"])
    if budget_bytes < block:
        text = f"budget_bytes = {budget_bytes}: one block of {block_size} tokens in all layers takes {block} bytes"
        raise ConfigError(f"{text} (accepted: that much or more)", fields=["budget_bytes"])
    return budget_bytes // block


def allocate_kv_cache(
    layout: str,
    config: AttentionConfig,
    num_blocks: int,
    block_size: int,
    device: torch.device | str,
) -> Tensor:
    """Return one layer's cache, zeroed, of ``num_blocks`` blocks of ``block_size`` tokens (the kernel's)."""
    # Zeros, since kernels may read slots that no token was written to and mask the result: NaN would survive that.
    # Raises ConfigError where this machine's memory does not hold them, torch.OutOfMemoryError where the GPU's does
    # not.
    shape, dtype = kv_cache_shape(layout, config, num_blocks, block_size), cache_dtype(layout, config)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError:  # says what is free, and engines wait for it
        raise
    except RuntimeError as error:
        size = byte_text(math.prod(shape) * dtype.itemsize)
        text = f"num_blocks = {num_blocks}: one layer's cache takes {size}, which this machine's memory does not hold"
        raise ConfigError(text, fields=["num_blocks"]) from error


def cache_dtype(layout: str, config: AttentionConfig) -> torch.dtype:
    """Return the dtype of a cache: the config's, but uint8 in ``FP8_DS_MLA``, also where the config says fp8_e4m3."""
    return torch.uint8 if layout == layouts.FP8_DS_MLA else storage_dtype(config.cache_dtype)


def zero_blocks(kv_cache: Tensor, layout: str, config: AttentionConfig, block_ids: Tensor) -> None:
    """Fill blocks of a cache with zeros; ``block_ids`` is int64 ``(N,)`` on its device, in the cache's own blocks."""
    _, axis, _ = _pattern(layout, config)
    # Zero bytes are the number zero in every dtype, and torch fills no FP8 by index.
    plain = kv_cache.view(torch.uint8) if kv_cache.element_size() == 1 else kv_cache
    plain.index_fill_(axis, block_ids, 0)


def in_blocks_of(block_size: int, kv_cache: Tensor, layout: str, config: AttentionConfig) -> Tensor:
    """Return a cache as a view in blocks of another size; the same tokens lie in the same slots."""
    # Raises ConfigError where the layout is not in ``layouts.SPLIT_IN_PLACE``, or its tokens do not fill blocks of
    # that size.
    num_blocks, block_tokens = check_cache_shape(kv_cache, layout, config)
    if block_tokens == block_size:
        return kv_cache
    if layout not in layouts.SPLIT_IN_PLACE or num_blocks * block_tokens % block_size:
        text = (
            f"block_size = {block_size}: a cache of {num_blocks} blocks of {block_tokens} tokens in {layout} cannot be "
            "viewed in blocks of that size"
        )
        raise ConfigError(text, fields=["block_size"])
    return kv_cache.view(kv_cache_shape(layout, config, num_blocks * block_tokens // block_size, block_size))


def key_value_views(kv_cache: Tensor, layout: str, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return K ``(num_blocks, block_size, num_kv_heads, head_size)`` and V ``(…, value_head_size)`` as views.

    Any layout but the classic one's K, which splits the head dimension: ``paged_attention_views`` is for that. With
    ``MLA`` both are views of the latent, with one head: K all of it, V its first ``kv_lora_rank`` elements.

    Raises:
        ConfigError: the cache's shape is not the layout's, or the layout has no such views.
    """
    check_cache_shape(kv_cache, layout, config)
    return key_value_unchecked(kv_cache, layout, config)


def key_value_unchecked(kv_cache: Tensor, layout: str, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return what ``key_value_views`` does, of a cache that was checked before."""
    if layout == layouts.FLASH_ATTN_NHD:
        key, value = kv_cache.unbind(0)
    elif layout == layouts.FLASHINFER_NHD:
        key, value = kv_cache.unbind(1)
    elif layout == layouts.FLASHINFER_HND:
        key, value = (half.transpose(1, 2) for half in kv_cache.unbind(1))
    elif layout == layouts.MLA:
        key = kv_cache.unsqueeze(2)
        return key, key[..., : config.kv_lora_rank]
    else:
        text = f"layout {layout} has no strided views of K and V of shape (num_blocks, block_size, heads, size)"
        raise ConfigError(text, fields=["layout"])
    if config.v_head_size is None:  # both fill their half: two views fewer to make per call
        return key, value
    return key[..., : config.head_size], value[..., : config.value_head_size]


class CacheView(Generic[T]):
    """Views of the cache that was seen last, made once instead of in every call; they do not keep it alive.

    Args:
        make: makes them of a cache.
    """

    def __init__(self, make: Callable[[Tensor], T]) -> None:
        self._make = make
        self._seen: Callable[[], Tensor | None] = lambda: None
        self._address: int | None = None
        self._view: T | None = None

    def __call__(self, kv_cache: Tensor) -> T:
        """Return the views of this cache."""
        view = self._view
        # A tensor may be given other memory, so its address counts too.
        if view is not None and self._seen() is kv_cache and self._address == kv_cache.data_ptr():
            return view
        # Made of an alias: a view keeps its base alive, and the engine must be able to free its cache.
        view = self._view = self._make(kv_cache.data)
        self._seen, self._address = weakref.ref(kv_cache, self._forget), kv_cache.data_ptr()
        return view

    def __deepcopy__(self, memo: object) -> CacheView[T]:
        """Return views of no cache yet: a copied view would be a copy of the cache's memory."""
        return CacheView(self._make)

    def _forget(self, _: Any) -> None:
        self._view = None


def paged_attention_views(kv_cache: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return views of the classic layout: K and V."""
    # K is ``(num_blocks, heads, head_size/x, block_size, x)``, V ``(num_blocks, heads, value_head_size, block_size)``;
    # ``x`` is 16 bytes of elements (vLLM csrc/attention/paged_attention_v1.cu).
    check_cache_shape(kv_cache, layouts.PAGED_ATTENTION, config)
    x = 16 // kv_cache.element_size()
    num_blocks, heads, size = kv_cache.shape[1], config.num_kv_heads, config.head_size
    if size % x:
        text = f"head_size = {size}: the classic layout packs {x} elements, so multiples of {x} are accepted"
        raise ConfigError(text, fields=["head_size"])
    # K and V of different sizes: both halves are as wide as the wider one, and a block's elements lie at its start.
    width = max(size, config.value_head_size)
    key, value = kv_cache.unbind(0)
    block_size = key.shape[2] // width
    key = key[..., : block_size * size].view(num_blocks, heads, size // x, block_size, x)
    return key, value.view(num_blocks, heads, width, block_size)[:, :, : config.value_head_size]


def check_cache_shape(kv_cache: Tensor, layout: str, config: AttentionConfig) -> tuple[int, int]:
    """Compare a cache with its layout; return its number of blocks and the tokens per block. Raises ConfigError."""
    extents, blocks, tokens = _pattern(layout, config)
    seen = tuple(kv_cache.shape)
    if len(seen) == len(extents):
        wanted = list(extents)
        wanted[blocks] = seen[blocks]
        # A layout may keep several elements of a token in the axis of tokens. What does not divide makes ``wanted``
        # differ.
        wanted[tokens] = seen[tokens] - seen[tokens] % extents[tokens] or extents[tokens]
        if seen == tuple(wanted):
            return seen[blocks], seen[tokens] // extents[tokens]
    shown = list(map(str, extents))
    shown[blocks] = "num_blocks"
    shown[tokens] = "block_size" + (f" * {extents[tokens]}" if extents[tokens] > 1 else "")
    raise ConfigError(f"kv_cache of shape {seen}: layout {layout} is ({', '.join(shown)})", fields=["kv_cache"])


@functools.lru_cache(maxsize=256)
def _pattern(layout: str, config: AttentionConfig) -> tuple[tuple[int, ...], int, int]:
    """Return a cache's extents with one block of one token, the axis of blocks, and the axis of a block's tokens."""
    if layout not in layouts.LAYOUTS:
        raise ConfigError(f"layout {layout!r} is unknown; known are {', '.join(layouts.LAYOUTS)}", fields=["layout"])
    # The axis of tokens is where a block of one token differs from one of two.
    one, two = kv_cache_shape(layout, config, 1, 1), kv_cache_shape(layout, config, 1, 2)
    tokens = next(axis for axis, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    return one, layouts.cache_shape(layout, config, 1).index("num_blocks"), tokens


def kernel_block_table(block_table: Tensor, ratio: int, width_multiple: int = 1, out: Tensor | None = None) -> Tensor:
    """Return a block table in the kernel's blocks, int32 ``(B, W')``, W' a multiple of ``width_multiple``."""
    # Block b of the allocator is the kernel's ``b * ratio .. b * ratio + ratio - 1``. Columns added behind the last
    # one name block 0, which every pool has. ``out`` is where to write for CUDA graphs; its leading part is returned.
    requests, width = block_table.shape
    wanted = -(-width * ratio // width_multiple) * width_multiple
    if out is None:
        out = block_table.new_empty(requests, wanted)
    table = out[:requests, :wanted]
    if ratio == 1:
        table[:, :width].copy_(block_table)
    else:
        offsets = torch.arange(ratio, dtype=torch.int32, device=block_table.device)
        table[:, : width * ratio] = ((block_table * ratio).unsqueeze(-1) + offsets).flatten(1)
    if wanted > width * ratio:
        table[:, width * ratio :] = 0
    return table
