"""How ``TORCH_SDPA`` cuts a batch: pieces whose keys are gathered at once, and tiles of rows that share a mask.

A piece is one request, or several with short queries and about as many keys, padded to the longest at the front, so
that all of them end at the same column. A tile is a range of a piece's rows with the keys that they can see: a window
or causality leaves out whole ranges of keys, and masks stay small. All of it is worked out on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from attn_select.runtime.metadata import CommonAttentionMetadata, Ranges
from attn_select_torch.runtime.dense_attention import Range, visible_intervals

STEPS = 8
"""Lengths between one power of two and the next, where kernels are prepared for each length."""
LEAST_STEP = 16
"""Tokens between such lengths, at least."""


def rounded(tokens: int) -> int:
    """Return a length that is not below ``tokens``: at most an eighth more, or ``LEAST_STEP``."""
    # torch builds a graph of cuDNN for each shape, which takes the host tens of milliseconds. Where lengths grow by a
    # token from step to step, that would be done in every step.
    step = max(LEAST_STEP, (1 << max(0, tokens - 1).bit_length()) // (2 * STEPS))
    return -(-tokens // step) * step


@dataclass(slots=True)
class Tile:
    """Rows and columns of a piece."""

    start: int  # first token of the piece's query; ``rows`` of them
    rows: int
    low: int  # low, high: columns of the piece's keys
    high: int
    # position of column ``low`` relative to the tile's last row; None where image ranges reach into the tile, and where
    # drafts may form a tree
    first_key: int | None


@dataclass(slots=True)
class Request:
    """The rows of one request that see any key, and the keys that they see."""

    index: int  # its number in the batch
    first_token: int  # of the rows, in the step
    rows: int  # tokens
    seq_len: int  # keys
    # low, high: positions of the keys, the end not included. Image ranges leave no gap: one that a row is part of
    # reaches from there to what the row sees anyway.
    low: int
    high: int
    # where drafts may form a tree, the number of the first of the rows among the request's tokens
    first_place: int | None = None
    tiles: list[Tile] = field(default_factory=list)  # its rows, cut

    @property
    def keys(self) -> int:
        """How many keys."""
        return self.high - self.low


@dataclass(slots=True)
class Limits:
    """How large the parts may be."""

    tile_rows: int  # tokens of one tile where rows see different keys
    group_keys: int  # keys that several requests may take together, padding included; 0: each request by itself
    few_keys: int = 0  # keys, padding included, that they may take however much of it is padding


def requests_of(
    common: CommonAttentionMetadata, causal: bool, window: int | None, limits: Limits, has_cache: bool
) -> tuple[list[Request], list[Range]]:
    """Return the requests with anything to compute, and the ``(start, end)`` tokens that see no key."""
    requests: list[Request] = []
    blind: list[Range] = []
    bounds = common.query_start_loc_cpu.tolist()
    seq_lens = common.seq_lens_cpu.tolist() if has_cache else common.query_lens_cpu.tolist()
    most_drafts = 0 if common.tree_mask is None else common.tree_mask.shape[1]
    for index, seq_len in enumerate(seq_lens):
        start, end = bounds[index], bounds[index + 1]
        # Rows that stand before the first key, out of its reach: row r is at seq_len - queries + r, which is negative
        # for some where there are more queries than keys.
        reach = 0 if causal else (seq_len + end - start if window is None else window - 1)
        unseeing = min(end - start, max(0, end - start - seq_len - reach)) if seq_len else end - start
        if unseeing:
            blind.append((start, start + unseeing))
        rows = end - start - unseeing
        if not rows:
            continue
        ranges = common.mm_prefix_ranges[index] if common.mm_prefix_ranges else ()
        seen = visible_intervals(
            seq_len - rows, rows, seq_len, causal=causal, sliding_window=window, mm_prefix_ranges=ranges
        )
        place = unseeing if 1 < end - start <= most_drafts else None
        request = Request(index, start + unseeing, rows, seq_len, seen[0][0], seen[-1][1], place)
        request.tiles = list(_tiles(request, causal, window, ranges, limits.tile_rows))
        requests.append(request)
    return requests, blind


def _tiles(request: Request, causal: bool, window: int | None, ranges: Ranges, most_rows: int) -> Iterator[Tile]:
    if not causal and window is None:
        most_rows = request.rows
    for start in range(0, request.rows, most_rows):
        rows = min(most_rows, request.rows - start)
        first = request.seq_len - request.rows + start
        last = first + rows - 1
        seen = visible_intervals(
            first, rows, request.seq_len, causal=causal, sliding_window=window, mm_prefix_ranges=ranges
        )
        low, high = seen[0][0], seen[-1][1]
        plain = request.first_place is None and not any(a <= last and b >= first for a, b in ranges)
        yield Tile(start, rows, low - request.low, high - request.low, low - last if plain else None)


@dataclass(slots=True)
class Group:
    """Requests with queries of one length that are computed together, in the batch's order."""

    rows: int  # tokens of each
    index: Sequence[int]  # their numbers in the batch, ascending
    first_tokens: Sequence[int]  # of each request's rows, in the step
    keys: int  # the most keys that one of them sees
    padded: bool  # whether another sees fewer


