"""What ``TORCH_SDPA`` works out once per step for all layers: pieces, row numbers of gathers, masks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig, Phase
from attn_select.runtime.backend import AttentionMetadataBuilder, BackendContext
from attn_select.runtime.batch import to_device
from attn_select.runtime.cascade import split_for_cascade
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select_torch.facts.torch_sdpa import SdpaFunction, SdpaKernel
from attn_select_torch.runtime import cudnn_prompts, varlen
from attn_select_torch.runtime.band_mask import BandMask
from attn_select_torch.runtime.dense_attention import Range, drafts_seen, visible_keys
from attn_select_torch.runtime.gather import Buffers, CacheGather
from attn_select_torch.runtime.request_tiles import (
    Group,
    Limits,
    Request,
    Tile,
    equal_queries,
    grouped,
    requests_of,
    rounded,
)

MASK_ELEMENTS = 2**25
"""Most elements of the mask that a step's tiles share."""
PACKED_ROWS = {"cpu": 256, "cuda": 1024}
"""Query rows of one tile, heads of a group counted each: on a CPU from 256 on nothing is gained (AMD EPYC)."""
GROUP_BYTES = {"cpu": 2**21, "cuda": 2**28}
"""Keys in bytes up to which several requests are computed together, on a CPU per thread: more leaves its cache."""
FEW_KEYS = {"cpu": 0, "cuda": 2**15}
"""Keys of requests of unlike lengths up to which one padded call is made: on a GPU several calls take longer on the
host than the padding on the device (16 requests of 200 to 2000 keys: 252 us in several, 123 in one, H200)."""


@dataclass(slots=True)
class Piece:
    """One or more requests that are computed together, as ``pieces`` has it, with what the device needs."""

    batch: int  # requests
    tokens: slice | Tensor  # slice of the step's tokens, or int64 ids of them, request by request
    keys: int  # keys per request, padding included
    rows: Tensor | None  # row numbers in the cache (``CacheGather.rows``); None without a cache
    first_key: int  # without a cache the first row of key and value
    padding: Tensor | None  # additive ``(batch, 1, 1, keys)``; None where nothing is padded
    # with their masks, additive ``(1, 1, rows * group, columns)`` or None; those of image ranges and trees of drafts
    # bool ``(rows, columns)``
    tiles: list[tuple[Tile, Tensor | None]]
    # positions of the columns relative to the sequence's end ``(keys,)``, with ALiBi or image ranges
    key_offsets: Tensor | None


@dataclass(slots=True)
class SDPAMetadata:
    """A step for all layers."""

    pieces: list[Piece]  # computed one after the other
    blind: list[Range]  # ``(start, end)`` tokens that see no key
    buffers: Buffers  # what gathers go to
    calls: list[varlen.Call]  # in place of pieces, the calls of ``varlen_attn``
    prompts: list[cudnn_prompts.Prompt]  # beside calls, the requests that cuDNN computes
    prefix: SDPAMetadata | None  # with cascade attention the shared prefix, for all queries; the rest is the suffix
    num_tokens: int  # of the step


