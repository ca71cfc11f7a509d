"""FLASHINFER_MLA through the gate: its decode kernels, its ragged prefill, and what both refuse."""

from __future__ import annotations

from typing import Any

import pytest
from flashinfer_gate import Gate
from pydantic import ValidationError

from attn_select.layer.layouts import MLA
from attn_select.machine.device import CPU, Device, lookup
from attn_select.testing import mla_layer
from attn_select_flashinfer.facts.mla import FLASHINFER_MLA

MIB = 1 << 20
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SMALL = {**DEEPSEEK, "kv_lora_rank": 256}
GEN, XQA, FA3, FA2 = "trtllm-gen", "xqa", "fa3", "fa2"
GPUS = ("sm80", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")


GATE = Gate(FLASHINFER_MLA, mla_layer)
plan_of = GATE.plan_of
reasons_of = GATE.reasons_of


# --- Decode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "name", "lse", "level", "width", "sizes"),
    [
        (("sm80", "sm89", "sm110"), FA2, True, "UNIFORM_BATCH", 1, (64, 32, 16, 1)),
        (("sm90",), FA3, True, "UNIFORM_BATCH", 1, (64, 32, 16, 1)),
        (("sm100", "sm103"), GEN, True, "UNIFORM_BATCH", 4, (64, 32)),
        (("sm120", "sm121"), XQA, False, "UNIFORM_SINGLE_TOKEN_DECODE", 8, (64, 32, 128, 16)),
    ],
)
def test_decode_kernel_follows_the_device(
    gpus: tuple[str, ...], name: str, lse: bool, level: str, width: int, sizes: tuple[int, ...]
) -> None:
    for gpu in gpus:
        plan = plan_of(gpu)
        assert (plan.kernel_name, plan.returns_lse, plan.cuda_graph) == (name, lse, level)
        assert (plan.block_table_width_multiple, plan.kernel_block_sizes) == (width, sizes)
        assert (plan.kv_layouts, plan.query_dtype) == ((MLA,), "bfloat16")
        assert set(reasons_of(gpu, cuda_graph="ALWAYS")) == {"cuda-graph-level"}


@pytest.mark.parametrize(
    ("gpu", "block_size", "sizes", "width"),
    [
        ("sm100", 32, (32,), 4),
        ("sm100", 64, (64, 32), 4),
        ("sm100", 96, (32,), 4),
        ("sm120", 128, (128, 64, 32, 16), 8),
        ("sm90", 1, (1,), 1),
        ("sm90", 128, (64, 32, 16, 1), 1),
    ],
)
def test_decode_pages(gpu: str, block_size: int, sizes: tuple[int, ...], width: int) -> None:
    plan = plan_of(gpu, block_size=block_size)
    assert (plan.kernel_block_sizes, plan.block_table_width_multiple) == (sizes, width)


@pytest.mark.parametrize("version", ["0.6.14", "0.6.18.post1", "0.7.0", "0.7.0.post1", "0.7.1", "0.7.2", "0.7.2.post1"])
def test_each_entry_has_releases_of_its_own(version: str) -> None:
    """The native decode wrapper of 0.7.0 and 0.7.1 was not looked into; that refuses nothing else."""
    native = version not in ("0.7.0", "0.7.0.post1", "0.7.1")
    for gpu, kernel in (("sm80", FA2), ("sm90", FA3)):
        if native:
            assert plan_of(gpu, version=version).kernel_name == kernel
        else:
            refused = reasons_of(gpu, version=version)
            assert list(refused) == ["library-version"]
            assert refused["library-version"].observed == version
            assert refused["library-version"].remedy == "pip install 'flashinfer-python>=0.7.2,<=0.7.2.post1'"
        assert plan_of(gpu, "prefill", version=version).kernel_name == kernel
    for gpu, kernel in (("sm100", GEN), ("sm103", GEN)):
        assert plan_of(gpu, version=version).kernel_name == kernel
        assert plan_of(gpu, "prefill", version=version).kernel_name == kernel
    assert plan_of("sm120", version=version, num_heads=128).kernel_name == XQA
    assert plan_of("sm110", "prefill", version=version).kernel_name == "cutlass"


