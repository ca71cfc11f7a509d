"""``FLASHMLA_SPARSE`` at run time on emulated kernels: every build and path, void indices, sinks, copies in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from flashmla_layers import check, group_of, sparse_config, with_indices

from attn_select.reference.running import common_of, layer_of, problem_for
from attn_select.runtime import BatchError, Capacity
from attn_select.testing import pack_fp8_ds_mla, unpack_fp8_ds_mla
from attn_select_flashmla.facts.builds import BUILDS
from attn_select_flashmla.runtime import flashmla_sparse
from attn_select_flashmla.runtime.flashmla_sparse import dequantised

Emulate = Callable[[str], list[str]]
NAMES = [build.distribution for build in BUILDS]
MIXED = [(1, 1), (1, 64), (1, 70), (5, 5), (20, 90), (70, 70)]


@pytest.mark.parametrize(
    ("fields", "called"),
    [
        ({"num_heads": 4}, {"flash_mla_sparse_fwd"}),
        ({"num_heads": 64}, {"flash_mla_sparse_fwd"}),
        ({"num_heads": 4, "kv_cache_dtype": "fp8_ds_mla"}, {"flash_mla_with_kvcache", "schedule"}),
        (
            {"num_heads": 40, "kv_cache_dtype": "fp8_ds_mla"},
            {"flash_mla_with_kvcache", "schedule", "flash_mla_sparse_fwd"},
        ),
        ({"num_heads": 2, "kv_cache_dtype": "fp8_e4m3"}, {"flash_mla_with_kvcache", "schedule"}),
    ],
    ids=["bf16", "bf16 of 64 heads", "FP8", "FP8 with a copy", "FP8 by another name"],
)
def test_every_path(emulate: Emulate, fields: dict[str, Any], called: set[str]) -> None:
    calls = emulate("vllm")
    group = group_of(sparse_config(**fields))
    check(group, MIXED)
    assert set(calls) == called


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("num_heads", [4, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_void_indices(emulate: Emulate, kv_cache_dtype: str, num_heads: int, sinks: bool) -> None:
    """-1 is void anywhere in its row, and so may be the whole row."""
    emulate("vllm")
    group = group_of(sparse_config(num_heads=num_heads, kv_cache_dtype=kv_cache_dtype, sinks=sinks))
    problem = problem_for(group, [(1, 66), (1, 70), (4, 68)])
    indices = problem.topk_indices
    assert indices is not None
    indices = indices.clone()
    indices[:, ::3] = -1
    indices[2:4] = -1
    check(group, [], with_indices(problem, indices))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize(("wrong", "accepted"), [(-2, False), (10**6, False), (-1, True)])
def test_checked_mode_names_an_index_that_is_no_slot(
    emulate: Emulate, monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str, wrong: int, accepted: bool
) -> None:
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1")
    calls = emulate("vllm")
    group = group_of(sparse_config(kv_cache_dtype=kv_cache_dtype))
    problem = problem_for(group, [(1, 66), (4, 68)])
    assert problem.topk_indices is not None
    indices = problem.topk_indices.clone()
    indices[3, 17] = wrong
    if accepted:
        check(group, [], with_indices(problem, indices))
        return
    with pytest.raises(BatchError, match=rf"^topk_indices\[3, 17\] = {wrong}: accepted are slots 0 to \d+, and -1 for"):
        check(group, [], with_indices(problem, indices))
    assert calls == []


def test_a_top_k_of_any_size(emulate: Emulate) -> None:
    emulate("vllm")
    for kv_cache_dtype in ("auto", "fp8_ds_mla"):
        check(group_of(sparse_config(sparse_top_k=70, kv_cache_dtype=kv_cache_dtype)), [(1, 90), (5, 80)])


def test_only_a_copy_wants_decodes_first(emulate: Emulate) -> None:
    emulate("vllm")
    for fields, threshold in (
        ({"num_heads": 4}, None),
        ({"num_heads": 4, "kv_cache_dtype": "fp8_ds_mla"}, None),
        ({"num_heads": 40, "kv_cache_dtype": "fp8_ds_mla"}, 3),
    ):
        group = group_of(sparse_config(num_speculative_tokens=2, **fields))
        assert group.reorder_batch_threshold == threshold


def test_a_copy_is_made_in_parts(emulate: Emulate) -> None:
    """As many requests at a time as have ``max_model_len`` tokens together."""
    calls = emulate("vllm")
    config = sparse_config(num_heads=40, kv_cache_dtype="fp8_ds_mla")
    group = group_of(config, capacity=Capacity(16, 512, 192))
    assert group.backends["prefill"].context.plans["prefill"].kernel.copies_cache
    check(group, [(1, 9), (5, 70), (2, 64), (3, 192), (2, 2), (30, 40)])
    assert calls.count("flash_mla_sparse_fwd") == 3  # 2 + 1 blocks, 3, 1 + 1
    calls.clear()
    check(group, [(2, 2), (4, 65)])
    assert calls == ["flash_mla_sparse_fwd"]


def test_prefill_alone(emulate: Emulate) -> None:
    calls = emulate("vllm")
    config = sparse_config(num_heads=40, kv_cache_dtype="fp8_ds_mla")
    group = group_of(config, phases=["prefill"])
    check(group, [(5, 70), (2, 64)])
    assert calls == ["flash_mla_sparse_fwd"]


def test_long_prefills_run_in_parts(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashmla_sparse, "MAX_DECODE_ROWS", 8)
    calls = emulate("vllm")
    check(group_of(sparse_config(kv_cache_dtype="fp8_ds_mla")), [(1, 9), (20, 40)])
    # 8 + 8 + 5 tokens: a schedule serves both parts of 8.
    assert calls.count("flash_mla_with_kvcache") == 3
    assert calls.count("schedule") == 2


def test_captures_begin_with_an_empty_schedule(emulate: Emulate) -> None:
    calls = emulate("vllm")
    config = sparse_config(num_heads=40, kv_cache_dtype="fp8_ds_mla", num_speculative_tokens=1)
    group = group_of(config, cuda_graphs=True)
    problem = problem_for(group, [(2, 9), (2, 70)])
    metadata = group.build_for_cudagraph_capture(common_of(problem))
    (span,) = metadata.parts[0].metadata.spans
    assert span.schedule.tile_scheduler_metadata is None
    for _ in range(2):
        layer = layer_of(group, problem)
        layer(problem.query, problem.key, problem.value, problem.kv_cache, metadata, topk_indices=problem.topk_indices)
    assert calls.count("schedule") == 1
    assert span.schedule.tile_scheduler_metadata is not None


def test_a_batch_without_tokens(emulate: Emulate) -> None:
    calls = emulate("vllm")
    for num_heads, kv_cache_dtype in ((4, "auto"), (4, "fp8_ds_mla"), (40, "fp8_ds_mla")):
        group = group_of(sparse_config(num_heads=num_heads, kv_cache_dtype=kv_cache_dtype))
        problem = problem_for(group, [(1, 9)])
        none = torch.zeros(2, dtype=torch.int32)
        changes = {"query_start_loc": none, "query_start_loc_cpu": none, "slot_mapping": none[:0].long()}
        common = common_of(problem, num_actual_tokens=0, max_query_len=0, **changes)
        assert group.build(common).parts == ()
    assert calls == []


@pytest.mark.parametrize("power_of_two_scales", [True, False])
def test_dequantised_is_the_inverse_of_packing(power_of_two_scales: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashmla_sparse, "COPIED_BLOCKS", 2)
    draw = torch.Generator().manual_seed(0)
    latent = 5 * torch.randn(5, 64, 512, generator=draw)
    rope = torch.randn(5, 64, 64, generator=draw)
    cache = pack_fp8_ds_mla(latent, rope, power_of_two_scales=power_of_two_scales)
    blocks = torch.tensor([4, 0, 3])
    found = dequantised(cache, blocks)
    wanted = unpack_fp8_ds_mla(cache[blocks]).flatten(0, 1).to(torch.bfloat16)
    assert torch.equal(found, wanted)
