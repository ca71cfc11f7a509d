"""Median times of calls that take turns, on one GPU: what the plugins' benchmarks share.

They are scripts of this repository, which find this file in ``tests/bench``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
Name = TypeVar("Name")
FLUSH_BYTES = 512 << 20
"""More than any GPU's L2."""


def gpu_times(calls: Mapping[Name, Call], repeat: int = 10, rounds: int = 15) -> dict[Name, float]:
    """Return the median GPU time of each call in us: ``repeat`` of them in one graph, graphs replayed in turn."""
    graphs, samples = {}, {name: [] for name in calls}  # type: Any, Any
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(repeat):
                call()
    for turn in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn > 1:
                samples[name].append(start.elapsed_time(end) * 1e3 / repeat)
    return {name: statistics.median(found) for name, found in samples.items()}


def flushed_times(calls: Mapping[Name, Call], rounds: int) -> dict[Name, float]:
    """Return the median GPU time of each call in us; calls take turns, and L2 is overwritten before each."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[Name, list[Any]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            if turn > 1:
                events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs) for name, pairs in events.items()}


def host_times(calls: Mapping[Name, Call], repeat: int = 50, rounds: int = 40) -> dict[Name, float]:
    """Return the median host time of each call in us; the device is idle when a round begins."""
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(repeat):
                call()
            spent = (time.perf_counter() - began) * 1e6 / repeat
            if turn > 2:
                samples[name].append(spent)
    return {name: statistics.median(found) for name, found in samples.items()}
