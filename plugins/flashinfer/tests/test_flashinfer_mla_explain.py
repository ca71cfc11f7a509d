"""What ``attn-select explain`` says of both MLA backends for DeepSeek's layers: the right path, or the right reason."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from attn_select.decide.selector import select
from attn_select.layer.config import AttentionConfig

DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GEN, XQA, FA3, FA2 = "trtllm-gen", "xqa", "fa3", "fa2"

DENSE = [
    ("b200", "auto", 16, GEN, "bfloat16"),
    ("b200", "auto", 128, GEN, "bfloat16"),
    ("b200", "fp8", 16, GEN, "fp8_e4m3"),
    ("b200", "fp8", 128, GEN, "fp8_e4m3"),
    ("h200", "auto", 16, FA3, "bfloat16"),
    ("h200", "auto", 128, FA3, "bfloat16"),
    ("h200", "fp8", 16, FA3, "bfloat16"),
    ("h200", "fp8", 128, FA3, "bfloat16"),
    ("rtx5090", "auto", 16, FA2, "bfloat16"),
    ("rtx5090", "auto", 128, XQA, "bfloat16"),
    ("rtx5090", "fp8", 16, XQA, "fp8_e4m3"),
    ("rtx5090", "fp8", 128, XQA, "fp8_e4m3"),
    ("a100", "auto", 16, FA2, "bfloat16"),
    ("a100", "auto", 128, FA2, "bfloat16"),
]
"""GPU, cache dtype, query heads; kernel, query dtype."""

PREFILL = {"b200": GEN, "h200": FA3, "rtx5090": FA2, "a100": FA2}

SPARSE = [
    ("b200", "auto", "bfloat16", "MLA"),
    ("b200", "fp8", "fp8_e4m3", "MLA"),
    ("rtx5090", "fp8", "bfloat16", "FP8_DS_MLA"),
    ("rtx5090", "fp8_ds_mla", "bfloat16", "FP8_DS_MLA"),
]
"""GPU, cache dtype; query dtype, layout. Both phases, 16 and 128 heads."""

REFUSED = [
    ("a100", "fp8", False, ("fa2 reads no FP8 latent cache", "--kv-cache-dtype auto")),
    ("a100", "auto", True, ("compute capability 8.0 (supported: 9.0, 10.0, 10.3, 12.0, 12.1)", None)),
    ("a100", "fp8", True, ("compute capability 8.0 (supported: 9.0, 10.0, 10.3, 12.0, 12.1)", None)),
    (
        "rtx5090",
        "auto",
        True,
        (
            "KV-cache dtype bfloat16 (supported on compute capability 12.x: fp8_ds_mla, fp8_e4m3)",
            "--kv-cache-dtype fp8_ds_mla",
        ),
    ),
]
"""GPU, cache dtype, sparse; the only reason against decode and its remedy, for 16 and 128 heads."""


def verdicts(gpu: str, cache: str, heads: int, *, sparse: bool = False) -> dict[str, Any]:
    """Return what is said per phase of the backend that serves such layers, with the packaged rules."""
    fields: dict[str, Any] = {"sparse_top_k": 2048} if sparse else {}
    config = AttentionConfig(num_heads=heads, kv_cache_dtype=cache, **DEEPSEEK, **fields)
    name = "FLASHINFER_MLA_SPARSE" if sparse else "FLASHINFER_MLA"
    found = {candidate.backend: candidate.phases for candidate in select(config, gpu).candidates}
    other = "FLASHINFER_MLA" if sparse else "FLASHINFER_MLA_SPARSE"
    assert all(verdict.verdict == "rejected" for verdict in found[other].values())
    return dict(found[name])


@pytest.mark.parametrize(("gpu", "cache", "heads", "kernel", "query"), DENSE)
def test_dense_decode(gpu: str, cache: str, heads: int, kernel: str, query: str) -> None:
    plan = verdicts(gpu, cache, heads)["decode"].plan
    assert (plan.kernel_name, plan.query_dtype) == (kernel, query)
    padded = [note for note in plan.notes if "padded" in note]
    assert padded == (["query heads are padded from 16 to 128"] if (kernel, heads) == (XQA, 16) else [])
    assert any("not made for Blackwell" in note for note in plan.notes) == (kernel == FA2 and gpu == "rtx5090")
    assert any("2.3 times as long" in note for note in plan.notes) == (kernel == FA3 and cache == "fp8")


@pytest.mark.parametrize("gpu", PREFILL)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_dense_prefill(gpu: str, cache: str, heads: int) -> None:
    plan = verdicts(gpu, cache, heads)["prefill"].plan
    assert plan.kernel_name == PREFILL[gpu]
    assert plan.query_dtype == "bfloat16"


@pytest.mark.parametrize(("gpu", "cache", "query", "layout"), SPARSE)
@pytest.mark.parametrize("heads", [16, 128])
def test_sparse(gpu: str, cache: str, query: str, layout: str, heads: int) -> None:
    found = verdicts(gpu, cache, heads, sparse=True)
    for verdict in found.values():
        assert (verdict.plan.query_dtype, verdict.plan.kv_layouts) == (query, (layout,))
    if gpu == "b200" and cache == "fp8":
        assert {verdict.verdict for verdict in found.values()} == {"selected"}


@pytest.mark.parametrize(("gpu", "cache", "sparse", "reason"), REFUSED)
@pytest.mark.parametrize("heads", [16, 128])
def test_refused(gpu: str, cache: str, sparse: bool, reason: tuple[str, str | None], heads: int) -> None:
    verdict = verdicts(gpu, cache, heads, sparse=sparse)["decode"]
    assert verdict.verdict == "rejected"
    assert [(each.message, each.remedy) for each in verdict.reasons] == [reason]


@pytest.mark.parametrize("gpu", ["b200", "b300"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_blackwell_decodes_with_it(gpu: str, cache: str, heads: int) -> None:
    assert verdicts(gpu, cache, heads)["decode"].verdict == "selected"


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ("--mla --num-heads 128 --with flashinfer-python==0.7.2.post1", "FLASHINFER_MLA"),
        ("--num-heads 16 --num-kv-heads 2 --head-size 256 --block-size 16", "FLASHINFER"),
    ],
)
def test_decode_on_blackwell_on_the_command_line(arguments: str, backend: str) -> None:
    """With the release that vLLM 0.33 pins, and with the pages and heads that 0.4.1 computed wrongly."""
    command = [sys.executable, "-m", "attn_select", "explain", "--gpu", "10.0", *arguments.split(), "--json"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert found["layers"][0]["selected"]["decode"] == backend
