"""Batches drawn from the ranges that serving covers, all log-uniform."""

from __future__ import annotations

import math
import random

from attn_select.times.batch_shape import BatchShape, RequestGroup

MOST_TOKENS = 1 << 20
"""Of all requests of a batch: larger ones are drawn anew."""
MOST_PREFILL_TOKENS = 1 << 15


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """Draw an integer whose logarithm is uniform."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def draw(rng: random.Random, kind: str, drafts: int, tiny: bool) -> BatchShape:
    """Draw one batch: 1 to 256 requests, contexts of 128 to 128 k tokens, prompts of 64 to 16 k, all log-uniform."""
    most_requests, contexts, prompts = (4, (16, 64), (8, 32)) if tiny else (256, (128, 131072), (64, 16384))
    new = 1 + drafts
    while True:
        if kind == "prefill":
            query = log_uniform(rng, *prompts)
            context = 0 if rng.random() < 0.5 else log_uniform(rng, *contexts)
            groups = [RequestGroup(log_uniform(rng, 1, min(16, most_requests)), query, query + context)]
        elif kind == "mixed":
            query = log_uniform(rng, prompts[0], max(prompts[0] + 1, prompts[1] // 4))
            context = 0 if rng.random() < 0.5 else log_uniform(rng, *contexts)
            groups = [RequestGroup(log_uniform(rng, 1, 4), query, query + context)]
            groups.append(RequestGroup(log_uniform(rng, 1, most_requests), new, log_uniform(rng, *contexts)))
        elif kind == "uneven":
            short = log_uniform(rng, contexts[0], contexts[1] // 4)
            long = log_uniform(rng, 4 * short, contexts[1])
            groups = [RequestGroup(log_uniform(rng, 1, most_requests), new, short)]
            groups.append(RequestGroup(log_uniform(rng, 1, max(2, most_requests // 16)), new, long))
        else:
            groups = [RequestGroup(log_uniform(rng, 1, most_requests), new, log_uniform(rng, *contexts))]
        batch = BatchShape(tuple(groups))
        prefilled = sum(group.count * group.query_len for group in groups if group.query_len > new)
        total = sum(group.count * group.seq_len for group in groups)
        if total <= MOST_TOKENS and prefilled <= MOST_PREFILL_TOKENS and batch.num_requests <= 256:
            return batch
