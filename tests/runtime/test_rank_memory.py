"""When ranks share memory, and how torch's symmetric memory is asked for it; no GPU takes part."""

from __future__ import annotations

import os
import platform
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric

from attn_select.runtime.context_parallel.collectives import NO_MULTICAST, ProcessGroupCollectives
from attn_select.runtime.rank_memory import ALIGNED, PROGRAMS, RankLayout, RankMemory

LAYOUT = RankLayout(2, 3, 4, 16, 8, torch.float16)
HERE = torch.device("cuda", 0)


class Two(ProcessGroupCollectives):
    """Rank 0 of a group whose other ranks bring what a test says: the first time their places, then the rest."""

    def __init__(self, brought: list[Any], size: int = 2) -> None:
        self.rank, self.size, self.brought = 0, size, brought
        options = SimpleNamespace(_timeout=timedelta(seconds=90))
        self.group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))

    def gather_objects(self, own: Any) -> list[Any]:
        return [own, self.brought.pop(0)]

    def _symmetric(self, layout: RankLayout, device: torch.device) -> RankMemory:
        return RankMemory(layout, self.rank, [], lambda: None)


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: (device.index, other) == (0, 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize("device", [HERE, torch.device("cuda")])
def test_gpus_of_one_host_share(device: torch.device) -> None:
    found = Two([(platform.node(), 1), True, None]).share_memory(LAYOUT, device)
    assert found is not None
    assert found.layout is LAYOUT


@pytest.mark.parametrize(
    ("device", "size", "brought"),
    [
        (torch.device("cpu"), 2, []),
        (HERE, 9, []),
        (HERE, 2, [("elsewhere", 1), True]),
        (HERE, 2, [(platform.node(), 0), True]),  # each process sees one GPU only: which, nobody knows
        (HERE, 2, [(platform.node(), 2), True]),  # out of reach
        (HERE, 2, [(platform.node(), 1), False]),  # the other one cannot reach this one
    ],
)
def test_ranks_that_cannot_share(device: torch.device, size: int, brought: list[Any]) -> None:
    collectives = Two(brought, size)
    assert collectives.share_memory(LAYOUT, device) is None
    assert not brought  # nobody waits for this rank


def test_sharing_that_fails_on_a_rank_is_said_and_none_share(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning, match=r"cannot share memory, and use collectives \(rank 1: no\)"):
        assert Two([(platform.node(), 1), True, "rank 1: no"]).share_memory(LAYOUT, HERE) is None

    def fail(*_: Any) -> None:
        raise RuntimeError("no handles\nmore")

    monkeypatch.setattr(Two, "_symmetric", fail)
    with pytest.warns(RuntimeWarning, match=r"\(rank 0: RuntimeError: no handles\)"):
        assert Two([(platform.node(), 1), True, None]).share_memory(LAYOUT, HERE) is None


@pytest.mark.parametrize("before", [None, "0"])
def test_torch_shares_without_multicast(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv(NO_MULTICAST, raising=False)
    if before is not None:
        monkeypatch.setenv(NO_MULTICAST, before)
    seen: list[Any] = []
    waited: list[Any] = []
    zeros = torch.zeros

    def rendezvous(own: torch.Tensor, group: Any) -> Any:
        seen.append((os.environ[NO_MULTICAST], bool(own.any())))
        return SimpleNamespace(
            get_buffer=lambda rank, shape, dtype: zeros(shape, dtype=dtype).add_(rank),
            buffer_ptrs=[512, 1024],
            barrier=lambda *given: waited.append(given),
        )

    made = {"dtype": torch.uint8}
    monkeypatch.setattr(symmetric, "empty", lambda size, dtype, device: torch.full((size,), 7, **made))
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(device))
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    memory = ProcessGroupCollectives._symmetric(Two([]), LAYOUT, HERE)
    assert seen == [HERE, ("1", False)]  # the zeros are there before another rank can reach them
    assert os.environ.get(NO_MULTICAST) == before
    assert memory.addresses == (512, 1024)
    assert [int(buffer[0]) for buffer in memory.buffers] == [0, 1]
    assert all(len(buffer) == LAYOUT.num_bytes for buffer in memory.buffers)
    assert memory.met is not None
    assert (memory.met.shape, memory.met.dtype, memory.timeout) == ((2 * PROGRAMS,), torch.int32, 90)
    memory.meet()
    assert waited == [(0, 90_000)]


def test_the_parts_of_a_layout_do_not_overlap() -> None:
    assert all(start % ALIGNED == 0 for start in LAYOUT.starts)
    memory = RankMemory(LAYOUT, 0, [torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)], lambda: None)
    memory.buffers[0][: LAYOUT.starts[0]] = 1
    memory.queries(0, 3).fill_(2)
    memory.partial(0, 3).fill_(3)
    memory.lse(0, 3).fill_(4)
    assert (memory.addresses, memory.met, memory.timeout) == (None, None, 0)
    assert LAYOUT.starts[0] >= 2 * PROGRAMS * 2 * 4
    assert bool((memory.queries(0, 3) == 2).all())
    assert bool((memory.partial(0, 3) == 3).all())
    assert bool((memory.lse(0, 3) == 4).all())
    assert bool((memory.buffers[0][: LAYOUT.starts[0]] == 1).all())
    assert memory.queries(0, 2).shape == (2, 4, 16)
    assert memory.partial(0, 2).shape == (2, 4, 8)
    assert memory.lse(0, 2).shape == (2, 4)
