"""What ``MLAAttention`` refuses, and the errors that say so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mla_steps import MIXED, SMALL, layer_of, run

from attn_select import AttentionConfig, select
from attn_select.errors import ConfigError, PluginError
from attn_select.layer.config import Phase
from attn_select.layer.layouts import MLA
from attn_select.reference.running import common_of
from attn_select.runtime import (
    AttentionBackend,
    BatchError,
    MLAAttention,
    MLAAttentionGroup,
    MLAAttentionImpl,
)
from attn_select.testing import random_problem, same_bits


@pytest.mark.parametrize(("phases", "missing"), [(("decode",), "prefill"), (("prefill",), None)])
def test_a_phase_that_was_not_loaded(phases: Any, missing: str | None) -> None:
    problem = random_problem(0, AttentionConfig(**SMALL), requests=[(1, 4), (8, 8)])
    group = MLAAttentionGroup(select(problem.config, device="cpu", backend="TORCH_MLA"), phases=phases)
    if missing is None:
        assert [part.phase for part in group.build(common_of(problem)).parts] == ["prefill"]
        return
    with pytest.raises(BatchError, match=rf"requests in {missing}, but this group was made for decode only"):
        group.build(common_of(problem))
    assert group.workspace.numel() == 0  # decode decompresses nothing


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("query", lambda t: t[..., :-1], r"query of shape \(9, 4, 23\): accepted is \(at least 9 tokens, 4, 24\)"),
        ("query", lambda t: t.double(), r"query is torch.float64: accepted is torch.bfloat16"),
        ("kv_c_normed", lambda t: t[:, 1:], r"kv_c_normed of shape \(9, 31\): accepted is \(at least 9 tokens, 32\)"),
        ("kv_cache", lambda t: None, r"kv_cache is None"),
        ("kv_cache", lambda t: t.view(-1, 8, 40), r"kv_cache of shape \(\d+, 8, 40\)"),
        ("output", lambda t: t[..., :8], r"output of shape \(9, 4, 8\): accepted is \(at least 9 tokens, 4, 24\)"),
        (
            "topk_indices",
            lambda t: torch.zeros(9, 4, dtype=torch.int32),
            r"topk_indices given, but sparse_top_k = None",
        ),
        ("output_lse", lambda t: t[:, :2], r"output_lse of shape \(9, 2\): accepted is \(at least 9 tokens, 4\)"),
        ("attn_metadata", lambda t: None, r"layer 'attention.\d+': no attn_metadata was given"),
    ],
)
def test_bad_arguments_are_named(name: str, change: Callable[[Any], Any], says: str) -> None:
    problem = random_problem(0, AttentionConfig(**SMALL), requests=[(1, 4), (8, 8)])
    group = MLAAttentionGroup(select(problem.config, device="cpu", backend="TORCH_MLA"))
    assert problem.kv_cache is not None
    given = {
        "query": problem.query,
        "kv_c_normed": problem.key,
        "k_pe": problem.value,
        "kv_cache": problem.kv_cache.clone(),
        "attn_metadata": group.build(common_of(problem)),
        "output": torch.empty(9, 4, 24, dtype=torch.bfloat16),
        "topk_indices": None,
        "output_lse": torch.empty(9, 4),
    }
    layer, before = layer_of(group, problem), given["kv_cache"].clone()
    with pytest.raises((BatchError, ConfigError), match=says):
        layer(**{**given, name: change(given[name])})
    assert same_bits(given["kv_cache"], before)


def test_a_weight_of_the_wrong_shape() -> None:
    group = MLAAttentionGroup(select(AttentionConfig(**SMALL), device="cpu", backend="TORCH_MLA"))
    with pytest.raises(ConfigError, match=r"kv_b_proj of shape \(32, 160\): accepted is \(160, 32\)"):
        MLAAttention(group, torch.zeros(32, 160))
    with pytest.raises(ConfigError, match="kv_b_proj is a list: accepted is a floating-point tensor"):
        MLAAttention(group, torch.zeros(160, 32).tolist())
    with pytest.raises(ConfigError, match=r"kv_b_proj is torch.int8: accepted is a floating-point tensor"):
        MLAAttention(group, torch.zeros(160, 32, dtype=torch.int8))


@pytest.mark.parametrize(("phase", "path"), [("prefill", "forward_mha"), ("decode", "forward_mqa")])
def test_an_impl_without_the_path_of_a_phase(phase: Phase, path: str) -> None:
    group = MLAAttentionGroup(select(AttentionConfig(**SMALL), device="cpu", backend="TORCH_MLA"), phases=[phase])

    class Pathless(MLAAttentionImpl):
        pass

    group.distinct[0].backend = type("Backend", (AttentionBackend,), {"impl_cls": Pathless})
    with pytest.raises(PluginError, match=f"Pathless has no {path}, but its backend's spec serves {phase}"):
        MLAAttention(group, torch.zeros(160, 32))


def test_metadata_of_another_group_is_refused() -> None:
    problem = random_problem(3, AttentionConfig(**SMALL, dtype="float32"), MLA)
    ran = run(problem, common_of(problem))
    foreign = MLAAttentionGroup(ran.group.selection).build(common_of(problem))
    given = (problem.query, problem.key, problem.value, ran.kv_cache)
    with pytest.raises(BatchError, match="attn_metadata was built by another group than the layer's"):
        ran.layer(*given, foreign)


@pytest.mark.parametrize("silent", ["prefill", "decode"])
def test_a_phase_without_lse(silent: Phase) -> None:
    problem = random_problem(3, AttentionConfig(**SMALL, dtype="float32"), MLA)
    ran = run(problem, common_of(problem))
    context = ran.group.distinct[0].context
    context.plans = {**context.plans, silent: dataclasses.replace(context.plans[silent], returns_lse=False)}
    layer = layer_of(ran.group, problem)
    given = (problem.query, problem.key, problem.value, ran.kv_cache, ran.metadata)
    layer(*given)
    with pytest.raises(BatchError, match="output_lse given, but TORCH_MLA returns no LSE"):
        layer(*given, output_lse=torch.zeros(len(problem.query), 4))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: None, "topk_indices missing, but sparse_top_k = 12"),
        (lambda t: t.long(), "is torch.int64"),
        (lambda t: t[:, :5], r"\(76, 5\)"),
    ],
)
def test_sparse_layers_need_their_indices(change: Callable[[Any], Any], says: str) -> None:
    config = AttentionConfig(**SMALL, sparse_top_k=12, block_size=64)
    problem = random_problem(0, config, requests=MIXED)
    group = MLAAttentionGroup(select(config, device="cpu", backend="TORCH_MLA_SPARSE"))
    layer = layer_of(group, problem)
    given = (problem.query, problem.key, problem.value, problem.kv_cache, group.build(common_of(problem)))
    with pytest.raises(BatchError, match=says):
        layer(*given, topk_indices=change(problem.topk_indices))
