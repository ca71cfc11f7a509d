"""On a GPU: a step is prepared without waiting for the device, and nothing is overwritten before it was read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attn_select import AttentionConfig, select
from attn_select.backends.registry import load_plugins
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BlockTable,
    Capacity,
    CommonAttentionMetadata,
    attention_group,
    prepare_batch,
)

pytestmark = pytest.mark.gpu
HEADS = AttentionConfig(num_heads=8, num_kv_heads=2, head_size=128)
LATENT = AttentionConfig(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
SPECS = load_plugins().specs
DENSE = [
    name
    for name, spec in SPECS.items()
    if not any(c.sort in ("sparse_mla", "state") for c in spec.capabilities.values())
]
HEADED = [name for name in DENSE if not any(c.mla for c in SPECS[name].capabilities.values())]
STEPS, REQUESTS, MOST_TOKENS = 50, 8, 1024
SLEEP_CYCLES = 4_000_000_000
"""Two seconds and more on any GPU of the last ten years."""


@functools.cache
def group_for(backend: str) -> AttentionGroup:
    """Return a group of one backend on this machine's GPU, or skip with the reason why there is none."""
    selection = select(LATENT if backend not in HEADED else HEADS, backend=backend)
    if not selection.ok or backend not in selection.selected.values():
        pytest.skip(selection.explain())
    return attention_group(selection, capacity=Capacity(REQUESTS, 1024, 2048))


BATCHES = {
    "decode": ([1] * REQUESTS, [17 * r + 1 for r in range(REQUESTS)]),
    "prefill": ([64] * REQUESTS, [64 + 30 * r for r in range(REQUESTS)]),
    "mixed": ([1] * 5 + [40, 9, 64], [300, 17, 16, 1, 500, 40, 90, 640]),
}


def table_for(group: AttentionGroup) -> BlockTable:
    """Return a table whose rows have blocks for ``MOST_TOKENS`` tokens, in reverse order."""
    assert group.block_size is not None
    blocks_each = MOST_TOKENS // group.block_size
    table = BlockTable(REQUESTS, blocks_each, group.block_size, group.device)
    for row in range(REQUESTS):
        first = row * blocks_each
        table.append_row(row, range(first + blocks_each - 1, first - 1, -1))
    return table


def warm(group: AttentionGroup, table: BlockTable) -> None:
    """Fill torch's pools of pinned and device memory with as much as all steps of a test hold at a time."""
    held = [group.build(prepare_batch(*lens, table)) for lens in BATCHES.values() for _ in range(STEPS)]
    torch.cuda.synchronize()
    del held


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", DENSE)
def test_nothing_synchronises(backend: str, batch: str) -> None:
    group = group_for(backend)
    table = table_for(group)
    warm(group, table)
    with synchronisation_is_an_error():
        common = prepare_batch(*BATCHES[batch], table)
        group.build(common)
        group.build(common, fast_build=True)
    assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist()
    assert common.seq_lens.tolist() == BATCHES[batch][1]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("backend", DENSE)
def test_a_build_returns_while_the_device_is_busy(backend: str, batch: str) -> None:
    group = group_for(backend)
    table = table_for(group)
    warm(group, table)
    done = torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    done.record()
    group.build(prepare_batch(*BATCHES[batch], table))
    returned_first = not done.query()
    torch.cuda.synchronize()
    assert returned_first


def inputs_for(step: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(step)
    drawn: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    query = torch.randn(tokens, HEADS.num_heads, HEADS.head_size, **drawn)
    key = torch.randn(tokens, HEADS.num_kv_heads, HEADS.head_size, **drawn)
    return query, key, torch.randn(key.shape, **drawn)


def serve(group: AttentionGroup, wait: bool) -> list[tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor]]:
    """Run ``STEPS`` steps whose lengths, rows and order all change; with ``wait`` the device is idle at each.

    Returns:
        Per step the batch, its block table as the device saw it then, and the output.
    """
    layer, table = Attention(group), table_for(group)
    cache = group.allocate_kv_cache(table.host.numel())
    inputs = [inputs_for(step, 32, group.device) for step in range(STEPS)]
    lens = [40 + 11 * r for r in range(REQUESTS)]
    torch.cuda.synchronize()
    if not wait:
        torch.cuda._sleep(SLEEP_CYCLES)
    results = []
    for step in range(STEPS):
        first, second = step % REQUESTS, (3 * step + 1) % REQUESTS
        table.swap_rows(first, second)
        lens[first], lens[second] = lens[second], lens[first]
        query_lens = [1] * (REQUESTS - 1) + [1 + step % 5 * 5]
        lens = [length + query for length, query in zip(lens, query_lens, strict=True)]
        common = prepare_batch(query_lens, lens, table)
        output = layer(*(tensor[: common.num_actual_tokens] for tensor in inputs[step]), cache, group.build(common))
        assert common.block_table_tensor is not None
        results.append((common, common.block_table_tensor.clone(), output))
        if wait:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("backend", HEADED)
@torch.inference_mode()
def test_steps_that_are_built_behind_a_busy_device(backend: str) -> None:
    """The device sees the first step's tables after the host has written the last one's."""
    group = group_for(backend)
    expected = serve(group, wait=True)
    found = serve(group, wait=False)
    for (common, table, output), (waited, its_table, its_output) in zip(found, expected, strict=True):
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            assert torch.equal(getattr(common, name), getattr(waited, name))
        assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist()
        assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist()
        assert torch.equal(table, its_table)
        torch.testing.assert_close(output, its_output, rtol=2**-6, atol=2**-6)


def test_the_device_gets_what_changed_in_a_block_table() -> None:
    """Steps that change nothing copy nothing, so that each change must be noted."""
    table = BlockTable(3, 6, 16, "cuda")
    for row in range(3):
        table.append_row(row, [10 * row + 1])

    def on_device(requests: int) -> list[list[int]]:
        committed = table.commit(requests)
        assert torch.equal(committed.cpu(), table.host[:requests, : committed.shape[1]])
        return committed.tolist()

    assert on_device(1) == [[1]]
    assert on_device(2) == [[1], [11]]  # a row that was there all along, but not on the device
    table.append_row(1, [12, 13])
    assert on_device(2) == [[1, 0, 0], [11, 12, 13]]
    table.swap_rows(0, 1)
    assert on_device(2) == [[11, 12, 13], [1, 0, 0]]
    table.clear_row(1)
    table.set_row(1, [5])
    assert on_device(1) == [[11, 12, 13]]
    assert on_device(3) == [[11, 12, 13], [5, 0, 0], [21, 0, 0]]
    table.swap_rows(0, 2)
    table.clear_row(0)
    assert on_device(3) == [[0, 0, 0], [5, 0, 0], [11, 12, 13]]
    assert on_device(2) == [[0], [5]]
