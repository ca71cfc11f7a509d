"""FLASHINFER through the gate: what it takes, on which of its kernels, and why."""

from __future__ import annotations

from typing import Any

import pytest
from flashinfer_gate import Gate

from attn_select.backends.reasons import library_reasons
from attn_select.backends.spec import BackendSpec, Fact
from attn_select.backends.spec_check import problems_of
from attn_select.layer.layouts import FLASHINFER_HND, FLASHINFER_NHD
from attn_select.machine.environment import Environment
from attn_select.testing import check_sources, gqa_layer, mla_layer, toolkit
from attn_select_flashinfer.facts import libraries, mha_kernels, mla_kernels
from attn_select_flashinfer.plugin import attn_select_register_backends

SPECS = {spec.name: spec for spec in attn_select_register_backends()}
FLASHINFER = SPECS["FLASHINFER"]
MIB = 1 << 20
GPUS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")
GEN = "trtllm-gen"
XQA = "xqa"


GATE = Gate(FLASHINFER, gqa_layer)
plan_of = GATE.plan_of
reasons_of = GATE.reasons_of


# --- Registration ---------------------------------------------------------------------------------


def test_registers_its_backends() -> None:
    of_mla = ["FLASHINFER_MLA", "FLASHINFER_MLA_CUTE_DSL", "FLASHINFER_MLA_SPARSE"]
    of_states = ["FLASHINFER_GDN", "FLASHINFER_KDA", "FLASHINFER_MAMBA"]
    assert list(SPECS) == ["FLASHINFER", *of_mla, *of_states]
    assert [problem for spec in SPECS.values() for problem in problems_of(spec)] == []


def test_every_fact_has_a_source() -> None:
    for name, holders in {
        "FLASHINFER": [],
        "FLASHINFER_MLA": [*mla_kernels.KERNELS.values(), *mla_kernels.PREFILL_KERNELS.values()],
        "FLASHINFER_MLA_SPARSE": [],
    }.items():
        check_sources(SPECS[name], *holders, least=30)
    found = [value for value in (*vars(libraries).values(), *vars(mla_kernels).values()) if isinstance(value, Fact)]
    assert len(found) > 5
    assert all(len(fact.source) >= 10 for fact in found)
    conditions = (*mha_kernels.OBSTACLES, *mha_kernels.PREFERENCES)
    assert all(condition.source for condition in conditions)
    assert len({condition.name for condition in conditions}) == len(conditions)


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_an_older_release_is_refused(spec: BackendSpec) -> None:
    reasons = library_reasons(spec, Environment(assume_installed=True, pins={"flashinfer-python": "0.6.13"}))
    assert [reason.code for reason in reasons] == ["library-version"]
    remedy = "pip install --upgrade flashinfer-python"
    assert reasons[0].remedy == remedy
    for version in ("0.6.14", "0.6.18.post1", "0.7.0", "0.7.2.post1"):
        environment = Environment(assume_installed=True, pins={"flashinfer-python": version})
        assert not library_reasons(spec, environment)


@pytest.mark.parametrize("text", ["0.6.14", "0.6.15rc1", "0.7.2.post1", "1.0", "0.6.14+cu130"])
def test_releases_compare_by_their_numbers(text: str) -> None:
    environment = Environment(assume_installed=True, pins={"flashinfer-python": text})
    expected = {"0.6.15rc1": (0, 6, 15), "0.7.2.post1": (0, 7, 2), "1.0": (1, 0)}
    assert libraries.release(environment) == expected.get(text, (0, 6, 14))
    assert libraries.release(Environment(assume_installed=True)) == libraries.NEWEST


