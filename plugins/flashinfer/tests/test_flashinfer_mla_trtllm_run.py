"""FLASHINFER_MLA's decode through TRT-LLM's entry: trtllm-gen on 10.x, XQA on 12.x."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from attn_select.reference.running import impl_of
from attn_select.runtime import Outputs

pytest.importorskip("torch")

import flashinfer_emulated as fi
import flashinfer_mla_groups as layers
import torch

from attn_select.reference.oracle import attention_reference
from attn_select.runtime import BatchError, Capacity

Emulate = Callable[..., Any]
ENTRY = "trtllm_batch_decode_with_kv_cache_mla"
MIB = 1 << 20


def on_b200(emulate: Emulate, *, version: str = "0.6.14", **fields: Any) -> tuple[Any, Any]:
    """Return the emulated device and a group of decodes."""
    world = emulate((10, 0), release=version)
    options = {name: fields.pop(name) for name in ("cuda_graphs", "capacity", "device_scales") if name in fields}
    return world, layers.group_for("b200", layers.mla_config(**fields), phases=["decode"], **options)


def test_one_token_each(emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_heads=16)
    layers.run(group, layers.problem_for(group, [(1, 70), (1, 1), (1, 200)]), wants_lse=False)
    (call,) = world.named(ENTRY)
    assert call["query"].shape == (3, 1, 16, 576)
    assert call["out"].shape == (3, 1, 16, 512)
    assert call["block_tables"].shape[1] % 4 == 0
    assert (call["backend"], call["max_seq_len"], call["bmm2_scale"]) == ("trtllm-gen", 200, 1.0)
    assert call["bmm1_scale"] == 192**-0.5
    assert (call["qk_nope_head_dim"], call["kv_lora_rank"], call["qk_rope_head_dim"]) == (128, 512, 64)
    assert call["workspace_buffer"].numel() == group.backends["decode"].context.plans["decode"].workspace_bytes
    assert not call["return_lse"]
    assert call["lse"] is None
    assert not world.syncs


@pytest.mark.parametrize("block_size", [32, 64, 96])
def test_equal_queries_of_several_tokens(block_size: int, emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_speculative_tokens=3, block_size=block_size)
    layers.run(group, layers.problem_for(group, [(4, 70), (4, 4), (4, 129)]))
    (call,) = world.named(ENTRY)
    assert call["query"].shape[:2] == (3, 4)
    assert call["lse"].shape == (12, 8)


def test_requests_without_keys(emulate: Emulate) -> None:
    for sinks in (False, True):
        world, group = on_b200(emulate, num_heads=8, num_speculative_tokens=1, sinks=sinks)
        problem = layers.problem_for(group, [(2, 70), (2, 0), (2, 9)])
        problem.block_table[1] = -7  # stale
        ran = layers.run(group, problem)
        assert (ran.output[2:4] == 0).all()
        (call,) = world.named(ENTRY)
        assert int(call["seq_lens"].min()) == 1
        if sinks:
            torch.testing.assert_close(ran.lse[2:4], problem.sinks.expand(2, -1).float())


def test_unequal_queries_are_rows(emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_speculative_tokens=3)
    layers.run(group, layers.problem_for(group, [(1, 129), (4, 4), (3, 130), (1, 0)]), wants_lse=False)
    (call,) = world.named(ENTRY)
    assert call["cum_seq_lens_q"] is None
    assert call["query"].shape[:2] == (9, 1)
    assert call["seq_lens"].tolist() == [129, 1, 2, 3, 4, 128, 129, 130, 1]


def test_layers_that_are_not_causal_are_rows(emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_speculative_tokens=2, non_causal=True)
    layers.run(group, layers.problem_for(group, [(3, 70), (3, 9)]))
    (call,) = world.named(ENTRY)
    assert call["seq_lens"].tolist() == [70] * 3 + [9] * 3


@pytest.mark.parametrize(("heads", "padded"), [(4, 8), (20, 32), (128, 128)])
@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8", "dtype": "float16"}])
def test_heads_and_dtypes(heads: int, padded: int, fields: dict[str, Any], emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_heads=heads, sinks=True, **fields)
    problem = layers.problem_for(group, [(1, 70), (1, 9)])
    layers.run(group, problem)
    (call,) = world.named(ENTRY)
    assert call["query"].shape[2] == padded
    assert call["sinks"].shape == (padded,)
    assert call["out"].dtype == torch.bfloat16
    if fields:
        q, k = float(problem.q_scale), float(problem.k_scale)
        assert call["query"].dtype == torch.float8_e4m3fn
        assert (call["bmm1_scale"], call["bmm2_scale"]) == pytest.approx((q * k * problem.scale, k))


def test_scales_on_the_device(emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_heads=8, kv_cache_dtype="fp8", device_scales=True)
    problem = layers.problem_for(group, [(1, 70)])
    layers.run(group, problem)
    (call,) = world.named(ENTRY)
    for name, wanted in (("bmm1_scale", problem.q_scale * problem.k_scale * problem.scale),
                         ("bmm2_scale", problem.k_scale)):  # fmt: skip
        assert call[name].shape == (1,)
        torch.testing.assert_close(call[name][0], wanted.float())


def test_scales_follow_the_layer(emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_heads=8, kv_cache_dtype="fp8")
    problem = layers.problem_for(group, [(1, 70)])
    for factor in (1.0, 2.0):
        q, k = float(problem.q_scale) * factor, float(problem.k_scale)
        scaled = dataclasses.replace(problem, q_scale=torch.tensor(q))
        layers.run(group, scaled)
        assert world.named(ENTRY)[-1]["bmm1_scale"] == pytest.approx(q * k * problem.scale)


def test_statistics_that_do_not_fit_are_taken_in_parts(emulate: Emulate) -> None:
    capacity = Capacity(64, 512, 128)
    world, group = on_b200(emulate, num_heads=128, num_speculative_tokens=1, capacity=capacity)
    served = group.backends["decode"]
    served.builder._decode.workspace = torch.zeros(33 * MIB + 5 * 8 * 128 * 256 + 7, dtype=torch.uint8)
    problem = layers.problem_for(group, [(2, 3)] * 12)
    ran = layers.run(group, problem)
    assert [len(call["query"]) for call in world.named(ENTRY)] == [5, 5, 2]
    whole = layers.run(group, problem, wants_lse=False)
    assert len(world.named(ENTRY)) == 4
    assert torch.equal(ran.output, whole.output)


def test_more_requests_than_counters_are_taken_in_parts(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_select.backends.spec import Fact
    from attn_select_flashinfer.runtime import mla_trtllm

    monkeypatch.setattr(mla_trtllm, "MOST_REQUESTS", Fact(2, ""))
    world, group = on_b200(emulate)
    layers.run(group, layers.problem_for(group, [(1, 9), (1, 70), (1, 3)]), wants_lse=False)
    assert [len(call["seq_lens"]) for call in world.named(ENTRY)] == [2, 1]


@pytest.mark.parametrize(("query_len", "causal"), [(1, True), (3, True), (3, False)])
def test_a_graph_replays_with_other_lengths_and_tables(query_len: int, causal: bool, emulate: Emulate) -> None:
    fields = {"num_heads": 8, "num_speculative_tokens": query_len - 1, "non_causal": not causal}
    _, group = on_b200(emulate, cuda_graphs=True, **fields)
    served = group.backends["decode"]
    impl = impl_of(served, scale=0.1)
    cache, query = torch.randn(64, 64, 576).bfloat16(), torch.randn(2 * query_len, 8, 576).bfloat16()
    output, table, lens = torch.empty(2 * query_len, 8, 512).bfloat16(), torch.zeros(2, 8).int(), torch.zeros(2).int()

    def common(lengths: list[int], blocks: torch.Tensor) -> Any:
        problem = layers.problem_for(group, [(query_len, length) for length in lengths])
        lens.copy_(problem.seq_lens)
        table.copy_(blocks)
        return layers.common_of(problem, block_table_tensor=table, seq_lens=lens, max_seq_len=512)

    metadata = served.builder.build_for_cudagraph_capture(common([query_len] * 2, torch.zeros(2, 8)))
    with fi.capturing() as graph:
        impl.forward_mqa(query, cache, metadata, Outputs(output))
    for seed, lengths in enumerate(([70, 5], [129, 0], [300, 64])):
        blocks = torch.randperm(64, generator=torch.Generator().manual_seed(seed))[:16].view(2, 8)
        served.builder.build(0, common(lengths, blocks))
        graph.replay()
        for request, length in enumerate(lengths):
            if length:
                rows = slice(request * query_len, (request + 1) * query_len)
                keys = cache[blocks[request]].flatten(0, 1)[:length, None]
                wanted, _ = attention_reference(query[rows], keys, keys[..., :512], scale=0.1, causal=causal)
                torch.testing.assert_close(output[rows].double(), wanted, atol=2e-2, rtol=0)


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_built_before_the_first_one_runs(graphs: bool, emulate: Emulate) -> None:
    _, group = on_b200(emulate, cuda_graphs=graphs)
    problems = [layers.problem_for(group, lens) for lens in ([(1, 70), (1, 9)], [(1, 3), (1, 200)])]
    first, second = (group.build(layers.common_of(problem)) for problem in problems)
    if graphs:
        with pytest.raises(BatchError, match="a later build has overwritten the lengths"):
            layers.run(group, problems[0], metadata=first)
    else:
        layers.run(group, problems[0], metadata=first)
    layers.run(group, problems[1], metadata=second)


@pytest.mark.parametrize(("heads", "fields"), [(128, {}), (16, {"kv_cache_dtype": "fp8"})])
def test_xqa(heads: int, fields: dict[str, Any], emulate: Emulate) -> None:
    world = emulate((12, 0))
    group = layers.group_for("rtx5090", layers.mla_config(num_heads=heads, block_size=32, **fields), phases=["decode"])
    problem = layers.problem_for(group, [(1, 70), (1, 0), (1, 200)])
    layers.run(group, problem)
    (call,) = world.named(ENTRY)
    assert (call["backend"], call["query"].shape, call["out"].shape) == ("xqa", (3, 1, 128, 576), (3, 128, 512))
    assert call["seq_lens"].tolist() == [70, 1, 200]
    q, k = (float(problem.q_scale), float(problem.k_scale)) if fields else (1.0, 1.0)
    # The cache's scale is a factor of the scores by itself.
    assert (call["bmm1_scale"], call["bmm2_scale"]) == pytest.approx((q * problem.scale, k))
