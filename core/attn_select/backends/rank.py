"""The order of backends where no rule says otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attn_select.backends.spec import BackendSpec


def by_rank(specs: Mapping[str, BackendSpec], listed: Sequence[str]) -> list[str]:
    """Return the names of all backends, best first.

    Backends that this project lists stand as listed, and those without a rank behind them, as registered. A backend
    with a rank stands next to the one that it names. Where nobody of that name is registered, it stands at the end.
    """
    free = [name for name, spec in specs.items() if spec.rank is None]
    order = [name for name in listed if name in free] + [name for name in free if name not in listed]
    waiting = [spec for spec in specs.values() if spec.rank is not None]
    while waiting:
        ready = [spec for spec in waiting if spec.rank is not None and spec.rank[1] in order]
        spec = (ready or waiting)[0]
        waiting.remove(spec)
        if not ready or spec.rank is None:
            order.append(spec.name)
            continue
        where, neighbour = spec.rank
        order.insert(order.index(neighbour) + (where == "after"), spec.name)
    return order