def test_small_pages_leave_trtllm_gen() -> None:
    plan = plan_of("sm100", block_size=16)
    assert (plan.kernel_name, plan.kernel_block_sizes) == (FA2, (16, 1))
    assert any("slow there" in note for note in plan.notes)
    # fa2 reads no FP8 cache, so there a page of 16 tokens is refused.
    refused = reasons_of("sm100", block_size=16, kv_cache_dtype="fp8")
    assert set(refused) == {"block-size", "kv-cache-dtype"}
    assert refused["block-size"].remedy == "--block-size 32"
    assert plan_of("sm100", block_size=32, kv_cache_dtype="fp8").kernel_name == GEN


@pytest.mark.parametrize(
    ("gpu", "name", "query"),
    [("sm90", FA3, "bfloat16"), ("sm100", GEN, "fp8_e4m3"), ("sm120", XQA, "fp8_e4m3"), ("sm80", None, None)],
)
def test_fp8_cache(gpu: str, name: str | None, query: str | None) -> None:
    if name is None:
        reasons = reasons_of(gpu, kv_cache_dtype="fp8")
        assert list(reasons) == ["kv-cache-dtype"]
        assert reasons["kv-cache-dtype"].remedy == "--kv-cache-dtype auto"
        return
    plan = plan_of(gpu, kv_cache_dtype="fp8")
    assert (plan.kernel_name, plan.query_dtype) == (name, query)
    if query == "fp8_e4m3":
        assert any("converted" in note for note in plan_of(gpu, kv_cache_dtype="fp8", dtype="float16").notes)
    else:
        refused = reasons_of(gpu, kv_cache_dtype="fp8", dtype="float16")
        assert refused["dtype"].remedy == "--dtype bfloat16"


@pytest.mark.parametrize("gpu", GPUS)
def test_float16(gpu: str) -> None:
    plan = plan_of(gpu, dtype="float16")
    assert (plan.kernel_name, plan.query_dtype) == (FA3 if gpu == "sm90" else FA2, "float16")


@pytest.mark.parametrize(("gpu", "name"), [("sm80", FA2), ("sm90", FA2), ("sm100", GEN), ("sm120", FA2)])
def test_small_mla(gpu: str, name: str) -> None:
    plan = plan_of(gpu, **SMALL)
    assert plan.kernel_name == name
    if gpu in ("sm90", "sm120"):
        refused = reasons_of(gpu, kv_cache_dtype="fp8", **SMALL)
        assert set(refused) & {"mla-dims", "kv-cache-dtype"}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("rank", [384, 1024])
def test_other_latent_widths(gpu: str, rank: int) -> None:
    assert "head-size" in reasons_of(gpu, **{**DEEPSEEK, "kv_lora_rank": rank})


def test_latent_width_alone_is_not_enough() -> None:
    refused = reasons_of("sm90", **{**DEEPSEEK, "kv_lora_rank": 448, "qk_rope_head_dim": 128})
    assert list(refused) == ["mla-dims"]
    assert refused["mla-dims"].observed == "448 + 128"


@pytest.mark.parametrize(
    ("gpu", "heads", "name", "padded"),
    [
        ("sm100", 128, GEN, None),
        ("sm100", 16, GEN, None),
        ("sm100", 20, GEN, 32),
        ("sm100", 160, FA2, None),
        ("sm90", 5, FA3, None),
        ("sm90", 160, FA3, None),
        ("sm120", 128, XQA, None),
        ("sm120", 16, FA2, None),
    ],
)
def test_heads(gpu: str, heads: int, name: str, padded: int | None) -> None:
    plan = plan_of(gpu, num_heads=heads)
    assert plan.kernel_name == name
    notes = [note for note in plan.notes if "padded" in note]
    assert notes == ([] if padded is None else [f"query heads are padded from {heads} to {padded}"])


