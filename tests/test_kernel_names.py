"""Every plan's kernel has a stable name: measured times are kept by it, in files that outlive a release."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from attn_select.backends.registry import load_plugins
from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import PHASES, AttentionConfig, Phase
from attn_select.testing import ask, plan_of

MLA = {"num_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GQA = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
LAYERS: tuple[dict[str, Any], ...] = (
    GQA,
    {**GQA, "block_size": 64},
    {**GQA, "kv_cache_dtype": "fp8_e4m3"},
    {**GQA, "sinks": True},
    {**GQA, "logits_soft_cap": 30.0},
    {**GQA, "batch_invariant": True},
    {**GQA, "num_speculative_tokens": 3},
    {**GQA, "attn_type": "encoder_only"},
    MLA,
    {**MLA, "num_heads": 16},
    {**MLA, "kv_cache_dtype": "fp8_e4m3"},
    {**MLA, "batch_invariant": True},
    {**MLA, "sparse_top_k": 2048},
    {**MLA, "sparse_top_k": 2048, "num_heads": 16},
    {**MLA, "sparse_top_k": 2048, "kv_cache_dtype": "fp8_ds_mla"},
)
DEVICES = ("cpu", "a100", "l40s", "h100", "b200", "rtx-pro-6000")

NAMES = {
    "CUDNN_ATTN": {"cudnn"},
    "CUTLASS_MLA": {"cutlass-mla"},
    "FLASHINFER_MLA_CUTE_DSL": {"cute-dsl"},
    "FLASHINFER": {"native-fa2", "native-fa3", "trtllm-gen", "xqa"},
    "FLASHINFER_MLA": {"fa2", "fa3", "trtllm-gen", "xqa"},
    "FLASHINFER_MLA_SPARSE": {"fa3", "sparse", "trtllm-gen"},
    "FLASHMLA": {"dense", "dense-fp8"},
    "FLASHMLA_SPARSE": {"sparse-decode", "sparse-prefill"},
    "FLASH_ATTN": {"fa2", "fa2-varlen", "fa3", "fa3-varlen", "fa4", "fa4-varlen"},
    "FLASH_ATTN_MLA": {"fa2-varlen", "fa3", "fa3-varlen", "fa4-varlen"},
    "FLASH_ATTN_MLA_SPARSE": {"fa3", "fa4-gather"},
    "FLEX_ATTENTION": {"flex-cpp", "flex-triton"},
    "PAGED_ATTENTION": {"paged-attention", "triton-prefill"},
    "TORCH_MLA": {"torch-latent", "torch-multi-head"},
    "TORCH_MLA_SPARSE": {"torch-sparse-latent"},
    "TORCH_SDPA": {"torch-cudnn", "torch-matmul", "torch-sdpa", "torch-varlen"},
    "TRITON_ATTN": {
        "triton-decode",
        "triton-decode-fixed-splits",
        "triton-prefill",
        "triton-prefill-gather",
        "triton-prefill-tma",
        "triton-prefill-warp-specialised-gather",
        "triton-prefill-warp-specialised-tma",
    },
    "TRITON_MLA": {
        "gluon-mla-decode",
        "gluon-mla-decode-fixed-splits",
        "gluon-mla-decode-fp8",
        "triton-mla-decode",
        "triton-mla-decode-fixed-splits",
        "triton-prefill",
        "triton-prefill-warp-specialised",
    },
    "TRITON_MLA_SPARSE": {"gluon-mla-sparse", "triton-mla-sparse"},
}
"""Of the default options. Names are added; a name is changed only together with the kernel that it stands for."""


def test_every_plan_has_a_kernel_with_a_stable_name() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for spec, layer, device in product(load_plugins().specs.values(), LAYERS, DEVICES):
        config = AttentionConfig(**layer)
        for phase in PHASES:
            if phase not in config.phases or phase not in spec.capabilities:
                continue
            outcome = ask(spec, config, device, phase=phase)
            if isinstance(outcome, BackendPlan):
                name = outcome.kernel_name
                assert name is not None, f"{spec.name}: the kernel of {outcome.path} has no name: {outcome.kernel!r}"
                assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name), f"{spec.name}: {name!r}"
                found[spec.name].add(name)
    assert dict(found) == NAMES


@pytest.mark.parametrize(
    ("backend", "layer", "device", "phase", "options", "name"),
    [
        ("CUTLASS_MLA", MLA, "b200", "decode", {"num_kv_splits": 4}, "cutlass-mla-4-splits"),
        ("FLASHINFER_MLA", MLA, "b200", "prefill", {"prefill_kernel": "cutlass"}, "cutlass"),
        ("TRITON_ATTN", GQA, "h100", "prefill", {"gather_workspace_mib": 0}, "triton-prefill-warp-specialised"),
    ],
)
def test_an_option_that_changes_the_kernel_changes_its_name(
    backend: str, layer: dict[str, Any], device: str, phase: Phase, options: dict[str, Any], name: str
) -> None:
    plan = plan_of(load_plugins().specs[backend], AttentionConfig(**layer), device, phase, options=options)
    assert plan.kernel_name == name


def test_a_kernel_without_a_name_has_none() -> None:
    plan = plan_of(load_plugins().specs["FLASH_ATTN"], AttentionConfig(**GQA))
    assert replace(plan, kernel=None).kernel_name is None
