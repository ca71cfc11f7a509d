"""FLASHINFER through the gate: what it refuses, by which reason, and where the same layer is accepted."""

from __future__ import annotations

from typing import Any

import pytest
from flashinfer_gate import Gate
from pydantic import ValidationError

from attn_select.machine.device import CPU, Device
from attn_select.testing import gqa_layer
from attn_select_flashinfer.facts.mha import FLASHINFER

GPUS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")
PHASES: tuple[Any, ...] = ("prefill", "decode")


GATE = Gate(FLASHINFER, gqa_layer)
ask = GATE.ask
accepts = GATE.accepts
plan_of = GATE.plan_of
reasons_of = GATE.reasons_of


# --- What no kernel takes -------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("device", [CPU, Device("v100", (7, 0))], ids=lambda d: d.name)
def test_devices_below_turing(device: Device, phase: str) -> None:
    reasons = reasons_of(device, phase, alibi=True)
    assert set(reasons) == {"compute-capability", "alibi"}
    assert reasons["compute-capability"].observed == device.capability_text
    assert reasons["compute-capability"].supported == "7.5 to 12.1"


@pytest.mark.parametrize("phase", PHASES)
def test_turing_is_unproven(phase: str) -> None:
    """float16 and head sizes that fit its shared memory, from the release that was repaired for it."""
    turing = Device("t4", (7, 5))
    for cache in ("auto", "fp8_e4m3", "fp8_e5m2"):
        plan = plan_of(turing, phase, dtype="float16", kv_cache_dtype=cache)
        assert plan.kernel_name == "native-fa2"
        assert any("7.5" in mark for mark in plan.unverified)
    assert set(reasons_of(turing, phase)) == {"dtype"}
    assert set(reasons_of(turing, phase, dtype="float16", head_size=512)) == {"head-size"}
    old = reasons_of(turing, phase, version="0.6.15", dtype="float16")
    assert set(old) == {"library-version"}
    assert old["library-version"].supported == "0.6.16"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("gpu", GPUS)
def test_plain_layers_run_from_ampere_up(gpu: str, phase: str) -> None:
    assert accepts(gpu, phase)
    assert accepts(gpu, phase, dtype="float16", sliding_window=1024)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"head_size": 80}, "head-size"),
        ({"head_size": 192}, "head-size"),
        ({"alibi": True}, "alibi"),
        ({"mm_prefix": True}, "mm-prefix"),
        ({"v_head_size": 64}, "v-head-size"),
        ({"kv_cache_dtype": "float16"}, "kv-cache-dtype"),
        ({"attn_type": "encoder_decoder"}, "attn-type"),
    ],
)
def test_refused_everywhere(gpu: str, phase: str, fields: dict[str, Any], code: str) -> None:
    assert code in reasons_of(gpu, phase, **fields)


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_encoders(attn_type: str) -> None:
    assert set(reasons_of("sm90", "prefill", attn_type=attn_type)) == {"attn-type"}


