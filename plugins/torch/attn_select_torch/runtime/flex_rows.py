"""Tiles of rows for ``FLEX_ATTENTION``, on the host: which token each row holds and what it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.runtime.metadata import CommonAttentionMetadata, Ranges
from attn_select_torch.facts.flex_attention import TILE

FAR = 2**30
"""Behind every position; rows that see nothing are bounded by it and -1."""


@dataclass(slots=True)
class Rows:
    """Rows and tiles of a batch on the host."""

    tiles: int  # how many
    tokens: Tensor  # int32, the token of each row; for padding the first one of its request
    requests: Tensor  # int32, the request of each row
    valid: Tensor  # bool, False for padding
    bounds: list[Tensor]  # int32, first and last position that each row sees; a pair more for image ranges
    first_rows: Tensor  # int32, the first row of each request


def lay_out(common: CommonAttentionMetadata, config: AttentionConfig, paged: bool, fixed: bool) -> Rows:
    """Lay out the tokens of each request from a tile's first row on."""
    # paged: keys are in a cache, and bounds are positions; else they are the step's own
    # fixed: as many tiles for every batch of as many requests and tokens
    causal = config.attn_type == "decoder" and not config.non_causal and common.causal
    lens, starts = common.query_lens_cpu, common.query_start_loc_cpu[:-1]
    seq_lens = common.seq_lens_cpu if paged else lens
    counts = (lens + TILE - 1) // TILE
    ends = counts.cumsum(0, dtype=torch.int32)
    used = int(ends[-1])
    # A size of 1 would be compiled apart.
    tiles = max(2, common.num_actual_tokens // TILE + common.num_reqs if fixed else used)
    tile_requests = torch.repeat_interleave(counts, output_size=used).int()
    tile_requests = torch.nn.functional.pad(tile_requests, (0, tiles - used), value=common.num_reqs - 1)
    requests = tile_requests.repeat_interleave(TILE)
    at = requests.long()
    first_rows = (ends - counts) * TILE
    within = torch.arange(tiles * TILE, dtype=torch.int32) - first_rows[at]
    valid = within < lens[at]
    positions = (seq_lens - lens)[at] + within
    ends_of = seq_lens[at] - 1
    window = config.sliding_window
    first = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp_(min=0)
    if config.attention_chunk_size is not None:
        first = (positions - positions % config.attention_chunk_size).clamp_(min=0)
    last = positions if causal else ends_of
    if window is not None and not causal:
        last = torch.minimum(positions + window - 1, ends_of)
    bounds = [first.masked_fill(~valid, FAR), last.masked_fill(~valid, -1)]
    # Padding repeats its own request's first token, so that as a key it holds no other request's NaN.
    tokens = torch.where(valid, starts[at] + within, starts[at].clamp(max=common.num_actual_tokens - 1))
    rows = Rows(tiles, tokens, requests, valid, bounds, first_rows)
    if config.mm_prefix:
        first_positions = (seq_lens - lens).tolist()
        rows.bounds += _image_bounds(rows, common.mm_prefix_ranges or (), lens.tolist(), first_positions)
    return rows


def _image_bounds(rows: Rows, ranges: Sequence[Ranges], lens: list[int], first_positions: list[int]) -> list[Tensor]:
    """Return the first and last position of the images that each row belongs to."""
    first, last = torch.full_like(rows.requests, FAR), torch.full_like(rows.requests, -1)
    for request, own in enumerate(ranges):
        offset = int(rows.first_rows[request]) - first_positions[request]  # from a position to its row
        end = first_positions[request] + lens[request]
        for low, high in own:
            part = slice(max(low, first_positions[request]) + offset, min(high + 1, end) + offset)
            if part.start < part.stop:
                first[part].clamp_(max=max(0, low))
                last[part].clamp_(min=min(high, end - 1))
    return [first, last]


def spans_of(rows: Rows, starts: Tensor | None) -> list[Tensor]:
    """Return per tile where its blocks start, where the full ones start and end, and where all end; int32 each."""
    # starts: without a cache, the row of each request's first key; bounds are shifted by it
    if starts is not None:
        shift = starts[rows.requests.long()]
        for number, bound in enumerate(rows.bounds):
            rows.bounds[number] = torch.where(rows.valid & (bound >= 0) & (bound < FAR), bound + shift, bound)
    first, last = (bound.view(rows.tiles, TILE) for bound in rows.bounds[:2])
    blind = first > last
    low, high = first.masked_fill(blind, FAR).amin(1), last.masked_fill(blind, -1).amax(1)
    if len(rows.bounds) > 2:
        low = torch.minimum(low, rows.bounds[2].view(rows.tiles, TILE).amin(1))
        high = torch.maximum(high, rows.bounds[3].view(rows.tiles, TILE).amax(1))
    start, end = low // TILE, high // TILE + 1
    # A block is full where it lies between the latest first and the earliest last position of the tile's rows. A row of
    # padding may see anything, a row without keys nothing.
    padding = ~rows.valid.view(rows.tiles, TILE)
    latest = first.masked_fill(blind, FAR).masked_fill(padding, 0).amax(1)
    earliest = last.masked_fill(blind, -1).masked_fill(padding, FAR).amin(1)
    nothing = low > high
    start, end = start.masked_fill(nothing, 0), end.masked_fill(nothing, 0)
    full = torch.minimum(torch.maximum((latest + TILE - 1) // TILE, start), end)
    rest = torch.maximum(torch.minimum((earliest + 1) // TILE, end), full)
    return [start, full, rest, end]
