"""``GroupCache``: the KV cache of one kind of layers, counted in the allocator's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.errors import ConfigError, show
from attn_select.layer.config import AttentionConfig
from attn_select.runtime import checks
from attn_select.runtime import kv_cache as caches
from attn_select.runtime.batch import to_device
from attn_select.runtime.integers import integers, size
from attn_select.runtime.metadata import BatchError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class GroupCache:
    """How the caches of a group's layers are laid out."""

    config: AttentionConfig
    device: torch.device
    kv_layout: str | None
    # Tokens of one of the allocator's blocks. The cache is laid out in kernel blocks, so many of which make one of
    # these.
    block_size: int | None
    kernel_block_size: int | None

    def _blocks(self) -> tuple[str, int, int]:
        """Return the cache's layout, its tokens per block, and how many of these make one of the allocator's blocks."""
        if self.kv_layout is None or self.block_size is None or self.kernel_block_size is None:
            raise ConfigError(
                f"attn_type = {self.config.attn_type!r}: its layers keep no KV cache", fields=["attn_type"]
            )
        return self.kv_layout, self.kernel_block_size, self.block_size // self.kernel_block_size

    def allocate(self, num_blocks: int) -> Tensor:
        """Return one layer's cache for ``num_blocks`` of the allocator's blocks, zeroed. Raises ConfigError."""
        layout, kernel_block_size, ratio = self._blocks()
        blocks = size("num_blocks", num_blocks)
        return caches.allocate_kv_cache(layout, self.config, blocks * ratio, kernel_block_size, self.device)

    def num_blocks(self, kv_cache: Tensor | None) -> int:
        """Return how many of the allocator's blocks a layer's cache holds. Raises as ``check_cache`` does."""
        layout, kernel_block_size, ratio = self._blocks()
        return checks.check_cache(kv_cache, layout, self.config, self.device, kernel_block_size) // ratio

    def zero_blocks(self, kv_cache: Tensor, block_ids: Sequence[int] | Tensor) -> None:
        """Fill blocks of one layer's cache with zeros, as ``LayerGroup.zero_blocks`` documents it."""
        layout, _, ratio = self._blocks()
        in_cache = self.num_blocks(kv_cache)
        if isinstance(block_ids, Tensor):
            if block_ids.dtype not in _INTEGERS or block_ids.ndim != 1:
                kind = f"{block_ids.dtype} {tuple(block_ids.shape)}"
                raise BatchError(f"block_ids is {kind}: accepted is a tensor of integers of one dimension")
            # Ids on the device are not read back, since this may not synchronise.
            ids = block_ids.to(torch.int64)
        else:
            blocks = integers(block_ids)
            if blocks is None:
                raise BatchError(f"block_ids = {show(block_ids)}: accepted is a sequence of integers")
            if wrong := [block for block in blocks if not 0 <= block < in_cache]:
                raise BatchError(f"block_ids holds {wrong[0]}: accepted are the cache's blocks, 0 to {in_cache - 1}")
            ids = to_device(torch.tensor(blocks, dtype=torch.int64), self.device)
        if ratio > 1:
            # A block of ``ratio`` kernel blocks: they lie in a row in the cache.
            ids = (ids[:, None] * ratio + torch.arange(ratio, device=ids.device)).flatten()
        caches.zero_blocks(kv_cache, layout, self.config, ids)
