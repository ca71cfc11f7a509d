"""TRITON_ATTN's layer against the oracle: layouts, outputs in FP8, cascade, batch invariance."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch
import triton_attn_layers as layers

from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.reference.running import common_of, layer_of, shared_prefix
from attn_select.runtime import Capacity, torch_ops
from attn_select.runtime.batch import prepare_batch
from attn_select.testing import Problem, lse_error, relative_error, same_bits
from attn_select_triton.runtime import schedule, triton_attn

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("apart")]


@pytest.mark.parametrize("layout", [FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND])
@pytest.mark.parametrize("fields", [{}, {"head_size": 48, "v_head_size": 32}, {"block_size": 48}], ids=str)
def test_every_layout_is_read_where_it_lies(layout: str, fields: dict[str, Any], device: torch.device) -> None:
    group = layers.made(device, layers.layer_config(**fields), layout)
    assert group.kv_layout == layout
    layers.check(group, layers.problem_of(group, layers.MIXED))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_cache_dtype": "fp8_e5m2", "dtype": "float16", "sinks": True},
        {"sliding_window": 20, "head_size": 64, "v_head_size": 32},
        {"num_heads": 4, "num_kv_heads": 4, "batch_invariant": True},
    ],
    ids=str,
)
def test_each_head_has_scales_of_its_own(fields: dict[str, Any], device: torch.device) -> None:
    given = {"kv_cache_dtype": "fp8_e4m3", "per_head_quant_scales": True, **fields}
    for sms in (1, 100):
        group = layers.many_sms(layers.made(device, layers.layer_config(**given)), sms)
        problem = layers.problem_of(group, layers.MIXED)
        assert problem.k_scale.shape == (group.config.num_kv_heads,)
        layers.check(group, problem)


@pytest.mark.parametrize("fields", [{}, {"head_size": 48, "v_head_size": 32}, {"kv_cache_dtype": "fp8_e5m2"}], ids=str)
def test_a_layer_writes_the_views_that_it_reads(
    fields: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where this plugin's kernel serves the shared operation; keys that lie apart go through that."""
    monkeypatch.setattr(triton_attn, "_writes", lambda context: True)
    group = layers.made(device, layers.layer_config(**fields))
    problem = layers.problem_of(group, layers.MIXED)
    layer = layer_of(group, problem)
    slots = problem.slot_mapping
    rows = [torch.cat([tensor, tensor[:1]]) for tensor in (problem.key, problem.value)]  # padding
    for key, value in (rows, [tensor.mT.contiguous().mT for tensor in rows]):
        kv_cache = problem.kv_cache.clone()
        layer.write(key, value, kv_cache, slots)
        assert same_bits(kv_cache.view(torch.uint8), problem.written_cache().view(torch.uint8))


@pytest.mark.parametrize(
    ("kv_cache_dtype", "capability", "brings", "writes"),
    [
        ("auto", (8, 0), "attn_select_triton.ops:reshape_and_cache", True),
        ("auto", (9, 0), "acme_runtime:reshape_and_cache_for", False),
        ("auto", (9, 0), "torch", False),
        ("fp8_e4m3", (8, 9), "attn_select_triton.ops:reshape_and_cache", True),
        ("fp8_e4m3", (8, 6), "attn_select_triton.ops:reshape_and_cache", False),
        ("fp8_e5m2", (8, 6), "attn_select_triton.ops:reshape_and_cache", True),
    ],
)
def test_who_writes_the_cache(
    kv_cache_dtype: str, capability: tuple[int, int], brings: str, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not this plugin's kernel where another one serves the operation, or torch casts."""
    monkeypatch.setattr(triton_attn, "capability_of", lambda device: capability)
    monkeypatch.setattr(triton_attn.ops, "implementation", lambda name, device: (None, brings))
    config = layers.layer_config(kv_cache_dtype=kv_cache_dtype)
    context: Any = SimpleNamespace(device=torch.device("cuda", 0), kv_layout=FLASH_ATTN_NHD, config=config)
    assert triton_attn._writes(context) == writes


def test_nothing_to_do(device: torch.device) -> None:
    group = layers.made(device, layers.layer_config())
    problem = layers.problem_of(group, ((0, 9), (0, 0)))
    output, lse = layers.run(group, problem)
    assert output.shape == (0, 4, 32)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize("scale", [0.01, 0.0005], ids=["fits", "saturates"])
@pytest.mark.parametrize("sms", [1, 100], ids=["whole", "split"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"sliding_window": 20, "sinks": True}, {"kv_cache_dtype": "fp8_e4m3"}, {"attn_type": "encoder"}],
    ids=str,
)
def test_outputs_are_rounded_to_e4m3_over_their_scale(
    fields: dict[str, Any], sms: int, scale: float, device: torch.device
) -> None:
    config = layers.layer_config(dtype="float32", **fields)
    requests = ((40, 40), (5, 5)) if "attn_type" in fields else layers.MIXED
    plain = layers.many_sms(layers.made(device, config), sms)
    group = layers.many_sms(layers.made(device, config.model_copy(update={"output_quantization": "fp8"})), sms)
    problem = layers.problem_of(plain, requests)
    wanted, wanted_lse = layers.check(plain, problem)
    output_scale = torch.tensor(scale, device=device)
    output, lse = layers.run(group, problem, output_scale=output_scale)
    stored = torch_ops.quantize_fp8(wanted, output_scale, torch.float8_e4m3fn)
    assert bool((stored.float().abs() == 448).any()) == (scale < 0.001)
    off = (output.view(torch.uint8).int() - stored.view(torch.uint8).int()).abs()
    assert off.max() <= 1  # compiled for another output, a result may differ in its last bit
    assert (off > 0).float().mean() < 1e-3
    assert torch.allclose(lse, wanted_lse, atol=1e-5)


