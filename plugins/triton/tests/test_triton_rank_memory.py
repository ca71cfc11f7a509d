"""Gathering and merging through the ranks' memory, against torch; the other ranks have come before."""

from __future__ import annotations

import dataclasses
import mmap
import platform
import subprocess
import sys

import pytest
import torch

from attn_select.runtime import torch_ops
from attn_select.runtime.rank_memory import PROGRAMS, RankLayout, RankMemory
from attn_select_triton.kernels import rank_memory

HERE = 1
SIZE = 3


def memory_of(layout: RankLayout, device: torch.device, met: int = 7) -> RankMemory:
    """Return the memory of rank ``HERE``; all programs have met ``met`` times before, the others once more."""
    buffers = [torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device) for _ in range(SIZE)]
    counts = buffers[HERE][: 2 * PROGRAMS * SIZE * 4].view(torch.int32)
    counts.fill_(met + 1)
    done = torch.full((2 * PROGRAMS,), met, dtype=torch.int32, device=device)
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    return RankMemory(layout, HERE, buffers, lambda: None, addresses, done, 5)


def come(memory: RankMemory, meeting: int) -> int:
    """Return how many programs the others were told of, of 8 meetings."""
    for rank in (0, 2):
        told = memory.buffers[rank][: 2 * PROGRAMS * SIZE * 4].view(torch.int32).view(2, PROGRAMS, SIZE)
        assert not told[..., [0, 2]].any()
        count = int((told[meeting, :, HERE] == 8).sum())
        assert int((told != 0).sum()) == count
    assert memory.met is not None
    assert int((memory.met.view(2, PROGRAMS)[meeting] == 8).sum()) == count
    return count


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "width"), [(1, 4, 2, 16), (5, 4, 1, 24), (40, 8, 2, 128)])
def test_gather_rank_heads(tokens: int, heads: int, kv_heads: int, width: int, device: torch.device) -> None:
    layout = RankLayout(SIZE, tokens, SIZE * heads, width, 16, torch.float16)
    rows = torch.randn(tokens, heads, width, device=device).half()
    found, wanted = memory_of(layout, device), memory_of(layout, device)
    gathered = rank_memory.gather_rank_heads(rows, found, kv_heads)
    assert gathered.shape == (tokens, SIZE * heads, width)
    torch_ops.gather_rank_heads(rows, wanted, kv_heads)
    for rank in range(SIZE):
        assert torch.equal(found.queries(rank, tokens), wanted.queries(rank, tokens))
    assert found.queries(HERE, tokens).data_ptr() == gathered.data_ptr()
    assert come(found, 0) == min(PROGRAMS, -(-rows.nbytes // 8 // rank_memory.WORDS))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="MAP_32BIT is of x86-64")
def test_addresses_that_fit_into_32_bits_are_addresses_too(device: torch.device) -> None:
    """Triton types a whole number by its size, and a host's memory may lie low."""
    if device.type != "cpu":
        pytest.skip("a GPU's memory lies above")
    layout = RankLayout(SIZE, 2, SIZE * 2, 16, 16, torch.float16)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40  # MAP_32BIT
    low = [torch.frombuffer(mmap.mmap(-1, layout.num_bytes, flags=flags), dtype=torch.uint8) for _ in range(SIZE)]
    assert max(buffer.data_ptr() for buffer in low) < 2**31
    found, wanted = (memory_of(layout, torch.device("cpu")) for _ in range(2))
    for buffer, own in zip(low, found.buffers, strict=True):
        buffer.copy_(own)
    found = dataclasses.replace(found, buffers=low, addresses=tuple(buffer.data_ptr() for buffer in low))
    rows = torch.randn(2, 2, 16).half()
    rank_memory.gather_rank_heads(rows, found, 1)
    torch_ops.gather_rank_heads(rows, wanted, 1)
    for rank in range(SIZE):
        assert torch.equal(found.queries(rank, 2), wanted.queries(rank, 2))


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("with_sinks", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "width"), [(1, 4, 2, 16), (70, 4, 1, 24), (3, 2, 1, 512)])
def test_merge_rank_memory(
    tokens: int, heads: int, kv_heads: int, width: int, with_sinks: bool, sharded: bool, device: torch.device
) -> None:
    every = SIZE * heads if sharded else heads
    layout = RankLayout(SIZE, tokens, every, 16, width, torch.float16)
    memory = memory_of(layout, device)
    for rank in range(SIZE):
        memory.partial(rank, tokens).copy_(torch.randn(tokens, every, width))
        memory.lse(rank, tokens).copy_(torch.randn(tokens, every) * 3)
    memory.lse(0, tokens)[0, 0], memory.partial(0, tokens)[0, 0] = -torch.inf, torch.nan
    for rank in range(SIZE):
        memory.lse(rank, tokens)[-1, -1] = -torch.inf
    sinks = torch.randn(every, device=device) if with_sinks else None
    results = []
    for merge in (rank_memory.merge_rank_memory, torch_ops.merge_rank_memory):
        output = torch.full((heads, tokens, width), torch.nan, dtype=torch.float16, device=device).transpose(0, 1)
        lse = torch.full((tokens, heads), torch.nan, device=device)
        merge(output, lse, sinks, memory, kv_heads, sharded)
        results.append((output, lse))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)
    assert 0 < come(memory, 1) <= PROGRAMS
    memory.met.sub_(1)  # type: ignore[union-attr]  # once more, without the LSE
    again = torch.empty(tokens, heads, width, dtype=torch.float16, device=device)
    rank_memory.merge_rank_memory(again, None, sinks, memory, kv_heads, sharded)
    assert torch.equal(again, results[0][0])


@pytest.mark.gpu
def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    program = (
        "import torch\n"
        "from attn_select.runtime.rank_memory import *\n"
        "from attn_select_triton.kernels import rank_memory\n"
        "layout = RankLayout(2, 1, 4, 16, 16, torch.float16)\n"
        "buffers = [torch.zeros(layout.num_bytes, dtype=torch.uint8, device='cuda') for _ in range(2)]\n"
        "done = torch.zeros(2 * PROGRAMS, dtype=torch.int32, device='cuda')\n"
        "memory = RankMemory(layout, 0, buffers, None, tuple(b.data_ptr() for b in buffers), done, 1)\n"
        "rank_memory.gather_rank_heads(torch.ones(1, 2, 16, dtype=torch.float16, device='cuda'), memory, 1)\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "CUDA error" in done.stderr
