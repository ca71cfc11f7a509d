"""How the cached contexts of MLA prefills are cut into chunks that fit the workspace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import CommonAttentionMetadata, Ranges, VarlenMetadata, prefix_sums

Spans = tuple[slice, ...]
"""Tokens that one matmul projects: all of them, or with ``batch_invariant`` each request's by themselves."""


@dataclass(slots=True)
class ContextChunk:
    """Cached context of n prefilling requests, neighbours in the batch, or the part that fits the workspace."""

    # The requests' tokens among the tokens of all prefills.
    rows: slice
    # int32 ``(n, W)`` on the device, in the cache's blocks.
    block_table: Tensor
    # int32 on the device: ``(n,)``, the first position of each request's part, and ``(n + 1,)``, prefix sums of the
    # parts' lengths, which are 0 where there is no context.
    starts: Tensor
    start_loc: Tensor
    num_tokens: int
    spans: Spans
    # What the prefill backend's ``build_prefill`` built.
    metadata: Any


def spans_of(config: AttentionConfig, bounds_cpu: Tensor) -> Spans:
    """Return the spans of tokens whose requests begin and end at ``bounds_cpu`` ``(B + 1,)``."""
    if not config.batch_invariant:
        return (slice(None),)
    return tuple(slice(start, end) for start, end in pairwise(bounds_cpu.tolist()) if start < end)


def context_parts(
    common: CommonAttentionMetadata, config: AttentionConfig, workspace_tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """Cut contexts every ``workspace_tokens``: return per chunk each request's first position and length in it."""
    # The contexts lie one behind the other. Both tensors are int32 ``(B,)`` on the host.
    context = common.num_computed_tokens_cpu.clamp_min(0)
    origins = _first_needed(common, config, context)
    lengths = context - origins
    room = lengths
    # batch_invariant: each request begins at an edge of its own, so that where it is cut depends on its length alone.
    if config.batch_invariant:
        room = -(-lengths // workspace_tokens) * workspace_tokens
    ends = room.cumsum(0)
    # Row c, column r: where chunk c begins, counted from the start of request r's context. The clamps below cut off
    # what of the chunk lies before that context (then both are 0) or behind it (then both are its length).
    edges = torch.arange(0, int(ends[-1]), workspace_tokens).unsqueeze(1) - (ends - room)
    first = torch.minimum(edges.clamp_min(0), lengths)
    last = torch.minimum((edges + workspace_tokens).clamp_min(0), lengths)
    return list(zip((origins + first).int(), (last - first).int(), strict=True))


def _first_needed(common: CommonAttentionMetadata, config: AttentionConfig, context: Tensor) -> Tensor:
    """Return the first cached position that any of each request's rows sees, ``(B,)`` on the host."""
    window = config.sliding_window
    if window is None:
        return torch.zeros_like(context)
    # The oldest key that the first new token sees: later tokens see less of the context.
    found = (context - window + 1).clamp_min(0)
    for request, ranges in enumerate(common.mm_prefix_ranges or ()):
        begin, end = int(context[request]), int(common.seq_lens_cpu[request])
        reached = [first for first, last in ranges if first < end and last >= begin]
        # A range that reaches into this step's tokens is seen whole by them, even before the window.
        found[request] = min([int(found[request]), *reached])
    return torch.minimum(found, context)


def context_chunks(
    parts: Sequence[tuple[Tensor, Tensor]],
    common: CommonAttentionMetadata,
    config: AttentionConfig,
    block_table: Tensor,
    build_prefill: Callable[[VarlenMetadata], Any],
) -> tuple[ContextChunk, ...]:
    """Make chunks of ``context_parts``, with one copy to the device for all."""
    bounds, context, ranges = common.query_start_loc_cpu, common.num_computed_tokens_cpu, common.mm_prefix_ranges
    hosts: list[tuple[Tensor, Tensor, Tensor]] = []
    requests = []
    for starts, lengths in parts:
        used = lengths.nonzero()
        # From the first to the last request with context in this chunk; one between them may have none, and a length
        # of 0.
        who = slice(int(used[0]), int(used[-1]) + 1)
        own = bounds[who.start : who.stop + 1]
        requests.append(who)
        hosts.append((starts[who], prefix_sums(lengths[who]), own - own[0]))
    flat = [numbers for host in hosts for numbers in host]
    devices = to_device(torch.cat(flat), block_table.device).split_with_sizes([len(numbers) for numbers in flat])
    chunks = []
    for index, (who, (starts_cpu, key_bounds_cpu, bounds_cpu)) in enumerate(zip(requests, hosts, strict=True)):
        starts, key_bounds, query_bounds = devices[3 * index : 3 * index + 3]
        varlen = VarlenMetadata(
            query_start_loc=query_bounds,
            query_start_loc_cpu=bounds_cpu,
            key_start_loc=key_bounds,
            key_start_loc_cpu=key_bounds_cpu,
            max_query_len=int(bounds_cpu.diff().max()),
            max_key_len=int(key_bounds_cpu.diff().max()),
            causal=False,
            # How far the query stands behind this chunk's first key, which is what windows and ALiBi measure.
            query_offsets_cpu=context[who] - starts_cpu,
            counts_sinks=False,
            mm_prefix_ranges=shifted(None if ranges is None else ranges[who], starts_cpu),
        )
        first_row = int(bounds[who.start])
        chunks.append(
            ContextChunk(
                rows=slice(first_row, first_row + int(bounds_cpu[-1])),
                block_table=block_table[who],
                starts=starts,
                start_loc=key_bounds,
                num_tokens=int(key_bounds_cpu[-1]),
                spans=spans_of(config, key_bounds_cpu),
                metadata=build_prefill(varlen),
            )
        )
    return tuple(chunks)


def shifted(ranges: Sequence[Ranges] | None, origins: Tensor) -> list[list[tuple[int, int]]] | None:
    """Return each request's ranges relative to its origin."""
    if ranges is None:
        return None
    return [
        [(first - origin, last - origin) for first, last in request]
        for request, origin in zip(ranges, origins.tolist(), strict=True)
    ]
