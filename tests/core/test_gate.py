"""What speaks against a backend by its capabilities: every reason, with the value seen and the values supported."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gate_cases import H100, MLA, PLAIN, SPARSE, T4, WIDE_HEADS, MakeCapabilities, MakePlan, MakeSpec, marks, reasons

from attn_select.backends.spec import ComputeCapabilities, HeadSizes
from attn_select.layer.config import PHASES
from attn_select.machine.device import CPU, Device

# One row per question: what the spec says, what the layer asks, the code, observed, supported, remedy.
ROWS: list[tuple[dict[str, Any], dict[str, Any], str, Any, Any, str | None]] = [
    ({}, MLA, "mla-unsupported", "MLA", "MHA, GQA, MQA", None),
    ({}, SPARSE, "mla-unsupported", "MLA", "MHA, GQA, MQA", None),
    ({"mla": True}, PLAIN, "mla-only", "no MLA dims", "MLA", None),
    ({"mla": True, **WIDE_HEADS}, SPARSE, "sparse-unsupported", "sparse_top_k 2048", "dense MLA", None),
    ({"mla": True, "sparse": True, **WIDE_HEADS}, MLA, "sparse-only", "dense MLA", "sparse MLA (sparse_top_k)", None),
    ({}, {**PLAIN, "head_size": 80 + 4}, "head-size", 84, "multiples of 8 from 1 to 256", None),
    ({}, {**PLAIN, "head_size": 512}, "head-size", 512, "multiples of 8 from 1 to 256", None),
    ({"head_sizes": HeadSizes((64, 128))}, {**PLAIN, "head_size": 96}, "head-size", 96, "64, 128", None),
    ({"head_sizes": HeadSizes(minimum=64)}, {**PLAIN, "head_size": 56}, "head-size", 56, "from 64", None),
    ({"mla": True}, MLA, "head-size", 576, "multiples of 8 from 1 to 256", None),
    ({}, {**PLAIN, "dtype": "float32"}, "dtype", "float32", ["bfloat16", "float16"], "--dtype bfloat16"),
    ({}, {**PLAIN, "attn_type": "encoder_only"}, "attn-type", "encoder_only", ["decoder"], None),
    ({}, {**PLAIN, "v_head_size": 64}, "v-head-size", 64, 128, None),
    ({}, {**PLAIN, "sliding_window": 128}, "sliding-window", 128, False, None),
    ({}, {**PLAIN, "logits_soft_cap": 30.0}, "logits-soft-cap", 30.0, False, None),
    ({}, {**PLAIN, "alibi": True}, "alibi", True, False, None),
    ({}, {**PLAIN, "sinks": True}, "sinks", True, False, None),
    ({}, {**PLAIN, "mm_prefix": True}, "mm-prefix", True, False, None),
    ({}, {**PLAIN, "non_causal": True}, "non-causal", True, False, None),
    ({}, {**PLAIN, "batch_invariant": True}, "batch-invariant", True, False, None),
    (
        {"kv_cache_dtypes": ("bfloat16", "fp8_e4m3")},
        {**PLAIN, "kv_cache_dtype": "fp8", "per_head_quant_scales": True},
        "per-head-quant-scales",
        True,
        False,
        None,
    ),
    (
        {"output_quantizations": ("fp8",)},
        {**PLAIN, "output_quantization": "fp4"},
        "output-quantization",
        "fp4",
        ["none", "fp8"],
        "--output-quantization none",
    ),
    ({}, {**PLAIN, "decode_context_parallel_size": 4}, "decode-context-parallel", 4, 1, "--dcp 1"),
    (
        {"speculative_tokens": 1},
        {**PLAIN, "num_speculative_tokens": 3},
        "speculative-tokens",
        3,
        "at most 1",
        "--speculative-tokens 1",
    ),
    ({}, {**PLAIN, "block_size": 24}, "block-size", 24, "multiples of 16", "--block-size 32"),
    (
        {"block_sizes": (64, 48)},
        {**PLAIN, "block_size": 16},
        "block-size",
        16,
        "multiples of 64 or 48",
        "--block-size 48",
    ),
    (
        {},
        {**PLAIN, "kv_cache_dtype": "fp8"},
        "kv-cache-dtype",
        "fp8_e4m3",
        ["auto", "bfloat16"],
        "--kv-cache-dtype auto",
    ),
    (
        {},
        {**PLAIN, "kv_cache_dtype": "float16"},
        "kv-cache-dtype",
        "float16",
        ["auto", "bfloat16"],
        "--kv-cache-dtype auto",
    ),
    (
        {"kv_cache_dtypes": ("fp8_ds_mla",), "mla": True, "sparse": True, **WIDE_HEADS},
        SPARSE,
        "kv-cache-dtype",
        "bfloat16",
        ["fp8_ds_mla"],
        "--kv-cache-dtype fp8_ds_mla",
    ),
    (
        {"kv_cache_dtypes": ("fp8_ds_mla",), "mla": True, "sparse": True, **WIDE_HEADS},
        {**SPARSE, "kv_cache_dtype": "fp8"},
        "kv-cache-dtype",
        "fp8_e4m3",
        ["fp8_ds_mla"],
        "--kv-cache-dtype fp8_ds_mla",
    ),
    (
        {"kv_cache_dtypes": ("bfloat16", "float16"), "mixed_kv_cache_dtype": True},
        {**PLAIN, "kv_cache_dtype": "fp8"},
        "kv-cache-dtype",
        "fp8_e4m3",
        ["auto", "bfloat16", "float16"],
        "--kv-cache-dtype auto",
    ),
]


@pytest.mark.parametrize(("facts", "values", "code", "observed", "supported", "remedy"), ROWS)
def test_one_reason(
    spec: MakeSpec,
    capabilities: MakeCapabilities,
    facts: dict[str, Any],
    values: dict[str, Any],
    code: str,
    observed: Any,
    supported: Any,
    remedy: str | None,
) -> None:
    (reason,) = reasons(spec(capabilities={"decode": capabilities(**facts)}), values)
    assert (reason.code, reason.observed, reason.supported, reason.remedy) == (code, observed, supported, remedy)
    for value in (observed, supported):
        for part in value if isinstance(value, list) else [value]:
            assert isinstance(part, bool) or str(part) in reason.message or "mla" in code or "sparse" in code


# The same question answered with yes: what the spec must say for the layer to pass.
ACCEPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"mla": True, **WIDE_HEADS}, MLA),
    ({"mla": True, "sparse": True, **WIDE_HEADS}, SPARSE),
    ({"head_sizes": HeadSizes((96,))}, {**PLAIN, "head_size": 96}),
    ({"head_sizes": HeadSizes(minimum=80, maximum=96, multiple_of=8)}, {**PLAIN, "head_size": 88}),
    ({"dtypes": ("float32",), "kv_cache_dtypes": ("float32",)}, {**PLAIN, "dtype": "float32"}),
    ({"attn_types": ("decoder", "encoder_only")}, {**PLAIN, "attn_type": "encoder_only"}),
    ({"v_head_size_differs": True}, {**PLAIN, "v_head_size": 64}),
    ({}, {**PLAIN, "v_head_size": 128}),
    ({"sliding_window": True}, {**PLAIN, "sliding_window": 128}),
    ({"logits_soft_cap": True}, {**PLAIN, "logits_soft_cap": 30.0}),
    ({"alibi": True}, {**PLAIN, "alibi": True}),
    ({"sinks": True}, {**PLAIN, "sinks": True}),
    ({"mm_prefix": True}, {**PLAIN, "mm_prefix": True}),
    ({"non_causal": True}, {**PLAIN, "non_causal": True}),
    ({"batch_invariant": True}, {**PLAIN, "batch_invariant": True}),
    ({"output_quantizations": ("fp8", "fp4")}, {**PLAIN, "output_quantization": "fp4"}),
    ({"decode_context_parallel": True}, {**PLAIN, "decode_context_parallel_size": 4}),
    ({"speculative_tokens": 3}, {**PLAIN, "num_speculative_tokens": 3}),
    ({}, {**PLAIN, "block_size": 48}),
    ({"block_sizes": (64, 48)}, {**PLAIN, "block_size": 96}),
    ({"block_sizes": (1,)}, {**PLAIN, "block_size": 7}),
    ({"kv_cache_dtypes": ("fp8_e4m3",)}, {**PLAIN, "kv_cache_dtype": "fp8"}),
    ({"mixed_kv_cache_dtype": True}, {**PLAIN, "kv_cache_dtype": "float16"}),
    ({}, {**PLAIN, "kv_cache_dtype": "bfloat16"}),
    # Without a cache, or where none is read, its dtype and block size bind nobody.
    ({"attn_types": ("encoder",), "kv_cache_dtypes": ()}, {**PLAIN, "attn_type": "encoder", "block_size": 7}),
    ({"reads_cache": False, "block_sizes": ()}, {**PLAIN, "kv_cache_dtype": "fp8", "block_size": 7}),
]


@pytest.mark.parametrize(("facts", "values"), ACCEPTED)
def test_no_reason(
    spec: MakeSpec, capabilities: MakeCapabilities, plan: MakePlan, facts: dict[str, Any], values: dict[str, Any]
) -> None:
    both = capabilities(**facts)
    own = plan(kernel_block_sizes=both.block_sizes.value or (16,))
    asked = spec(capabilities={"prefill": both, "decode": both}, plan=lambda *_: own)
    assert reasons(asked, values, phase="prefill") == []


@pytest.mark.parametrize(
    ("accepted", "device", "supported"),
    [
        (ComputeCapabilities((((8, 0), (9, 9)),)), T4, "8.0 to 9.x"),
        (ComputeCapabilities((((9, 0), (9, 9)),)), Device("b200", (10, 0)), "9.x"),
        (ComputeCapabilities((((8, 0), (99, 9)),)), T4, "8.0 and up"),
        (ComputeCapabilities((((9, 0), (9, 0)), ((12, 0), (12, 1)))), T4, "9.0, 12.0 to 12.1"),
        (ComputeCapabilities((((8, 0), (8, 9)),)), CPU, "8.x"),
        (ComputeCapabilities(cpu=True), H100, "CPU"),
    ],
)
def test_devices_that_are_not_served(
    spec: MakeSpec, capabilities: MakeCapabilities, accepted: ComputeCapabilities, device: Device, supported: str
) -> None:
    backend = spec(capabilities={"decode": capabilities(compute_capabilities=accepted)})
    (reason,) = reasons(backend, PLAIN, device)
    assert reason.code == "compute-capability"
    assert (reason.observed, reason.supported) == (device.capability_text, supported)
    assert reason.observed in reason.message
    assert supported in reason.message


def test_devices_that_are_served(spec: MakeSpec, capabilities: MakeCapabilities) -> None:
    wide = ComputeCapabilities((((8, 0), (9, 9)), ((12, 0), (99, 9))), cpu=True)
    backend = spec(capabilities={"decode": capabilities(compute_capabilities=wide)})
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0), (13, 1)):
        assert reasons(backend, PLAIN, Device("x", capability)) == []
    assert reasons(backend, PLAIN, CPU) == []
    assert [r.code for r in reasons(backend, PLAIN, Device("x", (10, 0)))] == ["compute-capability"]


def test_every_reason_is_returned(spec: MakeSpec) -> None:
    values = {
        **{**PLAIN, "head_size": 84, "dtype": "float32", "kv_cache_dtype": "fp8", "block_size": 24, "v_head_size": 64},
        **{"sliding_window": 1, "logits_soft_cap": 1.0, "alibi": True, "sinks": True, "mm_prefix": True},
        **{"non_causal": True, "batch_invariant": True, "per_head_quant_scales": True, "output_quantization": "fp8"},
        **{"decode_context_parallel_size": 2},
    }
    found = [reason.code for reason in reasons(spec(), values, T4)]
    assert len(found) == len(set(found)) >= 16
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in found)


def test_a_phase_that_is_not_served(spec: MakeSpec, capabilities: MakeCapabilities) -> None:
    backend = spec(capabilities={"decode": capabilities()})
    (reason,) = reasons(backend, PLAIN, phase="prefill")
    assert (reason.code, reason.observed, reason.supported) == ("phase-not-served", "prefill", ["decode"])
    assert "decode" in reason.message
    assert reasons(backend, PLAIN) == []


def test_fp4_outputs_are_not_merged_across_ranks(spec: MakeSpec, capabilities: MakeCapabilities) -> None:
    both = capabilities(output_quantizations=("fp8", "fp4"), decode_context_parallel=True)
    backend = spec(capabilities={"decode": both})
    asked = {**PLAIN, "output_quantization": "fp4", "decode_context_parallel_size": 2}
    (reason,) = reasons(backend, asked)
    assert (reason.code, reason.observed, reason.remedy) == ("decode-context-parallel-output", "fp4", "--dcp 1")
    assert marks(backend, {**asked, "output_quantization": "fp8"}) == ()


def test_trees_of_drafts_of_mla_layers_are_for_one_rank(spec: MakeSpec, capabilities: MakeCapabilities) -> None:
    tree = {"num_speculative_tokens": 3, "draft_tree": True, "decode_context_parallel_size": 2}
    facts = {"draft_tree": True, "decode_context_parallel": True, **WIDE_HEADS}
    (reason,) = reasons(spec(capabilities={"decode": capabilities(mla=True, **facts)}), {**MLA, **tree})
    assert (reason.code, reason.observed, reason.remedy) == ("decode-context-parallel-draft-tree", True, "--dcp 1")
    assert reasons(spec(capabilities={"decode": capabilities(**facts)}), {**PLAIN, "head_size": 576, **tree}) == []


@pytest.mark.parametrize("values", [PLAIN, MLA])
@pytest.mark.parametrize("listed", [("bfloat16", "fp8_e4m3", "nvfp4"), ("bfloat16", "fp8_e4m3")])
def test_an_nvfp4_cache_is_refused_whatever_the_backend_lists(
    spec: MakeSpec, capabilities: MakeCapabilities, values: dict[str, Any], listed: tuple[str, ...]
) -> None:
    both = capabilities(kv_cache_dtypes=listed, mla=values is MLA, head_sizes=HeadSizes())
    backend = spec(capabilities={"prefill": both, "decode": both})
    for phase in PHASES:
        (reason,) = reasons(backend, {**values, "kv_cache_dtype": "nvfp4"}, phase=phase)
        assert (reason.code, reason.observed) == ("kv-cache-dtype", "nvfp4")
        assert (reason.supported, reason.remedy) == (["auto", "bfloat16", "fp8_e4m3"], "--kv-cache-dtype auto")
        assert "attn_select.runtime cannot allocate a KV cache of dtype nvfp4" in reason.message


def test_an_nvfp4_cache_is_refused_in_a_phase_that_does_not_read_it(
    spec: MakeSpec, capabilities: MakeCapabilities
) -> None:
    prefill = capabilities(reads_cache=False, mla=True, kv_cache_dtypes=("bfloat16",), head_sizes=HeadSizes())
    backend = spec(capabilities={"prefill": prefill})
    (reason,) = reasons(backend, {**MLA, "kv_cache_dtype": "nvfp4"}, phase="prefill")
    assert (reason.code, reason.observed, reason.remedy) == ("kv-cache-dtype", "nvfp4", "--kv-cache-dtype auto")
    assert reason.supported == ["auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"]
    for stored in reason.supported:
        assert reasons(backend, {**MLA, "kv_cache_dtype": stored}, phase="prefill") == []


@pytest.mark.parametrize(
    ("device", "supported"), [(H100, ["auto", "bfloat16", "fp8_e4m3"]), (T4, ["auto", "bfloat16"])]
)
def test_quantised_caches_are_offered_on_devices_that_read_them(
    spec: MakeSpec, capabilities: MakeCapabilities, device: Device, supported: list[str]
) -> None:
    served = capabilities(
        kv_cache_dtypes=("bfloat16", "fp8_e4m3"),
        quantized_kv_cache_on=ComputeCapabilities((((8, 9), (9, 9)),)),
        compute_capabilities=ComputeCapabilities((((7, 0), (99, 9)),)),
    )
    backend = spec(capabilities={"decode": served})
    (found,) = reasons(backend, {**PLAIN, "kv_cache_dtype": "fp8_e5m2"}, device=device)
    assert (found.code, found.supported) == ("kv-cache-dtype", supported)