def compute_dtype(config: AttentionConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that kernels compute in: on a CPU float32 for float16, which takes them 2 to 3 times as long."""
    if device.type == "cpu" and config.dtype == "float16":
        return torch.float32
    return PLAIN_DTYPES[config.dtype]


def functions(context: BackendContext) -> dict[Phase, SdpaFunction]:
    """Return what attends in each phase, as the plans say."""
    return {phase: context.kernel(SdpaKernel, phase).function for phase in context.plans}


class SDPABuilder(AttentionMetadataBuilder[SDPAMetadata]):
    """Cuts a batch into pieces; takes requests in any order. Reads host copies only."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config, device = context.config, context.device
        self.group = config.num_heads // config.num_kv_heads
        self.dtype = compute_dtype(config, device)
        self.varlen = varlen.available(functions(context))
        self._joins_decodes = functions(context).get("decode") == "scaled_dot_product_attention"
        self._rounds = device.type == "cuda"
        self._prompts_by_cudnn = functions(context).get("prefill") == "cuDNN and varlen_attn"
        self.gather: CacheGather | None = None
        if context.kv_layout is not None and context.block_size is not None:
            self.gather = CacheGather(config, context.kv_layout, context.block_size, self.dtype)
        self._bands: dict[bool, BandMask] = {}  # by causality
        self._columns = torch.empty(0, dtype=torch.int64, device=device)
        self._seen, self._hidden = (torch.tensor(bias, dtype=self.dtype, device=device) for bias in (0.0, -torch.inf))
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        kind = "cpu" if device.type == "cpu" else "cuda"
        # A CPU's kernel hands out tiles of 64 rows of each KV head to its threads.
        packed = max(PACKED_ROWS[kind], 64 * (threads // config.num_kv_heads))
        packed = min(packed, max(16, MASK_ELEMENTS // context.max_model_len))
        width = max(config.head_size, config.value_head_size)
        key_bytes = config.num_kv_heads * width * self.dtype.itemsize
        together = 0 if config.batch_invariant or self.gather is None else GROUP_BYTES[kind] * threads // key_bytes
        few = FEW_KEYS[kind] if together else 0
        self.limits = Limits(tile_rows=max(1, packed // self.group), group_keys=together, few_keys=few)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SDPAMetadata:
        if not common_prefix_len:
            return self._built(common_attn_metadata)
        assert self.context.block_size is not None
        split = split_for_cascade(common_attn_metadata, common_prefix_len, self.context.block_size)
        metadata = self._built(split.suffix, merged=True)
        metadata.prefix = self._built(split.prefix, merged=True)
        return metadata

    def _built(self, common: CommonAttentionMetadata, merged: bool = False) -> SDPAMetadata:
        config = self.context.config
        causal = config.attn_type == "decoder" and not config.non_causal and common.causal
        metadata = SDPAMetadata([], [], Buffers(self.context.device), [], [], None, common.num_actual_tokens)
        if self.varlen and (merged or not self._decodes(common)):
            if self._prompts_by_cudnn and causal and not merged and self.gather is not None:
                metadata.prompts = cudnn_prompts.prompts(common, self.gather)
            apart = [prompt.request for prompt in metadata.prompts]
            metadata.calls = varlen.calls(common, config, causal, self.gather, apart)
            return metadata
        window = config.sliding_window
        band = self._band(causal)
        groups: Iterable[Request | Group] | None = None
        if not config.mm_prefix and common.tree_mask is None:
            groups = equal_queries(common, window, self.limits, alone=self._rounds)
        if groups is None:
            requests, metadata.blind = requests_of(common, causal, window, self.limits, self.gather is not None)
            groups = grouped(requests, self.limits)
        for group in groups:
            if isinstance(group, Group):
                metadata.pieces.append(self._together(common, group, band))
            else:
                metadata.pieces.append(self._single(common, group, band))
        return metadata

    def _decodes(self, common: CommonAttentionMetadata) -> bool:
        """Whether a batch is better off without ``varlen_attn``."""
        return self._joins_decodes and common.max_query_len <= self.context.config.max_decode_query_len

    def _band(self, causal: bool) -> BandMask:
        if causal not in self._bands:
            self._bands[causal] = BandMask(
                self.limits.tile_rows,
                self.group,
                causal=causal,
                sliding_window=self.context.config.sliding_window,
                dtype=self.dtype,
                device=self.context.device,
            )
        return self._bands[causal]

    def _single(self, common: CommonAttentionMetadata, request: Request, band: BandMask) -> Piece:
        config, device = self.context.config, self.context.device
        rows = None
        if self.gather is not None:
            assert common.block_table_tensor is not None
            table = common.block_table_tensor[request.index, None]
            rows = self.gather.rows_at(table, torch.arange(request.low, request.high, device=device)[None])
        explicit = any(tile.first_key is None for tile in request.tiles)
        offsets = None
        if explicit or config.alibi:
            offsets = torch.arange(request.low - request.seq_len, request.high - request.seq_len, device=device)
        tiles: list[tuple[Tile, Tensor | None]] = []
        for tile in request.tiles:
            if tile.first_key is not None:
                tiles.append((tile, _mask(band, tile)))
                continue
            assert offsets is not None
            ranges = () if common.mm_prefix_ranges is None else common.mm_prefix_ranges[request.index]
            columns, drafts = offsets[tile.low : tile.high], None
            if request.first_place is not None:
                assert common.tree_mask is not None
                rows_of_tree = common.tree_mask[request.first_token + tile.start :][: tile.rows]
                # From the sequence's end to places in the step: the request's tokens of the step are its last keys.
                drafts = drafts_seen(rows_of_tree, columns + request.rows + request.first_place)
            seen = visible_keys(
                row_offsets(request.rows, tile, device),
                columns,
                causal=band.causal,
                sliding_window=band.sliding_window,
                mm_prefix_ranges=[(first - request.seq_len, last - request.seq_len) for first, last in ranges],
                drafts=drafts,
            )
            tiles.append((tile, seen))
        tokens = slice(request.first_token, request.first_token + request.rows)
        first_key = int(common.query_start_loc_cpu[request.index]) + request.low
        return Piece(1, tokens, request.keys, rows, first_key, None, tiles, offsets)

    def _together(self, common: CommonAttentionMetadata, group: Group, band: BandMask) -> Piece:
        assert self.gather is not None
        assert common.block_table_tensor is not None
        device = self.context.device
        batch, rows = len(group.index), group.rows
        table, seq_lens = common.block_table_tensor, common.seq_lens
        tokens: slice | Tensor = slice(0, batch * rows)
        if batch < common.num_reqs or batch * rows < common.num_actual_tokens:
            numbers = to_device(torch.tensor([group.index, group.first_tokens]), device)
            table, seq_lens = table.index_select(0, numbers[0]), seq_lens.index_select(0, numbers[0])
            tokens = (numbers[1][:, None] + torch.arange(rows, device=device)).flatten()
        keys = rounded(group.keys) if self._rounds else group.keys
        if len(self._columns) < keys:
            self._columns = torch.arange(1 << (keys - 1).bit_length(), device=device)
        # Padding stands in front, so that all requests end at the last column and one mask serves all.
        positions = (seq_lens - keys)[:, None] + self._columns[:keys]  # int64, as indices are
        padding = None
        # Fewer keys than others have only requests that see their first one: windows cut all to one length.
        if group.padded or keys > group.keys:
            padding = torch.where(positions < 0, self._hidden, self._seen)[:, None, None]
            positions.clamp_(min=0)  # what is masked must be finite too
        tile = Tile(0, rows, 0, keys, 1 - keys)  # the last row stands at the last key
        key_offsets = torch.arange(-keys, 0, device=device) if self.context.config.alibi else None
        gathered = self.gather.rows_at(table, positions)
        return Piece(batch, tokens, keys, gathered, 0, padding, [(tile, _mask(band, tile))], key_offsets)


def _mask(band: BandMask, tile: Tile) -> Tensor | None:
    assert tile.first_key is not None
    end = tile.first_key + tile.high - tile.low
    if not band.hides(tile.rows, tile.first_key, end):
        return None
    return band.view(tile.rows, tile.first_key, end)


def row_offsets(rows: int, tile: Tile, device: torch.device) -> Tensor:
    """Return the positions of a tile's rows relative to the sequence's end."""
    return torch.arange(tile.start - rows, tile.start - rows + tile.rows, device=device)
