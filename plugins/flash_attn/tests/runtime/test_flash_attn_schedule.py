"""FLASH_ATTN's builder: schedules, what graphs capture, and batch invariance."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import flash_attn_layers as layers
import torch

from attn_select.reference.running import random_batch
from attn_select.runtime import Attention, Capacity
from attn_select_flash_attn.runtime.adapters import Shape, Step
from attn_select_flash_attn.runtime.schedule import MAX_SPLITS, SPLIT_BYTES, is_uneven

Emulate = Callable[[str], list[dict[str, Any]]]
FA3 = ["vllm", "flash-attn-3", "sglang-kernel", "sgl-kernel"]
SCHEDULED = ["vllm", "flash-attn-3", "sglang-kernel"]
FA2 = ["vllm", "flash-attn"]


# --- The schedule ---------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", SCHEDULED)
def test_one_schedule_serves_all_layers(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, block_size=16)
    common, cache = random_batch(group, [1, 5, 30], [40, 5, 31])
    metadata = group.build(common)
    query = torch.randn(36, 4, 64).bfloat16()
    for _ in range(3):
        Attention(group, caller_writes=True)(query, None, None, cache, metadata)
    (scheduled,) = layers.calls_of(calls, scheduling=True)
    attended = layers.calls_of(calls)
    assert len(attended) == 3
    schedule = attended[0]["scheduler_metadata"]
    assert schedule is not None
    assert all(call["scheduler_metadata"] is schedule for call in attended)
    assert scheduled["batch_size"] == 3
    assert scheduled["page_size"] == 16
    assert scheduled["has_softcap"] is False


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "uneven"),
    [
        ([1, 30], [20000, 30], True),  # one decode reads far more than the rest of the batch
        ([1, 30], [8000, 30], False),  # so few keys are not worth a merge
        ([1] * 200 + [30], [20000] * 200 + [30], False),  # all multiprocessors have decodes
        ([1, 3000], [20000, 50000], False),  # the prefill takes longer
    ],
)
def test_keys_of_a_long_decode_beside_a_prefill_are_split(
    query_lens: list[int], seq_lens: list[int], uneven: bool
) -> None:
    queries, keys = torch.tensor(query_lens, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32)
    common = SimpleNamespace(query_lens_cpu=queries, seq_lens_cpu=keys)
    shape = Shape(4, 2, 64, 64, torch.bfloat16, 0.0, 16)
    assert is_uneven(common, shape, (-1, -1), 132) is uneven  # type: ignore[arg-type]
    assert not is_uneven(common, shape, (1023, 0), 132)  # type: ignore[arg-type]


@pytest.mark.parametrize(("head_size", "uneven"), [(64, True), (96, True), (128, False)])
def test_a_chunk_of_narrow_heads_has_fewer_tiles(head_size: int, uneven: bool) -> None:
    """FA3 takes 192 rows at a time up to heads of 96, so that a chunk keeps the multiprocessors less long."""
    queries, keys = torch.tensor([1, 2048], dtype=torch.int32), torch.tensor([140000, 16384], dtype=torch.int32)
    common = SimpleNamespace(query_lens_cpu=queries, seq_lens_cpu=keys)
    shape = Shape(32, 8, head_size, head_size, torch.bfloat16, 0.0, 16)
    assert is_uneven(common, shape, (-1, -1), 132) is uneven  # type: ignore[arg-type]


@pytest.mark.parametrize("provider", SCHEDULED)
@pytest.mark.parametrize(("longest", "splits"), [(40, 0), (9000, MAX_SPLITS)])
def test_splits_of_a_mixed_step(
    provider: str, longest: int, splits: int, emulate: Emulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = emulate(provider)
    group = layers.made(provider, block_size=16, group_capacity=Capacity(4, 64, 16384))
    for served in group.distinct:
        monkeypatch.setattr(served.builder, "_sms", 132)
    common, cache = random_batch(group, [1, 30], [longest, 31])
    Attention(group, caller_writes=True)(torch.randn(31, 4, 64).bfloat16(), None, None, cache, group.build(common))
    assert layers.calls_of(calls)[0]["num_splits"] == splits


@pytest.mark.parametrize("provider", SCHEDULED)
def test_a_fast_build_has_no_schedule(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider)
    common, cache = random_batch(group, [1], [40])
    fast, _ = layers.run(group, common, cache, fast_build=True)
    assert not layers.calls_of(calls, scheduling=True)
    assert layers.calls_of(calls)[0]["scheduler_metadata"] is None
    slow, _ = layers.run(group, common, cache)
    assert torch.equal(fast, slow)


@pytest.mark.parametrize("provider", ["flash-attn", "sgl-kernel"])
def test_providers_without_a_scheduler_need_none(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, "a100" if provider == "flash-attn" else "h100")
    common, cache = random_batch(group, [1, 4], [300, 20])
    layers.run(group, common, cache)
    assert not layers.calls_of(calls, scheduling=True)


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", SCHEDULED)
def test_a_captured_schedule_stays_in_place_and_its_rest_is_zero(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, group_cuda_graphs=True, group_capacity=Capacity(10, 64, 512))
    builder = group.backends["decode"].builder
    buffer = builder._scheduler._buffer
    assert buffer.shape == (1 + 12 * 4,)
    seen = []
    for seq_lens in ([9] * 10, [40, 3], [300, 200, 100]):
        common, cache = random_batch(group, [1] * len(seq_lens), seq_lens)
        buffer.fill_(7)
        layers.run(group, common, cache, fast_build=True)  # a graph replays whatever was captured, so it is not skipped
        schedule = layers.calls_of(calls)[-1]["scheduler_metadata"]
        assert schedule.data_ptr() == buffer.data_ptr()
        assert not buffer[len(schedule) :].any()
        seen.append(len(schedule))
    assert seen[0] > seen[1]


def test_what_a_graph_captures_does_not_depend_on_the_lengths(emulate: Emulate) -> None:
    calls = emulate("vllm")
    group = layers.made("vllm", sliding_window=32, group_cuda_graphs=True)
    for seq_len in (5, 400):
        common, cache = random_batch(group, [1, 1], [seq_len, seq_len])
        layers.run(group, common, cache)
    scalars = [{k: v for k, v in c.items() if isinstance(v, int | float | tuple)} for c in layers.calls_of(calls)]
    assert scalars[0] == scalars[1]
    assert scalars[0]["max_seqlen_k"] == group.capacity.max_model_len
    sizes = [len(call["scheduler_metadata"]) for call in layers.calls_of(calls)]
    assert sizes[0] == sizes[1]


def test_captured_splits_are_bounded_in_number_and_memory(emulate: Emulate) -> None:
    calls = emulate("vllm")
    group = layers.made("vllm", num_heads=32, group_cuda_graphs=True, group_capacity=Capacity(8, 8192, 512))
    scheduler = group.backends["decode"].builder._scheduler
    per_split = 32 * (64 + 1) * 4
    splits = {}
    for tokens in (1, 64, 2048, 8192):
        bounds = torch.tensor([0, tokens], dtype=torch.int32)
        step = layers_step(bounds, tokens)
        splits[tokens] = scheduler.arguments(step)["num_splits"]
        assert splits[tokens] == 1 or splits[tokens] * per_split * tokens <= SPLIT_BYTES
    assert splits[1] == splits[64] == MAX_SPLITS
    assert MAX_SPLITS > splits[2048] > splits[8192] >= 1
    assert {call["num_splits"] for call in layers.calls_of(calls, scheduling=True)} == set(splits.values())


@pytest.mark.parametrize(("requests", "splits"), [(992, 0), (993, 1)])
def test_fa3_splits_keys_for_up_to_992_requests(requests: int, splits: int, emulate: Emulate) -> None:
    """FA3's scheduler handles 992 requests in one block of threads (hopper/flash_prepare_scheduler.cu)."""
    emulate("vllm")
    scheduler = layers.made("vllm", group_capacity=Capacity(1024, 1024, 64)).backends["decode"].builder._scheduler
    table, lens = torch.zeros(requests, 4, dtype=torch.int32), torch.full((requests,), 20, dtype=torch.int32)
    bounds = torch.arange(requests + 1, dtype=torch.int32)
    step = Step(bounds, requests, 1, 20, True, (-1, -1), 0, lens, table)
    assert scheduler.arguments(step)["num_splits"] == splits