# --- Which kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "phase", "fields", "name", "query"),
    [
        (("sm80", "sm86", "sm89", "sm110"), "prefill", {}, "native-fa2", "bfloat16"),
        (("sm80", "sm86", "sm89", "sm110"), "decode", {}, "native-fa2", "bfloat16"),
        (("sm90",), "prefill", {}, "native-fa3", "bfloat16"),
        (("sm90", "sm120", "sm121"), "decode", {}, XQA, "bfloat16"),
        (("sm120", "sm121"), "prefill", {}, "native-fa2", "bfloat16"),
        (("sm100", "sm103"), "prefill", {}, GEN, "bfloat16"),
        (("sm100", "sm103"), "decode", {}, GEN, "bfloat16"),
        (("sm90",), "prefill", {"kv_cache_dtype": "fp8"}, "native-fa3", "fp8_e4m3"),
        (("sm90", "sm120"), "decode", {"kv_cache_dtype": "fp8"}, XQA, "bfloat16"),
        (("sm80", "sm89"), "decode", {"kv_cache_dtype": "fp8"}, "native-fa2", "bfloat16"),
        (("sm100", "sm103"), "decode", {"kv_cache_dtype": "fp8"}, GEN, "fp8_e4m3"),
        (("sm100", "sm103"), "prefill", {"kv_cache_dtype": "fp8"}, GEN, "fp8_e4m3"),
        (GPUS, "prefill", {"kv_cache_dtype": "fp8_e5m2"}, "native-fa2", "bfloat16"),
        (GPUS, "decode", {"kv_cache_dtype": "fp8_e5m2"}, "native-fa2", "bfloat16"),
        (GPUS, "decode", {"logits_soft_cap": 50.0}, "native-fa2", "bfloat16"),
        (("sm90",), "prefill", {"logits_soft_cap": 50.0}, "native-fa3", "bfloat16"),
        (("sm90",), "prefill", {"logits_soft_cap": 50.0, "kv_cache_dtype": "fp8"}, "native-fa2", None),
        (("sm90", "sm120", "sm100"), "decode", {"logits_soft_cap": 5.0}, "native-fa2", None),
        (("sm90", "sm120"), "decode", {"num_heads": 64, "num_kv_heads": 2}, XQA, None),
        (("sm90", "sm120"), "decode", {"num_heads": 48, "num_kv_heads": 1}, "native-fa2", None),
        (("sm100",), "decode", {"num_heads": 48, "num_kv_heads": 1}, GEN, None),
        (("sm90", "sm120"), "decode", {"num_speculative_tokens": 3}, XQA, None),
        (("sm80",), "decode", {"num_speculative_tokens": 3}, "native-fa2", None),
        (("sm90", "sm120"), "decode", {"decode_context_parallel_size": 2}, "native-fa2", None),
        (("sm100",), "decode", {"decode_context_parallel_size": 2}, GEN, None),
        (("sm100",), "prefill", {"decode_context_parallel_size": 2}, "native-fa2", None),
        (("sm90",), "decode", {"non_causal": True}, XQA, None),
        (("sm100",), "decode", {"non_causal": True}, "native-fa2", None),
        (("sm90",), "decode", {"block_size": 8}, "native-fa2", None),
        (("sm100",), "prefill", {"block_size": 24}, "native-fa2", None),
        (("sm90",), "decode", {"head_size": 256}, XQA, None),
        (("sm90",), "decode", {"head_size": 512}, "native-fa2", None),
        (("sm90",), "prefill", {"head_size": 512}, "native-fa2", None),
        (("sm100",), "decode", {"head_size": 512}, GEN, None),
        (("sm90",), "prefill", {"head_size": 256}, "native-fa3", "bfloat16"),
        (("sm90",), "prefill", {"head_size": 256, "kv_cache_dtype": "fp8"}, "native-fa3", "fp8_e4m3"),
    ],
)
def test_path(gpus: tuple[str, ...], phase: str, fields: dict[str, Any], name: str, query: str | None) -> None:
    for gpu in gpus:
        plan = plan_of(gpu, phase, **fields)
        assert plan.kernel_name == name, gpu
        assert query in (None, plan.query_dtype)
        assert plan.returns_lse is (name != XQA)


