"""The facts of the Triton backends, through the gate: each rule in both directions."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from attn_select.backends.spec import BackendSpec
from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASHINFER_HND, MLA
from attn_select.layer.layouts import PAGED_ATTENTION as PAGED_ATTENTION_LAYOUT
from attn_select.machine.detection import Detection
from attn_select.machine.device import CPU, Device
from attn_select.testing import check_sources, codes_of, gqa_layer, mla_layer, plan_of, toolkit
from attn_select.testing.toolkit import Where, codes
from attn_select_triton.facts.paged_attention import DECODE, PAGED_ATTENTION
from attn_select_triton.facts.planned_kernels import DecodeKernel, MLADecodeKernel, PrefillKernel
from attn_select_triton.facts.triton_attn import TRITON_ATTN
from attn_select_triton.facts.triton_mla import TRITON_MLA
from attn_select_triton.facts.triton_mla_sparse import TRITON_MLA_SPARSE
from attn_select_triton.plugin import attn_select_register_backends

SPECS = (TRITON_ATTN, TRITON_MLA, PAGED_ATTENTION)
GPUS = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
H100 = Device("h100", (9, 0), sm_count=132)


def layer_of(spec: BackendSpec, **asked: Any) -> AttentionConfig:
    return mla_layer(**asked) if spec is TRITON_MLA else gqa_layer(**asked)


def ask(spec: BackendSpec, where: Where, phase: Any = "decode", **asked: Any) -> Any:
    return toolkit.ask(spec, layer_of(spec, **asked), where, phase)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_runs_from_turing_on(spec: BackendSpec) -> None:
    for capability in GPUS:
        for phase in ("prefill", "decode"):
            assert codes(ask(spec, capability, phase, dtype="float16")) == set()
            assert codes(ask(spec, capability, phase)) == set()
    for capability in (None, (7, 0), (6, 1)):
        assert codes(ask(spec, capability, "decode")) == {"compute-capability"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_e4m3_needs_ada_and_e5m2_does_not(spec: BackendSpec) -> None:
    for capability in GPUS:
        expected = {"kv-cache-dtype"} if capability < (8, 9) else set()
        assert codes(ask(spec, capability, kv_cache_dtype="fp8_e4m3")) == expected
        assert codes(ask(spec, capability, kv_cache_dtype="fp8_e5m2")) == set()
    (reason,) = ask(spec, (8, 6), kv_cache_dtype="fp8")
    assert (reason.observed, reason.remedy) == ("fp8_e4m3", "--kv-cache-dtype auto")


def test_mla_prefill_reads_no_cache() -> None:
    plan = ask(TRITON_MLA, (8, 0), "prefill", kv_cache_dtype="fp8", block_size=1)
    assert (plan.kv_layouts, plan.kernel_block_sizes) == ((), ())


def test_old_gpus_are_warned() -> None:
    assert any("tensor cores" in note for note in ask(TRITON_ATTN, (7, 5)).notes)
    assert any("emulated" in note for note in ask(TRITON_ATTN, (7, 5)).notes)
    assert not any("emulated" in note for note in ask(TRITON_ATTN, (7, 5), dtype="float16").notes)
    assert not any("tensor cores" in note for note in ask(TRITON_ATTN, (8, 0)).notes)


def test_what_was_never_measured_is_said() -> None:
    for capability in ((7, 5), (8, 0), (10, 0), (12, 0)):
        assert any("never measured" in note for note in ask(TRITON_ATTN, capability).notes)
    assert not any("never measured" in note for note in ask(TRITON_ATTN, (9, 0)).notes)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, set()),
        ({"dtype": "float32"}, set()),
        ({"kv_cache_dtype": "float16"}, set()),
        ({"kv_cache_dtype": "nvfp4"}, {"kv-cache-dtype"}),
        ({"sliding_window": 128, "sinks": True}, set()),
        ({"logits_soft_cap": 30.0}, set()),
        ({"alibi": True}, set()),
        ({"mm_prefix": True}, set()),
        ({"non_causal": True}, set()),
        ({"batch_invariant": True}, set()),
        ({"decode_context_parallel_size": 4}, set()),
        ({"num_speculative_tokens": 1024}, set()),
        ({"cuda_graph": "ALWAYS"}, set()),
        ({"attn_type": "encoder_decoder"}, set()),
        ({"num_heads": 71, "num_kv_heads": 1}, set()),
        ({"head_size": 24}, {"head-size"}),
        ({"head_size": 32}, set()),
        ({"head_size": 72}, set()),
        ({"head_size": 100}, {"head-size"}),
        ({"head_size": 256}, set()),
        ({"head_size": 512}, set()),
        ({"head_size": 520}, {"head-size"}),
        ({"head_size": 192, "v_head_size": 128}, set()),
        ({"head_size": 64, "v_head_size": 520}, {"v-head-size"}),
        ({"block_size": 48}, set()),
        ({"block_size": 8}, {"block-size"}),
        ({"kv_cache_dtype": "fp8", "per_head_quant_scales": True}, set()),
        (
            {"kv_cache_dtype": "fp8", "per_head_quant_scales": True, "output_quantization": "fp8"},
            {"per-head-quant-scales"},
        ),
        ({"output_quantization": "fp8"}, set()),
        ({"output_quantization": "fp4"}, {"output-quantization"}),
    ],
)
def test_triton_attn_rules(asked: dict[str, Any], expected: set[str]) -> None:
    for phase in ("prefill", "decode"):
        assert codes(ask(TRITON_ATTN, (9, 0), phase, **asked)) == expected


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_fp8_output_needs_casts_to_e4m3(phase: str) -> None:
    (reason,) = ask(TRITON_ATTN, (8, 6), phase, output_quantization="fp8")
    assert (reason.code, reason.supported, reason.remedy) == (
        "output-quantization", ["none"], "--output-quantization none",
    )  # fmt: skip
    assert "compute capability 8.6" in reason.message
    assert not isinstance(ask(TRITON_ATTN, (8, 9), phase, output_quantization="fp8"), list)


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_triton_attn_takes_encoders(attn_type: str) -> None:
    plan = ask(TRITON_ATTN, (7, 5), "prefill", attn_type=attn_type, dtype="float16")
    assert (plan.kv_layouts, plan.kernel_block_sizes, plan.cuda_graph) == ((), (), "ALWAYS")


def test_triton_attn_workspace() -> None:
    plan = ask(TRITON_ATTN, H100)
    # 2 x 8 programs on each of 132 SMs, 16 rows of 128 accumulators, maximum and sum in float32.
    assert plan.workspace_bytes == 2 * 8 * 132 * 16 * 130 * 4
    assert plan.returns_lse
    assert FLASHINFER_HND in plan.kv_layouts
    assert ask(TRITON_ATTN, H100, num_speculative_tokens=7).workspace_bytes == 2 * plan.workspace_bytes
    assert ask(TRITON_ATTN, (9, 0)).workspace_bytes > plan.workspace_bytes
    fixed = ask(TRITON_ATTN, H100, batch_invariant=True)
    assert (fixed.kernel, fixed.workspace_bytes) == (DecodeKernel(fixed_splits=True), 0)
    assert plan.kernel == DecodeKernel()
    assert any("longest sequence" in note for note in fixed.notes)


@pytest.mark.parametrize(
    ("where", "asked", "kernel"),
    [
        (H100, {}, PrefillKernel(warp_specialised=True, gather_bytes=128 << 20)),
        (H100, {"block_size": 64, "dtype": "float16"}, PrefillKernel(warp_specialised=True, pages_by_tma=True)),
        (H100, {"batch_invariant": True}, PrefillKernel()),
        (H100, {"batch_invariant": True, "block_size": 64}, PrefillKernel(pages_by_tma=True)),
        (H100, {"head_size": 64}, PrefillKernel(warp_specialised=True, gather_bytes=128 << 20)),
        (H100, {"head_size": 64, "sinks": True}, PrefillKernel(warp_specialised=True, gather_bytes=128 << 20)),
        (H100, {"head_size": 64, "sliding_window": 100}, PrefillKernel(gather_bytes=128 << 20)),
        (H100, {"sinks": True}, PrefillKernel(warp_specialised=True, gather_bytes=128 << 20)),
        (H100, {"mm_prefix": True}, PrefillKernel(gather_bytes=128 << 20)),
        (H100, {"block_size": 64, "alibi": True}, PrefillKernel(pages_by_tma=True)),
        (H100, {"block_size": 192, "sliding_window": 100}, PrefillKernel(warp_specialised=True, pages_by_tma=True)),
        (H100, {"block_size": 192, "sliding_window": 100, "non_causal": True}, PrefillKernel(pages_by_tma=True)),
        (
            H100,
            {"head_size": 256, "logits_soft_cap": 30.0},
            PrefillKernel(warp_specialised=True, gather_bytes=128 << 20),
        ),
        (
            H100,
            {"block_size": 64, "kv_cache_dtype": "fp8"},
            PrefillKernel(gather_bytes=128 << 20, gathered_warps=True),
        ),
        (H100, {"kv_cache_dtype": "fp8", "alibi": True}, PrefillKernel(gather_bytes=128 << 20)),
        (H100, {"head_size": 96, "v_head_size": 64}, PrefillKernel(gather_bytes=128 << 20)),
        (H100, {"head_size": 96}, PrefillKernel(warp_specialised=True)),
        (
            H100,
            {"head_size": 96, "kv_cache_dtype": "fp8"},
            PrefillKernel(gather_bytes=128 << 20, gathered_warps=True),
        ),
        (H100, {"head_size": 112, "v_head_size": 64}, PrefillKernel()),
        (H100, {"dtype": "float32"}, PrefillKernel()),
        ((8, 9), {}, PrefillKernel()),
        ((12, 0), {}, PrefillKernel(gather_bytes=128 << 20)),
    ],
)
def test_triton_attn_says_how_it_reads_pages(where: Any, asked: dict[str, Any], kernel: PrefillKernel) -> None:
    plan, decode = ask(TRITON_ATTN, where, "prefill", **asked), ask(TRITON_ATTN, where, **asked)
    assert plan.kernel == kernel
    assert plan.workspace_bytes == decode.workspace_bytes + kernel.gather_bytes


def test_fp8_pages_are_not_read_by_the_gluon_kernel_without_room_to_copy_them() -> None:
    layer = gqa_layer(kv_cache_dtype="fp8")
    plan = plan_of(TRITON_ATTN, layer, H100, "prefill", options={"gather_workspace_mib": 0})
    assert plan.kernel == PrefillKernel()


@pytest.mark.parametrize("release", [None, "3.6.1", "3.9.0", "3.11.0+git1234"])
def test_gluon_is_planned_with_every_release_and_marked_where_it_never_ran(release: str | None) -> None:
    """An assumed machine and a real one get the same."""
    pins = {"triton": release} if release else {}
    marked = release is not None and not release.startswith("3.6.")
    sparse = mla_layer(sparse_top_k=2048, num_heads=16)
    for spec, layer, phase, gluon in (
        (TRITON_ATTN, gqa_layer(), "prefill", True),
        (TRITON_ATTN, gqa_layer(kv_cache_dtype="fp8"), "prefill", True),
        (TRITON_ATTN, gqa_layer(), "decode", False),
        (TRITON_MLA, mla_layer(), "prefill", True),
        (TRITON_MLA, mla_layer(), "decode", True),
        (TRITON_MLA, mla_layer(block_size=16), "decode", False),
        (TRITON_MLA_SPARSE, sparse, "decode", True),
    ):
        plan = plan_of(spec, layer, H100, phase, pins=pins)
        assert plan.kernel == plan_of(spec, layer, H100, phase).kernel
        assert [str(release) in mark for mark in plan.unverified] == [True] * (marked and gluon)
        if release:
            installed = {"torch": "2.13.0", "triton": release}
            here = plan_of(spec, layer, replace(H100, local=True), phase, installed=installed)
            assert (here.kernel, here.unverified) == (plan.kernel, plan.unverified)


def test_triton_attn_reserves_what_it_is_told() -> None:
    none, some = (
        plan_of(TRITON_ATTN, gqa_layer(alibi=True), H100, "prefill", options={"gather_workspace_mib": mib})
        for mib in (0, 7)
    )
    assert none.kernel == PrefillKernel()
    assert some.workspace_bytes - none.workspace_bytes == 7 << 20


def test_triton_attn_takes_pages_as_they_are() -> None:
    sizes = {size: ask(TRITON_ATTN, H100, block_size=size).kernel_block_sizes for size in (None, 16, 48, 64, 192)}
    assert sizes == {
        None: (16, 32, 64, 128, 256), 16: (16,), 48: (48, 16), 64: (64, 32, 16), 192: (192, 64, 32, 16)
    }  # fmt: skip
    assert ask(TRITON_ATTN, H100, block_size=2**31 - 16).kernel_block_sizes[0] == 2**31 - 16


def test_triton_attn_warns_of_float16_products() -> None:
    assert any("float16" in note for note in ask(TRITON_ATTN, H100, kv_cache_dtype="fp8").notes)
    assert not any("float16" in note for note in ask(TRITON_ATTN, H100, kv_cache_dtype="fp8", dtype="float16").notes)


@pytest.mark.parametrize(
    ("asked", "prefill", "decode"),
    [
        ({}, set(), set()),
        ({"num_heads": 1}, set(), set()),
        ({"num_heads": 192}, set(), set()),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, set(), set()),
        ({"kv_lora_rank": 528}, set(), {"mla-dims"}),
        ({"kv_lora_rank": 500}, {"head-size"}, {"head-size", "mla-dims"}),
        ({"qk_rope_head_dim": 144}, {"head-size"}, {"mla-dims", "head-size"}),
        ({"qk_nope_head_dim": 464}, {"mla-dims"}, set()),
        ({"qk_nope_head_dim": 192}, set(), set()),
        ({"v_head_dim": 520}, {"mla-dims"}, set()),
        ({"v_head_dim": 256}, set(), set()),
        ({"dtype": "float32"}, {"dtype"}, {"dtype"}),
        ({"block_size": 64}, set(), set()),
        ({"block_size": 8}, set(), {"block-size"}),
        ({"non_causal": True}, set(), set()),
        ({"batch_invariant": True}, set(), set()),
        ({"decode_context_parallel_size": 8}, set(), set()),
        ({"num_speculative_tokens": 3}, set(), set()),
        ({"sinks": True}, {"sinks"}, {"sinks"}),
        ({"sliding_window": 128}, {"sliding-window"}, {"sliding-window"}),
        ({"sparse_top_k": 2048}, {"sparse-unsupported"}, {"sparse-unsupported"}),
        ({"cuda_graph": "UNIFORM_BATCH"}, set(), set()),
        ({"cuda_graph": "ALWAYS"}, {"cuda-graph-level"}, {"cuda-graph-level"}),
    ],
)
def test_triton_mla_rules(asked: dict[str, Any], prefill: set[str], decode: set[str]) -> None:
    assert codes(ask(TRITON_MLA, (9, 0), "prefill", **asked)) == prefill
    assert codes(ask(TRITON_MLA, (9, 0), "decode", **asked)) == decode


def test_triton_mla_plan() -> None:
    plan = ask(TRITON_MLA, H100)
    assert (plan.kv_layouts, plan.returns_lse, plan.cuda_graph) == ((MLA,), True, "UNIFORM_BATCH")
    assert plan.workspace_bytes == 4 * 132 * 64 * (512 + 2) * 4
    assert ask(TRITON_MLA, H100, num_heads=16).workspace_bytes == plan.workspace_bytes // 4
    fixed = ask(TRITON_MLA, H100, batch_invariant=True)
    assert fixed.kernel == MLADecodeKernel(gluon=True, fixed_splits=True)
    assert fixed.workspace_bytes == 0
    assert any("longest request" in note for note in fixed.notes)


@pytest.mark.parametrize(
    ("where", "asked", "gluon"),
    [
        (H100, {}, True),
        (H100, {"block_size": 128}, True),
        (H100, {"block_size": 16}, False),
        (H100, {"kv_cache_dtype": "fp8"}, True),
        (H100, {"kv_cache_dtype": "fp8_e5m2"}, False),
        (H100, {"qk_rope_head_dim": 128}, False),
        ((10, 0), {}, False),
    ],
)
def test_triton_mla_kernel(where: Any, asked: dict[str, Any], gluon: bool) -> None:
    plan = ask(TRITON_MLA, where, **asked)
    assert plan.kernel == MLADecodeKernel(gluon=gluon, fp8_query=plan.query_dtype == "fp8_e4m3")


def test_triton_mla_takes_blocks_as_they_are() -> None:
    sizes = {size: ask(TRITON_MLA, H100, block_size=size).kernel_block_sizes for size in (None, 16, 64, 48, 256)}
    assert sizes == {
        None: (64, 32, 16), 16: (64, 32, 16), 64: (64, 32, 16), 48: (48, 64, 32, 16), 256: (256, 64, 32, 16)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, set()),
        ({"dtype": "float32"}, set()),
        ({"alibi": True}, set()),
        ({"cuda_graph": "ALWAYS"}, set()),
        ({"block_size": 8}, set()),
        ({"block_size": 24}, set()),
        ({"block_size": 4}, {"block-size"}),
        ({"head_size": 120}, set()),
        ({"head_size": 120, "kv_cache_dtype": "fp8"}, {"head-size"}),
        ({"head_size": 112, "kv_cache_dtype": "fp8"}, set()),
        ({"head_size": 160}, {"head-size"}),
        ({"sliding_window": 128}, {"sliding-window"}),
        ({"logits_soft_cap": 30.0}, {"logits-soft-cap"}),
        ({"sinks": True}, {"sinks"}),
        ({"mm_prefix": True}, {"mm-prefix"}),
        ({"non_causal": True}, {"non-causal"}),
        ({"batch_invariant": True}, {"batch-invariant"}),
        ({"decode_context_parallel_size": 2}, {"decode-context-parallel"}),
        ({"num_speculative_tokens": 1}, {"speculative-tokens"}),
        ({"v_head_size": 64}, {"v-head-size"}),
        ({"attn_type": "encoder_decoder"}, {"attn-type"}),
    ],
)
def test_paged_attention_rules(asked: dict[str, Any], expected: set[str]) -> None:
    for phase in ("prefill", "decode"):
        assert codes(ask(PAGED_ATTENTION, (9, 0), phase, **asked)) == expected


def test_paged_attention_plan() -> None:
    plan = ask(PAGED_ATTENTION, (9, 0), num_heads=32, num_kv_heads=1)
    assert plan.kernel == DECODE
    assert (plan.kv_layouts, plan.returns_lse) == ((PAGED_ATTENTION_LAYOUT,), False)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_library_versions(spec: BackendSpec) -> None:
    for version, capability, expected in (
        ("3.5.1", (9, 0), {"library-version"}),
        ("3.6.0", (9, 0), set()),
        ("3.6.0", (12, 1), set()),
        ("3.6.0", (11, 0), {"library-version"}),
        ("3.7.0", (11, 0), set()),
    ):
        assert codes_of(spec, layer_of(spec), capability, pins={"triton": version}) == expected


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_needs_a_compiler_here(spec: BackendSpec, tmp_path: Any) -> None:
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    path = str(tmp_path)
    for variables, local, expected in (
        ({"PATH": path}, True, {"compiler-missing"}),
        ({"PATH": path}, False, set()),
        ({"PATH": path, "CC": "mycc -O2"}, True, set()),
        ({"PATH": path, "CC": "othercc"}, True, {"compiler-missing"}),
    ):
        installed = {"torch": "2.9.0", "triton": "3.6.0"}
        device = replace(H100, local=local)
        assert codes_of(spec, layer_of(spec), device, installed=installed, variables=variables) == expected


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_compiles_once_per_shape_class(spec: BackendSpec) -> None:
    key = spec.compile_key(layer_of(spec))
    assert key == spec.compile_key(layer_of(spec, cuda_graph="UNIFORM_BATCH"))
    others: list[dict[str, Any]] = [{"dtype": "float16"}, {"kv_cache_dtype": "fp8"}, {"block_size": 64}]
    assert key not in [spec.compile_key(layer_of(spec, **asked)) for asked in others]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_nan_behind_a_sequence_is_declared_harmless(spec: BackendSpec) -> None:
    """The conformance suites run every plan that declares it with NaN there."""
    for phase, capabilities in spec.capabilities.items():
        assert capabilities.nan_tail_safe.value
        assert plan_of(spec, layer_of(spec), H100, phase).nan_tail_safe


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_fact_has_a_source(spec: BackendSpec) -> None:
    check_sources(spec, least=20)


@pytest.mark.parametrize("device", [H100, CPU], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_load_begins_to_hash_triton_for_a_gpu(
    spec: BackendSpec, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="needs triton")
    from attn_select_triton.runtime import hashing

    hashed: list[str] = []
    begin = cache(hashing.begin_hashing.__wrapped__)
    monkeypatch.setattr(hashing, "begin_hashing", begin)
    monkeypatch.setattr(hashing, "detect_device", lambda: Detection(device))

    def hash_it() -> None:
        hashed.append(threading.current_thread().name)

    monkeypatch.setattr(hashing.triton_cache, "triton_key", hash_it, raising=False)
    for _ in range(2):
        spec.get_class()
    if (thread := begin()) is not None:
        thread.join()
    assert hashed == ([] if device is CPU else ["triton_key"])
    monkeypatch.delattr(hashing.triton_cache, "triton_key")
    begin.cache_clear()
    assert begin() is None


def test_registers_its_backends() -> None:
    names = [spec.name for spec in attn_select_register_backends()]
    assert names == ["TRITON_ATTN", "TRITON_MLA", "TRITON_MLA_SPARSE", "PAGED_ATTENTION", "TRITON_STATE"]


def test_registration_imports_no_kernel_library() -> None:
    code = (
        "import sys, attn_select_triton.plugin as p; p.attn_select_register_backends();"
        "print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_older_devices_never_ran_is_unverified(spec: BackendSpec) -> None:
    for capability in GPUS:
        marks = [
            len(toolkit.plan_of(spec, layer_of(spec, **asked), capability, "decode").unverified)
            for asked in ({"dtype": "float16"}, {}, {"kv_cache_dtype": "fp8_e5m2"})
        ]
        turing, old = capability < (8, 0), capability < (8, 9)
        assert marks == [0, turing, turing + old], capability
    assert not toolkit.plan_of(TRITON_MLA, mla_layer(kv_cache_dtype="fp8_e5m2"), (8, 0), "prefill").unverified
