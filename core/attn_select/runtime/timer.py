"""Times of calls that take turns, on one device: the one way in which this project measures.

On a GPU a call's time is what passes between two events on the stream, so what the host does beside it does not count
as long as the device is kept busy. On a CPU it is wall time. Calls take turns round by round, each round begun by
another one, so that a clock that changes meets all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
Name = TypeVar("Name")
FLUSH_BYTES = 512 << 20
"""More than any GPU's L2."""
WARM_UP_ROUNDS = 2


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Return one graph of all calls, one behind the other. Each must have run before, so that nothing compiles."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def timed_rounds(
    calls: Mapping[Name, Call], device: torch.device | str = "cuda", before: Call | None = None
) -> Iterator[dict[Name, float]]:
    """Yield round after round, without end, the microseconds of each call, ``before`` not timed."""
    # A caller drops the first rounds.
    measure = _gpu_time if torch.device(device).type == "cuda" else _wall_time
    names, turn = [*calls], 0
    while True:
        found: dict[Name, float] = {}
        for name in names[turn:] + names[:turn]:
            if before is not None:
                before()
            found[name] = measure(calls[name])
        turn = (turn + 1) % len(names)
        yield found


def _gpu_time(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _wall_time(call: Call) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6


def medians(rounds: Iterator[dict[Name, float]], count: int) -> dict[Name, float]:
    """Return the median of each call's time over ``count`` rounds after the warm-up's rounds."""
    taken = [*islice(rounds, WARM_UP_ROUNDS, WARM_UP_ROUNDS + count)]
    return {name: statistics.median(found[name] for found in taken) for name in taken[0]}
