"""FLASHMLA and FLASHMLA_SPARSE through the gate: what they take, which build serves, and why not."""

from __future__ import annotations

from typing import Any

import pytest
from flashmla_layers import installed
from pydantic import ValidationError

from attn_select.backends.spec import BackendPlan, BackendSpec, Reason
from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FP8_DS_MLA, MLA
from attn_select.testing import check_sources, codes_of, environment_of, gqa_layer, mla_layer
from attn_select.testing import plan_of as plan_of_spec
from attn_select.testing import reasons_of as reasons_of_spec
from attn_select_flashmla.facts.builds import BUILDS, LIBRARIES, FlashMLAKernel
from attn_select_flashmla.plugin import attn_select_register_backends

SPECS = {spec.name: spec for spec in attn_select_register_backends()}
DENSE, SPARSE = SPECS["FLASHMLA"], SPECS["FLASHMLA_SPARSE"]
DISTRIBUTIONS = [build.distribution for build in BUILDS]
HOPPER = (9, 0)


def layer(**fields: Any) -> AttentionConfig:
    return mla_layer(**{"num_heads": 64, **fields})


def sparse(**fields: Any) -> AttentionConfig:
    return layer(**{"sparse_top_k": 2048, **fields})


def plan_of(config: AttentionConfig, where: tuple[int, int] = HOPPER, **asked: Any) -> BackendPlan:
    return plan_of_spec(SPARSE if config.sparse else DENSE, config, where, **asked)


def reasons_of(config: AttentionConfig, where: tuple[int, int] = HOPPER, **asked: Any) -> dict[str, Reason]:
    return reasons_of_spec(SPARSE if config.sparse else DENSE, config, where, **asked)


# --- Facts -------------------------------------------------------------------------------------


def test_registers_both_backends() -> None:
    assert {name: set(spec.capabilities) for name, spec in SPECS.items()} == {
        "FLASHMLA": {"decode"},
        "FLASHMLA_SPARSE": {"prefill", "decode"},
    }


def test_every_fact_has_a_source() -> None:
    check_sources(DENSE, *BUILDS, least=30)
    check_sources(SPARSE, least=30)


def test_builds_come_from_declared_libraries() -> None:
    assert tuple(build.library for build in BUILDS) == LIBRARIES[1]
    assert all(build.module.split(".")[0] == build.library.module for build in BUILDS)


# --- Dense -------------------------------------------------------------------------------------


def test_dense_decode_on_hopper() -> None:
    plan = plan_of(layer())
    assert (plan.kernel_name, plan.query_dtype, plan.returns_lse) == ("dense", "bfloat16", True)
    assert (plan.kv_layouts, plan.kernel_block_sizes, plan.cuda_graph) == ((MLA,), (64,), "UNIFORM_BATCH")


def test_dense_serves_decode_only() -> None:
    assert set(reasons_of(layer(), phase="prefill")) == {"phase-not-served"}


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (10, 3), (12, 0)])
def test_dense_is_hopper_only(capability: tuple[int, int]) -> None:
    reason = reasons_of(layer(), capability)["compute-capability"]
    assert reason.observed == f"{capability[0]}.{capability[1]}"
    assert reason.supported == "9.0"


def test_dense_fp8_quantises_the_query() -> None:
    plan = plan_of(layer(kv_cache_dtype="fp8", per_head_quant_scales=True))
    assert (plan.kernel_name, plan.query_dtype, plan.kv_layouts) == ("dense-fp8", "fp8_e4m3", (MLA,))
    assert any("float16" in note for note in plan_of(layer(kv_cache_dtype="fp8", dtype="float16")).notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float16"},
        {"num_heads": 1},
        {"num_heads": 128},
        {"block_size": 128},
        {"num_speculative_tokens": 3},
        {"decode_context_parallel_size": 8},
        {"non_causal": True},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_dense_accepts(fields: dict[str, Any]) -> None:
    assert plan_of(layer(**fields))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"block_size": 16}, "block-size"),
        ({"dtype": "float32"}, "dtype"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv-cache-dtype"),
        ({"qk_rope_head_dim": 32}, "head-size"),
        ({"kv_lora_rank": 448, "qk_rope_head_dim": 128}, "kv-lora-rank"),
        ({"sinks": True}, "sinks"),
        ({"sliding_window": 512}, "sliding-window"),
        ({"logits_soft_cap": 30.0}, "logits-soft-cap"),
        ({"batch_invariant": True}, "batch-invariant"),
        ({"cuda_graph": "ALWAYS"}, "cuda-graph-level"),
    ],
)
def test_dense_rejects(fields: dict[str, Any], code: str) -> None:
    assert code in reasons_of(layer(**fields))


def test_dense_serves_no_sparse_and_no_plain_layers() -> None:
    for config, code in ((sparse(), "sparse-unsupported"), (gqa_layer(), "mla-only")):
        assert code in codes_of(DENSE, config, HOPPER)


