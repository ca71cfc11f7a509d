"""The metadata of a ``FLEX_ATTENTION`` step: padded rows, the keys each row sees, and cache blocks per tile.

Queries are laid out in tiles of 16 rows, none of which holds rows of two requests, so that a tile reads its own
request's blocks alone and in their own order. What a row sees is one range of positions, with image ranges two:
causality, windows and both lengths are in their bounds. A block that all rows of a tile see whole is read without a
mask.

A kernel names a key by its place in the cache. The way back to its position is a table per request and block, since
requests that share a prefix share its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.runtime.backend import AttentionMetadataBuilder, BackendContext
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select_torch.facts.flex_attention import TILE
from attn_select_torch.runtime.flex_rows import FAR, lay_out, spans_of

_LEAST_ROWS, _LEAST_PAGES = 2**14, 2**20
"""Least sizes of what masks read: static ones, in powers of two, since each size is compiled anew."""


@dataclass(slots=True)
class BlockLists:
    """Blocks of the cache that each tile reads, int32."""

    counts: Tensor  # ``(1, 1, tiles)``
    indices: Tensor  # ``(1, 1, tiles, W)``; entries behind a tile's count are undefined

    def widened(self, num_blocks: int) -> BlockLists:
        """Return lists of at least ``num_blocks`` columns: the CPU's template wants them, though it reads only some."""
        tiles, width = self.indices.shape[2:]
        if width >= num_blocks:
            return self
        flat = self.indices.new_empty(tiles * width + num_blocks)
        flat[: tiles * width].view(tiles, width).copy_(self.indices[0, 0])
        strides = (tiles * width, tiles * width, width, 1)
        return BlockLists(self.counts, flat.as_strided((1, 1, tiles, num_blocks), strides))


@dataclass(slots=True)
class Pages:
    """From a block of the cache back to its place in a request."""

    num_blocks: int  # of the cache
    first: Tensor  # int32, one per row: where its request's part of ``places`` begins
    # int32, per request and block of the cache the block's number within the request; set only where the request has
    # the block
    places: Tensor


@dataclass(slots=True)
class Tails:
    """The slots behind each request's last key in that key's block. A block is read whole, and 0 * NaN is NaN."""

    slots: Tensor  # int64 ``(B * (TILE - 1),)``. Where a request has fewer, its block's first slot, which holds a key.
    unused: Tensor  # bool, False for those

    def clear(self, values: Tensor) -> None:
        """Write zeros where unused slots of ``values`` are not finite."""
        # values: ``(num_slots, num_kv_heads, value_head_size)``
        # Finite numbers stay: they may be tokens that this batch does not attend to, such as the step's own ones where
        # its context is attended to alone.
        kept = values.index_select(0, self.slots)
        values.index_copy_(0, self.slots, kept.masked_fill_(self.unused[:, None, None] & ~kept.isfinite(), 0))


@dataclass(slots=True)
class FlexMetadata:
    """A step for all layers: T tokens in R padded rows."""

    num_tokens: int  # T
    tokens: Tensor  # int64 ``(R,)``, the token of each row; any for padding
    rows: Tensor  # int64 ``(T,)``, the row of each token
    # first and last position that each row sees, with image ranges a second pair; int32, at least R each
    bounds: tuple[Tensor, ...]
    requests: Tensor  # int32, one per row
    partial: BlockLists  # partial, full: blocks that need the mask, and blocks that do not
    full: BlockLists
    block_table: Tensor | None  # int32 ``(B, W)``; None without a cache
    present: Tensor  # int32 ``(B, 2)``, first and end column of the block table that the request's rows see
    tails: Tails | None  # what is cleared before the cache is read; None without a cache
    make_pages: Callable[[FlexMetadata, int], Pages]  # makes ``pages``, which needs the size of the cache
    _pages: Pages | None = None

    def pages(self, num_blocks: int) -> Pages:
        """Return the way back to positions for a cache of ``num_blocks``: made for one layer, kept for the others."""
        if self._pages is None or self._pages.num_blocks != num_blocks:
            self._pages = self.make_pages(self, num_blocks)
        return self._pages