def test_heads_on_12_with_fp8_are_padded_to_128() -> None:
    plan = plan_of("sm120", num_heads=16, kv_cache_dtype="fp8")
    assert plan.kernel_name == XQA
    assert "query heads are padded from 16 to 128" in plan.notes
    assert "num-heads" in reasons_of("sm120", num_heads=160, kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"num_speculative_tokens": 1}, "speculative-tokens"),
        ({"decode_context_parallel_size": 2}, "decode-context-parallel"),
    ],
)
def test_xqa_limits(fields: dict[str, Any], code: str) -> None:
    assert plan_of("sm120", **fields).kernel_name == FA2
    assert code in reasons_of("sm120", kv_cache_dtype="fp8", **fields)
    assert plan_of("sm100", kv_cache_dtype="fp8", **fields).kernel_name == GEN
    assert plan_of("sm90", kv_cache_dtype="fp8", **fields).kernel_name == FA3


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_sinks(phase: Any) -> None:
    assert plan_of("sm100", phase, sinks=True).kernel_name == GEN
    for gpu in ("sm80", "sm90", "sm110", "sm120"):
        assert list(reasons_of(gpu, phase, sinks=True)) == ["sinks"]


def test_context_parallel_decode_on_10_doubles_the_workspace() -> None:
    one, two = plan_of("sm100"), plan_of("sm100", decode_context_parallel_size=2)
    assert (one.workspace_bytes, two.workspace_bytes) == (128 * MIB, 256 * MIB)
    assert (one.cuda_graph, two.cuda_graph) == ("UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE")
    own = plan_of("sm100", options={"workspace_bytes": 64 * MIB}, decode_context_parallel_size=2)
    assert [any("256 MiB" in note for note in plan.notes) for plan in (one, two, own)] == [False, True, False]
    assert plan_of("sm90", decode_context_parallel_size=2).workspace_bytes == plan_of("sm90").workspace_bytes
    assert plan_of("sm90", options={"workspace_bytes": 64 * MIB}).workspace_bytes == 64 * MIB


# --- Prefill --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("sm80", FA2),
        ("sm90", FA3),
        ("sm100", GEN),
        ("sm103", GEN),
        ("sm110", "cutlass"),
        ("sm120", FA2),
    ],
)
def test_prefill_kernel_follows_the_device(gpu: str, name: str) -> None:
    # The cache does not bind prefill, which runs on decompressed K and V.
    for fields in ({}, {"kv_cache_dtype": "fp8"}, {"block_size": 7}):
        plan = plan_of(gpu, "prefill", **fields)
        assert (plan.kernel_name, plan.kv_layouts, plan.kernel_block_sizes) == (name, (), ())
        assert plan.query_dtype == "bfloat16"
        assert plan.returns_lse


@pytest.mark.parametrize("gpu", GPUS)
def test_prefill_in_float16(gpu: str) -> None:
    plan = plan_of(gpu, "prefill", dtype="float16")
    assert plan.query_dtype == "float16"
    if gpu in ("sm100", "sm103"):  # trtllm-gen has no float16 there
        assert plan.kernel_name == "cutlass"


def test_prefill_head_dims() -> None:
    wide = {**DEEPSEEK, "qk_nope_head_dim": 192, "v_head_dim": 256}
    plan = plan_of("sm100", "prefill", **wide)
    assert plan.kernel_name == "trtllm-gen"
    assert plan_of("sm100", "prefill", options={"prefill_kernel": "trtllm-gen"}, **wide).kernel_name == plan.kernel_name
    assert plan_of("sm100", "prefill", dtype="float16", **wide).kernel_name == "fa2"
    assert plan_of("sm90", "prefill", **wide).kernel_name == "fa3"
    for gpu in GPUS:
        refused = reasons_of(gpu, "prefill", **{**DEEPSEEK, "v_head_dim": 96})
        assert list(refused) == ["mla-dims"]
        assert refused["mla-dims"].observed == "192 / 96"