def layers_step(bounds: Any, tokens: int) -> Any:
    table, lens = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    return Step(bounds, tokens, tokens, tokens, True, (-1, -1), 0, lens, table)


def test_eager_steps_leave_the_splits_to_the_kernel(emulate: Emulate) -> None:
    calls = emulate("vllm")
    group = layers.made("vllm")
    common, cache = random_batch(group, [1], [300])
    layers.run(group, common, cache)
    assert [call["num_splits"] for call in calls] == [0, 0]


def test_fa2_keeps_its_key_bounds_in_place_for_graphs(emulate: Emulate) -> None:
    calls = emulate("flash-attn")
    group = layers.made("flash-attn", "a100", group_cuda_graphs=True)
    for seq_lens in ([5, 300], [17, 1]):
        common, cache = random_batch(group, [1, 1], seq_lens)
        layers.run(group, common, cache)
    first, second = (call["cu_seqlens_k"] for call in layers.calls_of(calls))
    assert first.data_ptr() == second.data_ptr()
    assert second.tolist() == [0, 17, 18]


# --- Batch invariance -----------------------------------------------------------------------------


@pytest.mark.parametrize("provider", FA3)
def test_batch_invariance_fixes_splits_and_bounds(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, batch_invariant=True, sliding_window=100)
    for query_lens, seq_lens in (([1], [30]), ([1, 40], [30, 200])):
        common, cache = random_batch(group, query_lens, seq_lens)
        layers.run(group, common, cache)
    alone, together = layers.calls_of(calls)
    assert not layers.calls_of(calls, scheduling=True)
    assert alone["num_splits"] == together["num_splits"] == 1
    assert alone["max_seqlen_q"] == together["max_seqlen_q"] == group.capacity.max_num_batched_tokens
    if provider == "vllm":
        assert alone["max_seqlen_k"] == together["max_seqlen_k"] == group.capacity.max_model_len
    else:
        assert alone["page_table"].shape[1] == together["page_table"].shape[1]


@pytest.mark.parametrize("provider", FA2)
def test_batch_invariant_fa2_does_not_split_decodes(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, "a100", batch_invariant=True)
    common, cache = random_batch(group, [1], [30])
    layers.run(group, common, cache)
    assert calls[0]["max_seqlen_q"] == 2  # 1 lets it split as it likes
    assert calls[0].get("num_splits", 1) == 1


@pytest.mark.parametrize("provider", FA3)
def test_a_batch_invariant_graph_reads_the_table_where_it_is(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, batch_invariant=True, group_cuda_graphs=True)
    common, cache = random_batch(group, [1, 1], [30, 9])
    layers.run(group, common, cache)
    assert layers.calls_of(calls)[0]["block_table" if provider == "vllm" else "page_table"] is common.block_table_tensor
