"""Which batches to measure, or to keep of many: the ones that lie farthest from each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat

from attn_select.times.batch_shape import BatchShape
from attn_select.times.terms import coordinates


def farthest_first(batches: Sequence[BatchShape], count: int, chosen: Sequence[BatchShape] = ()) -> list[BatchShape]:
    """Return up to ``count`` of ``batches``, each the one farthest from those before it.

    Args:
        batches: to choose from.
        count: how many.
        chosen: what is there already; the first one is far from these, or from the middle where there is none.
    """
    places = [coordinates(batch.groups, 0.0) for batch in batches]
    return [batches[i] for i in far_places(places, count, [coordinates(each.groups, 0.0) for each in chosen])]


def far_places(
    places: Sequence[Sequence[float]], count: int, chosen: Sequence[Sequence[float]] = (), least: float = 0.0
) -> list[int]:
    """Return indices of up to ``count`` of ``places``, as ``farthest_first`` orders batches: those that are farther
    than ``least`` from the ones before them."""
    if chosen:
        near = [min(math.dist(place, each) for each in chosen) for place in places]
    else:
        middle = [sum(axis) / len(places) for axis in zip(*places, strict=True)]
        near = [math.dist(place, middle) for place in places]
    found: list[int] = []
    while len(found) < min(count, len(places)):
        best = max(range(len(places)), key=near.__getitem__)
        if found and near[best] <= least:
            break
        found.append(best)
        to_best = list(map(math.dist, repeat(places[best]), places))
        near = to_best if not chosen and len(found) == 1 else list(map(min, near, to_best))
    return found
