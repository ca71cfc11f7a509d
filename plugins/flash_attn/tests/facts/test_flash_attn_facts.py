"""FLASH_ATTN through the gate: what it takes, and which FlashAttention version."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from flash_attn_layers import installed

from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.testing import ask, check_sources, gqa_layer, mla_layer, plan_of, reasons_of
from attn_select_flash_attn.facts.builds import BUILDS, LIBRARIES, ProviderName
from attn_select_flash_attn.plugin import attn_select_register_backends

SPECS = {spec.name: spec for spec in attn_select_register_backends()}
FLASH_ATTN = SPECS["FLASH_ATTN"]


# --- Facts ----------------------------------------------------------------------------------------


def test_registers_its_backends() -> None:
    assert list(SPECS) == ["FLASH_ATTN", "FLASH_ATTN_MLA", "FLASH_ATTN_MLA_SPARSE"]
    assert all(set(spec.capabilities) == {"prefill", "decode"} for spec in SPECS.values())


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_every_fact_has_a_source(spec: BackendSpec) -> None:
    check_sources(spec, *BUILDS, least=60)


def test_builds_come_from_declared_libraries() -> None:
    assert {build.distribution for build in BUILDS} == {library.distribution for library in LIBRARIES[1]}
    assert len({build.label for build in BUILDS}) == len(BUILDS)
    for build in BUILDS:
        # FA4's wheel adds to a namespace, which cannot be looked for: CuTe DSL stands for it.
        expected = "cutlass" if build.distribution == "flash-attn-4" else build.module.split(".")[0]
        assert build.library.module == expected
    assert {"auto", *(build.distribution for build in BUILDS)} == set(get_args(ProviderName))


# --- Version --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "kernel", "graph"),
    [
        ((8, 0), "fa2", "UNIFORM_BATCH"),
        ((8, 9), "fa2", "UNIFORM_BATCH"),
        ((9, 0), "fa3", "ALWAYS"),
        ((10, 0), "fa4", "ALWAYS"),
        ((10, 3), "fa4", "ALWAYS"),
        ((11, 0), "fa2", "UNIFORM_BATCH"),
        ((12, 1), "fa2", "UNIFORM_BATCH"),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_version_follows_the_device(capability: tuple[int, int], kernel: str, graph: str, phase: str) -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(), capability, phase=phase)
    assert (plan.kernel_name, plan.cuda_graph) == (kernel, graph)
    assert plan.returns_lse
    assert plan.kv_layouts == (FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND)
    assert plan.query_dtype == "bfloat16"


@pytest.mark.parametrize(("device", "text"), [((7, 5), "7.5"), (None, "cpu")])
def test_below_ampere_is_rejected(device: tuple[int, int] | None, text: str) -> None:
    reasons = reasons_of(FLASH_ATTN, gqa_layer(sinks=True), device)
    assert set(reasons) == {"compute-capability"}
    assert reasons["compute-capability"].observed == text
    assert set(reasons_of(FLASH_ATTN, gqa_layer(), device, options={"version": 3})) == {"compute-capability"}


def test_alibi_forces_fa2() -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(alibi=True), (9, 0))
    assert (plan.kernel_name, plan.cuda_graph) == ("fa2", "UNIFORM_BATCH")
    assert any("PTX" in note for note in plan.notes)
    reasons = reasons_of(FLASH_ATTN, gqa_layer(alibi=True), (9, 0), options={"version": 3})
    assert reasons["alibi"].remedy == 'backends.FLASH_ATTN.version = "auto"'


def test_ptx_and_fa4_are_mentioned_where_they_matter() -> None:
    assert not plan_of(FLASH_ATTN, gqa_layer(), (8, 0)).notes
    ampere, hopper, fa2, fa4 = (
        plan_of(FLASH_ATTN, gqa_layer(**fields), device).notes
        for device, fields in (((8, 0), {}), ((9, 0), {}), ((10, 0), {"alibi": True}), ((10, 0), {}))
    )
    assert [any("PTX" in note for note in notes) for notes in (ampere, hopper, fa2, fa4)] == [False, False, True, False]
    assert [any("CuTe DSL" in note for note in notes) for notes in (hopper, fa2, fa4)] == [False, False, True]


# --- FP8, sinks, V head size ----------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["fp8_e5m2", "nvfp4"])
@pytest.mark.parametrize("device", [(8, 0), (12, 0)])
def test_fp8_is_not_named_as_supported_where_it_is_not(device: tuple[int, int], asked: str) -> None:
    reason = reasons_of(FLASH_ATTN, gqa_layer(kv_cache_dtype=asked), device)["kv-cache-dtype"]
    assert reason.observed == asked
    assert reason.supported == ["auto", "bfloat16"]
    on_hopper = reasons_of(FLASH_ATTN, gqa_layer(kv_cache_dtype=asked), (9, 0))["kv-cache-dtype"]
    assert on_hopper.supported == ["auto", "bfloat16", "fp8_e4m3"]


@pytest.mark.parametrize(("device", "kernel"), [((9, 0), "fa3"), ((10, 0), "fa4")])
def test_fp8_needs_an_fp8_query(device: tuple[int, int], kernel: str) -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(kv_cache_dtype="fp8", per_head_quant_scales=True), device)
    assert (plan.kernel_name, plan.query_dtype) == (kernel, "fp8_e4m3")


def test_fp8_needs_fa3_or_fa4() -> None:
    for device in ((8, 9), (11, 0), (12, 0)):
        reason = reasons_of(FLASH_ATTN, gqa_layer(kv_cache_dtype="fp8"), device)["kv-cache-dtype"]
        assert (reason.observed, reason.remedy) == ("fp8_e4m3", "--kv-cache-dtype auto")
    assert "kv-cache-dtype" in reasons_of(FLASH_ATTN, gqa_layer(kv_cache_dtype="fp8_e5m2"), (9, 0))
    assert set(reasons_of(FLASH_ATTN, gqa_layer(kv_cache_dtype="fp8", alibi=True), (9, 0))) == {
        "alibi",
        "kv-cache-dtype",
    }


def test_fp8_head_sizes_are_multiples_of_16() -> None:
    assert plan_of(FLASH_ATTN, gqa_layer(head_size=72), (9, 0)).kernel_name == "fa3"
    assert plan_of(FLASH_ATTN, gqa_layer(head_size=80, kv_cache_dtype="fp8"), (9, 0)).kernel_name == "fa3"
    reason = reasons_of(FLASH_ATTN, gqa_layer(head_size=72, kv_cache_dtype="fp8"), (9, 0))["head-size"]
    assert (reason.observed, reason.remedy) == (72, "--kv-cache-dtype auto")


def test_fp8_output_of_a_float16_layer_is_converted() -> None:
    notes = plan_of(FLASH_ATTN, gqa_layer(kv_cache_dtype="fp8", dtype="float16"), (9, 0)).notes
    assert any("float16" in note for note in notes)
    assert not any("float16" in note for note in plan_of(FLASH_ATTN, gqa_layer(kv_cache_dtype="fp8"), (9, 0)).notes)


@pytest.mark.parametrize(("heads", "provider"), [(64, "vllm"), (128, "sglang-kernel")])
def test_sinks_choose_a_build_that_has_them(heads: int, provider: str) -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(num_heads=heads, sinks=True), (9, 0))
    assert plan.kernel_name == "fa3"
    assert plan.provider is not None
    assert plan.provider.startswith(f"{provider} ")


@pytest.mark.parametrize(("capability", "codes"), [((8, 0), {"sinks"}), ((12, 0), {"sinks", "paged-kv"})])
def test_sinks_need_fa3_or_fa4(capability: tuple[int, int], codes: set[str]) -> None:
    assert set(reasons_of(FLASH_ATTN, gqa_layer(sinks=True), capability)) == codes


@pytest.mark.parametrize("capability", [(10, 0), (11, 0)])
def test_sinks_on_blackwell_are_fa4s(capability: tuple[int, int]) -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(num_heads=128, sinks=True), capability)
    assert plan.kernel_name == "fa4"
    assert not any("bfloat16" in note for note in plan.notes)


def test_sinks_limit_of_vllm() -> None:
    environment = installed(vllm="0.26.0")
    plan = plan_of(FLASH_ATTN, gqa_layer(num_heads=64, sinks=True), (9, 0), environment=environment)
    assert plan.kernel_name == "fa3"
    reason = reasons_of(FLASH_ATTN, gqa_layer(num_heads=128, sinks=True), (9, 0), environment=environment)["sinks"]
    assert "128 query heads" in reason.message
    assert "at most 64" in reason.message
    assert reason.remedy == "pip install sglang-kernel"


@pytest.mark.parametrize(
    ("sizes", "fields", "fits"),
    [
        ((192, 128), {}, True),
        ((192, 96), {}, False),
        ((128, 64), {}, False),
        ((128, 128), {}, True),
        ((64, 32), {}, True),
        ((64, 36), {}, False),
        ((64, 256), {}, False),
        ((64, 256), {"attn_type": "encoder_only"}, True),
        ((64, 520), {"attn_type": "encoder_only"}, False),
        ((192, 128), {"kv_cache_dtype": "fp8"}, True),
        ((192, 104), {"kv_cache_dtype": "fp8"}, False),
        ((64, 48), {"kv_cache_dtype": "fp8"}, True),
    ],
)
def test_v_head_sizes_of_fa3(sizes: tuple[int, int], fields: dict[str, Any], fits: bool) -> None:
    config = gqa_layer(head_size=sizes[0], v_head_size=sizes[1], **fields)
    outcome = ask(FLASH_ATTN, config, (9, 0), phase="prefill", options={"version": 3})
    if fits:
        assert isinstance(outcome, BackendPlan), outcome
    else:
        assert isinstance(outcome, list)
        assert any(r.code == "v-head-size" and str(sizes[1]) in r.message for r in outcome)


def test_v_head_size_off_hopper_and_with_sinks() -> None:
    assert set(reasons_of(FLASH_ATTN, gqa_layer(head_size=192, v_head_size=128), (8, 0))) == {"v-head-size"}
    both = gqa_layer(head_size=192, v_head_size=128, sinks=True)
    assert plan_of(FLASH_ATTN, both, (9, 0)).provider == "sglang-kernel (sgl_kernel.flash_attn)"
    assert set(reasons_of(FLASH_ATTN, both, (9, 0), environment=installed(vllm="0.26.0"))) == {"sinks"}
    plan = plan_of(FLASH_ATTN, both, (9, 0), environment=installed(vllm="0.33.0"))
    assert plan.kernel_name == "fa4"


@pytest.mark.parametrize(
    ("device", "fields", "codes"),
    [
        ((9, 0), {"head_size": 256}, set()),
        ((9, 0), {"head_size": 72}, {"head-size"}),
        ((9, 0), {"head_size": 72, "attn_type": "encoder_only"}, set()),
        ((9, 0), {"head_size": 224}, {"head-size"}),  # an illegal memory access on an H200
        ((9, 0), {"head_size": 224, "attn_type": "encoder_only"}, set()),
        ((9, 0), {"head_size": 96}, {"head-size"}),
        ((9, 0), {"head_size": 112}, set()),
        ((9, 0), {"head_size": 192}, set()),
        ((9, 0), {"head_size": 192, "v_head_size": 128}, set()),
        ((9, 0), {"head_size": 160}, {"head-size"}),
        ((10, 0), {"head_size": 96}, set()),
        ((9, 0), {"kv_cache_dtype": "fp8"}, {"kv-cache-dtype"}),
        ((9, 0), {"batch_invariant": True}, set()),
        ((9, 0), {"head_size": 64, "v_head_size": 128}, {"v-head-size"}),
        ((9, 0), {"head_size": 64, "v_head_size": 128, "attn_type": "encoder_only"}, set()),
        ((9, 0), {"head_size": 64, "v_head_size": 192, "attn_type": "encoder_only"}, {"head-size"}),  # on an H200 too
        ((9, 0), {"head_size": 128, "v_head_size": 256, "attn_type": "encoder_only"}, set()),
        ((10, 0), {"head_size": 256}, set()),
        ((10, 0), {"head_size": 192}, {"head-size"}),
        ((10, 0), {"head_size": 192, "v_head_size": 128}, set()),
        ((10, 0), {"head_size": 160}, {"head-size"}),
        ((10, 0), {"batch_invariant": True}, set()),
        ((10, 0), {"alibi": True}, {"alibi"}),
        ((11, 0), {}, set()),
        ((11, 0), {"kv_cache_dtype": "fp8"}, {"kv-cache-dtype"}),
        ((12, 0), {}, {"paged-kv"}),
        ((12, 0), {"attn_type": "encoder_only"}, set()),
    ],
)
def test_what_fa4_takes(device: tuple[int, int], fields: dict[str, Any], codes: set[str]) -> None:
    options = {"provider": "flash-attn-4"}
    outcome = ask(FLASH_ATTN, gqa_layer(**fields), device, phase="prefill", options=options)
    assert (set() if isinstance(outcome, BackendPlan) else {reason.code for reason in outcome}) == codes


def test_head_size_512_on_hopper_is_vllms_fa4() -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(head_size=512), (9, 0), environment=installed(vllm="0.33.0"))
    assert (plan.kernel.version, plan.kernel.provider) == (4, "vllm")
    assert plan.unverified
    environment = installed(vllm="0.32.0")
    assert "head-size" in reasons_of(FLASH_ATTN, gqa_layer(head_size=512), (9, 0), environment=environment)
    assert set(reasons_of(FLASH_ATTN, gqa_layer(head_size=512), (10, 0))) == {"head-size"}


@pytest.mark.parametrize(
    ("fields", "kernel"), [({}, "fa2"), ({"kv_cache_dtype": "fp8"}, "fa4"), ({"sinks": True}, "fa4")]
)
def test_what_nobody_proved_batch_invariant_comes_last_and_is_marked(fields: dict[str, Any], kernel: str) -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(batch_invariant=True, **fields), (10, 0))
    assert (plan.kernel_name, bool(plan.unverified)) == (kernel, kernel == "fa4")
    assert plan_of(FLASH_ATTN, gqa_layer(**fields), (10, 0)).kernel_name == "fa4"
    mla = plan_of(SPECS["FLASH_ATTN_MLA"], mla_layer(batch_invariant=True), (10, 0), phase="prefill")
    assert (mla.kernel_name, mla.unverified) == ("fa2-varlen", ())
    pinned = {"prefill_version": 4}
    mla = plan_of(SPECS["FLASH_ATTN_MLA"], mla_layer(batch_invariant=True), (10, 0), phase="prefill", options=pinned)
    assert mla.unverified


def test_vllms_fa4_leaves_heads_of_256_on_blackwell_to_fa2() -> None:
    environment = installed(vllm="0.33.0")
    plan = plan_of(FLASH_ATTN, gqa_layer(head_size=256), (10, 0), environment=environment)
    assert plan.kernel_name == "fa2"


@pytest.mark.parametrize(("device", "splits"), [((9, 0), False), ((10, 0), True)])
def test_fa4_splits_no_keys_on_hopper(device: tuple[int, int], splits: bool) -> None:
    for spec, fields, option in (
        (FLASH_ATTN, {}, "version"),
        (SPECS["FLASH_ATTN_MLA"], {"num_heads": 16}, "prefill_version"),
    ):
        config = gqa_layer(**fields) if spec is FLASH_ATTN else mla_layer(**fields)
        plan = plan_of(spec, config, device, phase="prefill", options={option: 4})
        assert plan.kernel.version == 4
        assert plan.kernel.splits_keys is splits


# --- Blocks, layouts, types -----------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 64])
def test_fa3_takes_any_block_size(block_size: int) -> None:
    assert plan_of(FLASH_ATTN, gqa_layer(block_size=block_size), (9, 0)).kernel_block_sizes == (16, 1)


def test_fa2_pages_depend_on_the_build() -> None:
    assert plan_of(FLASH_ATTN, gqa_layer(), (8, 0)).kernel_block_sizes == (16,)
    upstream = installed(flash_attn="2.8.3")
    assert plan_of(FLASH_ATTN, gqa_layer(), (8, 0), environment=upstream).kernel_block_sizes == (256,)
    assert plan_of(FLASH_ATTN, gqa_layer(block_size=512), (8, 0), environment=upstream).kernel_block_sizes == (256,)
    reason = reasons_of(FLASH_ATTN, gqa_layer(block_size=16), (8, 0), environment=upstream)["block-size"]
    assert (reason.observed, reason.remedy) == (16, "--block-size 256")
    both = installed(vllm="0.26.0", flash_attn="2.8.3")
    reason = reasons_of(FLASH_ATTN, gqa_layer(block_size=24), (10, 0), environment=both)["block-size"]
    assert "FA2 of vllm: multiples of 16" in reason.message
    assert "FA2 of flash-attn: multiples of 256" in reason.message
    assert reason.remedy == "--block-size 32"


def test_token_pools_on_ampere_take_the_fa3_that_is_built_for_it() -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(block_size=1), (8, 0))
    assert (plan.kernel_name, plan.provider) == ("fa3", "sglang-kernel (sgl_kernel.flash_attn)")
    assert set(reasons_of(FLASH_ATTN, gqa_layer(block_size=1), (8, 0), environment=installed(vllm="0.33.0"))) == {
        "block-size"
    }


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_encoders_read_no_cache(attn_type: str) -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(attn_type=attn_type, sliding_window=64), (9, 0), phase="prefill")
    assert plan.kv_layouts == ()
    assert plan.kernel_block_sizes == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_type": "encoder_decoder"},
        {"non_causal": True},
        {"sliding_window": 4096, "logits_soft_cap": 50.0},
        {"batch_invariant": True},
        {"num_speculative_tokens": 3},
        {"decode_context_parallel_size": 2},
        {"dtype": "float16"},
        {"head_size": 80},
        {"head_size": 256},
    ],
    ids=lambda fields: "-".join(fields),
)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_accepted_on_both_versions(fields: dict[str, Any], capability: tuple[int, int]) -> None:
    assert isinstance(ask(FLASH_ATTN, gqa_layer(**fields), capability), BackendPlan)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"mm_prefix": True}, "mm-prefix"),
        ({"output_quantization": "fp8"}, "output-quantization"),
        ({"dtype": "float32"}, "dtype"),
        ({"head_size": 100}, "head-size"),
        ({"head_size": 264}, "head-size"),
        ({"kv_cache_dtype": "float16"}, "kv-cache-dtype"),
        ({"kv_cache_dtype": "nvfp4"}, "kv-cache-dtype"),
    ],
)
def test_rejected_on_both_versions(fields: dict[str, Any], code: str) -> None:
    for capability in ((8, 0), (9, 0)):
        assert code in reasons_of(FLASH_ATTN, gqa_layer(**fields), capability)


@pytest.mark.parametrize(("fields", "word"), [({"sliding_window": 128}, "128"), ({"alibi": True}, "ALiBi")])
def test_dcp_excludes_what_depends_on_distance(fields: dict[str, Any], word: str) -> None:
    assert isinstance(ask(FLASH_ATTN, gqa_layer(**fields), (8, 0)), BackendPlan)
    reason = reasons_of(FLASH_ATTN, gqa_layer(decode_context_parallel_size=4, **fields), (8, 0))[
        "decode-context-parallel-distance"
    ]
    assert word in reason.message
    assert (reason.observed, reason.remedy) == (4, "--dcp 1")


def test_graph_level_is_compared() -> None:
    assert isinstance(ask(FLASH_ATTN, gqa_layer(cuda_graph="ALWAYS"), (9, 0)), BackendPlan)
    assert "cuda-graph-level" in reasons_of(FLASH_ATTN, gqa_layer(cuda_graph="ALWAYS"), (8, 0))
    assert any("num_splits" in note for note in plan_of(FLASH_ATTN, gqa_layer(cuda_graph="ALWAYS"), (9, 0)).notes)


def test_what_was_measured_wrong_once_is_marked() -> None:
    def marks(capability: tuple[int, int] = (9, 0), **fields: Any) -> tuple[str, ...]:
        layer = gqa_layer(**{"head_size": 192, "sliding_window": 2048, **fields})
        return plan_of(FLASH_ATTN, layer, capability, phase="prefill").unverified

    assert marks()
    assert not marks(sliding_window=None)
    assert not marks(head_size=128)
    assert not marks((8, 0))
