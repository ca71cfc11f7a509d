"""The facts of the torch backends, through the gate: each rule in both directions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from attn_select.backends.spec import BackendPlan, BackendSpec, Fact
from attn_select.decide.gate import check
from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, MLA, PAGED_ATTENTION
from attn_select.machine.device import CPU, Device
from attn_select.machine.environment import Environment
from attn_select_torch.facts.flex_attention import FLEX_ATTENTION, TRITON
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.facts.torch_mla_sparse import TORCH_MLA_SPARSE
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA
from attn_select_torch.facts.torch_state import TORCH_STATE
from attn_select_torch.plugin import attn_select_register_backends

SPECS = (TORCH_SDPA, FLEX_ATTENTION, TORCH_MLA, TORCH_MLA_SPARSE)
ASSUMED = Environment(assume_installed=True)
LLAMA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
DEEPSEEK: dict[str, Any] = {
    "num_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def device_of(capability: tuple[int, int] | None) -> Device:
    return CPU if capability is None else Device("gpu", capability)


def ask(spec: BackendSpec, where: tuple[int, int] | None, phase: Any = "decode", **asked: Any) -> Any:
    config = AttentionConfig(**((DEEPSEEK if spec is TORCH_MLA else LLAMA) | asked))
    return check(spec, config, device_of(where), ASSUMED, spec.options(), phase)


def codes(outcome: Any) -> set[str]:
    return set() if isinstance(outcome, BackendPlan) else {reason.code for reason in outcome}


def test_sdpa_says_which_path_and_why() -> None:
    plain = ask(TORCH_SDPA, None)
    assert (plain.kernel_name, plain.returns_lse, plain.cuda_graph) == ("torch-sdpa", True, "NEVER")
    assert PAGED_ATTENTION not in plain.kv_layouts
    capped = ask(TORCH_SDPA, None, logits_soft_cap=50.0)
    assert capped.kernel_name == "torch-matmul"
    assert ask(TORCH_SDPA, (9, 0), dtype="float32", decode_context_parallel_size=2).kernel_name == "torch-matmul"
    assert ask(TORCH_SDPA, None, decode_context_parallel_size=2).kernel_name == "torch-sdpa"
    assert ask(TORCH_SDPA, None, "prefill", attn_type="encoder_only").kv_layouts == ()


@pytest.mark.parametrize("spec", [TORCH_SDPA, TORCH_MLA])
@pytest.mark.parametrize("where", [None, (9, 0)])
def test_what_keeps_no_cache_is_never_captured(spec: BackendSpec, where: tuple[int, int] | None) -> None:
    """An encoder, and dense MLA prefill on decompressed keys and values: their kernels' shapes follow the batch."""
    asked = {} if spec is TORCH_MLA else {"attn_type": "encoder"}
    plan = ask(spec, where, "prefill", **asked)
    assert (plan.kv_layouts, plan.cuda_graph) == ((), "NEVER")
    assert codes(ask(spec, where, "prefill", **asked, cuda_graph="ALWAYS")) == {"cuda-graph-level"}


@pytest.mark.parametrize(
    ("asked", "capability", "kernel"),
    [
        ({}, (8, 0), "torch-varlen"),
        ({"sinks": True}, (9, 0), "torch-cudnn"),
        ({"head_size": 128}, (9, 0), "torch-cudnn"),
        ({"head_size": 128}, (10, 0), "torch-varlen"),
        ({"non_causal": True}, (9, 0), "torch-varlen"),
        ({"sliding_window": 128, "sinks": True, "kv_cache_dtype": "fp8"}, (9, 0), "torch-varlen"),
        ({"attn_type": "encoder_only"}, (10, 0), "torch-varlen"),
        ({"head_size": 256}, (9, 0), "torch-varlen"),
        ({"head_size": 264}, (9, 0), "torch-sdpa"),
        ({"head_size": 100}, (9, 0), "torch-sdpa"),
        ({"v_head_size": 64}, (9, 0), "torch-sdpa"),
        ({"dtype": "float32"}, (9, 0), "torch-sdpa"),
        ({"alibi": True}, (9, 0), "torch-sdpa"),
        ({"mm_prefix": True}, (9, 0), "torch-sdpa"),
        ({}, (7, 5), "torch-sdpa"),
        ({}, None, "torch-sdpa"),
    ],
)
def test_sdpa_packs_batches_for_flash_attention(asked: dict[str, Any], capability: Any, kernel: str) -> None:
    assert ask(TORCH_SDPA, capability, "prefill", **asked).kernel_name == kernel


def test_sdpa_computes_float16_in_float32_on_a_cpu() -> None:
    assert any("float32" in note for note in ask(TORCH_SDPA, None, dtype="float16").notes)
    assert not any("float32" in note for note in ask(TORCH_SDPA, (9, 0), dtype="float16").notes)


