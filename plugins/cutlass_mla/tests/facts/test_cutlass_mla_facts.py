"""CUTLASS_MLA through the gate: what it takes, from which build, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from attn_select.backends.spec import BackendPlan, Reason
from attn_select.backends.spec_check import problems_of
from attn_select.layer.layouts import MLA
from attn_select.machine.environment import Environment
from attn_select.testing import check_sources, device_of, environment_of, mla_layer
from attn_select.testing import plan_of as plan_of_spec
from attn_select.testing import reasons_of as reasons_of_spec
from attn_select_cutlass_mla.facts.builds import BUILDS, LIBRARIES, CutlassMLAKernel
from attn_select_cutlass_mla.plugin import attn_select_register_backends

(CUTLASS_MLA,) = attn_select_register_backends()
MIB = 1 << 20
TO_AUTO = 'backends.CUTLASS_MLA.provider = "auto"'
ASKED = ("phase", "environment", "options", "variables")


def plan_of(where: Any = "sm100", **fields: Any) -> BackendPlan:
    """Return the plan of DeepSeek-V3's layer with ``fields`` changed."""
    asked = {"phase": "decode", **{name: fields.pop(name) for name in ASKED if name in fields}}
    return plan_of_spec(CUTLASS_MLA, mla_layer(**fields), where, **asked)


def reasons_of(where: Any = "sm100", **fields: Any) -> dict[str, Reason]:
    """Return the reasons against DeepSeek-V3's layer with ``fields`` changed, by code."""
    asked = {"phase": "decode", **{name: fields.pop(name) for name in ASKED if name in fields}}
    return reasons_of_spec(CUTLASS_MLA, mla_layer(**fields), where, **asked)


def installed(**versions: str) -> Environment:
    """Return an environment in which torch and only these distributions (``sgl_kernel="0.3.21"``) are installed."""
    there = {name.replace("_", "-"): version for name, version in versions.items()}
    return environment_of(installed={"torch": "2.11.0", **there})


# --- Facts ----------------------------------------------------------------------------------------


def test_registers_decode_only() -> None:
    assert (CUTLASS_MLA.name, set(CUTLASS_MLA.capabilities)) == ("CUTLASS_MLA", {"decode"})
    assert problems_of(CUTLASS_MLA) == []
    assert list(reasons_of(phase="prefill")) == ["phase-not-served"]


def test_every_fact_has_a_source() -> None:
    check_sources(CUTLASS_MLA, *BUILDS, least=30)


def test_builds_are_the_alternatives_in_order() -> None:
    assert [library.distribution for library in LIBRARIES[1]] == ["vllm", "sgl-kernel", "flashinfer-python"]
    assert tuple(build.library for build in BUILDS) == LIBRARIES[1]
    assert all(build.module.split(".")[0] == build.library.module for build in BUILDS)


# --- Plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["sm100", "sm103"])
def test_plan(gpu: str) -> None:
    plan = plan_of(gpu, block_size=128)
    assert (plan.kernel_name, plan.provider) == ("cutlass-mla", "vllm (vllm._custom_ops)")
    assert (plan.kv_layouts, plan.kernel_block_sizes, plan.block_table_width_multiple) == ((MLA,), (128,), 1)
    assert (plan.query_dtype, plan.returns_lse) == ("bfloat16", True)
    assert (plan.cuda_graph, plan.workspace_bytes) == ("UNIFORM_SINGLE_TOKEN_DECODE", 128 * MIB)


@pytest.mark.parametrize("level", ["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"])
def test_cuda_graph_level(level: str) -> None:
    if level in ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE"):
        assert plan_of(cuda_graph=level)
    else:
        assert list(reasons_of(cuda_graph=level)) == ["cuda-graph-level"]


@pytest.mark.parametrize(("heads", "padded"), [(128, False), (64, True), (1, True)])
def test_heads_are_padded(heads: int, padded: bool) -> None:
    notes = [note for note in plan_of(num_heads=heads).notes if "padded" in note]
    assert notes == ([f"query heads are padded from {heads} to 128"] if padded else [])
    assert list(reasons_of(num_heads=129)) == ["num-heads"]


def test_the_heads_of_all_ranks_are_gathered() -> None:
    """A rank's decode gets the heads of all ranks: two of 64 fill the kernel, and two of 65 are too many."""
    assert not [note for note in plan_of(num_heads=64, decode_context_parallel_size=2).notes if "padded" in note]
    refused = reasons_of(num_heads=65, decode_context_parallel_size=2)
    assert list(refused) == ["num-heads"]
    assert "130 query heads, 65 from each of 2 ranks" in str(refused["num-heads"])


