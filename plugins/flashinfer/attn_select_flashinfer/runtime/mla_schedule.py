"""Which cluster of the fa3 MLA kernel attends to which keys: a balanced schedule in the place of FlashInfer's.

Each cluster of CTAs runs a list of pieces, a request's query on some of its keys, and then the pieces of requests that
were cut are merged (include/flashinfer/attention/mla_hopper.cuh v0.6.14). FlashInfer's plan (``MLAPlan`` in
attention/scheduler.cuh) cuts all requests at multiples of one length, which is itself a multiple of 256 keys, and deals
the pieces out in the order of requests. Where requests are a little longer than such a multiple, clusters that already
have a long piece get their short last pieces.

Here the keys of all requests lie on one line, which is cut into equal parts, one per cluster. A piece costs
``PIECE_TILES`` beside its tiles of keys. Cuts through requests that are equally long would only add pieces, so that
whole requests, or equal parts of them, are dealt out where no cluster gets more to do by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_select.errors import KernelMismatchError
from attn_select.runtime.batch import staging
from attn_select_flashinfer.facts.libraries import READ

Ints = NDArray[np.int64]

TILE_KEYS = 64
"""Keys of a step of the kernel's loop (``CTA_TILE_KV``); pieces begin at multiples of it."""
PIECE_TILES = 3
"""As many more tiles take as long as the start and the end of a piece, where nothing else runs on its SM.

Measured on an H200 with 16 heads: 2.4 us a tile, 8 to 9 us a cluster's second piece where requests are equally long;
where they are not, 2 did better than 4 by 1 to 3 %, and 4 better than 6.
"""
MERGES_PER_TILE = 12
"""As many pieces of one request are merged in the time of a tile: one CTA goes through all pieces of a row.

Measured on an H200, one request of 5000 keys and 16 heads: 18.5 us in 27 pieces, 27.0 us in 79.
"""
MOST_SMS = 256
_PLANNED = ("_plan_info", "_sm_scale", "_causal", "_kv_indices_buf")
"""What ``run`` reads of a plan beside dtypes and sizes, which are the same for all (mla/_core.py 0.6.14)."""
_FIELDS = 18
"""Numbers in ``MLAPlanInfo::ToVector``: the grid, the offsets of 14 lists, the offsets of two scratch buffers."""
(
    Q_INDPTR,
    KV_INDPTR,
    PARTIAL_INDPTR,
    MERGE_START,
    MERGE_END,
    MERGE_PARTIAL_START,
    MERGE_PARTIAL_END,
    MERGE_STRIDE,
    Q_LEN,
    KV_LEN,
    Q_START,
    KV_START,
    KV_END,
    WORK_INDPTR,
) = range(14)
"""The lists in the order of ``MLAPlanInfo``; the merges' have an entry per CTA, the last one per cluster."""
_LISTS = 14
_FIRST = np.ones(1, dtype=bool)


class Pieces(NamedTuple):
    """What clusters do, one piece behind the other: request and range of keys ``(P,)``."""

    request: Ints
    start: Ints
    end: Ints
    first: Ints  # ``(clusters + 1,)``, each cluster's first piece, and how many there are