@pytest.mark.parametrize(
    ("spec", "refused", "accepted"),
    [(TORCH_SDPA, (3, 7), (5, 0)), (TORCH_MLA, (3, 7), (5, 0)), (FLEX_ATTENTION, (6, 1), (7, 0))],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_oldest_gpu_that_is_served(spec: BackendSpec, refused: tuple[int, int], accepted: tuple[int, int]) -> None:
    assert codes(ask(spec, refused, dtype="float16")) == {"compute-capability"}
    assert codes(ask(spec, accepted, dtype="float16")) == set()


def test_sdpa_warns_of_old_gpus() -> None:
    assert any("emulated" in note for note in ask(TORCH_SDPA, (7, 5)).notes)
    assert not any("emulated" in note for note in ask(TORCH_SDPA, (7, 5), dtype="float16").notes)
    assert any("CUDA 12" in note for note in ask(TORCH_SDPA, (7, 0)).notes)
    assert not any("CUDA 12" in note for note in ask(TORCH_SDPA, (7, 5)).notes)
    assert codes(ask(TORCH_SDPA, (3, 7))) == {"compute-capability"}


def test_mla_prefill_reads_no_cache() -> None:
    assert ask(TORCH_MLA, None, "prefill", kv_cache_dtype="fp8").kv_layouts == ()
    assert ask(TORCH_MLA, None, "decode", kv_cache_dtype="fp8").kv_layouts == (MLA,)
    without = check(TORCH_MLA, AttentionConfig(**LLAMA), CPU, ASSUMED, TORCH_MLA.options(), "decode")
    assert codes(without) == {"mla-only"}


@pytest.mark.parametrize(
    ("asked", "gpu", "cpu"),
    [
        ({}, set(), set()),
        ({"dtype": "float16"}, set(), set()),
        ({"dtype": "float32"}, set(), set()),
        ({"sliding_window": 128}, set(), set()),
        ({"mm_prefix": True}, set(), set()),
        ({"non_causal": True}, set(), set()),
        ({"num_speculative_tokens": 3}, set(), set()),
        ({"block_size": 48}, set(), set()),
        ({"block_size": 24}, {"block-size"}, {"block-size"}),
        ({"sinks": True}, {"sinks"}, {"sinks"}),
        ({"alibi": True}, {"alibi"}, {"alibi"}),
        ({"logits_soft_cap": 30.0}, {"logits-soft-cap"}, {"logits-soft-cap"}),
        ({"kv_cache_dtype": "fp8"}, {"kv-cache-dtype"}, {"kv-cache-dtype"}),
        ({"kv_cache_dtype": "float16"}, set(), {"kv-cache-dtype"}),
        ({"kv_cache_dtype": "bfloat16"}, set(), set()),
        ({"batch_invariant": True}, set(), {"batch-invariant"}),
        ({"decode_context_parallel_size": 2}, set(), {"decode-context-parallel"}),
        ({"cuda_graph": "ALWAYS"}, set(), {"cuda-graph-level"}),
        ({"head_size": 15}, {"head-size"}, set()),
        ({"head_size": 16}, set(), set()),
        ({"head_size": 20, "v_head_size": 8}, {"v-head-size"}, set()),
        ({"head_size": 192, "v_head_size": 128}, set(), set()),
        ({"head_size": 2048}, set(), set()),
        ({"head_size": 2049}, {"head-size"}, set()),
        ({"output_quantization": "fp8"}, {"output-quantization"}, {"output-quantization"}),
        ({"attn_type": "encoder_decoder"}, {"attn-type"}, {"attn-type"}),
    ],
)
def test_flex_rules(asked: dict[str, Any], gpu: set[str], cpu: set[str]) -> None:
    for phase in ("prefill", "decode"):
        assert codes(ask(FLEX_ATTENTION, (9, 0), phase, **asked)) == gpu
        assert codes(ask(FLEX_ATTENTION, None, phase, **asked)) == cpu


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_flex_takes_encoders(attn_type: str) -> None:
    plan = ask(FLEX_ATTENTION, (8, 0), "prefill", attn_type=attn_type)
    assert (plan.kv_layouts, plan.kernel_block_sizes) == ((), ())


@pytest.mark.parametrize(
    ("capability", "dtype", "largest"),
    [
        ((7, 5), "float16", 512),
        ((7, 5), "float32", 256),
        ((8, 0), "bfloat16", 1024),
        ((8, 6), "bfloat16", 1024),
        ((8, 6), "float32", 512),
        ((9, 0), "bfloat16", 2048),
        ((9, 0), "float32", 1024),
        ((12, 0), "float16", 1024),
    ],
)
def test_flex_tiles_must_fit_shared_memory(capability: tuple[int, int], dtype: str, largest: int) -> None:
    assert codes(ask(FLEX_ATTENTION, capability, head_size=largest, dtype=dtype)) == set()
    assert codes(ask(FLEX_ATTENTION, capability, head_size=largest + 1, dtype=dtype)) == {"head-size"}


def test_flex_has_no_bfloat16_before_ampere() -> None:
    (reason,) = ask(FLEX_ATTENTION, (7, 5))
    assert (reason.code, reason.observed, reason.remedy) == ("dtype", "bfloat16", "--dtype float16")
    assert codes(ask(FLEX_ATTENTION, (7, 5), dtype="float16")) == set()
    assert codes(ask(FLEX_ATTENTION, (6, 1), dtype="float16")) == {"compute-capability"}


def test_flex_differs_by_device() -> None:
    on_cpu, on_gpu = ask(FLEX_ATTENTION, None), ask(FLEX_ATTENTION, (9, 0))
    assert (on_cpu.kernel_name, on_cpu.returns_lse, on_cpu.cuda_graph) == ("flex-cpp", False, "NEVER")
    assert (on_gpu.kernel_name, on_gpu.returns_lse, on_gpu.cuda_graph) == ("flex-triton", True, "ALWAYS")
    assert on_cpu.kv_layouts == on_gpu.kv_layouts == (FLASH_ATTN_NHD,)


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_flex_needs_a_compiler_here(
    capability: tuple[int, int] | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_select_torch.facts.flex_attention._cpu_has_template", lambda: True)
    device = replace(device_of(capability), local=True)
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    variable = "CXX" if capability is None else "CC"
    path = str(tmp_path)
    for variables, expected in (
        ({"PATH": path}, {"compiler-missing"}),
        ({"PATH": path, variable: "mycc -O2"}, set()),
        ({"PATH": path, variable: "othercc"}, {"compiler-missing"}),
    ):
        here = Environment(variables=variables)
        here._states.update(dict.fromkeys([TRITON, *FLEX_ATTENTION.libraries[0]], "installed"))
        outcome = check(FLEX_ATTENTION, AttentionConfig(**LLAMA), device, here, FLEX_ATTENTION.options(), "decode")
        assert codes(outcome) == expected


def test_flex_needs_x86_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_select_torch.facts.flex_attention._cpu_has_template", lambda: False)
    monkeypatch.setattr("attn_select_torch.facts.flex_attention.compiler_reason", lambda *_: None)
    here = Environment()
    here._states.update(dict.fromkeys(FLEX_ATTENTION.libraries[0], "installed"))
    outcome = check(FLEX_ATTENTION, AttentionConfig(**LLAMA), CPU, here, FLEX_ATTENTION.options(), "decode")
    assert codes(outcome) == {"cpu-architecture"}


def test_flex_needs_triton_on_a_gpu() -> None:
    here = Environment(assume_installed=True)
    here._states[TRITON] = "missing"
    config, options = AttentionConfig(**LLAMA), FLEX_ATTENTION.options()
    (reason,) = check(FLEX_ATTENTION, config, Device("h100", (9, 0)), here, options, "decode")
    assert (reason.code, reason.remedy) == ("library-missing", "pip install triton")
    assert codes(check(FLEX_ATTENTION, config, CPU, here, options, "decode")) == set()


@pytest.mark.parametrize(("spec", "version"), [(TORCH_SDPA, "2.5.0"), (TORCH_MLA, "2.5.0"), (FLEX_ATTENTION, "2.9.0")])
def test_torch_versions(spec: BackendSpec, version: str) -> None:
    config = AttentionConfig(**(DEEPSEEK if spec is TORCH_MLA else LLAMA))
    for pinned, expected in ((version, set()), ("2.4.1", {"library-version"})):
        there = Environment(assume_installed=True, pins={"torch": pinned})
        assert codes(check(spec, config, Device("h100", (9, 0)), there, spec.options(), "decode")) == expected


def test_flex_compiles_once_per_shape_class() -> None:
    config = AttentionConfig(**LLAMA)
    assert FLEX_ATTENTION.compile_key(config) == FLEX_ATTENTION.compile_key(AttentionConfig(**LLAMA))
    others: list[dict[str, Any]] = [{"head_size": 64}, {"num_heads": 16}, {"dtype": "float16"}, {"mm_prefix": True}]
    for asked in others:
        assert FLEX_ATTENTION.compile_key(config) != FLEX_ATTENTION.compile_key(AttentionConfig(**(LLAMA | asked)))
    numbers: list[dict[str, Any]] = [{"sliding_window": 8}, {"non_causal": True}, {"block_size": 64}]
    for asked in numbers:
        assert FLEX_ATTENTION.compile_key(config) == FLEX_ATTENTION.compile_key(AttentionConfig(**(LLAMA | asked)))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_fact_has_a_source(spec: BackendSpec) -> None:
    for capabilities in spec.capabilities.values():
        for field in fields(capabilities):
            fact = getattr(capabilities, field.name)
            if isinstance(fact, Fact):
                assert fact.source
                assert not fact.source.startswith("default") or fact == field.default


def test_registers_all_backends() -> None:
    assert tuple(attn_select_register_backends()) == (*SPECS, TORCH_STATE)


def test_registration_imports_no_torch() -> None:
    code = (
        "import sys, attn_select_torch.plugin as p; p.attn_select_register_backends();"
        "print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
