"""What ``TORCH_MLA`` makes of a batch: which decodes are gathered together and from where, and the prefills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attn_select.runtime.backend import AttentionMetadataBuilder
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import CommonAttentionMetadata, Ranges, VarlenMetadata
from attn_select_torch.runtime.dense_attention import drafts_seen, visible_intervals, visible_keys

GATHERED_TOKENS = 2**16
"""Latents that decodes copy out of the cache at a time, padding included, unless one request alone has more: 72 MiB at
576 elements of 16 bits."""
FEW_KEYS = 128
"""Keys up to which padding is cheaper than a call of its own."""


@dataclass(slots=True)
class Gather:
    """Decodes of one query length that are computed together: n requests, q tokens each, at most S keys."""

    tokens: Tensor  # int64 ``(n * q,)``, their rows in the batch
    shape: tuple[int, int, int]  # ``(n, q, S)``
    slots: Tensor  # int64 ``(n * S,)`` of the cache; behind a request's last key its first one again
    visible: Tensor | None  # bool ``(n, q or 1, S)``; None where every row sees every key
    distance: Tensor | None  # int32 ``(n, q, S)``, from row to key, with ALiBi


class _Decode(NamedTuple):
    """One request on the host: its keys are ``first_key`` to ``seq_len - 1``."""

    request: int
    first_token: int
    query_len: int
    first_key: int
    seq_len: int

    @property
    def num_keys(self) -> int:
        return self.seq_len - self.first_key


class Prefill(NamedTuple):
    """One request of a ``forward_mha`` call: its rows and keys, and where its first row stands among the keys."""

    rows: slice
    keys: slice
    offset: int
    ranges: Ranges


@dataclass(slots=True)
class PrefillMetadata:
    """What ``build_prefill`` makes of a ``VarlenMetadata``."""

    requests: tuple[Prefill, ...]
    causal: bool
    counts_sinks: bool


class TorchMLAMetadataBuilder(AttentionMetadataBuilder[tuple[Gather, ...]]):
    """Says on the host which decodes are gathered together, and on the device from which slots."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> tuple[Gather, ...]:
        """As ``AttentionMetadataBuilder.build``, for decodes."""
        common, config = common_attn_metadata, self.context.config
        causal = common.causal and not config.non_causal
        bounds, ranges = common.query_start_loc_cpu.tolist(), common.mm_prefix_ranges
        decodes = []
        for request, seq_len in enumerate(common.seq_lens_cpu.tolist()):
            start, end = bounds[request], bounds[request + 1]
            seen = visible_intervals(
                seq_len - (end - start),
                end - start,
                seq_len,
                causal=causal,
                sliding_window=config.sliding_window,
                mm_prefix_ranges=() if ranges is None else ranges[request],
            )
            if start < end:
                decodes.append(_Decode(request, start, end - start, seen[0][0] if seen else seq_len, seq_len))
        groups = _grouped(decodes, alone=config.batch_invariant or ranges is not None)
        if not groups:
            return ()
        numbers = torch.tensor([decode for group in groups for decode in group], dtype=torch.int32)
        on_device = to_device(numbers, self.context.device).split_with_sizes([len(group) for group in groups])
        return tuple(
            self._gather(group, columns, common, causal) for group, columns in zip(groups, on_device, strict=True)
        )

    def _gather(
        self, group: Sequence[_Decode], numbers: Tensor, common: CommonAttentionMetadata, causal: bool
    ) -> Gather:
        config, device, block_size = self.context.config, numbers.device, self.context.block_size
        table = common.block_table_tensor
        assert table is not None
        assert block_size is not None
        request, first_token, _, first_key, seq_len = numbers.unsqueeze(-1).unbind(1)
        query_len, num_keys = group[0].query_len, max(decode.num_keys for decode in group)
        row = torch.arange(query_len, dtype=torch.int32, device=device)
        rows = seq_len - query_len + row
        keys = first_key + torch.arange(num_keys, dtype=torch.int32, device=device)
        exists = None
        if any(decode.num_keys < num_keys for decode in group):
            exists = keys < seq_len
            # Tables are stale and slots poisoned behind a sequence's end: its first key stands in, which is masked.
            keys = torch.where(exists, keys, first_key)
            exists = exists.unsqueeze(1)
        blocks = table[request, torch.div(keys, block_size, rounding_mode="floor")]
        tokens, visible = (first_token + row).flatten().long(), None
        if query_len > 1:  # a single row sees all keys that were kept
            drafts = None
            if common.tree_mask is not None:
                tree_rows = common.tree_mask.index_select(0, tokens).view(len(group), query_len, -1)
                drafts = drafts_seen(tree_rows, keys - (seq_len - query_len))
            visible = visible_keys(
                rows,
                keys,
                causal=causal,
                sliding_window=config.sliding_window,
                # with image ranges each request is a group by itself
                mm_prefix_ranges=() if common.mm_prefix_ranges is None else common.mm_prefix_ranges[group[0].request],
                drafts=drafts,
            )
        if exists is not None:
            visible = exists if visible is None else visible & exists
        return Gather(
            tokens=tokens,
            shape=(len(group), query_len, num_keys),
            slots=(blocks.long() * block_size + keys % block_size).flatten(),
            visible=visible,
            distance=(rows.unsqueeze(-1) - keys.unsqueeze(-2)).abs_() if config.alibi else None,
        )

    def build_prefill(self, varlen: VarlenMetadata) -> PrefillMetadata:
        """As ``AttentionMetadataBuilder.build_prefill``."""
        bounds, key_bounds = varlen.query_start_loc_cpu.tolist(), varlen.key_start_loc_cpu.tolist()
        ranges = varlen.mm_prefix_ranges or [()] * (len(bounds) - 1)
        requests = zip(pairwise(bounds), pairwise(key_bounds), varlen.query_offsets_cpu.tolist(), ranges, strict=True)
        return PrefillMetadata(
            tuple(Prefill(slice(*rows), slice(*keys), offset, own) for rows, keys, offset, own in requests),
            varlen.causal,
            varlen.counts_sinks,
        )


def _grouped(decodes: Sequence[_Decode], *, alone: bool) -> list[list[_Decode]]:
    """Put decodes of one query length and similar numbers of keys together, and decodes without keys apart."""
    # Longest first: each member of a group takes as many latents as the first one, at most half of them padding, unless
    # there are few.
    groups: list[list[_Decode]] = []
    room = 0
    for decode in sorted(decodes, key=lambda d: (d.query_len, d.num_keys), reverse=True):
        longest = groups[-1][0] if groups else None
        if (
            alone
            or longest is None
            or decode.query_len != longest.query_len
            or room < longest.num_keys
            or longest.num_keys > max(2 * decode.num_keys, FEW_KEYS)
            or (longest.num_keys > 0) != (decode.num_keys > 0)
        ):
            groups.append([])
            room = GATHERED_TOKENS
            longest = decode
        groups[-1].append(decode)
        room -= longest.num_keys
    return groups