# --- Sparse ------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_sparse_bf16(capability: tuple[int, int], phase: str) -> None:
    plan = plan_of(sparse(), capability, phase=phase)
    assert (plan.kernel_name, plan.query_dtype, plan.kv_layouts) == ("sparse-prefill", "bfloat16", (MLA,))
    assert plan.kernel_block_sizes == (64, 1)
    assert not plan.notes


@pytest.mark.parametrize("capability", [(8, 0), (11, 0), (12, 0)])
def test_sparse_elsewhere(capability: tuple[int, int]) -> None:
    assert set(reasons_of(sparse(), capability)) == {"compute-capability"}


@pytest.mark.parametrize("dtype", ["fp8", "fp8_ds_mla"])
@pytest.mark.parametrize(
    ("heads", "phase", "kernel"),
    [
        (128, "decode", "sparse-decode"),
        (16, "decode", "sparse-decode"),
        (128, "prefill", "sparse-prefill"),
        (16, "prefill", "sparse-decode"),
    ],
)
def test_sparse_fp8(dtype: str, heads: int, phase: str, kernel: str) -> None:
    plan = plan_of(sparse(num_heads=heads, kv_cache_dtype=dtype), phase=phase)
    assert (plan.kernel_name, plan.kv_layouts, plan.kernel_block_sizes) == (kernel, (FP8_DS_MLA,), (64,))
    assert plan.query_dtype == "bfloat16"
    assert any("fp8_ds_mla" in note for note in plan.notes) is (dtype == "fp8")
    assert any("dequantises" in note for note in plan.notes) is (kernel == "sparse-prefill")


def test_sparse_fp8_wants_pages_of_64() -> None:
    assert plan_of(sparse(block_size=1))
    assert plan_of(sparse(block_size=128, kv_cache_dtype="fp8_ds_mla"))
    reason = reasons_of(sparse(block_size=16, kv_cache_dtype="fp8_ds_mla"))["block-size"]
    assert (reason.observed, reason.remedy) == (16, "--block-size 64")


@pytest.mark.parametrize(("heads", "padded"), [(16, 64), (64, None), (72, 128), (128, None)])
def test_sparse_pads_heads(heads: int, padded: int | None) -> None:
    notes = [note for note in plan_of(sparse(num_heads=heads)).notes if "padded" in note]
    assert notes == ([f"query heads are padded from {heads} to {padded}"] if padded else [])


def test_sparse_takes_128_heads_over_all_ranks() -> None:
    reason = reasons_of(sparse(num_heads=160))["num-heads"]
    assert (reason.observed, "160" in reason.message) == (160, True)
    assert plan_of(sparse(num_heads=16, decode_context_parallel_size=8))
    reason = reasons_of(sparse(num_heads=64, decode_context_parallel_size=4))["num-heads"]
    assert (reason.observed, "64 from each of 4 ranks" in reason.message) == (256, True)


@pytest.mark.parametrize(
    ("top_k", "dtype", "multiple"),
    [(2048, "auto", None), (192, "auto", 128), (192, "fp8_ds_mla", None), (100, "fp8_ds_mla", 64)],
)
def test_sparse_pads_indices(top_k: int, dtype: str, multiple: int | None) -> None:
    notes = [note for note in plan_of(sparse(sparse_top_k=top_k, kv_cache_dtype=dtype)).notes if "top-k" in note]
    assert [note.rsplit(" ", 1)[-1] for note in notes] == ([str(multiple)] if multiple else [])


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv-cache-dtype"),
        ({"qk_rope_head_dim": 32}, "head-size"),
        ({"qk_rope_head_dim": 0, "kv_cache_dtype": "fp8_ds_mla"}, "head-size"),
        ({"kv_lora_rank": 448, "qk_rope_head_dim": 64}, "kv-lora-rank"),
        ({"kv_lora_rank": 448, "qk_rope_head_dim": 128}, "kv-lora-rank"),
        ({"batch_invariant": True}, "batch-invariant"),
        ({"logits_soft_cap": 30.0}, "logits-soft-cap"),
    ],
)
def test_sparse_rejects(fields: dict[str, Any], code: str) -> None:
    assert code in reasons_of(sparse(**fields))


def test_a_layer_without_a_rope_part() -> None:
    assert plan_of(sparse(qk_rope_head_dim=0)).kernel_name == "sparse-prefill"
    assert "head-size" in reasons_of(sparse(qk_rope_head_dim=0), (10, 0))
    assert "head-size" in reasons_of(layer(qk_rope_head_dim=0))


