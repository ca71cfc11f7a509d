"""The gate: every reason that speaks against a backend, each with the value seen and the values supported."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select import gate
from attn_select.config import CUDA_GRAPH_LEVELS, PHASES, AttentionConfig, Phase
from attn_select.device import CPU, Device
from attn_select.environment import Environment
from attn_select.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Library,
    Reason,
)

MakeSpec = Callable[..., BackendSpec]
MakeCapabilities = Callable[..., Capabilities]
MakePlan = Callable[..., BackendPlan]

H100 = Device("h100", (9, 0))
T4 = Device("t4", (7, 5))
PLAIN = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
MLA = {"num_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SPARSE = {**MLA, "sparse_top_k": 2048}
ASSUMED = Environment(assume_installed=True)
WIDE_HEADS = {"head_sizes": HeadSizes((576,))}


def check(
    spec: BackendSpec,
    values: dict[str, Any],
    device: Device = H100,
    phase: Phase = "decode",
    environment: Environment = ASSUMED,
) -> BackendPlan | list[Reason]:
    return gate.check(spec, AttentionConfig(**values), device, environment, BackendOptions(), phase)


def reasons(spec: BackendSpec, values: dict[str, Any], device: Device = H100, phase: Phase = "decode") -> list[Reason]:
    outcome = check(spec, values, device, phase)
    return [] if isinstance(outcome, BackendPlan) else outcome


def test_no_reason_means_a_plan(spec: MakeSpec) -> None:
    for phase in PHASES:
        assert isinstance(check(spec(), PLAIN, phase=phase), BackendPlan)


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
    spec: MakeSpec, capabilities: MakeCapabilities, facts: dict[str, Any], values: dict[str, Any]
) -> None:
    both = capabilities(**facts)
    assert reasons(spec(capabilities={"prefill": both, "decode": both}), values, phase="prefill") == []


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


# --- What is accepted and unverified ---

FP4 = "FP4 output was never executed on a GPU, and the conformance suite has no reference for it"


def marks(spec: BackendSpec, values: dict[str, Any], phase: Phase = "decode") -> tuple[str, ...]:
    outcome = check(spec, values, phase=phase)
    assert isinstance(outcome, BackendPlan), outcome
    return outcome.unverified


@pytest.mark.parametrize(
    ("facts", "values", "expected"),
    [
        ({}, PLAIN, ()),
        ({"decode_context_parallel": True}, {**PLAIN, "decode_context_parallel_size": 2}, ()),
        ({"output_quantizations": ("fp8", "fp4")}, {**PLAIN, "output_quantization": "fp4"}, (FP4,)),
        ({"output_quantizations": ("fp8", "fp4")}, {**PLAIN, "output_quantization": "fp8"}, ()),
    ],
)
def test_what_was_never_executed_is_marked_and_accepted(
    spec: MakeSpec,
    capabilities: MakeCapabilities,
    facts: dict[str, Any],
    values: dict[str, Any],
    expected: tuple[str, ...],
) -> None:
    both = capabilities(**facts)
    backend = spec(capabilities={"prefill": both, "decode": both})
    for phase in PHASES:
        assert marks(backend, values, phase) == expected


# A fact, its value, a layer that uses it, a layer that does not (None: every layer does).
UNPROVED: list[tuple[str, Any, dict[str, Any], dict[str, Any] | None]] = [
    ("compute_capabilities", ComputeCapabilities((((8, 0), (9, 9)),)), PLAIN, None),
    ("dtypes", ("bfloat16",), PLAIN, None),
    ("head_sizes", HeadSizes(), PLAIN, None),
    ("attn_types", ("decoder", "encoder"), PLAIN, None),
    ("kv_cache_dtypes", ("bfloat16",), PLAIN, {**PLAIN, "attn_type": "encoder"}),
    ("block_sizes", (16,), PLAIN, {**PLAIN, "attn_type": "encoder"}),
    ("mixed_kv_cache_dtype", True, {**PLAIN, "kv_cache_dtype": "float16"}, PLAIN),
    ("v_head_size_differs", True, {**PLAIN, "v_head_size": 64}, PLAIN),
    ("sliding_window", True, {**PLAIN, "sliding_window": 128}, PLAIN),
    ("sinks", True, {**PLAIN, "sinks": True}, PLAIN),
    ("output_quantizations", ("fp8",), {**PLAIN, "output_quantization": "fp8"}, PLAIN),
    ("speculative_tokens", 8, {**PLAIN, "num_speculative_tokens": 3}, PLAIN),
]


@pytest.mark.parametrize(("fact", "value", "uses", "leaves"), UNPROVED)
def test_a_fact_without_a_source_marks_the_layers_that_use_it(
    spec: MakeSpec,
    capabilities: MakeCapabilities,
    fact: str,
    value: Any,
    uses: dict[str, Any],
    leaves: dict[str, Any] | None,
) -> None:
    both = capabilities(**{"attn_types": ("decoder", "encoder"), fact: value})
    setattr(both, fact, Fact(value, "unverified"))
    backend = spec(capabilities={"prefill": both, "decode": both})
    assert marks(backend, uses, "prefill") == (f"no source proves the capability {fact}",)
    if leaves is not None:
        assert marks(backend, leaves, "prefill") == ()


def test_a_quantised_cache_is_no_mixed_one(spec: MakeSpec, capabilities: MakeCapabilities) -> None:
    both = capabilities(kv_cache_dtypes=("bfloat16", "fp8_e4m3"), mixed_kv_cache_dtype=True)
    both.mixed_kv_cache_dtype = Fact(True, "unverified")
    backend = spec(capabilities={"prefill": both, "decode": both})
    assert marks(backend, {**PLAIN, "kv_cache_dtype": "fp8_e4m3"}) == ()


def test_a_plan_keeps_its_own_marks_in_front(spec: MakeSpec, capabilities: MakeCapabilities, plan: MakePlan) -> None:
    shared = plan(unverified=("never run on this GPU",))
    backend = spec(plan=lambda *_: shared, capabilities={"decode": capabilities(output_quantizations=("fp4",))})
    assert marks(backend, PLAIN) == ("never run on this GPU",)
    assert marks(backend, {**PLAIN, "output_quantization": "fp4"}) == ("never run on this GPU", FP4)
    assert shared.unverified == ("never run on this GPU",)


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


# --- plan() ---


def test_plan_is_asked_even_when_a_capability_speaks_against(spec: MakeSpec) -> None:
    backend = spec(plan=lambda *_: [Reason("special", "no luck", 1, 2)])
    assert [reason.code for reason in reasons(backend, PLAIN)] == ["special"]
    assert [reason.code for reason in reasons(backend, {**PLAIN, "sinks": True})] == ["sinks", "special"]


def test_plan_is_not_asked_about_another_kind_of_attention(spec: MakeSpec, capabilities: MakeCapabilities) -> None:
    asked: list[Phase] = []

    def plan(
        config: AttentionConfig, device: Device, environment: Environment, options: Any, phase: Phase
    ) -> list[Reason]:
        asked.append(phase)
        return [Reason("special", "no luck")]

    backend = spec(plan=plan, capabilities={"decode": capabilities(mla=True, **WIDE_HEADS)})
    assert [reason.code for reason in reasons(backend, PLAIN)] == ["mla-only"]
    assert [reason.code for reason in reasons(backend, SPARSE)] == ["sparse-unsupported"]
    assert [reason.code for reason in reasons(backend, MLA, phase="prefill")] == ["phase-not-served"]
    assert asked == []
    assert [reason.code for reason in reasons(backend, MLA)] == ["special"]
    assert asked == ["decode"]


def test_one_code_is_given_once_as_the_plan_says_it(spec: MakeSpec) -> None:
    """Capabilities hold for every device, the plan knows this one."""
    backend = spec(plan=lambda *_: [Reason("special", "no luck"), Reason("block-size", "of the plan")])
    found = reasons(backend, {**PLAIN, "block_size": 24})
    assert [(reason.code, reason.message) for reason in found] == [
        ("block-size", "of the plan"),
        ("special", "no luck"),
    ]


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


def test_what_the_gate_says_of_the_device_stands(spec: MakeSpec) -> None:
    backend = spec(plan=lambda *_: [Reason("compute-capability", "of the plan")])
    (found,) = reasons(backend, PLAIN, device=T4)
    assert "7.5" in found.message


def test_a_plan_does_not_outweigh_a_reason(spec: MakeSpec) -> None:
    assert [reason.code for reason in reasons(spec(), {**PLAIN, "sinks": True})] == ["sinks"]


def test_plan_gets_what_it_needs(spec: MakeSpec, plan: MakePlan) -> None:
    seen: list[Any] = []
    made = plan()

    def function(*arguments: Any) -> BackendPlan:
        seen.append(arguments)
        return made

    config, options = AttentionConfig(**PLAIN), BackendOptions()
    assert gate.check(spec(plan=function), config, H100, ASSUMED, options, "prefill") is made
    assert seen == [(config, H100, ASSUMED, options, "prefill")]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_(error: BaseException) -> Callable[..., Any]:
    def plan(*_: Any) -> Any:
        raise error

    return plan


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (raise_(ZeroDivisionError("no kernels")), "ZeroDivisionError: no kernels"),
        (raise_(KeyError("a\nb")), "KeyError"),
        (raise_(UnprintableError()), "UnprintableError"),
        (lambda *_: None, "None"),
        (lambda *_: [], "[]"),
        (lambda *_: ["a string"], "a string"),
        (lambda *_: (), "()"),
        (lambda *_: True, "True"),
        (lambda *_: Unprintable(), "Unprintable"),
    ],
)
def test_a_bug_in_plan_is_shown_and_not_hidden(spec: MakeSpec, function: Any, named: str) -> None:
    found = reasons(spec(plan=function), {**PLAIN, "sinks": True})
    assert [reason.code for reason in found] == ["sinks", "plugin-error"]
    assert "PLAIN" in found[1].message
    assert named in found[1].message
    assert found[1].message.isprintable()
    assert [reason.code for reason in reasons(spec(plan=function), PLAIN)] == ["plugin-error"]


@pytest.mark.parametrize(
    "changes",
    [
        {"cuda_graph": "SOMETIMES"},
        {"kernel_block_sizes": ()},
        {"kernel_block_sizes": (16, 0)},
        {"kv_layouts": ("FLASH_ATTN_NHD", "NO_SUCH_LAYOUT")},
        {"unverified": "a string"},
        {"unverified": ["a list"]},
        {"unverified": (3,)},
    ],
)
def test_a_plan_of_the_wrong_shape_is_a_bug_of_the_plugin(
    spec: MakeSpec, plan: MakePlan, changes: dict[str, Any]
) -> None:
    found = reasons(spec(plan=lambda *_: plan(**changes)), PLAIN)
    assert [reason.code for reason in found] == ["plugin-error"]
    assert next(iter(changes)) in found[0].message


def test_a_plan_that_reads_no_cache_needs_no_block_size(spec: MakeSpec, plan: MakePlan) -> None:
    assert reasons(spec(plan=lambda *_: plan(kv_layouts=(), kernel_block_sizes=())), PLAIN) == []


@pytest.mark.parametrize("wanted", CUDA_GRAPH_LEVELS)
@pytest.mark.parametrize("offered", CUDA_GRAPH_LEVELS)
def test_levels_of_cuda_graphs(spec: MakeSpec, plan: MakePlan, wanted: str, offered: str) -> None:
    backend = spec(plan=lambda *_: plan(cuda_graph=offered))
    found = reasons(backend, {**PLAIN, "cuda_graph": wanted})
    if CUDA_GRAPH_LEVELS.index(offered) >= CUDA_GRAPH_LEVELS.index(wanted):
        assert found == []
        return
    (reason,) = found
    assert (reason.code, reason.observed, reason.supported) == ("cuda-graph-level", wanted, offered)
    assert reason.remedy == f"--cuda-graph {offered}"
    assert wanted in reason.message
    assert offered in reason.message


# --- Libraries ---

ONE = Library("one", "attn_select_tests_one", "pip install one", ">=2")
TWO = Library("two", "attn_select_tests_two", "pip install two")


def test_assumed_libraries_are_there(spec: MakeSpec) -> None:
    assert isinstance(check(spec(libraries=[[ONE], [TWO]]), PLAIN), BackendPlan)


def test_missing_libraries(spec: MakeSpec) -> None:
    found = check(spec(libraries=[[ONE, TWO], [TWO]]), {**PLAIN, "sinks": True}, environment=Environment())
    assert isinstance(found, list)
    assert sorted(reason.code for reason in found) == ["library-missing", "library-missing", "sinks"]
    either, two = [reason for reason in found if reason.code == "library-missing"]
    assert either.message == "one is not installed; two is not installed"
    assert either.observed == {"one": "missing", "two": "missing"}
    assert either.supported == ["one>=2", "two"]
    assert either.remedy == "pip install one"
    assert (two.supported, two.remedy) == (["two"], "pip install two")


def test_one_alternative_is_enough(spec: MakeSpec) -> None:
    environment = Environment(pins={"two": "1.0"})
    assert isinstance(check(spec(libraries=[[ONE, TWO]]), PLAIN, environment=environment), BackendPlan)
    assert isinstance(check(spec(libraries=[[ONE]]), PLAIN, environment=environment), list)


def test_a_wrong_version_is_named(spec: MakeSpec) -> None:
    environment = Environment(assume_installed=True, pins={"one": "1.9"})
    found = check(spec(libraries=[[ONE]]), PLAIN, environment=environment)
    assert isinstance(found, list)
    (reason,) = found
    assert (reason.code, reason.observed) == ("library-version", {"one": "wrong-version"})
    assert reason.message == "one 1.9 (needs >=2)"


def test_an_unknown_version_is_not_called_none(spec: MakeSpec) -> None:
    library = Library("no-such-distribution", "pytest", "pip install it", ">=2")  # a module without metadata
    found = check(spec(libraries=[[library]]), PLAIN, environment=Environment())
    assert isinstance(found, list)
    assert found[0].code == "library-version"
    assert "None" not in found[0].message
    assert "unknown version" in found[0].message


def test_metadata_without_a_module_is_said(spec: MakeSpec) -> None:
    library = Library("pytest", "attn_select_tests_no_module", "pip install pytest")
    found = check(spec(libraries=[[library]]), PLAIN, environment=Environment())
    assert isinstance(found, list)
    assert found[0].observed == {"pytest": "broken"}
    assert found[0].message == "pytest is installed but has no module attn_select_tests_no_module"


CHUNKED = {**PLAIN, "attention_chunk_size": 48}


def test_chunks_are_requests_of_their_own(spec: MakeSpec, plan: MakePlan) -> None:
    """The blocks of such a plan divide a chunk, and captured steps hold one token of each request."""
    wide = spec(plan=lambda *_: plan(kernel_block_sizes=(64, 48, 16), notes=("slow",)))
    for size, kept in ((48, (48, 16)), (128, (64, 16))):
        found = check(wide, {**CHUNKED, "attention_chunk_size": size})
        assert isinstance(found, BackendPlan)
        assert (found.kernel_block_sizes, found.cuda_graph) == (kept, "UNIFORM_SINGLE_TOKEN_DECODE")
        assert found.notes[0] == "slow"
        assert "each chunk is a request of its own" in found.notes[1]
    of_32 = check(wide, {**CHUNKED, "block_size": 32})
    assert isinstance(of_32, BackendPlan)
    assert of_32.kernel_block_sizes == (16,)


def test_a_kernel_that_masks_chunks_keeps_its_plan(spec: MakeSpec, plan: MakePlan) -> None:
    masks = plan(masks_chunks=True, kernel_block_sizes=(64,))
    assert check(spec(plan=lambda *_: masks), CHUNKED) is masks


def test_chunks_that_no_block_divides_are_refused(spec: MakeSpec, plan: MakePlan) -> None:
    backend = spec(plan=lambda *_: plan(kernel_block_sizes=(64, 32)))
    (reason,) = reasons(backend, CHUNKED)
    assert (reason.code, reason.observed) == ("attention-chunk-size", 48)
    assert reason.message == (
        "attention inside chunks of 48 (supported: multiples of a block size of the kernel, 64 or 32)"
    )
    assert reasons(backend, {**CHUNKED, "attention_chunk_size": 96}) == []
    (reason,) = reasons(backend, {**CHUNKED, "attention_chunk_size": 64, "cuda_graph": "ALWAYS"})
    assert reason.code == "cuda-graph-level"


def test_chunks_are_not_measured_across_ranks(spec: MakeSpec, capabilities: MakeCapabilities) -> None:
    both = capabilities(decode_context_parallel=True)
    backend = spec(capabilities={"prefill": both, "decode": both})
    (reason,) = reasons(backend, {**CHUNKED, "decode_context_parallel_size": 2})
    assert reason.code == "decode-context-parallel-distance"
    assert reason.message.startswith("chunks of 48 over 2 ranks")


# --- The model: which codes speak against a layer, written down a second time ---

FLAGS = ["sliding_window", "logits_soft_cap", "alibi", "sinks", "mm_prefix", "non_causal", "batch_invariant"]


def expected_codes(facts: dict[str, Any], config: AttentionConfig, device: Device) -> set[str]:
    codes: set[str] = set()
    kind_is_right = False
    if config.mla and not facts["mla"]:
        codes.add("mla-unsupported")
    elif facts["mla"] and not config.mla:
        codes.add("mla-only")
    elif config.sparse and not facts["sparse"]:
        codes.add("sparse-unsupported")
    elif facts["sparse"] and not config.sparse:
        codes.add("sparse-only")
    else:
        kind_is_right = True
    if kind_is_right and config.head_size not in facts["head_sizes"].values:
        codes.add("head-size")
    low, high = facts["compute_capabilities"].ranges[0]
    if device.compute_capability is None or not low <= device.compute_capability <= high:
        codes.add("compute-capability")
    if config.dtype not in facts["dtypes"]:
        codes.add("dtype")
    if config.attn_type not in facts["attn_types"]:
        codes.add("attn-type")
    if config.has_cache and facts["reads_cache"]:
        stored = config.cache_dtype
        if stored == config.dtype:
            wrong = stored in facts["dtypes"] and stored not in facts["kv_cache_dtypes"]
        elif stored in ("bfloat16", "float16", "float32"):
            wrong = stored not in facts["kv_cache_dtypes"] or not facts["mixed_kv_cache_dtype"]
        else:
            wrong = stored not in facts["kv_cache_dtypes"]
        if wrong:
            codes.add("kv-cache-dtype")
        if config.block_size and all(config.block_size % size for size in facts["block_sizes"]):
            codes.add("block-size")
    if config.value_head_size != config.head_size and not facts["v_head_size_differs"]:
        codes.add("v-head-size")
    codes |= {flag.replace("_", "-") for flag in FLAGS if getattr(config, flag) and not facts[flag]}
    if config.output_quantization not in ("none", *facts["output_quantizations"]):
        codes.add("output-quantization")
    if config.decode_context_parallel_size > 1 and not facts["decode_context_parallel"]:
        codes.add("decode-context-parallel")
    if config.decode_context_parallel_size > 1 and (config.sliding_window or config.alibi):
        codes.add("decode-context-parallel-distance")
    if config.decode_context_parallel_size > 1 and config.output_quantization == "fp4":
        codes.add("decode-context-parallel-output")
    if config.num_speculative_tokens > facts["speculative_tokens"]:
        codes.add("speculative-tokens")
    return codes


def some(*values: Any) -> st.SearchStrategy[Any]:
    return st.lists(st.sampled_from(values), min_size=1, unique=True).map(tuple)


FACTS = st.fixed_dictionaries(
    {
        "mla": st.booleans(),
        "sparse": st.booleans(),
        "reads_cache": st.sampled_from([True, True, False]),
        "compute_capabilities": st.sampled_from(
            [ComputeCapabilities((((8, 0), (9, 9)),)), ComputeCapabilities((((9, 0), (99, 9)),))]
        ),
        "dtypes": some("bfloat16", "float16", "float32"),
        "kv_cache_dtypes": some("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"),
        "head_sizes": some(64, 128, 576).map(HeadSizes),
        "block_sizes": some(1, 16, 64),
        "attn_types": some("decoder", "encoder_only", "encoder_decoder"),
        "output_quantizations": some("fp8", "fp4"),
        "speculative_tokens": st.sampled_from([0, 1, 1024]),
        **dict.fromkeys(
            [*FLAGS, "mixed_kv_cache_dtype", "v_head_size_differs", "decode_context_parallel"], st.booleans()
        ),
    }
)
LAYERS = st.builds(
    lambda shape, values: {**shape, **values},
    st.sampled_from([PLAIN, {**PLAIN, "head_size": 64, "v_head_size": 32}, {**PLAIN, "v_head_size": 128}, MLA, SPARSE]),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
            "kv_cache_dtype": st.sampled_from(["auto", "bfloat16", "float16", "fp8", "fp8_e5m2"]),
            "block_size": st.sampled_from([1, 16, 24, 64, 128]),
            "sliding_window": st.just(128),
            "logits_soft_cap": st.just(30.0),
            "output_quantization": st.sampled_from(["none", "fp8", "fp4"]),
            "decode_context_parallel_size": st.sampled_from([1, 2]),
            "num_speculative_tokens": st.sampled_from([0, 1, 3]),
            **dict.fromkeys(["alibi", "sinks", "mm_prefix", "non_causal", "batch_invariant"], st.booleans()),
        },
    ),
)


@given(FACTS, LAYERS, st.sampled_from([H100, T4, CPU, Device("b200", (10, 0))]))
def test_the_gate_agrees_with_the_model(
    spec: MakeSpec, capabilities: MakeCapabilities, facts: dict[str, Any], values: dict[str, Any], device: Device
) -> None:
    config = AttentionConfig(**values)
    found = reasons(spec(capabilities={"decode": capabilities(**facts)}), values, device)
    assert {reason.code for reason in found} == expected_codes(facts, config, device)
    assert len(found) == len({reason.code for reason in found})
    for reason in found:
        assert reason.message.isprintable()
        assert reason.observed is not None
        assert reason.supported is not None


@given(FACTS, LAYERS)
def test_a_remedy_removes_its_reason(
    spec: MakeSpec, capabilities: MakeCapabilities, facts: dict[str, Any], values: dict[str, Any]
) -> None:
    """What a reason tells the user to do makes that reason go away."""
    fields = {"dcp": "decode_context_parallel_size", "speculative_tokens": "num_speculative_tokens"}
    backend = spec(capabilities={"decode": capabilities(**facts)})
    for reason in reasons(backend, values):
        if reason.remedy is None:
            continue
        flag, text = reason.remedy.removeprefix("--").replace("-", "_").split(" ")
        if reason.code == "kv-cache-dtype" and values.get("dtype", "bfloat16") not in facts["dtypes"]:
            continue  # another dtype comes first, and changes what `auto` is
        changed = {**values, fields.get(flag, flag): int(text) if text.isdigit() else text}
        assert reason.code not in {other.code for other in reasons(backend, changed)}
