"""FLASHINFER_MLA_SPARSE through the gate: fa3 on 9.0, trtllm-gen on 10.x, FlashInfer's own kernel on 12.x."""

from __future__ import annotations

from typing import Any

import pytest
from flashinfer_gate import Gate
from pydantic import ValidationError

from attn_select.layer.layouts import FP8_DS_MLA, MLA
from attn_select.machine.device import CPU, lookup
from attn_select.testing import mla_layer
from attn_select_flashinfer.facts.mla_sparse import FLASHINFER_MLA_SPARSE

DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
PHASES: tuple[Any, ...] = ("prefill", "decode")
ON_12 = {"kv_cache_dtype": "fp8_ds_mla"}


GATE = Gate(FLASHINFER_MLA_SPARSE, mla_layer, sparse_top_k=2048)
plan_of = GATE.plan_of
reasons_of = GATE.reasons_of


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("gpu", ["sm100", "sm103"])
@pytest.mark.parametrize(("cache", "query"), [("auto", "bfloat16"), ("bfloat16", "bfloat16"), ("fp8", "fp8_e4m3")])
def test_on_10(gpu: str, phase: str, cache: str, query: str) -> None:
    plan = plan_of(gpu, phase, kv_cache_dtype=cache)
    assert (plan.kernel_name, plan.kv_layouts) == ("trtllm-gen", (MLA,))
    assert (plan.query_dtype, plan.kernel_block_sizes) == (query, (64, 32))
    assert (plan.returns_lse, plan.cuda_graph) == (True, "UNIFORM_BATCH")
    assert any("at most 8192 query tokens" in note for note in plan.notes)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("gpu", ["sm120", "sm121"])
def test_on_12(gpu: str, phase: str) -> None:
    plan = plan_of(gpu, phase, **ON_12)
    assert (plan.kernel_name, plan.kv_layouts) == ("sparse", (FP8_DS_MLA,))
    assert (plan.query_dtype, plan.kernel_block_sizes) == ("bfloat16", (64,))
    assert not any("8192" in note for note in plan.notes)


@pytest.mark.parametrize("phase", PHASES)
def test_on_9(phase: str) -> None:
    for fields in ({}, {"dtype": "float16"}, {"kv_cache_dtype": "fp8"}, {"num_heads": 20}):
        plan = plan_of("sm90", phase, **fields)
        assert (plan.kernel_name, plan.kv_layouts) == ("fa3", (MLA,))
        assert plan.query_dtype == fields.get("dtype", "bfloat16")
        assert (plan.workspace_bytes, plan.nan_tail_safe) == (128 << 20, True)
        assert plan.unverified
        assert not any("padded" in note for note in plan.notes)
    assert "dtype" in reasons_of("sm90", phase, kv_cache_dtype="fp8", dtype="float16")
    assert "sinks" in reasons_of("sm90", phase, sinks=True)
    assert "kv-cache-dtype" in reasons_of("sm90", phase, **ON_12)
    assert "library-version" in reasons_of("sm90", phase, version="0.7.1")


@pytest.mark.parametrize("phase", PHASES)
def test_latents_without_a_rope_part(phase: str) -> None:
    without = {"qk_rope_head_dim": 0}
    refused = reasons_of("sm90", phase, version="0.6.14", **without)
    assert refused["mla-dims"].remedy == "pip install 'flashinfer-python>=0.6.18'"
    for cache in ("auto", "fp8"):
        assert plan_of("sm90", phase, version="0.7.2.post1", kv_cache_dtype=cache, **without)
    for gpu in ("sm100", "sm120"):
        assert "mla-dims" in reasons_of(gpu, phase, version="0.7.2.post1", **without)


@pytest.mark.parametrize("phase", PHASES)
def test_caches_by_device(phase: str) -> None:
    on_12 = reasons_of("sm120", phase)["kv-cache-dtype"]
    assert (on_12.observed, on_12.remedy) == ("bfloat16", "--kv-cache-dtype fp8_ds_mla")
    alias = plan_of("sm120", phase, kv_cache_dtype="fp8")
    assert (alias.kv_layouts, alias.query_dtype) == (("FP8_DS_MLA",), "bfloat16")
    assert any("stored as fp8_ds_mla" in note for note in alias.notes)
    assert any("converted" in n for n in plan_of("sm100", phase, kv_cache_dtype="fp8", dtype="float16").notes)
    for gpu, fields in (("sm100", {}), ("sm120", ON_12)):
        assert "dtype" in reasons_of(gpu, phase, dtype="float16", **fields)
    on_10 = reasons_of("sm100", phase, **ON_12)["kv-cache-dtype"]
    assert (on_10.observed, on_10.remedy) == ("fp8_ds_mla", "--kv-cache-dtype auto")
    for gpu in ("sm100", "sm120"):
        for cache in ("fp8_e5m2", "nvfp4"):
            assert "kv-cache-dtype" in reasons_of(gpu, phase, kv_cache_dtype=cache)


