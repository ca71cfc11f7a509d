"""What of a batch a kernel's time depends on: totals of its work, its tiles and waves, and its longest request.

Work is counted request by request and summed, so that batches of unequal requests have features like those of equal
ones. Where a batch holds prefills and decodes, each phase's requests have features of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from attn_select.config import AttentionConfig
from attn_select.times.batch_shape import RequestGroup
from attn_select.times.roofline import keys_read, visible_keys, work_rates

FEATURES = ("start", "bytes", "flops", "tiles", "waves", "tokens", "longest", "serial", "cold_bytes")
"""Names of the features, in order.

1; bytes of the step; its FLOPs; tiles of work, each a thread block's; rounds in which the multiprocessors take them;
new tokens; keys of the longest request; those of them that one thread block reads where blocks are left over to share
them; bytes where they exceed what the L2 keeps from one run to the next.
"""

_TILE_ROWS = {True: 64, False: 128}
"""Rows that a thread block takes: of decodes, queries times heads of one KV head; of prefills, queries of one head."""
_STEEP = 6
"""How sharply caches of more than ``l2_bytes`` fall out of the L2."""

Coordinates = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """One phase of one kind of layer on one device: makes the features of its batches. Made by ``phase_work``.

    Attributes:
        config: the layer.
        decode: whether it is the phase of decodes, which kernels split along the keys and pack along the heads.
        sm_count: multiprocessors of the device.
        key_bytes, token_bytes: bytes per key that a request reads, and per new token.
        pair_flops, key_flops, token_flops: FLOPs per visible pair, per key and per new token.
        tile_rows: rows of a tile that one new token of one request fills.
        tile_heads: heads of a request that have tiles of their own.
    """

    config: AttentionConfig
    decode: bool
    sm_count: int
    key_bytes: float
    token_bytes: float
    pair_flops: float
    key_flops: float
    token_flops: float
    tile_rows: int
    tile_heads: int

    def features(self, groups: Sequence[RequestGroup], l2_bytes: float) -> tuple[float, ...]:
        """Return the ``FEATURES`` of requests of this phase.

        ``l2_bytes`` is what stays in the L2 when a step is repeated; 0 where caches are cold.
        """
        config = self.config
        moved = flops = 0.0
        tiles = tokens = longest = 0
        for group in groups:
            count, query_len, seq_len = group.count, group.query_len, group.seq_len
            keys = keys_read(config, query_len, seq_len)
            moved += count * (keys * self.key_bytes + query_len * self.token_bytes)
            flops += count * (
                visible_keys(config, query_len, seq_len) * self.pair_flops
                + keys * self.key_flops
                + query_len * self.token_flops
            )
            tiles += count * self.tile_heads * -(-query_len * self.tile_rows // _TILE_ROWS[self.decode])
            tokens += count * query_len
            longest = max(longest, keys)
        cold = moved / (1 + (l2_bytes / moved) ** _STEEP) if l2_bytes else 0.0
        serial = longest / max(1.0, self.sm_count / tiles)
        waves = -(-tiles // self.sm_count)
        return 1.0, moved, flops, float(tiles), float(waves), float(tokens), float(longest), serial, cold


def phase_work(config: AttentionConfig, decode: bool, sm_count: int) -> PhaseWork:
    """Return what makes the features of one phase's batches."""
    rates = work_rates(config, decode)
    return PhaseWork(
        config,
        decode,
        sm_count,
        key_bytes=rates.kv_bytes_per_key + rates.projection_bytes_per_key,
        token_bytes=rates.query_bytes_per_token + rates.cache_write_bytes_per_token + rates.projection_bytes_per_token,
        pair_flops=rates.attention_flops_per_pair,
        key_flops=rates.projection_flops_per_key,
        token_flops=rates.projection_flops_per_token,
        tile_rows=config.num_heads // config.num_kv_heads if decode else 1,
        tile_heads=config.num_kv_heads if decode else config.num_heads,
    )


def coordinates(groups: Sequence[RequestGroup], cold_share: float) -> Coordinates:
    """Return where a batch lies among others: what is near has nearly the same deviation from a kernel's curve.

    The axes are the logarithms of requests, mean length and mean length per new token, and the share of cold bytes,
    which tells apart what fits into the L2 from what does not. Lengths differ by 1 where they double.
    """
    count = sum([group.count for group in groups])
    length = sum([group.count * group.seq_len for group in groups]) / count
    new = sum([group.count * group.query_len for group in groups]) / count
    return log2(count), log2(length), log2(length / new) / 2, 5 * cold_share
