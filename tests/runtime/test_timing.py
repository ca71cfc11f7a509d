"""Times of calls that take turns, by a clock that only the calls move: on a CPU, and on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import torch

from attn_select.runtime.timer import captured, medians, timed_rounds


class Machine:
    """A host and a GPU whose clock ``now`` (seconds) stands still but for kernels; the host's shows twice as much.

    Attributes:
        log: the kernels that ran, in order, and ``wait`` where the host waited for the device.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.capturing: list[Callable[[], None]] | None = None

    def kernel(self, name: str, *milliseconds: float) -> Callable[[], None]:
        """Return a call that takes this long; with several times the n-th call takes the n-th, then the last."""
        times = list(milliseconds)

        def launch() -> None:
            if self.capturing is not None:
                self.capturing.append(launch)
                return
            self.log.append(name)
            self.now += (times.pop(0) if len(times) > 1 else times[0]) / 1e3

        return launch


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Put a made-up machine below torch's CUDA events and graphs and the host's clock."""
    machine = Machine()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = machine.now

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    class Graph:
        def __init__(self) -> None:
            self.calls: list[Callable[[], None]] = []

        def replay(self) -> None:
            for call in self.calls:
                call()

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        assert machine.log[-1] == "wait"
        machine.capturing = graph.calls
        yield
        machine.capturing = None

    for name, fake in (("Event", Event), ("CUDAGraph", Graph), ("graph", capture)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: machine.log.append("wait"))
    monkeypatch.setattr("attn_select.runtime.timer.time.perf_counter", lambda: 2 * machine.now)
    return machine


@pytest.mark.parametrize(("device", "shown"), [("cpu", 2e3), ("cuda", 1e3), (torch.device("cuda", 1), 1e3)])
def test_each_round_is_begun_by_the_next_call(machine: Machine, device: Any, shown: float) -> None:
    calls = {name: machine.kernel(name, cost) for name, cost in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
    rounds = list(islice(timed_rounds(calls, device, before=machine.kernel("flush", 64.0)), 4))
    assert [name for name in machine.log if name != "flush"] == [*"abc", *"bca", *"cab", *"abc"]
    assert machine.log[::2] == ["flush"] * 12
    for found in rounds:
        assert found == pytest.approx({"a": shown, "b": 2 * shown, "c": 4 * shown})


def test_the_median_leaves_out_the_warm_up() -> None:
    def rounds() -> Iterator[dict[str, float]]:
        for time in (99.0, 98.0, 5.0, 1.0, 3.0):
            yield {"a": time, "b": 2 * time}
        raise AssertionError("one round too many")

    assert medians(rounds(), 3) == {"a": 3.0, "b": 6.0}


def test_captured_calls_run_when_the_graph_is_replayed(machine: Machine) -> None:
    graph = captured([machine.kernel("a", 1.0), machine.kernel("b", 1.0)])
    assert machine.log == ["wait"]
    graph.replay()
    assert machine.log == ["wait", "a", "b"]