def test_mla_and_sparse_layers_are_other_backends() -> None:
    mla = {"num_kv_heads": 1, "head_size": 576, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
    mla |= {"qk_rope_head_dim": 64, "v_head_dim": 128}
    assert list(reasons_of("sm90", **mla)) == ["mla-unsupported"]


# --- What some paths take -------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("gpu", GPUS)
def test_sinks(gpu: str, phase: Any) -> None:
    plan = plan_of(gpu, phase, sinks=True, head_size=64, sliding_window=128)
    trtllm = gpu in ("sm100", "sm103") or (phase == "decode" and gpu in ("sm90", "sm120", "sm121"))
    assert (plan.kernel_name in ("trtllm-gen", "xqa")) is trtllm
    assert trtllm or plan.kernel.sinks
    reasons = reasons_of(gpu, phase, sinks=True, logits_soft_cap=30.0)
    assert list(reasons) == ["sinks"]
    assert "soft cap" in reasons["sinks"].message


def test_sinks_with_fp8_leave_fa3() -> None:
    plan = plan_of("sm90", "prefill", sinks=True, kv_cache_dtype="fp8")
    assert (plan.kernel_name, plan.query_dtype) == ("native-fa2", "bfloat16")
    assert plan_of("sm90", "prefill", sinks=True).kernel_name == "native-fa3"


def test_sinks_over_context_parallel_ranks() -> None:
    refused = reasons_of("sm90", sinks=True, decode_context_parallel_size=2)
    assert (list(refused), refused["sinks"].remedy) == (["sinks"], "--dcp 1")
    assert plan_of("sm100", sinks=True, decode_context_parallel_size=2).kernel_name == "trtllm-gen"


@pytest.mark.parametrize(
    ("gpu", "phase", "name"),
    [
        ("sm80", "decode", "native-fa2"),
        ("sm90", "decode", "native-fa2"),
        ("sm100", "decode", "native-fa2"),
        ("sm120", "decode", "native-fa2"),
        ("sm90", "prefill", "native-fa3"),
        ("sm80", "prefill", None),
        ("sm100", "prefill", None),
        ("sm120", "prefill", None),
    ],
)
def test_batch_invariance(gpu: str, phase: str, name: str | None) -> None:
    if name is None:
        assert list(reasons_of(gpu, phase, batch_invariant=True)) == ["batch-invariant"]
        return
    plan = plan_of(gpu, phase, batch_invariant=True)
    assert plan.kernel_name == name
    assert ("splits no KV (disable_split_kv)" in plan.notes) is (phase == "decode")


def test_batch_invariant_prefill_is_lost_with_fa3() -> None:
    fields: dict[str, Any] = {"batch_invariant": True, "head_size": 512}
    assert list(reasons_of("sm90", "prefill", **fields)) == ["batch-invariant"]
    reasons = reasons_of("sm90", "prefill", batch_invariant=True, options={"prefill_kernel": "fa2"})
    assert list(reasons) == ["batch-invariant"]


@pytest.mark.parametrize("phase", PHASES)
def test_per_head_scales(phase: Any) -> None:
    fields: dict[str, Any] = {"kv_cache_dtype": "fp8", "per_head_quant_scales": True}
    plan = plan_of("sm90", phase, **fields)
    assert (plan.kernel_name, plan.query_dtype) == ("native-fa3", "fp8_e4m3")
    for gpu in ("sm80", "sm89", "sm100", "sm120"):
        reasons = reasons_of(gpu, phase, **fields)
        assert list(reasons) == ["per-head-quant-scales"]
        assert "9.x" in reasons["per-head-quant-scales"].message
    for spoiled in ({"kv_cache_dtype": "fp8_e5m2"}, {"logits_soft_cap": 5.0}, {"sinks": True}, {"head_size": 512}):
        assert "per-head-quant-scales" in reasons_of("sm90", phase, **{**fields, **spoiled})


def test_per_head_scales_need_fa3_in_prefill() -> None:
    fields: dict[str, Any] = {"kv_cache_dtype": "fp8", "per_head_quant_scales": True}
    fa2 = {"prefill_kernel": "fa2"}
    assert list(reasons_of("sm90", "prefill", options=fa2, **fields)) == ["per-head-quant-scales"]
    assert accepts("sm90", "decode", options=fa2, **fields)


@pytest.mark.parametrize(
    ("gpu", "phase", "output", "cache", "name"),
    [
        ("sm100", "decode", "fp8", "fp8", "trtllm-gen"),
        ("sm100", "prefill", "fp4", "fp8", "trtllm-gen"),
        ("sm90", "decode", "fp8", "fp8", "xqa"),
        ("sm120", "decode", "fp8", "fp8", "xqa"),
        ("sm100", "decode", "fp8", "auto", None),
        ("sm100", "decode", "fp8", "fp8_e5m2", None),
        ("sm90", "decode", "fp4", "fp8", None),
        ("sm90", "prefill", "fp8", "fp8", None),
        ("sm80", "decode", "fp8", "fp8", None),
    ],
)
def test_output_quantization(gpu: str, phase: str, output: str, cache: str, name: str | None) -> None:
    fields: dict[str, Any] = {"output_quantization": output, "kv_cache_dtype": cache}
    if name is not None:
        assert plan_of(gpu, phase, **fields).kernel_name == name
        return
    reason = reasons_of(gpu, phase, **fields)["output-quantization"]
    helps = gpu == "sm100"
    assert reason.observed == output
    assert reason.remedy == ("--kv-cache-dtype fp8_e4m3" if helps else "--output-quantization none")
    assert accepts(gpu, phase, **fields | ({"kv_cache_dtype": "fp8"} if helps else {"output_quantization": "none"}))


@pytest.mark.parametrize(
    ("gpu", "phase", "cache", "needed"),
    [
        ("sm80", "prefill", "auto", "0.6.15"),
        ("sm90", "decode", "auto", "0.6.15"),
        ("sm90", "decode", "fp8", "0.7.2"),
        ("sm90", "prefill", "fp8", "0.7.2"),
        ("sm100", "prefill", "auto", None),
        ("sm120", "decode", "fp8", None),
    ],
)
def test_head_size_512_below_blackwell(gpu: str, phase: str, cache: str, needed: str | None) -> None:
    fields: dict[str, Any] = {"head_size": 512, "kv_cache_dtype": cache}
    if needed is None:
        assert accepts(gpu, phase, version="0.6.14", **fields)
        return
    reasons = reasons_of(gpu, phase, version="0.6.14", **fields)
    assert list(reasons) == ["head-size"]
    assert reasons["head-size"].remedy == f"pip install 'flashinfer-python>={needed}'"
    assert accepts(gpu, phase, version=needed, **fields)


@pytest.mark.parametrize("phase", PHASES)
def test_no_gpu_takes_an_nvfp4_cache(phase: Any) -> None:
    for gpu in ("sm80", "sm90", "sm100", "sm103", "sm110", "sm120"):
        assert reasons_of(gpu, phase, kv_cache_dtype="nvfp4")["kv-cache-dtype"].remedy == "--kv-cache-dtype auto"


# --- Forced paths ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "phase", "name"),
    [
        ("sm90", "decode", "native-fa2"),
        ("sm100", "prefill", "native-fa2"),
        ("sm100", "decode", "native-fa2"),
        ("sm80", "decode", "native-fa2"),
    ],
)
def test_trtllm_off(gpu: str, phase: str, name: str) -> None:
    plan = plan_of(gpu, phase, options={"use_trtllm": False})
    assert plan.kernel_name == name
    # With an FP8 cache too: native kernels read it with a 16-bit query.
    assert plan_of(gpu, phase, options={"use_trtllm": False}, kv_cache_dtype="fp8").kernel_name == name