def test_caches() -> None:
    assert plan_of(dtype="float16").query_dtype == "float16"
    plan = plan_of(kv_cache_dtype="fp8")
    assert plan.query_dtype == "fp8_e4m3"
    assert any("part of the softmax scale" in note for note in plan.notes)
    assert any("converted to float16" in note for note in plan_of(kv_cache_dtype="fp8", dtype="float16").notes)
    assert plan_of(kv_cache_dtype="fp8", per_head_quant_scales=True)
    for cache in ("fp8_e5m2", "nvfp4", "float16"):
        assert "kv-cache-dtype" in reasons_of(kv_cache_dtype=cache)


@pytest.mark.parametrize(("size", "remedy"), [(128, None), (256, None), (64, 128), (16, 128), (192, 256)])
def test_pages(size: int, remedy: int | None) -> None:
    if remedy is None:
        assert plan_of(block_size=size).kernel_block_sizes == (128,)
    else:
        assert reasons_of(block_size=size)["block-size"].remedy == f"--block-size {remedy}"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"kv_lora_rank": 256}, "mla-dims"),
        ({"kv_lora_rank": 448, "qk_rope_head_dim": 128}, "mla-dims"),
        ({"num_speculative_tokens": 1}, "speculative-tokens"),
        ({"sinks": True}, "sinks"),
        ({"sliding_window": 64}, "sliding-window"),
        ({"logits_soft_cap": 5.0}, "logits-soft-cap"),
        ({"alibi": True}, "alibi"),
        ({"mm_prefix": True}, "mm-prefix"),
        ({"non_causal": True}, "non-causal"),
        ({"batch_invariant": True}, "batch-invariant"),
        ({"output_quantization": "fp8"}, "output-quantization"),
        ({"sparse_top_k": 2048}, "sparse-unsupported"),
    ],
)
def test_refused(fields: dict[str, Any], code: str) -> None:
    assert code in reasons_of(**fields)


def test_other_devices() -> None:
    for where in (None, "sm80", "sm90", "sm110", "sm120"):
        refused = reasons_of(where, num_heads=129)
        assert list(refused) == ["compute-capability"]
        assert refused["compute-capability"].observed == device_of(where).capability_text


# --- Builds ---------------------------------------------------------------------------------------

SGL = {"sgl_kernel": "0.3.21"}
FLASHINFER = {"flashinfer_python": "0.6.14"}


@pytest.mark.parametrize(
    ("there", "provider", "lse"),
    [
        ({"vllm": "0.33.0", **SGL, **FLASHINFER}, "vllm (vllm._custom_ops)", True),
        ({**SGL, **FLASHINFER}, "sgl-kernel (sgl_kernel)", False),
        (FLASHINFER, "flashinfer-python (flashinfer.mla)", False),
        ({"vllm": "0.10.0", **SGL}, "sgl-kernel (sgl_kernel)", False),
    ],
)
def test_the_first_installed_build_serves(there: dict[str, str], provider: str, lse: bool) -> None:
    plan = plan_of(environment=installed(**there))
    assert (plan.provider, plan.returns_lse) == (provider, lse)


def test_no_build() -> None:
    refused = reasons_of(environment=installed())
    assert (list(refused), refused["library-missing"].remedy) == (["library-missing"], "pip install vllm")
    refused = reasons_of(environment=installed(vllm="0.10.0"))
    assert list(refused) == ["library-version"]


def test_sgl_kernel_has_no_code_for_10_3() -> None:
    assert plan_of("sm103", environment=installed(**SGL, **FLASHINFER)).provider == "flashinfer-python (flashinfer.mla)"
    refused = reasons_of("sm103", environment=installed(**SGL))
    assert list(refused) == ["compute-capability"]
    assert refused["compute-capability"].remedy == "pip install vllm"


@pytest.mark.parametrize("there", [SGL, FLASHINFER], ids=["sgl-kernel", "flashinfer"])
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv-cache-dtype"),
        ({"num_heads": 64, "decode_context_parallel_size": 2}, "decode-context-parallel"),
    ],
)
def test_only_vllms_kernel_takes(there: dict[str, str], fields: dict[str, Any], code: str) -> None:
    refused = reasons_of(environment=installed(**there), **fields)
    assert (list(refused), refused[code].remedy) == ([code], "pip install vllm")
    assert f"CUTLASS MLA of {next(iter(there)).replace('_', '-')}: " in refused[code].message
    assert plan_of(environment=installed(vllm="0.33.0", **there), **fields).provider == "vllm (vllm._custom_ops)"


def test_flashinfers_kernel_has_notes() -> None:
    assert any("1 / sqrt(192)" in note for note in plan_of(environment=installed(**FLASHINFER)).notes)
    assert not any("1 / sqrt(192)" in note for note in plan_of(environment=installed(**SGL)).notes)