# --- Kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "phase", "kernel"),
    [
        (layer(), "decode", FlashMLAKernel("vllm", "dense")),
        (layer(kv_cache_dtype="fp8"), "decode", FlashMLAKernel("vllm", "dense_fp8")),
        (sparse(), "prefill", FlashMLAKernel("vllm", "sparse_prefill")),
        (sparse(), "decode", FlashMLAKernel("vllm", "sparse_prefill")),
        (sparse(kv_cache_dtype="fp8_ds_mla"), "decode", FlashMLAKernel("vllm", "sparse_decode")),
        (sparse(kv_cache_dtype="fp8"), "prefill", FlashMLAKernel("vllm", "sparse_prefill", copies_cache=True)),
        (sparse(kv_cache_dtype="fp8", num_heads=31), "prefill", FlashMLAKernel("vllm", "sparse_decode")),
        (
            sparse(kv_cache_dtype="fp8", num_heads=32),
            "prefill",
            FlashMLAKernel("vllm", "sparse_prefill", copies_cache=True),
        ),
    ],
    ids=lambda value: value.cache_dtype if isinstance(value, AttentionConfig) else str(value),
)
def test_the_kernel_is_data(config: AttentionConfig, phase: str, kernel: FlashMLAKernel) -> None:
    found = plan_of(config, phase=phase).kernel
    assert found == kernel
    assert hash(found) == hash(kernel)


# --- Builds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_each_build_serves_dense_decode(distribution: str) -> None:
    versions = {"vllm": "0.33.0", "sgl_kernel": "0.3.21", "sglang_kernel": "0.4.10"}
    name = distribution.replace("-", "_")
    plan = plan_of(layer(), environment=installed(**{name: versions.get(name, "1.0.0")}))
    assert plan.kernel == FlashMLAKernel(distribution, "dense")
    assert plan.provider is not None
    assert plan.provider.startswith(f"{distribution} (")


def test_upstream_has_no_dense_fp8() -> None:
    environment = installed(flash_mla="1.0.0+9241ae3")
    plan = plan_of(layer(), environment=environment)
    assert any("2026-09-30" in note for note in plan.notes)
    reason = reasons_of(layer(kv_cache_dtype="fp8"), environment=environment)["kv-cache-dtype"]
    assert "FlashMLA of flash-mla" in reason.message
    assert reason.remedy == "--kv-cache-dtype auto"


def test_sinks_choose_a_build_that_has_them() -> None:
    assert plan_of(sparse(sinks=True)).provider == "vllm (vllm.third_party.flashmla.flash_mla_interface)"
    reason = reasons_of(sparse(sinks=True), environment=installed(sgl_kernel="0.3.21"))["sinks"]
    assert reason.remedy == "pip install vllm"


def test_code_for_sm100a_does_not_run_on_10_3() -> None:
    environment = installed(sgl_kernel="0.3.21")
    assert plan_of(sparse(), (10, 0), environment=environment)
    reason = reasons_of(sparse(), (10, 3), environment=environment)["compute-capability"]
    assert (reason.observed, reason.remedy) == ("10.3", "pip install vllm")


def test_nothing_installed() -> None:
    reasons = reasons_of(layer(kv_lora_rank=448, qk_rope_head_dim=128), environment=installed())
    assert set(reasons) == {"library-missing", "kv-lora-rank"}
    assert "vllm is not installed" in reasons["library-missing"].message
    assert reasons["library-missing"].remedy == "pip install vllm"


def test_old_releases_do_not_count() -> None:
    pins = {"vllm": "0.8.0"}
    environment = environment_of(pins=pins)
    assert plan_of(layer(), environment=environment).provider == "sgl-flash-mla (flash_mla.flash_mla_interface)"
    reason = reasons_of(layer(), environment=environment, options={"provider": "vllm"})["library-version"]
    assert "vllm 0.8.0 (needs >=0.26)" in reason.message
    assert reason.remedy == 'backends.FLASHMLA.provider = "auto"'


def test_pinned_provider() -> None:
    assert plan_of(layer(), options={"provider": "sgl-kernel"}).provider == "sgl-kernel (sgl_kernel.flash_mla)"
    environment = installed(vllm="0.33.0")
    reason = reasons_of(sparse(), environment=environment, options={"provider": "flash-mla"})["library-missing"]
    assert 'backends.FLASHMLA_SPARSE.provider = "flash-mla"' in reason.message
    assert reason.remedy == 'backends.FLASHMLA_SPARSE.provider = "auto"'


@pytest.mark.parametrize("options", [{"provider": "pip"}, {"version": 3}])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_bad_options(spec: BackendSpec, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        spec.options(**options)


def test_sglangs_module_does_not_pass_for_upstreams() -> None:
    environment = environment_of(installed={"torch": "2.11.0", "sgl-flash-mla": "1.0.0", "flash-mla": None})
    assert plan_of(layer(), environment=environment).provider == "sgl-flash-mla (flash_mla.flash_mla_interface)"
    reason = reasons_of(layer(), environment=environment, options={"provider": "flash-mla"})["library-version"]
    assert "flash-mla of unknown version" in reason.message
