"""The items that programs of the warp-specialised prefill work on, listed on the host once for all layers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attn_select.runtime.batch import to_device

FIELDS = 4  # Numbers of a row of the list, 16 bytes


@dataclass(frozen=True, slots=True)
class WorkList:
    """B requests, of which S are cut: several programs share the keys of each of their row tiles."""

    # int32 ``(B, 4)`` on the device, in the order of work: the number of the request's first item, the request, its
    # shares, and the row of its first partial result; -1 where it has one share, whose result is the whole
    rows: Tensor
    cut: Tensor  # int32 ``(S, 4)``: request, shares, row of the first partial result, and rows of each share
    items: int  # row tiles x shares of all requests, for one KV head
    partials: int  # rows of all partial results
    most_cut: int  # the most rows that one share of a request has


def list_work(
    query_lens: Sequence[int] | NDArray[np.int64],
    shares: Sequence[int] | NDArray[np.int64],
    *,
    heads: tuple[int, int],
    tile_rows: int,
    device: torch.device,
    longest_first: Sequence[int] | NDArray[np.int64] | None = None,
) -> WorkList:
    """Return a step's list.

    Args:
        query_lens: ``(B,)``, query tokens of each request.
        shares: ``(B,)``, into how many shares its keys are cut, from 1.
        heads: of the query, and of K and V.
        tile_rows: query rows (tokens x heads of a group) of a program.
        longest_first: requests in the order of work; None: as they come.
    """
    lens, parts = np.asarray(query_lens, dtype=np.int64), np.asarray(shares, dtype=np.int64)
    order = np.arange(len(lens)) if longest_first is None else longest_first
    items = -(-lens * (heads[0] // heads[1]) // tile_rows) * parts
    cut = np.flatnonzero(parts > 1)
    listed = np.empty((len(lens) + len(cut), FIELDS), dtype=np.int32)
    rows, behind = listed[: len(lens)], listed[len(lens) :]
    rows[:, 1], rows[:, 3] = order, -1
    rows[:, 2] = parts[order]
    ends = items[order].cumsum()
    rows[:, 0] = ends - items[order]
    partials = most_cut = 0
    if len(cut):
        each = lens[cut] * heads[0]
        own = (each * parts[cut]).cumsum()
        first = np.full(len(lens), -1)
        first[cut] = own - each * parts[cut]
        rows[:, 3] = first[order]
        behind[:, 0], behind[:, 1], behind[:, 2], behind[:, 3] = cut, parts[cut], first[cut], each
        partials, most_cut = int(own[-1]), int(each.max())
    both = to_device(torch.from_numpy(listed), device)
    return WorkList(both[: len(lens)], both[len(lens) :], int(ends[-1]) if len(lens) else 0, partials, most_cut)
