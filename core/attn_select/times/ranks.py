"""What decode context parallelism costs and saves, estimated: bytes of cache, attention spared, collectives added."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from attn_select.layer.config import AttentionConfig
from attn_select.layer.dtypes import BITS
from attn_select.machine.device import Device
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.roofline import roofline_us
from attn_select.times.workload import Workload

SHARED = (8.5, 3.1)
"""us of gathering query heads and merging results through memory that the ranks share, and us per MB (10^6 bytes) that
a rank gets from each other rank.

Measured on two H200 over NVLink in torch 2.11, CUDA graphs (docs/gpu-results.md): within a sixth from 1 to 2048
tokens of 32 heads of 128 and of 64 heads with queries of 576 and results of 512."""
GATHER = (8.9, 7.0)
"""The same of gathering query heads by NCCL: within a fifth."""
MERGE = (11.4, 5.8)
"""The same of exchanging and merging results by NCCL (``a2a``)."""
MOST_SHARING = 8
"""Ranks that share memory, at most: the GPUs of one host."""
MOST_SHARED_BYTES = 128 << 20
"""Of one rank's shared memory, for one kind of layers."""
MEASURED_ON = "2 H200 over NVLink"


@dataclass(frozen=True, slots=True)
class RankStep:
    """Decodes of one batch."""

    batch: BatchShape
    alone_us: float  # attention of one rank's heads over the whole context, at the device's peak rates
    ranks_us: float  # attention of all ranks' heads over one rank's share, likewise
    collectives_us: float  # gathering query heads and merging results, up to ``MOST_SHARING`` ranks on one host
    # tokens of context, of as many requests, from which the collectives take less than is spared; None: never, since
    # the heads of all ranks keep each busy
    pays_from: int | None


@dataclass(frozen=True, slots=True)
class RankCosts:
    """One kind of layers whose cache lies on several ranks."""

    ranks: int
    bytes_per_token: float  # of one layer on each rank, of a token of context
    # decodes of the workload, or of one request; empty where the device's rates are unknown
    steps: tuple[RankStep, ...]


def shared_tokens(heads: int, query_width: int, width: int, element: float) -> int:
    """Return how many tokens' queries and results, of all ranks' heads, fit in the shared memory."""
    return int(MOST_SHARED_BYTES // (heads * ((query_width + width) * element + 4)))


def collectives_us(config: AttentionConfig, tokens: int) -> float:
    """Return the time of gathering and merging in a decode of ``tokens`` queries, us, in the compute dtype."""
    ranks, element = config.decode_context_parallel_size, BITS[config.dtype] / 8
    rows = tokens * config.num_heads * (ranks - 1) / 1e6
    width = config.kv_lora_rank or config.value_head_size
    gathered, merged = rows * config.head_size * element, rows * (width * element + 4)
    if ranks <= MOST_SHARING and tokens <= shared_tokens(config.num_heads * ranks, config.head_size, width, element):
        return SHARED[0] + (gathered + merged) * SHARED[1]
    return GATHER[0] + gathered * GATHER[1] + MERGE[0] + merged * MERGE[1]


def rank_costs(
    config: AttentionConfig, device: Device, bytes_per_token: int | None, workload: Workload | None
) -> RankCosts | None:
    """Return what the ranks of a layer cost and save; None for layers of one rank, or without a cache."""
    ranks = config.decode_context_parallel_size
    if ranks == 1 or bytes_per_token is None:
        return None
    batches = [BatchShape((RequestGroup(1, 1, 131072),))]
    if workload is not None:
        batches = [each.batch for each in workload.of_phase("decode", config)]
    steps = [_step(config, batch, device) for batch in batches]
    return RankCosts(ranks, bytes_per_token / ranks, tuple(step for step in steps if step is not None))


def _step(config: AttentionConfig, batch: BatchShape, device: Device) -> RankStep | None:
    alone_us, ranks_us = _attention_us(config, batch, device)
    if alone_us is None or ranks_us is None:
        return None
    added_us, spared_us = collectives_us(config, batch.num_tokens), alone_us - ranks_us
    pays_from = None
    if spared_us > 0:  # it grows with the context, what is added does not
        pays_from = math.ceil(batch.num_kv_tokens / batch.num_requests * added_us / spared_us)
    return RankStep(batch, alone_us, ranks_us, added_us, pays_from)


def _attention_us(config: AttentionConfig, batch: BatchShape, device: Device) -> tuple[float | None, float | None]:
    """Return the least time of one rank's attention without and with context parallelism, us."""
    ranks = config.decode_context_parallel_size
    alone = config.model_copy(update={"decode_context_parallel_size": 1})
    gathered = alone.model_copy(update={"num_heads": config.num_heads * ranks})
    share = tuple(replace(group, seq_len=max(group.query_len, -(-group.seq_len // ranks))) for group in batch.groups)
    on_ranks = roofline_us(gathered, BatchShape(share), device, attention_alone=True)
    return roofline_us(alone, batch, device, attention_alone=True), on_ranks
