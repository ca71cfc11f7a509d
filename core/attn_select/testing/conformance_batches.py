"""Batches to hold a backend to: drawn on poisoned caches, cut into parts, and laid out in a kernel's blocks."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_select.config import AttentionConfig, Phase
from attn_select.runtime import decodes_first
from attn_select.runtime.kv_cache import kv_cache_shape
from attn_select.testing.oracle_mla_problems import MLAProblem, random_mla_problem
from attn_select.testing.oracle_paged import token_views
from attn_select.testing.oracle_problems import Problem, Request
from attn_select.testing.oracle_random import random_problem, random_requests

LONGEST = 96
"""Tokens of a sequence: several blocks, few enough for a float64 oracle."""
MOST_REQUESTS = 6

Drawn = Problem | MLAProblem


@dataclass(slots=True)
class Batches:
    """Draws steps of one layer.

    Attributes:
        config: the layer.
        kv_layout: of its cache; None without.
        block_size: the allocator's, in tokens.
        device: where tensors go.
        phases: those that are served; requests are of no other.
        longest_decode: queries up to this many tokens are decodes.
        in_order: decodes come first.
        whole_prompts: a prefill has no cached context, since its parts could not be merged.
        nan_tails: slots behind a sequence's end hold NaN, not large finite numbers.
    """

    config: AttentionConfig
    kv_layout: str | None
    block_size: int
    device: torch.device
    phases: Collection[Phase]
    longest_decode: int
    in_order: bool
    whole_prompts: bool
    nan_tails: bool

    def mixed(self, seed: int) -> list[Request]:
        """Draw decodes, whole and chunked prefills, and short queries, in one batch."""
        sizes = {"num_requests": MOST_REQUESTS, "max_seq_len": LONGEST, "block_size": self.block_size}
        requests = [self._fitted(*request) for request in random_requests(seed, self.config, **sizes)]
        order = decodes_first([query for query, _ in requests], self.longest_decode if self.in_order else 0)
        return [requests[i] for i in order]

    def uniform(self, seed: int, *, rows_without_keys: bool) -> list[Request]:
        """Draw decodes of equal query length: the first without context, and if asked for a last one without keys."""
        rng = random.Random(seed)
        query_len = min(1 + self.config.num_speculative_tokens, self.longest_decode)
        whole_blocks = min(LONGEST, -(-query_len // self.block_size) * self.block_size)
        lengths = [query_len, max(query_len, whole_blocks), *(rng.randint(query_len, LONGEST) for _ in range(2))]
        return [(query_len, length) for length in lengths] + [(query_len, 0)] * rows_without_keys

    def _fitted(self, query_len: int, seq_len: int) -> Request:
        """Return a request like this one of a phase that is served."""
        if "decode" not in self.phases and self.config.has_cache:
            query_len = max(query_len, self.longest_decode + 1)
        elif "prefill" not in self.phases:
            query_len = min(query_len, self.longest_decode)
        if self.whole_prompts and query_len > self.longest_decode:
            seq_len = query_len
        return query_len, seq_len if self.config.attn_type == "encoder_decoder" else max(query_len, seq_len)

    def draw(self, seed: int, requests: Sequence[Request]) -> Drawn:
        """Draw a step of these requests; all steps have caches of the same size."""
        most = MOST_REQUESTS * -(-LONGEST // self.block_size) + 2
        options: dict[str, Any] = {
            "block_size": self.block_size,
            "requests": requests,
            "nan_tails": self.nan_tails,
            "spare_blocks": most - sum(-(-seq_len // self.block_size) for _, seq_len in requests),
            "device": self.device,
        }
        if self.config.mla and self.kv_layout is not None:
            return random_mla_problem(seed, self.config, self.kv_layout, **options)
        return random_problem(seed, self.config, self.kv_layout, **options)


def step_of(drawn: Drawn) -> Problem:
    """Return what MLA problems and others have in common."""
    return drawn.step if isinstance(drawn, MLAProblem) else drawn


def rows_of(drawn: Drawn, first: int, last: int) -> slice:
    """Return the tokens of requests ``first .. last - 1``."""
    bounds = step_of(drawn).query_start_loc
    return slice(int(bounds[first]), int(bounds[last]))


def part_of(drawn: Drawn, first: int, last: int) -> Drawn:
    """Return the step of requests ``first .. last - 1`` alone, on the same cache."""
    step, rows = step_of(drawn), rows_of(drawn, first, last)
    by_row = ("query", "key", "value", "slot_mapping", "topk_indices")
    by_request = ("requests", "seq_lens", "block_table", "mm_prefix_ranges")
    cuts = {**dict.fromkeys(by_row, rows), **dict.fromkeys(by_request, slice(first, last))}
    cut: dict[str, Any] = {name: getattr(step, name)[c] for name, c in cuts.items() if getattr(step, name) is not None}
    bounds = step.query_start_loc[first : last + 1]
    part = dataclasses.replace(step, query_start_loc=bounds - bounds[0], **cut)
    return dataclasses.replace(drawn, step=part, query=drawn.query[rows]) if isinstance(drawn, MLAProblem) else part


def poison(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory that is NaN in every float format, on the device of ``like``."""
    dtype = dtype or like.dtype
    count = math.prod(shape) * dtype.itemsize
    return torch.full((count,), 0xFF, dtype=torch.uint8, device=like.device).view(dtype).view(*shape)


def reblocked(kv_cache: Tensor, layout: str, config: AttentionConfig, block_size: int) -> Tensor:
    """Return a copy of a cache in blocks of another size, its tokens in the same slots; poison between them."""
    views = token_views(kv_cache, layout, config)
    num_blocks = views[0].shape[0] * views[0].shape[1] // block_size
    shape = kv_cache_shape(layout, config, num_blocks, block_size)
    if shape == tuple(kv_cache.shape):
        return kv_cache.clone()
    copy = poison(shape, kv_cache)
    for target, source in zip(token_views(copy, layout, config), views, strict=True):
        target.copy_(source.reshape(target.shape))
    return copy
