"""Captured steps of TRITON_ATTN's layer, and what its builds and launches do on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
import triton_attn_layers as layers

from attn_select.layer.layouts import FLASH_ATTN_NHD
from attn_select.reference.running import common_of, layer_of
from attn_select.runtime import Capacity
from attn_select.runtime.cuda_graph import CudaGraphRunner, StaticBatch
from attn_select.testing import Problem, lse_error, relative_error, same_bits
from attn_select_triton.runtime import schedule
from attn_select_triton.tuning import Gpu

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("apart")]


@pytest.mark.parametrize("query_len", [1, 3, None])
@pytest.mark.parametrize(
    "fields", [{}, layers.slow({"sinks": True, "sliding_window": 300}), layers.slow({"batch_invariant": True})], ids=str
)
def test_captured_launches_serve_other_batches(
    fields: dict[str, Any], query_len: int | None, device: torch.device
) -> None:
    """What a graph does, without one: the metadata of the capture, tensors of another step at the same addresses."""
    config = layers.layer_config(num_speculative_tokens=(query_len or 1) - 1, **fields)
    group = layers.many_sms(layers.made(device, config, cuda_graphs=True, capacity=Capacity(8, 256, 1024)))
    static = StaticBatch(group, query_len)
    captured = group.build_for_cudagraph_capture(static.dummy(4 if query_len else 80))
    if query_len is None:
        steps = [((1, 700), (30, 60), (20, 20)), ((1, 3), (1, 90), (70, 80))]
    else:
        steps = [((query_len, 700), (query_len, 20)), ((query_len, query_len), (query_len, 90), (query_len, 1000))]
    for number, requests in enumerate(steps):
        problem = layers.problem_of(group, requests, seed=number)
        common = common_of(problem)
        group.build(static.load(common, 4 if query_len else 80))
        metadata = dataclasses.replace(captured, slot_mapping=common.slot_mapping)
        padding = captured.num_actual_tokens - common.num_actual_tokens
        tensors = [torch.cat([t, t.new_zeros(padding, *t.shape[1:])]) for t in (problem.query,)]
        output = torch.full_like(tensors[0], torch.nan)
        lse = torch.full(output.shape[:2], torch.nan, device=device)
        layer, kv_cache = layer_of(group, problem, caller_writes=True), problem.written_cache()
        layer.forward(tensors[0], None, None, kv_cache, metadata, output, lse)
        tokens = common.num_actual_tokens
        layers.compare(group, problem, output[:tokens], lse[:tokens])


def test_a_small_mixed_graph_knows_not_whose_its_tokens_are(device: torch.device) -> None:
    config = layers.layer_config(num_speculative_tokens=3)
    group = layers.made(device, config, cuda_graphs=True, capacity=Capacity(4, 256, 1024))
    static = StaticBatch(group, None)
    captured = group.build_for_cudagraph_capture(static.dummy(2))
    for requests in (((0, 0), (0, 5), (1, 30), (1, 7)), ((2, 50),), ((1, 700),)):
        problem = layers.problem_of(group, requests)
        common = common_of(problem)
        group.build(static.load(common, 2))
        query = torch.cat([problem.query, problem.query])[:2]
        output, lse = torch.full_like(query, torch.nan), torch.full((2, 4), torch.nan, device=device)
        layer_of(group, problem, caller_writes=True).forward(
            query, None, None, problem.written_cache(), captured, output, lse
        )
        tokens = common.num_actual_tokens
        layers.compare(group, problem, output[:tokens], lse[:tokens])


def test_a_captured_decode_splits_by_what_the_replay_brings(device: torch.device) -> None:
    group = layers.many_sms(layers.made(device, layers.layer_config(), cuda_graphs=True))
    static = StaticBatch(group, 1)
    (part,) = group.build_for_cudagraph_capture(static.dummy(4)).parts[0].metadata.parts
    assert len(part.decode.pieces) == 4 + schedule.most_pieces(2, Gpu((9, 0), 100))
    seen = []
    for requests in (layers.UNEVEN, ((1, 2000),) * 4):
        group.build(static.load(common_of(layers.problem_of(group, requests)), 4))
        seen.append(layers.pieces_of(part))
    assert seen[0] == [11, 1, 1, 1]
    assert len(set(seen[1])) == 1
    # Other tiles than the interpreter's make other pieces.
    assert device.type == "cuda" or seen[1] == [12, 12, 12, 12]


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda")


STEPS = {
    "decode": layers.UNEVEN,
    "mixed": ((1, 700), (1, 3), (200, 900)),
    "extend": ((16, 2000),),
    "gather": ((600, 1200),),
}


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"block_size": 64}, {"head_size": 128}], ids=str
)
def test_neither_build_nor_forward_waits_or_allocates(step: str, fields: dict[str, Any], cuda: torch.device) -> None:
    config = layers.layer_config(**{"num_heads": 8, "head_size": 64, "dtype": "bfloat16", **fields})
    group = layers.made(cuda, config)
    problem = layers.problem_of(group, STEPS[step])
    layers.check(group, problem)
    common, kv_cache, layer = common_of(problem), problem.written_cache(), layer_of(group, problem, caller_writes=True)
    output = torch.empty_like(problem.query)
    arguments = (problem.query, problem.key, problem.value, kv_cache)
    layer(*arguments, group.build(common), output)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        metadata = group.build(common)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        layer(*arguments, metadata, output)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"block_size": 64}], ids=str)
def test_graphs(fields: dict[str, Any], mixed: bool, cuda: torch.device) -> None:
    config = layers.layer_config(num_heads=8, head_size=128, dtype="bfloat16", **fields)
    group = layers.made(cuda, config, cuda_graphs=True, capacity=Capacity(16, 512, 16384))
    steps = [((1, 9000), (1, 20), (1, 0), (1, 513)), ((1, 3), (1, 4096))]
    if mixed:
        steps = [((1, 9000), (200, 700), (64, 64)), ((1, 3), (1, 400), (300, 9000))]
    first, second = (layers.problem_of(group, requests) for requests in steps)
    scales = {name: getattr(first, name) for name in ("q_scale", "k_scale", "v_scale")}
    problems = [first, dataclasses.replace(second, **scales)]
    most = max(
        len(problem.kv_cache) if group.kv_layout != FLASH_ATTN_NHD else problem.kv_cache.shape[1]
        for problem in problems
    )
    kv_cache = group.allocate_kv_cache(most)
    layer = layer_of(group, problems[0])

    def step(inputs: Any, metadata: Any) -> torch.Tensor:
        return layer(inputs["query"], inputs["key"], inputs["value"], kv_cache, metadata[group])

    def inputs_of(problem: Problem) -> dict[str, torch.Tensor]:
        return {"query": problem.query, "key": problem.key, "value": problem.value}

    sizes = [512] if mixed else [2, 8]
    runner = CudaGraphRunner(step, [group], inputs_of(problems[0]), sizes, mixed=mixed)
    runner.capture()
    for problem in problems:
        axis = 1 if group.kv_layout == FLASH_ATTN_NHD else 0
        kv_cache.narrow(axis, 0, problem.kv_cache.shape[axis]).copy_(problem.kv_cache)
        found = runner(inputs_of(problem), {group: common_of(problem)})
        wanted, _ = problem.reference()
        worst = relative_error(found, wanted).row
        assert worst < layers.BOUNDS["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_decodes_beside_a_chunk(
    fields: dict[str, Any], captured: bool, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = layers.made(cuda, layers.layer_config(num_heads=8, head_size=128, dtype="bfloat16", **fields))
    problem = layers.problem_of(group, ((1, 2000), (1, 900), (1, 1), (700, 900), (64, 64)))
    # The same kernels on one stream and on two: by another way the sums have another order.
    monkeypatch.setattr(schedule, "prefill_way", lambda *_, **__: "gathered")
    monkeypatch.setattr(schedule, "worth_two_streams", lambda *_: False)
    wanted = layers.check(group, problem)
    monkeypatch.setattr(schedule, "worth_two_streams", lambda *_: True)
    metadata = group.build(common_of(problem))
    assert metadata.parts[0].metadata.beside
    kv_cache, output, lse = problem.written_cache(), torch.empty_like(wanted[0]), torch.empty_like(wanted[1])

    layer = layer_of(group, problem, caller_writes=True)

    def step() -> None:
        output.fill_(torch.nan)
        layer.forward(problem.query, None, None, kv_cache, metadata, output, lse)
        output.mul_(1)  # behind both streams

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
    else:
        step()
    assert same_bits(output, wanted[0])
    assert same_bits(lse, wanted[1])


@pytest.mark.gpu
def test_a_window_costs_what_it_holds(cuda: torch.device) -> None:
    """Blocks in front of the window are not read: their table entries lead out of the cache."""
    config = layers.layer_config(num_heads=8, head_size=128, dtype="bfloat16", sliding_window=500)
    group = layers.made(cuda, config, capacity=Capacity(16, 2048, 65536))
    for requests in (((1, 60000), (1, 700)), ((700, 60000),), ((30, 50000),)):
        problem = layers.problem_of(group, requests)
        wanted = problem.reference()
        table = problem.block_table.clone()
        for request, (query_len, seq_len) in enumerate(requests):
            table[request, : max(0, seq_len - query_len - 499) // group.block_size] = 2**31 - 1
        broken = dataclasses.replace(problem, block_table=table)
        output, lse = layers.run(group, broken)
        torch.cuda.synchronize()
        assert relative_error(output, wanted[0]).row < layers.BOUNDS["bfloat16"]
        assert lse_error(lse, wanted[1]) < layers.BOUNDS["bfloat16"]
