"""FLASHINFER under CUDA graphs, and what build() does while the GPU is behind: emulated, and replayed on a GPU."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_emulated as fi
import flashinfer_groups as groups
import torch

from attn_select.errors import ConfigError
from attn_select.reference.running import random_batch
from attn_select.runtime import Attention, BatchError, Capacity
from attn_select.runtime.cuda_graph import CudaGraphRunner, StaticBatch, check_level

Emulate = Callable[..., Any]
NATIVE = {"use_trtllm": False}
CUTE_DSL = {"options": {"decode_kernel": "cute-dsl"}, "release": "0.7.2.post1"}
CAPACITY = Capacity(16, 64, 512)
SIZES = [1, 2, 4, 8, 16]
LSE, LN2 = 2e-3, math.log(2.0)


# --- Emulated -------------------------------------------------------------------------------------


class Captured:
    """A decode step captured for one batch size, in emulated graphs."""

    def __init__(self, group: Any, layer: Any, cache: torch.Tensor, size: int, query_len: int) -> None:
        self.group, self.size, self.rows = group, size, size * query_len
        self.static = StaticBatch(group, query_len)
        self.query = torch.zeros(self.rows, group.config.num_heads, group.config.head_size, dtype=torch.bfloat16)
        self.output = torch.empty_like(self.query)
        returns = all(plan.returns_lse for plan in group.selection.plans.values())
        self.lse = torch.empty(self.query.shape[:2]) if returns else None
        metadata = group.build_for_cudagraph_capture(self.static.dummy(size))
        with fi.capturing() as self.graph:
            layer.forward(self.query, None, None, cache, metadata, self.output, self.lse)

    def replay(self, common: Any, query: torch.Tensor) -> torch.Tensor:
        self.query[: len(query)] = query
        self.group.build(self.static.load(common, self.size))
        self.output.zero_()  # real graphs record it where a kernel wants it; emulated ones record kernels alone
        self.graph.replay()
        return self.output[: len(query)]


@pytest.mark.parametrize(
    ("gpu", "fields", "query_len"),
    [
        ("h100", {}, 1),
        ("h100", {"num_speculative_tokens": 2}, 3),
        ("h100", {"options": NATIVE}, 1),
        ("h100", {"options": NATIVE, "sinks": True}, 1),
        ("h100", {"options": NATIVE, "batch_invariant": True}, 1),
        ("b200", {}, 1),
        ("b200", {"num_speculative_tokens": 1}, 2),
        ("b200", CUTE_DSL, 1),
        ("b200", {**CUTE_DSL, "sinks": True, "sliding_window": 40}, 1),
    ],
    ids=str,
)
def test_replay_with_other_lengths_and_pages(
    gpu: str, fields: dict[str, Any], query_len: int, emulate: Emulate
) -> None:
    emulate({"h100": (9, 0), "b200": (10, 0)}[gpu], release=fields.get("release", "0.6.14"))
    group = groups.made(gpu, block_size=16, group_cuda_graphs=True, group_capacity=CAPACITY, **fields)
    assert group.cudagraph_support == ("UNIFORM_SINGLE_TOKEN_DECODE" if "options" in fields else "UNIFORM_BATCH")
    sinks: dict[str, Any] = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.25])} if "sinks" in fields else {}
    layer = Attention(group, caller_writes=True, **sinks)
    cache = random_batch(group, [1] * 16, [500] * 16)[1]
    captured = {size: Captured(group, layer, cache, size, query_len) for size in (4, 2)}
    draw = random.Random(0)
    # A replay needs the counters, schedules and lists of no other: sizes take turns, eager steps come between.
    for requests, size in ((2, 2), (4, 4), (1, 2), (3, 4), (2, 2)):
        common, own = random_batch(
            group, [query_len] * requests, [draw.randint(query_len, 300) for _ in range(requests)]
        )
        cache[: len(own)].copy_(own)
        query = groups.drawn_query(group, requests * query_len)
        output = captured[size].replay(common, query)
        expected, expected_lse = groups.reference(group, common, cache, layer, **sinks)
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
        if (lse := captured[size].lse) is not None:  # emulated graphs do not record the conversion from base 2
            torch.testing.assert_close(lse[: len(query)].double() * LN2, expected_lse, atol=LSE, rtol=0)
        mixed, _ = random_batch(group, [1, 9], [20, 30])
        group.build(mixed)


def test_one_decode_wrapper_per_batch_size_with_shared_buffers(emulate: Emulate) -> None:
    world = emulate()
    group = groups.made(options=NATIVE, group_cuda_graphs=True, group_capacity=CAPACITY)
    static = StaticBatch(group, 1)
    for size in (4, 2, 4):
        group.build_for_cudagraph_capture(static.dummy(size))
    made = world.named("BatchDecodeWithPagedKVCacheWrapper.__init__")
    assert [len(call["paged_kv_last_page_len_buffer"]) for call in made] == [4, 2]
    assert all(call["use_cuda_graph"] and call["use_tensor_cores"] for call in made)
    for name in ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"):
        assert len({call[name].data_ptr() for call in made}) == 1
    pool = groups.builder_of(group).native.pool
    assert [pool.is_captured(size) for size in (1, 2, 4)] == [False, True, True]
    group.build(random_batch(group, [1], [30])[0])  # of another size: eager
    assert not world.named("BatchDecodeWithPagedKVCacheWrapper.__init__")[-1]["use_cuda_graph"]


def test_levels(emulate: Emulate) -> None:
    emulate()
    native = groups.made(options=NATIVE, num_speculative_tokens=2, group_cuda_graphs=True)
    check_level(native, 1)
    with pytest.raises(ConfigError, match="FLASHINFER is at UNIFORM_SINGLE_TOKEN_DECODE"):
        check_level(native, 3)
    check_level(groups.made(num_speculative_tokens=2, group_cuda_graphs=True), 3)
    with pytest.raises(ConfigError, match="FLASHINFER is at UNIFORM_BATCH"):
        check_level(groups.made(group_cuda_graphs=True), mixed=True)


def test_a_step_is_refused_whose_buffers_a_later_graph_step_has_overwritten(emulate: Emulate) -> None:
    emulate()
    group = groups.made(options=NATIVE, group_cuda_graphs=True, group_capacity=CAPACITY)
    layer, static = Attention(group, caller_writes=True), StaticBatch(group, 1)
    group.build_for_cudagraph_capture(static.dummy(2))
    eager, cache = random_batch(group, [1], [30])
    two, other = (random_batch(group, [1, 1], lens)[0] for lens in ([30, 7], [90, 3]))

    def run(common: Any, metadata: Any) -> None:
        query = groups.drawn_query(group, common.num_actual_tokens)
        layer.forward(query, None, None, cache, metadata, torch.empty_like(query))

    early, late = group.build(eager), group.build(two)
    with pytest.raises(BatchError, match="a later build has planned a CUDA graph in the buffer"):
        run(eager, early)
    group.build(other)
    with pytest.raises(BatchError, match="built for a CUDA graph, and a later build has overwritten the lists"):
        run(two, late)
    run(eager, group.build(eager))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_built_early_leaves_the_running_one_alone(
    graphs: bool, emulate: Emulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate()
    monkeypatch.setattr("attn_select_flashinfer.runtime.plans.new_event", lambda device: fi.Event())
    group = groups.made(options=NATIVE, block_size=16, group_cuda_graphs=graphs)
    layer, ring = Attention(group, caller_writes=True), groups.builder_of(group).native.pool.ring
    batches = [random_batch(group, [1, 1], [length, 7]) for length in (200, 30, 150)]
    results = []
    with fi.lagging():
        for common, cache in batches:
            query = groups.drawn_query(group, 2)
            output = torch.empty_like(query)
            layer.forward(query, None, None, cache, group.build(common), output, None)
            results.append(output)
        assert ring.buffers == 3  # no copy is through
    for (common, cache), output in zip(batches, results, strict=True):
        expected, _ = groups.reference(group, common, cache, layer)
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
    group.build(batches[0][0])
    assert ring.buffers == 3


def test_build_copies_nothing_back_from_the_device(emulate: Emulate) -> None:
    for options in ({}, NATIVE):
        world = emulate()  # anew: another batch may lie where the last one was on the device
        group = groups.made(options=options)
        common, cache = random_batch(group, [1, 1, 20], [200, 7, 40])
        lengths = common.seq_lens.clone(), common.query_start_loc.clone(), common.block_table_tensor.clone()
        common.seq_lens, common.query_start_loc, common.block_table_tensor = lengths
        fi.on_device(*lengths, cache)
        Attention(group, caller_writes=True)(groups.drawn_query(group, 22), None, None, cache, group.build(common))
        assert world.syncs == []


# --- On a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fields",
    [
        {"options": NATIVE},
        {},
        {"options": NATIVE, "kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"options": NATIVE, "batch_invariant": True},
    ],
    ids=["native", "xqa", "native-fp8", "xqa-fp8", "batch-invariant"],
)
def test_replay_of_every_captured_size(fields: dict[str, Any]) -> None:
    """Eager and replayed results agree for batches of all sizes, with new lengths and page tables every time."""
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16}
    capacity = Capacity(16, 64, 4096)
    group = groups.on_gpu(group_cuda_graphs=True, group_capacity=capacity, **shape, **fields)
    layer = Attention(group, caller_writes=True)
    _, cache = random_batch(group, [1] * 16, [2048] * 16)
    query = groups.drawn_query(group, 16)

    def step(inputs: Mapping[str, torch.Tensor], metadata: Mapping[Any, Any]) -> torch.Tensor:
        output: torch.Tensor = layer(inputs["query"], None, None, cache, metadata[group])
        return output

    runner = CudaGraphRunner(step, [group], {"query": query}, SIZES)
    runner.capture()
    draw = random.Random(0)
    for requests in (*range(1, 17), 16, 3, 1):
        lens = [draw.randint(1, 2048) for _ in range(requests)]
        common, _ = random_batch(group, [1] * requests, lens)
        found = runner({"query": query}, {group: common}).clone()
        expected, _ = groups.reference(group, common, cache, layer)
        bound = 6e-2 if fields.get("kv_cache_dtype") and "options" not in fields else 8e-3
        error = float((found[:requests].double() - expected).norm() / expected.norm())
        assert error < bound, (requests, lens, error)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("fields", [{"options": NATIVE}, {}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_neither_build_nor_forward_waits_for_the_gpu(fields: dict[str, Any], graphs: bool) -> None:
    group = groups.on_gpu(
        num_heads=32, num_kv_heads=8, head_size=128, block_size=16, group_cuda_graphs=graphs, **fields
    )
    common, cache = random_batch(group, [1, 9], [300, 20])
    layer, query = Attention(group, caller_writes=True), groups.drawn_query(group, 10)
    layer(query, None, None, cache, group.build(common))
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that it does not see every synchronisation
            torch.cuda.set_sync_debug_mode("error")
        output = layer(query, None, None, cache, group.build(common))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.isfinite().all()


@pytest.mark.gpu
def test_steps_built_while_the_gpu_is_behind_keep_their_schedules() -> None:
    """Twelve steps are built and launched behind a long kernel: each has the result that it has alone."""
    group = groups.on_gpu(num_heads=32, num_kv_heads=8, head_size=128, block_size=16, options=NATIVE)
    layer, query = Attention(group, caller_writes=True), groups.drawn_query(group, 8)
    draw = random.Random(0)
    batches = [random_batch(group, [1] * 8, [draw.randint(1, 2000) for _ in range(8)]) for _ in range(12)]
    alone = []
    for common, cache in batches:
        alone.append(layer(query, None, None, cache, group.build(common)).clone())
        torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
    late = [layer(query, None, None, cache, group.build(common)).clone() for common, cache in batches]
    behind = not torch.cuda.current_stream().query()
    for found, wanted in zip(late, alone, strict=True):
        assert torch.equal(found, wanted)
    assert behind, "the GPU caught up before all steps were built: nothing was shown"
    assert groups.builder_of(group).native.pool.ring.buffers > 1


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{"options": NATIVE}, {"options": NATIVE, "sinks": True}, {}], ids=str)
def test_steps_built_before_the_first_one_runs(fields: dict[str, Any]) -> None:
    group = groups.on_gpu(num_heads=8, num_kv_heads=2, **fields)
    sinks: dict[str, Any] = {"sinks": torch.arange(8.0, device="cuda") / 4} if "sinks" in fields else {}
    layer = Attention(group, caller_writes=True, **sinks)
    steps = []
    for query_lens, seq_lens in (([1, 1, 200], [900, 5, 400]), ([1, 7], [200, 64]), ([1] * 4, [9, 1000, 64, 65])):
        common, cache = random_batch(group, query_lens, seq_lens)
        expected, _ = groups.reference(group, common, cache, layer, **sinks)
        steps.append((common, cache, group.build(common), expected))
    for common, cache, metadata, expected in (*steps, *reversed(steps), *steps):
        query = groups.drawn_query(group, common.num_actual_tokens)
        output = layer.forward(query, None, None, cache, metadata, torch.empty_like(query))
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