def test_top_k() -> None:
    for top_k in (64, 512, 1024, 4096):
        refused = reasons_of("sm120", version="0.6.18", sparse_top_k=top_k, **ON_12)
        assert list(refused) == ["sparse-top-k"]
        assert refused["sparse-top-k"].observed == top_k
        assert refused["sparse-top-k"].remedy == "pip install 'flashinfer-python>=0.7.0'"
        assert plan_of("sm120", version="0.7.0", sparse_top_k=top_k, **ON_12)
        assert plan_of("sm100", sparse_top_k=top_k)
    assert plan_of("sm120", version="0.6.14", sparse_top_k=2048, **ON_12)
    for version, top_k, remedy in (("0.7.2.post1", 100, "128"), ("0.6.14", 100, "2048")):
        refused = reasons_of("sm120", version=version, sparse_top_k=top_k, **ON_12)
        assert refused["sparse-top-k"].remedy == f"--sparse-top-k {remedy}"
    assert list(reasons_of("sm120", sparse_top_k=None)) == ["sparse-only"]


@pytest.mark.parametrize(
    ("gpu", "size", "sizes"),
    [
        ("sm100", 32, (32,)),
        ("sm100", 64, (64, 32)),
        ("sm100", 96, (32,)),
        ("sm100", 16, None),
        ("sm120", 64, (64,)),
        ("sm120", 128, (64,)),
        ("sm120", 32, None),
    ],
)
def test_pages(gpu: str, size: int, sizes: tuple[int, ...] | None) -> None:
    fields = {"block_size": size, **(ON_12 if gpu == "sm120" else {})}
    if sizes is not None:
        assert plan_of(gpu, **fields).kernel_block_sizes == sizes
        return
    refused = reasons_of(gpu, **fields)
    assert list(refused) == ["block-size"]
    assert refused["block-size"].remedy == f"--block-size {32 if gpu == 'sm100' else 64}"


@pytest.mark.parametrize(
    ("heads", "padded"), [(128, None), (64, None), (8, None), (5, 8), (20, 32), (96, 128), (129, -1)]
)
def test_heads(heads: int, padded: int | None) -> None:
    for gpu, fields in (("sm100", {}), ("sm120", ON_12)):
        if padded == -1:
            assert list(reasons_of(gpu, num_heads=heads, **fields)) == ["num-heads"]
            continue
        notes = [note for note in plan_of(gpu, num_heads=heads, **fields).notes if "padded" in note]
        assert notes == ([] if padded is None else [f"query heads are padded from {heads} to {padded}"])


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("gpu", ["sm100", "sm120"])
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"qk_rope_head_dim": 32}, "mla-dims"),
        ({"kv_lora_rank": 448, "qk_rope_head_dim": 128}, "mla-dims"),
        ({"kv_lora_rank": 256}, "head-size"),
        ({"sliding_window": 64}, "sliding-window"),
        ({"logits_soft_cap": 5.0}, "logits-soft-cap"),
        ({"alibi": True}, "alibi"),
        ({"mm_prefix": True}, "mm-prefix"),
        ({"batch_invariant": True}, "batch-invariant"),
        ({"output_quantization": "fp8"}, "output-quantization"),
    ],
)
def test_refused(gpu: str, phase: str, fields: dict[str, Any], code: str) -> None:
    cache = ON_12 if gpu == "sm120" else {}
    assert code in reasons_of(gpu, phase, **cache, **fields)
    assert plan_of(gpu, phase, **cache)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("gpu", "fields"), [("sm100", {}), ("sm120", ON_12)])
def test_taken(gpu: str, phase: str, fields: dict[str, Any]) -> None:
    assert plan_of(gpu, phase, sinks=True, num_speculative_tokens=3, cuda_graph="UNIFORM_BATCH", **fields)
    plan = plan_of(gpu, phase, decode_context_parallel_size=2, **fields)
    assert any("log-sum-exp" in note for note in plan.notes) is (gpu == "sm100")


@pytest.mark.parametrize("phase", PHASES)
def test_other_devices(phase: str) -> None:
    for device in (CPU, *map(lookup, ("sm75", "sm80", "sm110"))):
        assert "compute-capability" in reasons_of(device, phase)


def test_workspace() -> None:
    assert plan_of("sm100").workspace_bytes == 394 << 20
    assert plan_of("sm100", options={"workspace_bytes": 64 << 20}).workspace_bytes == 64 << 20
    with pytest.raises(ValidationError):
        FLASHINFER_MLA_SPARSE.options(workspace_bytes="64 MiB")


def test_nan_in_slots_that_nobody_chose() -> None:
    assert plan_of("sm100").nan_tail_safe
    on_12 = plan_of("sm120", **ON_12)
    assert not on_12.nan_tail_safe
    assert any("null_block=True" in note for note in on_12.notes)