@pytest.mark.parametrize("version", ["0.6.14", "0.6.15"])
@pytest.mark.parametrize("window", [None, 4096])
def test_fp8_window_leaves_fa3_until_it_is_repaired(version: str, window: int | None) -> None:
    plan = plan_of("sm90", "prefill", version=version, kv_cache_dtype="fp8", sliding_window=window)
    hangs = version == "0.6.14" and window is not None
    assert plan.kernel_name == ("native-fa2" if hangs else "native-fa3")
    assert plan.query_dtype == ("bfloat16" if hangs else "fp8_e4m3")


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"sliding_window": 128, "num_speculative_tokens": 2}, "last one's window"),
        ({"non_causal": True, "num_speculative_tokens": 2, "kv_cache_dtype": "fp8"}, "masks drafts causally"),
    ],
)
def test_xqa_drafts_need_the_release_that_repairs_them(fields: dict[str, Any], fragment: str) -> None:
    before, after = plan_of("sm90", version="0.6.15", **fields), plan_of("sm90", version="0.6.16", **fields)
    assert (before.kernel_name, after.kernel_name) == ("native-fa2", XQA)
    assert fragment in before.because
    assert plan_of("sm90", version="0.6.15", **{**fields, "num_speculative_tokens": 0}).kernel_name == XQA


# --- Plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "kv_cache_dtype", "rounds_to"),
    [("sm90", "fp8", "fp8_e4m3"), ("sm120", "fp8", "fp8_e4m3"), ("sm90", "auto", None), ("sm100", "fp8", None)],
)
def test_xqa_rounds_the_query_of_an_fp8_cache_itself(gpu: str, kv_cache_dtype: str, rounds_to: str | None) -> None:
    plan = plan_of(gpu, kv_cache_dtype=kv_cache_dtype)
    assert plan.kernel_name == (GEN if gpu == "sm100" else XQA)
    assert plan.rounds_to == rounds_to


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_layouts(gpu: str, phase: str) -> None:
    expected = (FLASHINFER_HND,) if gpu in ("sm100", "sm103") else (FLASHINFER_NHD, FLASHINFER_HND)
    assert plan_of(gpu, phase).kv_layouts == expected
    assert plan_of(gpu, phase, logits_soft_cap=30.0).kv_layouts == expected


