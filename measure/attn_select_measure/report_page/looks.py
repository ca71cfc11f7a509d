"""How backends look in a report: each has one colour and sign, in the matrix and in every chart.

A chart shows backends of one sort of layers, so no two of a sort look alike while there are colours. The first backend
of a distribution has its distribution's look in every sort: FLASH_ATTN and FLASH_ATTN_MLA look alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from attn_select.backends.distributions import known_backends
from attn_select.backends.spec import BackendSpec
from attn_select_measure.charts import COLOURS


def looks(specs: Mapping[str, BackendSpec]) -> dict[str, int]:
    """Return the index of each backend's colour and sign."""
    brought = known_backends()
    distributions = [*dict.fromkeys(brought.values())]
    by_sort: dict[str, list[str]] = {}
    for name in sorted(specs, key=lambda name: [*brought].index(name) if name in brought else len(brought)):
        sort = min(capabilities.sort for capabilities in specs[name].capabilities.values())
        by_sort.setdefault(sort, []).append(name)
    found: dict[str, int] = {}
    for names in by_sort.values():
        here: dict[int, str] = {}
        for name in names:
            if name in brought:
                here.setdefault(distributions.index(brought[name]) % len(COLOURS), name)
        free = iter([index for index in range(len(COLOURS)) if index not in here])
        found |= {name: index for index, name in here.items()}
        for number, name in enumerate([name for name in names if name not in found]):
            found[name] = next(free, number % len(COLOURS))
    return found
