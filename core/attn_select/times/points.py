"""Which batches to measure or keep of many: those that lie farthest from each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attn_select.times.batch_shape import BatchShape
from attn_select.times.features import coordinates


def farthest_first(batches: Sequence[BatchShape], count: int, chosen: Sequence[BatchShape] = ()) -> list[BatchShape]:
    """Return up to ``count`` of ``batches``, each the one farthest from those before it.

    Args:
        batches: to choose from.
        count: how many.
        chosen: what is there already; the first one is far from these, or from the middle where there is none.
    """
    places = [coordinates(batch.groups, 0.0) for batch in batches]
    if chosen:
        near = [min(math.dist(place, coordinates(each.groups, 0.0)) for each in chosen) for place in places]
    else:
        middle = [sum(axis) / len(places) for axis in zip(*places, strict=True)]
        near = [math.dist(place, middle) for place in places]
    found: list[BatchShape] = []
    while len(found) < min(count, len(batches)):
        best = max(range(len(places)), key=near.__getitem__)
        found.append(batches[best])
        start = places[best]
        to_best = [math.dist(start, place) for place in places]
        near = to_best if not chosen and len(found) == 1 else list(map(min, near, to_best))
    return found