@pytest.mark.parametrize(
    ("gpu", "fields", "sizes"),
    [
        ("sm80", {}, (16, 32, 64, 1)),
        ("sm80", {"block_size": 24}, (24, 1)),
        ("sm80", {"block_size": 16}, (16, 1)),
        ("sm80", {"block_size": 128}, (128, 64, 32, 16, 1)),
        ("sm90", {}, (16, 32, 64, 128)),
        ("sm90", {"block_size": 48}, (16,)),
        ("sm90", {"block_size": 256}, (128, 64, 32, 16)),
        ("sm100", {}, (16, 32, 64)),
        ("sm100", {"block_size": 256}, (64, 32, 16)),
        ("sm100", {"head_size": 256}, (16, 32, 64)),
        ("sm100", {"head_size": 256, "logits_soft_cap": 50.0}, (16, 32, 64, 1)),
        ("sm100", {"head_size": 256, "block_size": 24}, (24, 1)),
    ],
)
def test_kernel_block_sizes(gpu: str, fields: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert plan_of(gpu, **fields).kernel_block_sizes == sizes


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("size", [16, 48])
def test_small_pages_with_wide_heads_on_sm100(phase: str, size: int) -> None:
    """Such pages gave wrong values in 0.4.1 (flashinfer-ai/flashinfer #1993)."""
    for gpu in ("sm100", "sm103"):
        plan = plan_of(gpu, phase, head_size=256, block_size=size)
        assert plan.kernel_name == GEN
        assert plan.kernel_block_sizes == (16,)
        assert plan_of(gpu, phase, head_size=256, block_size=size, logits_soft_cap=50.0).kernel_block_sizes[0] == size


@pytest.mark.parametrize(
    ("gpu", "fields", "level"),
    [
        ("sm80", {}, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("sm90", {}, "UNIFORM_BATCH"),
        ("sm90", {"logits_soft_cap": 5.0}, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("sm100", {}, "UNIFORM_BATCH"),
        ("sm100", {"decode_context_parallel_size": 2}, "UNIFORM_SINGLE_TOKEN_DECODE"),
    ],
)
def test_cuda_graph_level(gpu: str, fields: dict[str, Any], level: str) -> None:
    assert plan_of(gpu, **fields).cuda_graph == level
    assert plan_of(gpu, cuda_graph=level, **fields)
    assert set(reasons_of(gpu, cuda_graph="ALWAYS", **fields)) == {"cuda-graph-level"}
    assert plan_of(gpu, "prefill", cuda_graph="UNIFORM_BATCH", **fields).cuda_graph == "UNIFORM_BATCH"


def test_workspaces() -> None:
    assert plan_of("sm80").workspace_bytes == (394 + 8) * MIB
    assert plan_of("sm80", batch_invariant=True).workspace_bytes == (2048 + 8) * MIB
    assert plan_of("sm80", options={"native_workspace_bytes": 64 * MIB}).workspace_bytes == (64 + 8) * MIB
    assert plan_of("sm90").workspace_bytes == plan_of("sm100").workspace_bytes == 394 * MIB
    assert plan_of("sm90", options={"trtllm_workspace_bytes": 32 * MIB}).workspace_bytes == 32 * MIB
    assert any("apart from native scratch" in note for note in plan_of("sm90").notes)
    assert any("apart from native scratch" in note for note in plan_of("sm100", "prefill").notes)


def test_notes() -> None:
    assert any("prefill wrapper" in note for note in plan_of("sm80", num_speculative_tokens=2).notes)
    assert not any("prefill wrapper" in note for note in plan_of("sm80").notes)
    assert any("faster" in note for note in plan_of("sm90").notes)
    assert not any("faster" in note for note in plan_of("sm90", kv_cache_dtype="fp8").notes + plan_of("sm120").notes)
    assert any("not causal runs natively" in note for note in plan_of("sm100", "prefill").notes)


@pytest.mark.parametrize(
    ("gpu", "phase", "fields", "safe"),
    [
        ("sm80", "decode", {"kv_cache_dtype": "fp8"}, True),
        ("sm90", "prefill", {"kv_cache_dtype": "fp8"}, True),
        ("sm90", "decode", {}, True),
        ("sm90", "decode", {"kv_cache_dtype": "fp8"}, False),
        ("sm90", "decode", {"kv_cache_dtype": "fp8", "options": {"use_trtllm": False}}, True),
        ("sm120", "decode", {"kv_cache_dtype": "fp8"}, True),
        ("sm100", "prefill", {}, False),
        ("sm100", "decode", {}, False),
    ],
)
def test_nan_in_unused_tails(gpu: str, phase: str, fields: dict[str, Any], safe: bool) -> None:
    assert plan_of(gpu, phase, **fields).nan_tail_safe is safe


@pytest.mark.parametrize(("device", "marked"), [("sm80", True), ("sm89", True), ("sm90", False), ("sm100", False)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_sinks_are_unverified_where_no_gpu_ran_them(device: str, marked: bool, phase: Any) -> None:
    config = gqa_layer(sinks=True, head_size=64)
    plan = toolkit.plan_of(FLASHINFER, config, device, phase)
    assert any("attention sinks" in mark for mark in plan.unverified) is marked
    assert not toolkit.plan_of(FLASHINFER, gqa_layer(head_size=64), device, phase).unverified


@pytest.mark.parametrize(("device", "marked"), [("sm80", False), ("sm90", False), ("sm100", True), ("sm120", True)])
def test_fa2_decode_of_mla_is_unverified_on_blackwell(device: str, marked: bool) -> None:
    mla = SPECS["FLASHINFER_MLA"]
    plan = toolkit.plan_of(mla, mla_layer(num_heads=16, block_size=16), device, options={"decode_kernel": "fa2"})
    assert any("never executed" in mark for mark in plan.unverified) is marked
    assert not toolkit.plan_of(mla, mla_layer(num_heads=16), "sm100").unverified


# --- CuTe DSL -------------------------------------------------------------------------------------

CUTE_DSL: dict[str, Any] = {"options": {"decode_kernel": "cute-dsl"}, "version": "0.7.2.post1"}


@pytest.mark.parametrize("gpu", ["sm100", "sm103"])
def test_decodes_in_cute_dsl_where_they_are_asked_for(gpu: str) -> None:
    plan = plan_of(gpu, "decode", **CUTE_DSL, sinks=True, sliding_window=100)
    assert (plan.kernel_name, plan.kernel_block_sizes) == ("native-cute-dsl", (64, 32, 16, 8))
    assert plan.unverified
    assert not plan.nan_tail_safe
    assert plan_of(gpu, "decode", version="0.7.2.post1").kernel_name == GEN
    assert plan_of(gpu, "prefill", **CUTE_DSL) == plan_of(gpu, "prefill", version="0.7.2.post1")


@pytest.mark.parametrize(
    ("gpu", "fields", "codes"),
    [
        ("sm90", {}, {"forced-path"}),
        ("sm120", {}, {"forced-path"}),
        ("sm100", {"version": "0.7.1"}, {"library-version"}),
        ("sm100", {"block_size": 12}, {"block-size"}),
        ("sm100", {"num_speculative_tokens": 1}, {"forced-path"}),
        ("sm100", {"kv_cache_dtype": "fp8"}, {"forced-path"}),
        ("sm100", {"logits_soft_cap": 30.0}, {"forced-path"}),
        ("sm100", {"batch_invariant": True}, {"forced-path"}),
        ("sm100", {"draft_tree": True, "num_speculative_tokens": 3}, {"pinned-kernel"}),
        ("sm100", {"options": {"decode_kernel": "cute-dsl", "use_trtllm": True}}, {"forced-path"}),
    ],
    ids=str,
)
def test_what_cute_dsl_cannot_decode(gpu: str, fields: dict[str, Any], codes: set[str]) -> None:
    assert set(reasons_of(gpu, "decode", **{**CUTE_DSL, **fields})) == codes


@pytest.mark.parametrize(
    ("drafts", "version", "wrong"), [(3, "0.6.17", False), (4, "0.6.17", True), (4, "0.6.18", False)]
)
def test_trtllm_gen_decodes_many_drafts_from_the_release_that_repairs_them(
    drafts: int, version: str, wrong: bool
) -> None:
    plan = plan_of("sm100", version=version, num_speculative_tokens=drafts)
    assert plan.kernel_name == ("native-fa2" if wrong else GEN)
    assert plan_of("sm100", "prefill", version=version, num_speculative_tokens=drafts).kernel_name == GEN


def test_a_finite_mask_is_said_until_it_is_repaired() -> None:
    before, after = (plan_of("sm80", "prefill", version=version) for version in ("0.6.18", "0.7.2.post1"))
    assert before.kernel_name == after.kernel_name == "native-fa2"
    assert set(before.notes) - set(after.notes) == {note for note in before.notes if "-5e4" in note} != set()


def test_wide_heads_with_fp8_on_a_gb10_are_marked() -> None:
    fields = {"head_size": 256, "kv_cache_dtype": "fp8"}
    assert plan_of("gb10", "prefill", **fields).unverified
    for gpu, other in (("rtx5090", {}), ("gb10", {"head_size": 128}), ("gb10", {"kv_cache_dtype": "auto"})):
        assert not plan_of(gpu, "prefill", **{**fields, **other}).unverified
