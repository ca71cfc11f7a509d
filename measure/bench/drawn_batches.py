"""Batches drawn from the ranges that serving covers, all log-uniform."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

from attn_select.times.batch_shape import BatchShape, RequestGroup

MOST_TOKENS = 1 << 20
"""Of all requests of a batch: larger ones are drawn anew."""
MOST_PREFILL_TOKENS = 1 << 15


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """Draw an integer whose logarithm is uniform."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def spread(rng: random.Random, most_requests: int, new: int, contexts: tuple[int, int]) -> list[RequestGroup]:
    """Draw decodes of many lengths, as a service has them: eight quantiles of a log-normal, and its longest request."""
    requests, middle = log_uniform(rng, 2, most_requests), log_uniform(rng, contexts[0], contexts[1] // 8)
    sigma, normal = rng.uniform(0.3, 1.5), NormalDist()
    kinds = min(8, requests - 1)
    shares = [((i + 0.5) / kinds, (requests - 1 - i + kinds - 1) // kinds) for i in range(kinds)]
    lengths = [(round(middle * math.exp(sigma * normal.inv_cdf(q))), n) for q, n in [*shares, (1 - 0.5 / requests, 1)]]
    return [RequestGroup(n, new, min(contexts[1], max(new, length))) for length, n in lengths]


def draw(rng: random.Random, kind: str, drafts: int, tiny: bool) -> BatchShape:
    """Draw one batch: 1 to 256 requests, contexts of 128 to 128 k tokens, prompts of 64 to 16 k, all log-uniform."""
    most_requests, contexts, prompts = (4, (16, 64), (8, 32)) if tiny else (256, (128, 131072), (64, 16384))
    new = 1 + drafts
    while True:
        if kind == "spread":
            groups = spread(rng, most_requests, new, contexts)
        elif kind == "prefill":
            query = log_uniform(rng, *prompts)
            context = 0 if rng.random() < 0.5 else log_uniform(rng, *contexts)
            groups = [RequestGroup(log_uniform(rng, 1, min(16, most_requests)), query, query + context)]
        elif kind in ("mixed", "mixed spread"):
            query = log_uniform(rng, prompts[0], max(prompts[0] + 1, prompts[1] // 4))
            context = 0 if rng.random() < 0.5 else log_uniform(rng, *contexts)
            groups = [RequestGroup(log_uniform(rng, 1, 4), query, query + context)]
            if kind == "mixed":
                groups.append(RequestGroup(log_uniform(rng, 1, most_requests), new, log_uniform(rng, *contexts)))
            else:
                groups += spread(rng, most_requests, new, contexts)
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