def equal_queries(
    common: CommonAttentionMetadata, window: int | None, limits: Limits, *, alone: bool = False
) -> list[Group] | None:
    """Return the groups of a batch in which all queries are short and equally long, as in most decodes."""
    # None: another batch, a single request, or one that is too long to share a group. ``requests_of`` and ``grouped``,
    # which look at each request by itself, take ten times as long for many.
    # alone: whether a single request is a group too
    rows, number = common.max_query_len, common.num_reqs
    if (number == 1 and not alone) or not 0 < rows <= limits.tile_rows or rows * number != common.num_actual_tokens:
        return None
    seq_lens: list[int] = common.seq_lens_cpu.tolist()
    if min(seq_lens) < rows:
        return None
    keys = seq_lens if window is None else [min(seq_len, rows + window - 1) for seq_len in seq_lens]
    if 2 * max(keys) > limits.group_keys:  # not even two requests of this length may go together
        return None
    return [
        Group(rows, index, [rows * request for request in index], most, padded)
        for index, most, padded in _cut(keys, limits)
    ]


def grouped(requests: Sequence[Request], limits: Limits) -> Iterator[Request | Group]:
    """Yield groups of requests that are computed together. Most groups hold one request."""
    alike: dict[int, list[Request]] = {}
    for request in requests:
        single = len(request.tiles) == 1 and request.tiles[0].first_key is not None
        if single and 2 * request.keys <= limits.group_keys:
            alike.setdefault(request.rows, []).append(request)
        else:
            yield request
    for rows, found in alike.items():
        for numbers, most, padded in _cut([request.keys for request in found], limits):
            part = [found[number] for number in numbers]
            if len(part) == 1:
                yield part[0]
                continue
            index, first_tokens = [request.index for request in part], [request.first_token for request in part]
            yield Group(rows, index, first_tokens, most, padded)


def _fit(requests: int, most: int, total: int, limits: Limits) -> bool:
    """Whether requests with up to ``most`` and in all ``total`` keys make a group: up to a third of it is padding."""
    taken = requests * most
    return taken <= limits.group_keys and (taken <= limits.few_keys or taken <= 1.5 * total)


def _cut(keys: Sequence[int], limits: Limits) -> Iterator[tuple[list[int], int, bool]]:
    """Yield the requests of groups, ascending, with the most keys that one has, and whether another has fewer."""
    # From the fewest keys on, each group takes as many requests as fit.
    order = sorted(range(len(keys)), key=keys.__getitem__)
    first, total, whole = 0, 0, _fit(len(keys), max(keys), sum(keys), limits)
    ends = []
    for last, request in enumerate(order):
        total += keys[request]
        if not whole and last > first and not _fit(last - first + 1, keys[request], total, limits):
            ends.append(last)
            first, total = last, keys[request]
    for first, last in pairwise([0, *ends, len(order)]):
        fewest, most = keys[order[first]], keys[order[last - 1]]
        yield sorted(order[first:last]), most, fewest < most