def test_pinned_provider() -> None:
    plan = plan_of(options={"provider": "sgl-kernel"})
    assert plan.kernel == CutlassMLAKernel("sgl-kernel", 1)
    refused = reasons_of(options={"provider": "sgl-kernel"}, kv_cache_dtype="fp8")
    assert refused["kv-cache-dtype"].remedy == TO_AUTO
    environment = installed(vllm="0.33.0")
    refused = reasons_of(environment=environment, options={"provider": "sgl-kernel"})
    assert list(refused) == ["library-missing"]
    assert 'provider = "sgl-kernel"' in refused["library-missing"].message
    assert refused["library-missing"].remedy == TO_AUTO
    environment = installed(vllm="0.10.0", **SGL)
    refused = reasons_of(environment=environment, options={"provider": "vllm"})
    assert list(refused) == ["library-version"]
    assert "vllm 0.10.0 (needs >=0.11" in refused["library-version"].message
    refused = reasons_of(environment=installed(), options={"provider": "sgl-kernel"})
    assert list(refused) == ["library-missing"]


# --- KV splits ------------------------------------------------------------------------------------


def test_kv_splits() -> None:
    plan = plan_of()
    assert plan.kernel == CutlassMLAKernel("vllm", -1)
    assert not any("splits" in note for note in plan.notes)
    plan = plan_of(options={"num_kv_splits": 4})
    assert plan.kernel == CutlassMLAKernel("vllm", 4)
    assert plan.notes[-1] == "KV splits fixed by num_kv_splits = 4"
    plan = plan_of(options={"num_kv_splits": 4}, variables={"FORCE_NUM_KV_SPLITS": "2"})
    assert plan.kernel == CutlassMLAKernel("vllm", 2)
    assert plan.notes[-1] == "KV splits fixed by FORCE_NUM_KV_SPLITS=2"
    plan = plan_of(options={"num_kv_splits": 4}, variables={"FORCE_NUM_KV_SPLITS": "-1"})
    assert plan.kernel == CutlassMLAKernel("vllm", -1)
    assert not any("splits" in note for note in plan.notes)


def test_the_kernel_is_data() -> None:
    kernel = plan_of(options={"num_kv_splits": 4}).kernel
    assert repr(kernel) == "CutlassMLAKernel(provider='vllm', num_kv_splits=4)"
    assert len({kernel, plan_of(options={"num_kv_splits": 4}, num_heads=16).kernel}) == 1


@pytest.mark.parametrize("splits", [1, 16])
def test_as_many_splits_as_there_may_be(splits: int) -> None:
    for given in ({"options": {"num_kv_splits": splits}}, {"variables": {"FORCE_NUM_KV_SPLITS": str(splits)}}):
        assert plan_of(**given).kernel == CutlassMLAKernel("vllm", splits)


def test_sgl_kernel_splits_only_where_asked() -> None:
    """Its kernel may hang when it splits a batch."""
    plan = plan_of(options={"provider": "sgl-kernel"})
    assert plan.kernel == CutlassMLAKernel("sgl-kernel", 1)
    plan = plan_of(options={"provider": "sgl-kernel", "num_kv_splits": 8})
    assert plan.kernel == CutlassMLAKernel("sgl-kernel", 8)


@pytest.mark.parametrize("text", ["", "0", "17", "-2", "two", "1.5", "9" * 5000])
def test_malformed_variable(text: str) -> None:
    refused = reasons_of(variables={"FORCE_NUM_KV_SPLITS": text})
    assert list(refused) == ["environment-variable"]
    assert refused["environment-variable"].remedy == "unset FORCE_NUM_KV_SPLITS"
    assert refused["environment-variable"].supported == ["-1", "1 to 16"]
    assert len(refused["environment-variable"].message) < 300
    both = reasons_of(variables={"FORCE_NUM_KV_SPLITS": text}, num_heads=129)
    assert list(both) == ["environment-variable", "num-heads"]


def test_flashinfer_chooses_the_splits_itself() -> None:
    refused = reasons_of(environment=installed(**FLASHINFER), options={"num_kv_splits": 4})
    assert list(refused) == ["num-kv-splits"]
    assert refused["num-kv-splits"].message == (
        "a number of KV splits fixed by num_kv_splits = 4 (CUTLASS MLA of flashinfer-python: -1)"
    )
    assert plan_of(environment=installed(**FLASHINFER), options={"num_kv_splits": -1})
    assert plan_of(environment=installed(**SGL, **FLASHINFER), options={"num_kv_splits": 4}).provider == (
        "sgl-kernel (sgl_kernel)"
    )


@pytest.mark.parametrize(
    "values",
    [
        {"num_kv_splits": 0},
        {"num_kv_splits": 17},
        {"num_kv_splits": True},
        {"num_kv_splits": "4"},
        {"workspace_bytes": 1},
        {"provider": "sglang-kernel"},
        {"splits": 4},
    ],
    ids=str,
)
def test_options_that_are_none(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CUTLASS_MLA.options(**values)


def test_workspace() -> None:
    assert plan_of(options={"workspace_bytes": 256 * MIB}).workspace_bytes == 256 * MIB