def balanced(keys: Ints, clusters: int) -> Pieces:
    """Return the pieces of requests with ``keys (B,)``, at least one each, ``B`` at least 1."""
    tiles = (keys + (TILE_KEYS - 1)) // TILE_KEYS
    span = int(tiles.max()) + 1  # a place is a request's number times this, and a tile of its keys: places sort as one
    ends = (tiles + PIECE_TILES).cumsum()  # on the line, in tiles: where each request's keys end
    cost, longest = int(ends[-1]), max(1, span - 1)
    # In p pieces the longest request takes longest / p tiles, and p / MERGES_PER_TILE for the merge: least at
    # p = sqrt(longest * MERGES_PER_TILE). Where there are few requests, not all clusters work: none gets less than
    # such a piece.
    pieces = isqrt(longest * MERGES_PER_TILE)
    busy = min(clusters, -(-cost * pieces // longest))
    cuts = _whole_parts(tiles, cost, busy, span)
    if cuts is None:
        cuts = _equal_parts(tiles, ends, busy, span)
    # A piece begins with each request and at each cut, once where both are the same place.
    places = np.concatenate((np.arange(0, len(keys) * span, span), cuts))
    places.sort()
    places = places[np.concatenate((_FIRST, places[1:] != places[:-1]))]
    request = places // span
    start = (places - request * span) * TILE_KEYS
    end = keys[request]
    goes_on = (request[1:] == request[:-1]).nonzero()[0]
    end[goes_on] = start[goes_on + 1]
    # Cluster c > 0 begins at cut c - 1. Those without a cut begin at the end, so that they have no piece.
    first = np.empty(clusters + 1, dtype=np.int64)
    first[0], first[len(cuts) + 1 :] = 0, len(places)
    first[1 : len(cuts) + 1] = places.searchsorted(cuts)
    return Pieces(request, start, end, first)


def _equal_parts(tiles: Ints, ends: Ints, clusters: int, span: int) -> Ints:
    """Return the places where all clusters but the first begin, for equal parts of the line."""
    at = np.arange(1, clusters) * ends[-1] // clusters
    request: Ints = ends.searchsorted(at, side="right")
    # A request's line begins with what a piece costs; a part that would begin there begins with the request.
    tile: Ints = np.maximum(at - (ends - tiles)[request], 0)
    return request * span + tile


def _whole_parts(tiles: Ints, cost: int, clusters: int, span: int) -> Ints | None:
    """Return the same for equal parts of each request, or for whole requests; None where that takes longer."""
    count, longest = len(tiles), span - 1
    parts, each = max(1, clusters // count), -(-count // clusters)
    part = max(1, -(-longest // parts))
    # Here the slowest cluster has ``each`` longest parts; of equal parts of the line, its share and one more piece.
    if each * (part + PIECE_TILES) > -(-cost // clusters) + PIECE_TILES:
        return None
    parts = max(1, -(-longest // part))  # no more than it takes
    if parts == 1:
        return np.arange(each, count, each) * span
    at = np.arange(1, count * parts)
    request = at // parts
    tile: Ints = tiles[request] * (at - request * parts) // parts
    return request * span + tile


@dataclass(slots=True, eq=False)
class MLALists:
    """Where such schedules lie on the device, always in the same place: graphs hold the addresses."""

    memory: Tensor  # uint8, a wrapper's ``_int_workspace_buffer``
    offset: int  # in it, behind what FlashInfer writes
    requests: int  # of a batch, at most
    heads: int  # of a query, no more rows than a cluster has

    @staticmethod
    def width(requests: int) -> int:
        """Return the entries of each list: a piece per request, and one more per cut."""
        return requests + MOST_SMS + 1

    @staticmethod
    def num_bytes(requests: int) -> int:
        """Return the size of the lists."""
        return 4 * _LISTS * MLALists.width(requests)

    def info_of(self, wrapper: Any) -> Any:
        """Return the numbers of a plan of ``wrapper`` with the offsets of these lists."""
        # wrapper: what ``run`` reads a plan from (``planned``)
        info: Any = getattr(wrapper, _PLANNED[0], None) or ()
        if len(info) != _FIELDS or not all(hasattr(wrapper, name) for name in _PLANNED):
            text = f"a plan of {type(wrapper).__name__} of the installed FlashInfer is not {', '.join(_PLANNED)}"
            raise KernelMismatchError(f"{text} with {_FIELDS} numbers: {info!r}", hint=READ)
        offsets = range(self.offset, self.offset + self.num_bytes(self.requests), 4 * self.width(self.requests))
        return type(info)([*info[:2], *offsets, *info[-2:]])

    def host(self) -> tuple[Tensor, NDArray[np.int32]]:
        """Return host memory for the lists, uint8 and uninitialised, and the lists in it, ``(lists, width)``."""
        memory = staging(self.num_bytes(self.requests), self.memory.device, torch.uint8)
        return memory, memory.view(torch.int32).view(_LISTS, -1).numpy()


def planned(wrapper: Any) -> Any:
    """Return what a planned wrapper's ``run`` reads its plan from."""
    # Before 0.7 that is the wrapper, since then the back end that it has planned (mla/_batch_mla/_wrapper.py and
    # _backends/_fa_common.py 0.7.2.post1).
    return getattr(wrapper, "_planned_backend", wrapper)


@dataclass(slots=True, eq=False)
class BalancedPlan:
    """The schedule of one batch in which each request has a query of one token, or none."""

    place: MLALists
    queries: Tensor  # int32 ``(B + 1,)`` on the host, prefix sums of query lengths
    pages: Tensor  # int32 ``(B,)`` or longer on the host, where each request's page indices begin
    keys: Tensor  # int32 ``(B,)`` on the host
    indices: Tensor  # int32 on the device, page indices
    _host: Tensor | None = None

    def put(self, wrapper: Any, info: Any, scale: float, *, captured: bool) -> None:
        """Make it the plan of a wrapper that has planned such a batch before, not waiting for the device."""
        # info: from ``MLALists.info_of``
        # captured: whether page indices lie where a CUDA graph reads them
        place = self.place
        if self._host is None:
            self._host, lists = place.host()
            write_lists(lists, place.heads, self.queries, self.pages, self.keys, grid=(int(info[0]), int(info[1])))
        place.memory[place.offset : place.offset + len(self._host)].copy_(self._host, non_blocking=True)
        wrapper._plan_info, wrapper._sm_scale, wrapper._causal = info, scale, False
        if not captured:
            wrapper._kv_indices_buf = self.indices


def write_lists(
    lists: NDArray[np.int32], rows: int, queries: Tensor, pages: Tensor, keys: Tensor, *, grid: tuple[int, int]
) -> int:
    """Write the lists of a schedule in the order of ``MLAPlanInfo``, and return how many pieces there are."""
    # lists: ``(lists, width)``, from ``MLALists.host``
    # rows: query heads
    # queries, pages, keys: as ``BalancedPlan`` has them
    # grid: CTAs of a cluster, and clusters
    ctas, clusters = grid
    begins = queries.numpy()
    lens = begins[1:] - begins[:-1]
    lengths = np.multiply(keys.numpy(), lens, dtype=np.int64)
    pieces = balanced(lengths, clusters)
    request, count = pieces.request, len(pieces.request)
    of = np.bincount(request, minlength=len(lengths))  # pieces of each request
    is_cut = of > 1
    lists[Q_INDPTR, :count] = begins[request]
    lists[KV_INDPTR, :count] = pages.numpy()[request]
    lists[PARTIAL_INDPTR, :count] = -1  # written to the output at once
    lists[Q_LEN, :count] = lens[request]
    lists[KV_LEN, :count] = lengths[request]
    lists[Q_START, :count] = 0
    lists[KV_START, :count] = pieces.start
    lists[KV_END, :count] = pieces.end
    lists[WORK_INDPTR, : clusters + 1] = pieces.first
    # The memory is uninitialised. A CTA whose rows begin where they end merges nothing.
    lists[MERGE_START : MERGE_STRIDE + 1, : ctas * clusters] = 0
    cut = is_cut.nonzero()[0]
    if not len(cut):
        return count
    # Partial results of a request lie one piece behind the other, ``rows`` each: one row's are ``rows`` apart.
    in_parts = is_cut[request].nonzero()[0]
    lists[PARTIAL_INDPTR, in_parts] = np.arange(0, len(in_parts) * rows, rows)
    # The CTAs share the rows of the requests that were cut, each in as many parts as there are CTAs for it. There is at
    # least one: each of them was cut by a cluster's beginning, and the first cluster cuts none.
    part = -(-rows // (ctas * clusters // len(cut)))
    row = np.arange(0, rows, part)
    row_ends = of[cut].cumsum() * rows
    before = row_ends - of[cut] * rows
    merges = len(cut) * len(row)
    output = (begins[cut] * rows)[:, None]
    lists[MERGE_START, :merges] = (output + row).ravel()
    lists[MERGE_END, :merges] = (output + np.minimum(row + part, rows)).ravel()
    lists[MERGE_PARTIAL_START, :merges] = (before[:, None] + row).ravel()
    lists[MERGE_PARTIAL_END, :merges] = np.repeat(row_ends, len(row))
    lists[MERGE_STRIDE, :merges] = rows
    return count