@pytest.mark.parametrize(("gpu", "phase"), [("sm90", "decode"), ("sm100", "prefill"), ("sm100", "decode")])
def test_trtllm_on(gpu: str, phase: str) -> None:
    plan = plan_of(gpu, phase, options={"use_trtllm": True})
    assert plan.kernel_name in ("trtllm-gen", "xqa")


@pytest.mark.parametrize(
    ("gpu", "phase", "fields", "obstacles"),
    [
        ("sm80", "decode", {}, ["hardware"]),
        ("sm90", "prefill", {}, ["hardware"]),
        ("sm90", "decode", {"logits_soft_cap": 5.0, "block_size": 8}, ["soft-cap", "block-size"]),
        ("sm90", "decode", {"decode_context_parallel_size": 2}, ["decode-context-parallel"]),
        ("sm90", "decode", {"num_heads": 48, "num_kv_heads": 1}, ["group-size"]),
        ("sm90", "decode", {"kv_cache_dtype": "fp8_e5m2"}, ["kv-cache-dtype"]),
        ("sm100", "prefill", {"non_causal": True}, ["non-causal"]),
        ("sm100", "decode", {"batch_invariant": True}, ["batch-invariance"]),
        ("sm90", "decode", {"head_size": 512}, ["head-size"]),
        ("sm90", "decode", {"kv_cache_dtype": "fp8", "per_head_quant_scales": True}, ["per-head-scales"]),
        ("sm100", "decode", {"output_quantization": "fp8"}, ["output-quantization"]),
    ],
)
def test_trtllm_on_where_it_cannot_run(gpu: str, phase: Any, fields: dict[str, Any], obstacles: list[str]) -> None:
    outcome = ask(gpu, phase, options={"use_trtllm": True}, **fields)
    assert isinstance(outcome, list)
    assert [reason.observed for reason in outcome] == obstacles
    for reason in outcome:
        assert reason.code == "forced-path"
        assert reason.message.startswith("use_trtllm = true, but ")
        assert reason.remedy == 'backends.FLASHINFER.use_trtllm = "auto"'


def test_prefill_kernel() -> None:
    fa2, fa3 = {"prefill_kernel": "fa2"}, {"prefill_kernel": "fa3"}
    plan = plan_of("sm90", "prefill", options=fa2, kv_cache_dtype="fp8")
    assert (plan.kernel_name, plan.query_dtype) == ("native-fa2", "bfloat16")
    plan = plan_of("sm90", "prefill", options=fa3)
    assert plan.kernel_name == "native-fa3"
    assert plan_of("sm90", "decode", options={**fa3, "use_trtllm": False}).kernel_name == "native-fa2"
    refused: list[tuple[str, dict[str, Any]]] = [
        ("sm80", {}),
        ("sm90", {"kv_cache_dtype": "fp8_e5m2"}),
        ("sm90", {"kv_cache_dtype": "fp8", "logits_soft_cap": 5.0}),
        ("sm100", {"logits_soft_cap": 5.0}),
    ]
    for gpu, fields in refused:
        reasons = reasons_of(gpu, "prefill", options=fa3, **fields)
        assert list(reasons) == ["forced-path"]
        assert reasons["forced-path"].remedy == 'backends.FLASHINFER.prefill_kernel = "auto"'
        assert accepts(gpu, "prefill", **fields)


@pytest.mark.parametrize(
    "values",
    [
        {"use_trtllm": "yes"},
        {"prefill_kernel": "fa4"},
        {"native_workspace_bytes": 1024},
        {"trtllm_workspace_bytes": "394MiB"},
        {"use_xqa": True},
    ],
    ids=str,
)
def test_options_that_are_none(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FLASHINFER.options(**values)