# --- Refused everywhere ---------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"sliding_window": 128}, "sliding-window"),
        ({"logits_soft_cap": 5.0}, "logits-soft-cap"),
        ({"alibi": True}, "alibi"),
        ({"mm_prefix": True}, "mm-prefix"),
        ({"batch_invariant": True}, "batch-invariant"),
        ({"output_quantization": "fp8"}, "output-quantization"),
        ({"sparse_top_k": 2048}, "sparse-unsupported"),
    ],
)
def test_refused_everywhere(gpu: str, phase: str, fields: dict[str, Any], code: str) -> None:
    assert code in reasons_of(gpu, phase, **fields)


@pytest.mark.parametrize("cache", ["fp8_e5m2", "nvfp4", "float16"])
def test_other_caches(cache: str) -> None:
    for gpu in GPUS:
        assert "kv-cache-dtype" in reasons_of(gpu, kv_cache_dtype=cache)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("device", [CPU, Device("t4", (7, 5))], ids=["cpu", "sm75"])
def test_devices_below_ampere(device: Device, phase: str) -> None:
    assert set(reasons_of(device, phase)) == {"compute-capability"}


def test_per_head_scales() -> None:
    fields: dict[str, Any] = {"kv_cache_dtype": "fp8", "per_head_quant_scales": True}
    assert plan_of("sm90", **fields)
    assert plan_of("sm90", "prefill", **fields)


def test_layers_without_mla() -> None:
    none = dict.fromkeys(DEEPSEEK)
    assert list(reasons_of("sm90", num_kv_heads=8, head_size=128, **none)) == ["mla-only"]


# --- Forced kernels -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "phase", "key", "kernel", "name"),
    [
        ("sm90", "decode", "decode_kernel", "fa2", FA2),
        ("sm90", "decode", "decode_kernel", "fa3", FA3),
        ("sm100", "decode", "decode_kernel", "fa2", FA2),
        ("sm120", "decode", "decode_kernel", "fa2", FA2),
        ("sm100", "prefill", "prefill_kernel", "trtllm-gen", GEN),
        ("sm100", "prefill", "prefill_kernel", "fa2", FA2),
        ("sm90", "prefill", "prefill_kernel", "fa2", FA2),
        ("sm90", "decode", "decode_kernel", "trtllm-gen", None),
        ("sm90", "decode", "decode_kernel", "xqa", None),
        ("sm80", "decode", "decode_kernel", "fa3", None),
        ("sm90", "prefill", "prefill_kernel", "cutlass", None),
        ("sm120", "prefill", "prefill_kernel", "trtllm-gen", None),
    ],
)
def test_forced_kernel(gpu: str, phase: str, key: str, kernel: str, name: str | None) -> None:
    if name is not None:
        plan = plan_of(gpu, phase, options={key: kernel})
        assert plan.kernel_name == name
        return
    refused = reasons_of(gpu, phase, options={key: kernel})
    assert list(refused) == ["forced-path"]
    assert refused["forced-path"].remedy == f'backends.FLASHINFER_MLA.{key} = "auto"'
    assert lookup(gpu).capability_text in refused["forced-path"].message


def test_a_forced_kernel_still_has_its_limits() -> None:
    assert list(reasons_of("sm90", options={"decode_kernel": "fa3"}, **SMALL)) == ["mla-dims"]
    assert plan_of("sm90", options={"decode_kernel": "fa2"}, **SMALL).kernel_name == FA2


@pytest.mark.parametrize("values", [{"decode_kernel": "cutlass"}, {"prefill_kernel": "xqa"}, {"workspace_bytes": 1}])
def test_options_that_are_none(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FLASHINFER_MLA.options(**values)


@pytest.mark.parametrize(
    ("gpu", "safe"), [("sm80", True), ("sm90", True), ("sm100", False), ("sm103", False), ("sm120", False)]
)
def test_nan_in_unused_tails(gpu: str, safe: bool) -> None:
    assert plan_of(gpu).nan_tail_safe is safe
    assert plan_of(gpu, "prefill").nan_tail_safe  # reads no cache
