"""FLASHINFER_MLA_CUTE_DSL: what it accepts, and its decodes on emulated kernels of compute capability 10.0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from attn_select import AttentionConfig, ConfigError, select
from attn_select.backends.spec import BackendPlan
from attn_select_flashinfer.facts.mla_kernels import MLAKernel

pytest.importorskip("torch")

import flashinfer_mla_groups as layers
import torch

from attn_select_flashinfer.runtime.mla_trtllm import heads_of

Emulate = Callable[..., Any]
ENTRY = "trtllm_batch_decode_with_kv_cache_mla"
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def on_b200(emulate: Emulate, *, version: str = "0.6.14", **fields: Any) -> tuple[Any, Any]:
    """Return the emulated device and a group of decodes."""
    world = emulate((10, 0), release=version)
    options = {name: fields.pop(name) for name in ("cuda_graphs", "implementation") if name in fields}
    config = layers.mla_config(**fields)
    return world, layers.group_for("b200", config, phases=["decode"], cute_dsl=True, **options)


# --- Plans ----------------------------------------------------------------------------------------------------------


def test_trtllm_gen_comes_first_and_either_can_be_asked_for() -> None:
    config = AttentionConfig(num_heads=128, num_speculative_tokens=7, **DEEPSEEK)
    for workload in (None, "8q8s1m"):
        found = select(config, "b200", workload=workload)
        assert found.selected["decode"] == "FLASHINFER_MLA"
        verdicts = {each.backend: each.phases["decode"] for each in found.candidates if "decode" in each.phases}
        gen, cute = (verdicts[name] for name in ("FLASHINFER_MLA", "FLASHINFER_MLA_CUTE_DSL"))
        assert gen.rank is not None
        assert cute.rank is not None
        assert gen.rank < cute.rank
        assert cute.plan is not None
    for name in ("FLASHINFER_MLA", "FLASHINFER_MLA_CUTE_DSL"):
        assert select(config, "b200", backend={"decode": name}).selected["decode"] == name
    assert select(config, "h100", backend={"decode": "FLASHINFER_MLA_CUTE_DSL"}).selected["decode"] is None


# --- Runs -----------------------------------------------------------------------------------------------------------


def test_one_token_each(emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_heads=20)
    layers.run(group, layers.problem_for(group, [(1, 70), (1, 1), (1, 200)]))
    (call,) = world.named(ENTRY)
    assert (call["backend"], call["cute_dsl_impl"]) == ("cute-dsl", "monolithic")
    assert call["query"].shape == (3, 1, 20, 576)
    assert call["block_tables"].shape[1] % 2 == 0
    assert isinstance(call["bmm1_scale"], float)
    assert call["sinks"] is None
    assert not world.syncs


@pytest.mark.parametrize(
    ("fields", "block_size"),
    [({}, 16), ({"kv_cache_dtype": "fp8"}, 384), ({"kv_cache_dtype": "fp8", "dtype": "float16"}, 64)],
)
def test_drafts_and_dtypes(fields: dict[str, Any], block_size: int, emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_heads=16, num_speculative_tokens=3, block_size=block_size, **fields)
    layers.run(group, layers.problem_for(group, [(4, 70), (4, 4), (4, 129)]))
    (call,) = world.named(ENTRY)
    assert call["query"].shape[:2] == (3, 4)


@pytest.mark.parametrize(("cute_dsl", "heads", "worked"), [(True, 20, 20), (False, 20, 32), (False, 16, 16)])
def test_ranks_that_gather_queries_have_more_heads_than_the_plan(
    cute_dsl: bool, heads: int, worked: int, emulate: Emulate
) -> None:
    def planned_for_a_rank(plan: BackendPlan) -> BackendPlan:
        assert isinstance(plan.kernel, MLAKernel)
        return replace(plan, kernel=replace(plan.kernel, heads=8))

    world = emulate((10, 0))
    for fields in ({}, {"kv_cache_dtype": "fp8"}):
        config = layers.mla_config(num_heads=heads, **fields)
        group = layers.group_for("b200", config, phases=["decode"], cute_dsl=cute_dsl, change=planned_for_a_rank)
        layers.run(group, layers.problem_for(group, [(1, 70), (1, 9)]))
        assert world.named(ENTRY)[-1]["query"].shape[2] == worked


def test_more_gathered_heads_than_the_kernel_takes_are_refused(emulate: Emulate) -> None:
    emulate((10, 0))
    kernel = MLAKernel("trtllm-gen", 128)
    with pytest.raises(
        ConfigError, match="num_heads = 256, gathered from all ranks: FlashInfer's trtllm-gen takes 128"
    ):
        heads_of(kernel, layers.mla_config(num_heads=256))


def test_requests_without_keys(emulate: Emulate) -> None:
    for sinks in (False, True):
        _, group = on_b200(emulate, num_heads=8, num_speculative_tokens=1, sinks=sinks)
        ran = layers.run(group, layers.problem_for(group, [(2, 70), (2, 0), (2, 9)]))
        assert (ran.output[2:4] == 0).all()


def test_with_sinks_drafts_are_rows(emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_speculative_tokens=2, sinks=True)
    layers.run(group, layers.problem_for(group, [(3, 70), (3, 9)]))
    (call,) = world.named(ENTRY)
    assert (call["cute_dsl_impl"], call["return_lse"]) == ("modular", False)
    assert call["seq_lens"].tolist() == [68, 69, 70, 7, 8, 9]
    torch.testing.assert_close(call["sinks"].shape, torch.Size([4]))


def test_unequal_queries_are_rows(emulate: Emulate) -> None:
    world, group = on_b200(emulate, num_speculative_tokens=3)
    layers.run(group, layers.problem_for(group, [(1, 129), (4, 4), (3, 130)]), wants_lse=False)
    (call,) = world.named(ENTRY)
    assert call["cum_seq_lens_q"] is None
    assert call["query"].shape[:2] == (8, 1)