class FlexBuilder(AttentionMetadataBuilder[FlexMetadata]):
    """Lays out rows on the host, looks up blocks on the device; takes requests in any order. Does not synchronise."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.paged = context.block_size is not None
        self._persistent: dict[str, Tensor] = {}
        self._num_blocks = 0  # of the cache that the persistent pages are for
        self.most_tiles = max(2, context.max_num_batched_tokens // TILE + context.max_num_seqs)
        self.row_capacity = max(_LEAST_ROWS, 1 << (TILE * self.most_tiles - 1).bit_length())

    def use_cascade_attention(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> bool:
        return False

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlexMetadata:
        common, device = common_attn_metadata, self.context.device
        rows = lay_out(common, self.context.config, self.paged, self.context.cuda_graphs)
        spans = spans_of(rows, None if self.paged else rows.first_rows)
        partial_widths = (spans[1] - spans[0]) + (spans[3] - spans[2])
        # A size of 0 or 1 would be compiled apart. Both lists are equally wide: Triton's templates step through one by
        # the strides of the other (torch/_inductor/kernel/flex/templates v2.11.0, flex_attention.py.jinja).
        width = max(2, int(partial_widths.max()), int((spans[2] - spans[1]).max()))
        if self.context.cuda_graphs:
            width = -(-self.context.max_model_len // TILE) + 1
        present = torch.zeros(common.num_reqs, 2, dtype=torch.int32)
        tile_requests = rows.requests[::TILE]
        seeing = spans[3] > spans[0]
        index = tile_requests[seeing].long()
        present[:, 0].fill_(FAR).scatter_reduce_(0, index, spans[0][seeing], "amin")
        present[:, 1].scatter_reduce_(0, index, spans[3][seeing], "amax")
        out_rows = torch.zeros(common.num_actual_tokens, dtype=torch.int64)
        valid = rows.valid.nonzero().flatten()
        out_rows[rows.tokens[valid].long()] = valid
        tiles = to_device(torch.stack([*spans, tile_requests]), device)
        bounds = tuple(self._padded(f"bounds {number}", one) for number, one in enumerate(rows.bounds))
        table = common.block_table_tensor if self.paged else None
        metadata = FlexMetadata(
            num_tokens=common.num_actual_tokens,
            tokens=self._keep("tokens", to_device(rows.tokens.long(), device), self.row_capacity),
            rows=self._keep("rows", to_device(out_rows, device), self.context.max_num_batched_tokens),
            bounds=bounds,
            requests=self._padded("requests", rows.requests),
            partial=self._lists("partial", tiles, table, width),
            full=self._lists("full", tiles, table, width),
            block_table=table,
            present=to_device(present, device),
            tails=None if table is None else self._tails(table, common.seq_lens),
            make_pages=self._pages,
        )
        if self._num_blocks:
            metadata.pages(self._num_blocks)  # captured kernels read it: it must be this batch's from now on
        return metadata

    def _padded(self, name: str, values: Tensor) -> Tensor:
        """Return values per row on the device, in a tensor of static size."""
        if name in self._persistent:
            present = self._persistent[name]
        else:
            present = torch.zeros(self.row_capacity, dtype=torch.int32, device=self.context.device)
            if self.context.cuda_graphs:
                self._persistent[name] = present
        present[: len(values)].copy_(to_device(values, self.context.device))
        return present

    def _keep(self, name: str, values: Tensor, *most: int) -> Tensor:
        """Return ``values`` where they stay from step to step, if steps are captured."""
        if not self.context.cuda_graphs:
            return values
        if name not in self._persistent:
            self._persistent[name] = torch.zeros(most, dtype=values.dtype, device=values.device)
        present = self._persistent[name][tuple(slice(0, size) for size in values.shape)]
        return present.copy_(values)

    def _lists(self, name: str, tiles: Tensor, table: Tensor | None, width: int) -> BlockLists:
        """Look up each tile's blocks."""
        # name: ``full`` for the middle range, ``partial`` for the other two
        # tiles: int32 ``(5, tiles)``: starts of the first, the middle and the last range, end, request
        # table: None where a block's number is its place
        start, full, rest, end, requests = tiles.unbind(0)
        columns = torch.arange(width, dtype=torch.int32, device=tiles.device)
        if name == "full":
            counts, found = rest - full, full[:, None] + columns
        else:
            # The blocks before and behind the full ones, side by side: columns past the first skip the full ones.
            counts, found = (full - start) + (end - rest), start[:, None] + columns
            found = torch.where(found < full[:, None], found, found + (rest - full)[:, None])
        if table is not None:  # columns behind a tile's count may lie outside the table, and are not read
            found = table[requests.long()].gather(1, found.clamp(0, table.shape[1] - 1).long())
        counts = self._keep(f"{name} counts", counts, self.most_tiles)
        found = self._keep(f"{name} blocks", found, self.most_tiles, width)
        return BlockLists(counts[None, None], found[None, None])

    def _tails(self, table: Tensor, seq_lens: Tensor) -> Tails:
        """Look up the unused slots of each request's last block. A request without keys has none."""
        last_blocks = (seq_lens - 1).clamp_(min=0) // TILE
        offsets = torch.arange(1, TILE, dtype=torch.int32, device=table.device)
        unused = (last_blocks[:, None] * TILE + offsets >= seq_lens[:, None]) & (seq_lens > 0)[:, None]
        slots = table.gather(1, last_blocks[:, None].long()) * TILE + torch.where(unused, offsets, 0)
        most = self.context.max_num_seqs * (TILE - 1)
        return Tails(
            self._keep("tail slots", slots.long().flatten(), most), self._keep("tails", unused.flatten(), most)
        )

    def _pages(self, metadata: FlexMetadata, num_blocks: int) -> Pages:
        table, present = metadata.block_table, metadata.present
        assert table is not None
        device, row = table.device, num_blocks + 1
        most = self.context.max_num_seqs if self.context.cuda_graphs else len(table)
        size = max(_LEAST_PAGES, 1 << (most * row - 1).bit_length())
        places = self._persistent.get("places")
        if places is None or self._num_blocks != num_blocks:
            places = torch.empty(size, dtype=torch.int32, device=device)
            if self.context.cuda_graphs:
                self._persistent["places"], self._num_blocks = places, num_blocks
        columns = torch.arange(table.shape[1], dtype=torch.int32, device=device).expand_as(table)
        # Columns that no row sees may hold anything. They are written to a place that no row reads.
        seen = (columns >= present[:, :1]) & (columns < present[:, 1:])
        target = torch.where(seen, table, num_blocks).long()
        target += torch.arange(0, len(table) * row, row, device=device)[:, None]
        places.index_put_((target,), columns)
        first = metadata.requests * row
        if self.context.cuda_graphs:
            first = self._keep("page rows", first, self.row_capacity)
        return Pages(num_blocks, first, places)
