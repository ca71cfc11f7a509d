"""FLASHINFER_MLA_SPARSE: slots in front and how many, requests without any, 656-byte tokens on 12.x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_emulated as fi
import flashinfer_mla_groups as layers
import torch

from attn_select.runtime import Capacity
from attn_select_flashinfer.runtime.mla_sparse import in_front

Emulate = Callable[..., Any]
ENTRY = "trtllm_batch_decode_with_kv_cache_mla"
REQUESTS = [(1, 70), (2, 9), (1, 0), (30, 90)]
ON = {"b200": (10, 0), "rtx5090": (12, 0)}


def group_on(gpu: str, emulate: Emulate, **fields: Any) -> tuple[Any, Any]:
    given: dict[str, Any] = {"sparse_top_k": 64, "num_speculative_tokens": 1}
    if gpu == "rtx5090":
        given |= {"sparse_top_k": 2048, "kv_cache_dtype": "fp8_ds_mla"}
    return emulate(ON[gpu]), layers.group_for(gpu, layers.mla_config(**{**given, **fields}))


def test_valid_slots_come_first() -> None:
    indices = torch.tensor([[-1, 7, -5, 3], [1, 2, 3, 4], [-1, -1, -1, -2]], dtype=torch.int32)
    slots, lens = in_front(indices)
    assert slots.dtype == lens.dtype == torch.int32
    assert slots.shape == (3, 128)
    assert lens.tolist() == [2, 4, 0]
    assert slots[0].tolist() == [7, 3, *[7] * 126]
    assert slots[1].tolist() == [1, 2, 3, 4, *[1] * 124]
    assert not slots[2].any()


def test_rows_that_are_wide_enough_stay_as_wide() -> None:
    draw = torch.Generator().manual_seed(0)
    indices = torch.randint(-50, 50, (9, 256), generator=draw, dtype=torch.int32)
    slots, lens = in_front(indices)
    assert slots.shape == (9, 256)
    for row, (own, count) in enumerate(zip(slots, lens.tolist(), strict=True)):
        assert own[:count].tolist() == indices[row][indices[row] >= 0].tolist()
        assert set(own[count:].tolist()) <= {int(own[0])}


def test_the_nan_of_another_request_reaches_no_row(emulate: Emulate) -> None:
    _, group = group_on("b200", emulate)
    problem = layers.problem_for(group, [(1, 70), (3, 200)], nan_tails=True)
    chosen = problem.topk_indices
    chosen[(chosen >= 0) & (chosen < group.block_size)] = -1
    problem.kv_cache[0] = torch.nan
    layers.run(group, problem)


@pytest.mark.parametrize("gpu", ON)
@pytest.mark.parametrize("sinks", [False, True])
def test_both_phases_by_one_kernel(gpu: str, sinks: bool, emulate: Emulate) -> None:
    world, group = group_on(gpu, emulate, sinks=sinks)
    problem = layers.problem_for(group, REQUESTS)
    void = problem.topk_indices < 0
    problem.topk_indices[void] = -3  # any negative number is padding
    layers.run(group, problem)
    (call,) = world.named(ENTRY)
    assert call["query"].shape == (34, 1, 8, 576)
    assert call["backend"] == ("trtllm-gen" if gpu == "b200" else "sparse")
    width = call["sparse_mla_top_k"]
    assert call["block_tables"].shape == (34, 1, width)
    if gpu == "b200":
        assert (width, call["max_seq_len"]) == (128, 128)
        assert int(call["seq_lens"].min()) == 1
    else:
        assert (width, call["seq_lens"], call["kv_scale_format"]) == (2048, None, "pow2_fp32")
        assert call["kv_cache"].shape[1:] == (64, 656)
    assert not world.syncs


@pytest.mark.parametrize(
    ("gpu", "fields"),
    [
        ("b200", {"kv_cache_dtype": "fp8"}),
        ("b200", {"kv_cache_dtype": "fp8", "dtype": "float16", "num_heads": 16}),
        ("b200", {"num_heads": 20, "block_size": 32}),
        ("b200", {"num_heads": 128}),
        ("rtx5090", {"kv_cache_dtype": "fp8"}),
        ("rtx5090", {"num_heads": 40}),
    ],
    ids=str,
)
def test_dtypes_and_heads(gpu: str, fields: dict[str, Any], emulate: Emulate) -> None:
    world, group = group_on(gpu, emulate, **fields)
    problem = layers.problem_for(group, REQUESTS[:3])
    layers.run(group, problem)
    layers.run(group, problem, wants_lse=False)
    call = world.named(ENTRY)[0]
    if gpu == "b200" and "kv_cache_dtype" in fields:
        q, k = float(problem.q_scale), float(problem.k_scale)
        assert call["query"].dtype == torch.float8_e4m3fn
        assert (call["bmm1_scale"], call["bmm2_scale"]) == pytest.approx((q * k * problem.scale, k))
    else:
        assert (call["bmm1_scale"], call["bmm2_scale"]) == (problem.scale, 1.0)


@pytest.mark.parametrize("top_k", [64, 512])
def test_other_top_k_on_12_since_0_7(top_k: int, emulate: Emulate) -> None:
    world = emulate(ON["rtx5090"])
    config = layers.mla_config(sparse_top_k=top_k, kv_cache_dtype="fp8_ds_mla")
    group = layers.group_for("rtx5090", config, stated={"pins": {"flashinfer-python": "0.7.2.post1"}})
    layers.run(group, layers.problem_for(group, [(1, 70), (1, 9), (30, 90)]))
    (call,) = world.named(ENTRY)
    assert call["sparse_mla_top_k"] == top_k


def test_more_tokens_than_a_call_takes(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_select.backends.spec import Fact
    from attn_select_flashinfer.runtime import mla_trtllm

    monkeypatch.setattr(mla_trtllm, "MOST_REQUESTS", Fact(20, ""))
    world, group = group_on("b200", emulate)
    layers.run(group, layers.problem_for(group, REQUESTS))
    assert [len(call["query"]) for call in world.named(ENTRY)] == [20, 14]


def test_statistics_bound_a_call(emulate: Emulate) -> None:
    world, group = group_on("b200", emulate, num_heads=128)
    (served,) = group.distinct
    served.builder._workspace = torch.zeros((33 << 20) + 10 * 8 * 128 * 256, dtype=torch.uint8)
    layers.run(group, layers.problem_for(group, [(12, 30)]))
    assert [len(call["query"]) for call in world.named(ENTRY)] == [10, 2]


def test_the_workspace_stays(emulate: Emulate) -> None:
    capacity = Capacity(8, 64, 512)
    world = emulate((10, 0))
    config = layers.mla_config(sparse_top_k=64, num_speculative_tokens=1)
    group = layers.group_for("b200", config, cuda_graphs=True, capacity=capacity)
    for lengths in ([9, 70], [200, 3]):
        problem = layers.problem_for(group, [(2, length) for length in lengths])
        layers.run(group, problem, metadata=group.build_for_cudagraph_capture(layers.common_of(problem)))
    first, second = world.named(ENTRY)
    assert first["workspace_buffer"].data_ptr() == second["workspace_buffer"].data_ptr()


NATIVE = {release: {"pins": {"flashinfer-python": release}} for release in fi.RELEASES}


@pytest.mark.parametrize(
    ("release", "fields"),
    [
        ("0.6.14", {"num_heads": 20, "dtype": "float16", "sparse_top_k": 2048}),
        (fi.RELEASES[-1], {"num_heads": 128, "sparse_top_k": 200}),
        (fi.RELEASES[-1], {"qk_rope_head_dim": 0, "kv_cache_dtype": "fp8"}),
    ],
)
def test_on_9_by_a_schedule_of_our_own(release: str, fields: dict[str, Any], emulate: Emulate) -> None:
    world = emulate(release=release)
    config = layers.mla_config(**{"sparse_top_k": 64, "num_speculative_tokens": 1, **fields})
    group = layers.group_for("h100", config, stated=NATIVE[release])
    for requests in (REQUESTS, [(1, 500)], [(1, 64), (1, 65), (1, 1)]):
        problem = layers.problem_for(group, requests)
        for wants_lse in (True, False):
            layers.run(group, problem, wants_lse=wants_lse)
    assert len(world.named("BatchMLAPagedAttentionWrapper.plan")) == 1
    assert not world.syncs


def test_schedules_of_graphs_stay_where_they_are(emulate: Emulate) -> None:
    world = emulate()
    group = layers.group_for(
        "h100", layers.mla_config(sparse_top_k=64), cuda_graphs=True, capacity=Capacity(8, 64, 512)
    )
    (served,) = group.distinct
    schedules = []
    for lengths in ([9, 70], [200, 3]):
        problem = layers.problem_for(group, [(1, length) for length in lengths])
        common = layers.common_of(problem)
        layers.run(group, problem, metadata=group.build_for_cudagraph_capture(common))
        schedules.append(served.builder.build(0, common))
    assert schedules[0] is schedules[1]
    layers.run(group, layers.problem_for(group, [(1, 200), (1, 3), (1, 40)]))
    calls = world.named("BatchMLAPagedAttentionWrapper.run")
    assert [len(call["q_nope"]) for call in calls] == [2, 2, 3]


def test_layers_of_one_step_choose_apart(emulate: Emulate) -> None:
    emulate()
    group = layers.group_for("h100", layers.mla_config(sparse_top_k=64))
    problem = layers.problem_for(group, REQUESTS)
    metadata = group.build(layers.common_of(problem))
    layers.run(group, problem, metadata=metadata)
    chosen = problem.topk_indices.clone()
    problem.topk_indices[:, ::3] = -1
    layers.run(group, problem, metadata=metadata)
    problem.topk_indices.copy_(chosen)
    layers.run(group, problem, metadata=metadata)