def test_a_cascade_is_merged_before_its_output_is_rounded(device: torch.device) -> None:
    config = layers.layer_config(dtype="float32", output_quantization="fp8")
    group = layers.made(device, config)
    layers.builder_of(group).least_cascade_bytes = 0
    requests = (*((1, 256 + 10 + i) for i in range(7)), (20, 290))
    problem = shared_prefix(layers.problem_of(group, requests), 256 // group.block_size)
    metadata = group.build(common_of(problem), common_prefix_len=256)
    assert metadata.parts[0].metadata.prefix is not None
    scale = torch.tensor(0.01, device=device)
    output, lse = layers.run(group, problem, metadata, output_scale=scale)
    wanted, wanted_lse = problem.reference()
    assert relative_error(output.float() * scale, wanted).row < 3 * 2.0**-4
    assert lse_error(lse, wanted_lse) < 1e-5


@pytest.mark.parametrize(
    "fields",
    [
        layers.slow({}),
        {"sinks": True, "logits_soft_cap": 5.0},
        layers.slow({"kv_cache_dtype": "fp8_e5m2", "per_head_quant_scales": True}),
    ],
    ids=str,
)
def test_cascade(fields: dict[str, Any], device: torch.device) -> None:
    group = layers.many_sms(layers.made(device, layers.layer_config(**fields)))
    layers.builder_of(group).least_cascade_bytes = 0
    requests = (*((1, 256 + 10 + i) for i in range(7)), (20, 290))
    problem = shared_prefix(layers.problem_of(group, requests), 256 // group.block_size)
    metadata = group.build(common_of(problem), common_prefix_len=256).parts[0].metadata
    assert metadata.prefix is not None
    assert [part.causal for part in metadata.prefix] == [False]
    layers.check(group, problem, common_prefix_len=256)


def test_cascade_must_save_more_than_it_costs(device: torch.device) -> None:
    config = layers.layer_config(num_heads=32, num_kv_heads=8, head_size=128)
    builder = layers.builder_of(layers.made(device, config, capacity=Capacity(64, 512, 8192)))

    def worthwhile(requests: int, prefix: int) -> bool:
        return bool(builder.use_cascade_attention(prefix, prepare_batch([1] * requests, [8192] * requests)))

    assert [worthwhile(*case) for case in ((64, 8192), (64, 2048), (16, 8192))] == [True] * 3
    assert [worthwhile(*case) for case in ((64, 1024), (8, 4096), (7, 8192))] == [False] * 3


@pytest.mark.parametrize(
    "fields", [{}, layers.slow({"sliding_window": 260}), layers.slow({"num_speculative_tokens": 2})], ids=str
)
def test_batch_invariance(fields: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "LEAST_FIXED_SPLIT", 128)
    group = layers.many_sms(layers.made(device, layers.layer_config(batch_invariant=True, **fields)))
    problem = layers.problem_of(group, ((1, 300), (1, 129), (1, 128), (1, 5), (40, 150), (20, 20)))
    output, lse = layers.check(group, problem)
    bounds = problem.query_start_loc.tolist()
    for first, last in ((0, 1), (1, 2), (2, 4), (3, 4), (4, 5), (5, 6), (1, 6)):
        rows = slice(bounds[first], bounds[last])
        parts = layers.run(group, part_of(problem, first, last))
        assert same_bits(parts[0], output[rows])
        assert same_bits(parts[1], lse[rows])


def part_of(problem: Problem, first: int, last: int) -> Problem:
    """Return the step of some requests alone, on the cache that the whole step leaves."""
    rows = slice(*problem.query_start_loc[[first, last]].tolist())
    bounds = problem.query_start_loc[first : last + 1]
    assert problem.block_table is not None
    assert problem.slot_mapping is not None
    return dataclasses.replace(
        problem,
        requests=problem.requests[first:last],
        query=problem.query[rows],
        key=problem.key[rows],
        value=problem.value[rows],
        query_start_loc=bounds - bounds[0],
        seq_lens=problem.seq_lens[first:last],
        block_table=problem.block_table[first:last],
        slot_mapping=problem.slot_mapping[rows],
    )


def test_invariant_splits_follow_from_the_models_length() -> None:
    assert schedule.fixed_split(131072) == 8192
    assert schedule.fixed_split(1000) == schedule.LEAST_FIXED_SPLIT
