"""``MLAAttention`` against float64: both computation paths, chunked context, caches of every kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mla_steps import DEEPSEEK, MIXED, SMALL, Ran, layer_of, run

from attn_select import AttentionConfig, select
from attn_select.layer.layouts import FP8_DS_MLA, MLA
from attn_select.reference.running import common_of
from attn_select.runtime import (
    MLAAttention,
    MLAAttentionGroup,
    Scales,
    ops,
)
from attn_select.testing import (
    error_bound,
    random_problem,
    relative_error,
    same_bits,
)

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 20},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "soft cap": {"logits_soft_cap": 3.0},
    "images": {"mm_prefix": True, "sliding_window": 4},
    "non-causal": {"non_causal": True, "sliding_window": 9},
    "all": {"sinks": True, "alibi": True, "logits_soft_cap": 4.0, "mm_prefix": True, "sliding_window": 11},
}


@pytest.fixture
def run_config() -> Callable[..., Ran]:
    """Return ``run_config(config, requests, **options)``: draw a step, run it, compare it with the oracle."""

    def go(config: AttentionConfig, requests: Sequence[tuple[int, int]], seed: int = 0, **options: Any) -> Ran:
        problem = random_problem(seed, config, requests=requests)
        ran = run(problem, common_of(problem), **options)
        ran.check()
        return ran

    return go


@pytest.mark.parametrize("workspace", [5, 16, 101, 8192])
@pytest.mark.parametrize("name", EXTRAS)
def test_context_in_chunks(name: str, workspace: int, run_config: Callable[..., Ran]) -> None:
    config = AttentionConfig(**SMALL, dtype="float32", **EXTRAS[name])
    ran = run_config(config, MIXED, workspace_tokens=workspace)
    (decode, prefill), window = ran.metadata.parts, config.sliding_window
    assert (decode.phase, prefill.phase, decode.rows.stop) == ("decode", "prefill", 3)
    contexts = [64, 32, 5]
    if window is not None and not config.mm_prefix:
        contexts = [min(context, window - 1) for context in contexts]
    if not config.mm_prefix:
        assert len(prefill.chunks) == math.ceil(sum(contexts) / workspace)
    assert all(chunk.num_tokens <= workspace for chunk in prefill.chunks)


@given(
    seed=st.integers(0, 2**20),
    extras=st.sampled_from(list(EXTRAS)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    cache=st.sampled_from(["auto", "auto", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float32"]),
    block_size=st.sampled_from([1, 7, 16, 48, 64]),
    workspace=st.sampled_from([3, 16, 40, 8192]),
    speculative=st.sampled_from([0, 2]),
    wants_lse=st.booleans(),
)
def test_random_steps(
    seed: int,
    extras: str,
    dtype: str,
    cache: str,
    block_size: int,
    workspace: int,
    speculative: int,
    wants_lse: bool,
) -> None:
    config = AttentionConfig(
        **SMALL,
        **EXTRAS[extras],
        dtype=dtype,
        kv_cache_dtype=cache,
        block_size=block_size,
        num_speculative_tokens=speculative,
        per_head_quant_scales=cache.startswith("fp8") and seed % 2 == 0,
    )
    problem = random_problem(seed, config)
    run(problem, common_of(problem), workspace_tokens=workspace, wants_lse=wants_lse).check()


@pytest.mark.parametrize(("block_size", "kernel"), [(64, 16), (48, 16), (16, 16), (24, 1)])
def test_blocks_of_the_allocator_are_split(block_size: int, kernel: int, run_config: Callable[..., Ran]) -> None:
    config = AttentionConfig(**SMALL, block_size=block_size)
    ran = run_config(config, MIXED, workspace_tokens=10)
    assert ran.group.kernel_block_size == kernel
    assert ran.group.allocate_kv_cache(3).shape == (3 * block_size // kernel, kernel, 40)


def test_rows_without_keys_are_zero() -> None:
    """As the padded requests of a CUDA graph: one query, no key, no slot."""
    problem = random_problem(0, AttentionConfig(**SMALL), requests=[(1, 30), (1, 0), (1, 0)])
    ran = run(problem, common_of(problem))
    ran.check()
    assert ran.lse is not None
    assert (ran.output[1:3] == 0).all()
    assert ran.lse[1:3].isneginf().all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_weight_is_kept_once_and_followed_by_both_paths(dtype: str) -> None:
    """What is written to the model's weight later counts from the next call on, for decodes and for prefills."""
    problem = random_problem(0, AttentionConfig(**SMALL, dtype=dtype), requests=MIXED)
    model = torch.nn.Parameter(problem.kv_b_proj.clone())
    other = random_problem(1, problem.config, requests=MIXED).kv_b_proj
    group = MLAAttentionGroup(select(problem.config, device="cpu", backend="TORCH_MLA"))
    layer, metadata = MLAAttention(group, model), group.build(common_of(problem))
    given = (problem.query, problem.key, problem.value, problem.kv_cache, metadata)
    assert [buffer.data_ptr() for buffer in layer.buffers()] == [model.data_ptr()]
    assert layer.state_dict() == {}  # it is the model's, whose checkpoint has it
    before, after = (MLAAttention(group, weight)(*given) for weight in (problem.kv_b_proj, other))
    assert same_bits(layer(*given), before)
    assert not same_bits(before, after)
    with torch.no_grad():
        model.copy_(other)
    assert same_bits(layer(*given), after)


