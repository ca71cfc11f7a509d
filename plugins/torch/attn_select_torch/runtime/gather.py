"""Copies of keys and values out of a paged cache, token by token, in the compute dtype.

A cache seen as a matrix of tokens (HND: of a token's heads) is gathered by row numbers, which a step computes once for
all layers. Copies go to buffers that all layers of a step share: fresh memory costs a CPU more than the copy itself.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND
from attn_select.runtime.kv_cache import key_value_views
from attn_select.runtime.torch_dtypes import FP8_DTYPES


class Buffers:
    """Memory that is taken again and again under a few names; what was taken last under a name is overwritten."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised, contiguous ``(rows, columns)``."""
        size, kept = rows * columns, self._kept.get((name, dtype))
        if kept is None or kept.numel() < size:
            kept = self._kept[name, dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return kept[:size].view(rows, columns)


class CacheGather:
    """How one kind of layers reads its cache."""

    def __init__(self, config: AttentionConfig, layout: str, block_size: int, dtype: torch.dtype) -> None:
        # layout: ``FLASH_ATTN_NHD``, ``FLASHINFER_NHD`` or ``FLASHINFER_HND``
        # dtype: what keys and values are converted to. FP8 numbers come without their scale.
        self.config, self.layout, self.block_size, self.dtype = config, layout, block_size, dtype
        self.width = max(config.head_size, config.value_head_size)
        self.by_head = layout == FLASHINFER_HND
        heads = config.num_kv_heads
        per_block = block_size * heads if self.by_head else block_size
        self._row = self.width if self.by_head else heads * self.width
        halves_apart = layout == FLASH_ATTN_NHD
        self._rows_per_block = per_block if halves_apart else 2 * per_block
        # Where the values' rows begin; None: in the middle of all.
        self._values_at = None if halves_apart else per_block
        self._fp8 = FP8_DTYPES.get(config.cache_dtype)

    def rows(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Return row numbers, int64: of N tokens ``(N,)``, with HND ``(num_kv_heads * N,)`` head by head."""
        # blocks, offsets: block ids, and places within the blocks, ``(N,)``
        first = torch.add(offsets.long(), blocks, alpha=self._rows_per_block)
        if not self.by_head:
            return first
        heads = torch.arange(self.config.num_kv_heads, device=first.device) * self.block_size
        return (heads[:, None] + first).flatten()

    def rows_at(self, table: Tensor, positions: Tensor) -> Tensor:
        """Return the rows of tokens at ``positions``, int64 ``(B, S)``, of requests with block tables ``(B, W)``."""
        columns = torch.div(positions, self.block_size, rounding_mode="floor")
        offsets = torch.sub(positions, columns, alpha=self.block_size)
        return self.rows(table.gather(1, columns).flatten(), offsets.flatten())

    def read(self, kv_cache: Tensor, rows: Tensor, batch: int, buffers: Buffers) -> tuple[Tensor, Tensor]:
        """Return keys and values ``(batch, num_kv_heads, N / batch, width)``, overwritten by the next call."""
        # Both are as wide as the wider of them, as the cache's rows are; elements behind the own size are arbitrary.
        if self._fp8 is not None:
            kv_cache = kv_cache.view(torch.uint8)  # torch's index operations know no FP8
        if not kv_cache.is_contiguous():
            keys, values = (self._strided(view, rows) for view in key_value_views(kv_cache, self.layout, self.config))
        else:
            matrix = kv_cache.view(-1, self._row)
            count = len(rows)
            keys = buffers.take("keys", count, self._row, matrix.dtype)
            torch.index_select(matrix, 0, rows, out=keys)
            values = buffers.take("values", count, self._row, matrix.dtype)
            begin = len(matrix) // 2 if self._values_at is None else self._values_at
            torch.index_select(matrix[begin:], 0, rows, out=values)
        if self._fp8 is not None or keys.dtype != self.dtype:
            keys = self._converted("converted keys", keys, buffers)
            values = self._converted("converted values", values, buffers)
        heads, width = self.config.num_kv_heads, self.width
        if self.by_head:
            shape = (heads, batch, -1, width)
            return keys.view(shape).transpose(0, 1), values.view(shape).transpose(0, 1)
        shape = (batch, -1, heads, width)
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)

    def _strided(self, view: Tensor, rows: Tensor) -> Tensor:
        """Gather from a cache that lies in memory in another way than its layout's name says; several times slower."""
        if self.by_head:
            rows = rows[: len(rows) // self.config.num_kv_heads]
        blocks = torch.div(rows, self._rows_per_block, rounding_mode="floor")
        found = view[blocks, rows % self._rows_per_block]
        found = torch.nn.functional.pad(found, (0, self.width - found.shape[-1]))
        return (found.transpose(0, 1) if self.by_head else found).reshape(-1, self._row)

    def _converted(self, name: str, stored: Tensor, buffers: Buffers) -> Tensor:
        rows, columns = stored.shape
        out = buffers.take(name, rows, columns, self.dtype)
        if self._fp8 is None:
            return out.copy_(stored)
        if stored.device.type != "cpu" or stored.numel() % 2:
            return out.copy_(stored.view(self._fp8))
        # A CPU converts FP8 one by one; looking up two at a time is ten times as fast (AMD EPYC, torch 2.13.0).
        table = _pairs(self._fp8, self.dtype)
        codes = buffers.take("codes", 1, stored.numel() // 2, torch.int32)[0]
        codes.copy_(stored.view(-1).view(torch.uint16))
        torch.index_select(table, 0, codes, out=out.view(-1).view(table.dtype))
        return out


@lru_cache(maxsize=8)
def _pairs(fp8: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return for each of the 65536 pairs of FP8 codes the two numbers, as one integer of their joint width."""
    codes = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    numbers = codes.view(fp8).to(dtype)
    return numbers.view(torch.int64 if dtype == torch.float32 else torch.int32)