def test_prefill_alone() -> None:
    """A machine that only prefills: no backend reads the cache, yet it is written, and single tokens are prefills."""
    config = AttentionConfig(**SMALL, block_size=64, kv_cache_dtype="fp8_e4m3")
    problem = random_problem(3, config, requests=[(1, 70), (1, 1), (20, 31), (6, 6)])
    ran = run(problem, common_of(problem), phases=("prefill",), workspace_tokens=16)
    assert ran.group.kernel_block_size == 64
    assert ran.group.reorder_batch_threshold is None
    assert same_bits(ran.kv_cache, problem.written_cache())
    bound = error_bound(config, ran.group.selection.plans)
    assert relative_error(ran.output[: ran.tokens], problem.reference(longest_decode=0)[0]).row <= bound.row


PLACES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "contiguous": (lambda query: query, True),
    "cut from wider tokens": (lambda query: torch.cat((query, query), -1)[..., : query.shape[-1]], True),
    "at an odd place": (lambda query: torch.cat((query.new_zeros(1), query.flatten()))[1:].view_as(query), False),
    "rows of an odd width": (lambda query: torch.cat((query, query[..., :1]), -1)[..., :-1], False),
    "every second number": (lambda query: query.repeat_interleave(2, dim=-1)[..., ::2], False),
    "last dimension apart": (lambda query: query.transpose(0, 2).contiguous().transpose(0, 2), False),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_decode_that_takes_the_query_in_two_parts(place: str) -> None:
    """Its rope part is not copied where kernels can read it as it lies."""
    config = AttentionConfig(**{**SMALL, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}, dtype="bfloat16")
    problem = random_problem(0, config, requests=[(1, 9), (1, 40), (1, 3)])
    group = MLAAttentionGroup(select(config, device="cpu", backend="TORCH_MLA"))
    layer, common = layer_of(group, problem), common_of(problem)
    assert problem.kv_cache is not None
    lie, apart = PLACES[place]
    query, impl, seen = lie(problem.query), layer.impls["decode"], []
    whole = impl.forward_mqa

    def forward_mqa(query: Any, *rest: Any) -> torch.Tensor:
        seen.append(query)
        return whole(torch.cat(query, -1) if isinstance(query, tuple) else query, *rest)

    wanted = layer(query, problem.key, problem.value, problem.kv_cache.clone(), group.build(common))
    impl.forward_mqa, impl.takes_query_parts = forward_mqa, True  # type: ignore[method-assign]
    found = layer(query, problem.key, problem.value, problem.kv_cache.clone(), group.build(common))
    assert torch.equal(found, wanted)
    (given,) = seen
    assert isinstance(given, tuple) == apart
    if apart:
        assert given[1].data_ptr() == query[..., 16:].data_ptr()
    # What computes a layer in parts, over several ranks, joins and sends the query as a whole.
    layer._in_parts = SimpleNamespace(forward=lambda absorbed, *rest: seen.append(absorbed))
    layer(query, problem.key, problem.value, problem.kv_cache.clone(), group.build(common))
    assert seen[1].shape == (3, layer.heads, layer.rank + layer.rope)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (MLA, {**SMALL}),
        (MLA, {**SMALL, "kv_cache_dtype": "fp8_e4m3"}),
        (MLA, {**SMALL, "kv_cache_dtype": "fp8_e5m2", "per_head_quant_scales": True}),
        (MLA, {**SMALL, "dtype": "float32", "kv_cache_dtype": "float16"}),
        (FP8_DS_MLA, {**DEEPSEEK, "sparse_top_k": 8, "kv_cache_dtype": "fp8_ds_mla"}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_written_as_the_oracle_writes(layout: str, fields: dict[str, Any], seed: int) -> None:
    """Bit for bit, untouched slots included; saturated numbers and a token without a slot are among them."""
    config = AttentionConfig(**fields)
    problem = random_problem(seed, config, layout)
    assert problem.kv_cache is not None
    assert problem.slot_mapping is not None
    problem.slot_mapping[2] = -1
    problem.key[:2] *= 1e4
    scales = Scales.make("cpu", num_kv_heads=1 if config.per_head_quant_scales else 0)
    if problem.k_scale is not None:
        scales = dataclasses.replace(scales, k=problem.k_scale)
    cache = problem.kv_cache.clone()
    ops.concat_and_cache_mla(problem.key, problem.value, cache, problem.slot_mapping, layout, config, scales)
    assert same_bits(cache, problem.written_cache())
