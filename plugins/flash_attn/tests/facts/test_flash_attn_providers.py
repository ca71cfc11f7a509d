"""Which build of FlashAttention serves, what is recommended where none does, pins, and hybrid models."""

from __future__ import annotations

from typing import Any

import pytest
from flash_attn_layers import installed
from pydantic import ValidationError

from attn_select.machine.environment import Environment
from attn_select.testing import gqa_layer, plan_of, reasons_of
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN


@pytest.mark.parametrize(
    ("there", "capability", "kernel", "provider"),
    [
        ({"flash_attn_3": "3.0.0"}, (9, 0), "fa3", "flash-attn-3 (flash_attn_interface)"),
        ({"flash_attn_3": "3.0.0", "vllm": "0.33.0"}, (9, 0), "fa3", "flash-attn-3 (flash_attn_interface)"),
        ({"vllm": "0.33.0", "flash_attn": "2.8.3"}, (9, 0), "fa3", "vllm (vllm.vllm_flash_attn.flash_attn_interface)"),
        ({"vllm": "0.33.0", "flash_attn": "2.8.3"}, (8, 0), "fa2", "vllm (vllm.vllm_flash_attn.flash_attn_interface)"),
        ({"sglang_kernel": "0.4.10"}, (9, 0), "fa3", "sglang-kernel (sgl_kernel.flash_attn)"),
        ({"sgl_kernel": "0.3.21"}, (8, 6), "fa3", "sgl-kernel (sgl_kernel.flash_attn)"),
        ({"flash_attn": "2.8.3"}, (9, 0), "fa2", "flash-attn (flash_attn)"),
        ({"flash_attn": "2.8.3"}, (12, 0), "fa2", "flash-attn (flash_attn)"),
        ({"flash_attn_4": "4.0.0b36"}, (9, 0), "fa4", "flash-attn-4 (flash_attn.cute.interface)"),
        (
            {"flash_attn_4": "4.0.0b36", "vllm": "0.26.0"},
            (9, 0),
            "fa3",
            "vllm (vllm.vllm_flash_attn.flash_attn_interface)",
        ),
        ({"flash_attn_4": "4.0.0b36", "vllm": "0.33.0"}, (10, 0), "fa4", "flash-attn-4 (flash_attn.cute.interface)"),
        ({"vllm": "0.33.0"}, (10, 3), "fa4", "vllm (vllm.vllm_flash_attn.flash_attn_interface)"),
        ({"vllm": "0.26.0"}, (10, 0), "fa2", "vllm (vllm.vllm_flash_attn.flash_attn_interface)"),
        (
            {"flash_attn_4": "4.0.0b36", "vllm": "0.33.0"},
            (11, 0),
            "fa2",
            "vllm (vllm.vllm_flash_attn.flash_attn_interface)",
        ),
    ],
)
def test_the_first_installed_build_serves(
    there: dict[str, str], capability: tuple[int, int], kernel: str, provider: str
) -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(), capability, environment=installed(**there))
    assert (plan.kernel_name, plan.provider) == (kernel, provider)


def test_fa2_on_hopper_says_that_fa3_is_missing() -> None:
    assert (
        plan_of(FLASH_ATTN, gqa_layer(), (9, 0), environment=installed(flash_attn="2.8.3")).because
        == "no installed FA3 serves this layer"
    )


def test_output_copies_are_mentioned() -> None:
    assert any(
        "copied" in note
        for note in plan_of(FLASH_ATTN, gqa_layer(), (8, 0), environment=installed(flash_attn="2.8.3")).notes
    )
    assert not plan_of(FLASH_ATTN, gqa_layer(), (8, 0), environment=installed(vllm="0.33.0")).notes


def test_another_build_is_recommended() -> None:
    environment = installed(flash_attn_3="3.0.0")
    assert (
        reasons_of(FLASH_ATTN, gqa_layer(sinks=True), (9, 0), environment=environment)["sinks"].remedy
        == "pip install vllm"
    )
    assert (
        reasons_of(FLASH_ATTN, gqa_layer(alibi=True), (9, 0), environment=environment)["alibi"].remedy
        == "pip install vllm"
    )


@pytest.mark.parametrize("capability", [(8, 0), (11, 0)])
def test_installed_but_not_for_this_device(capability: tuple[int, int]) -> None:
    reason = reasons_of(FLASH_ATTN, gqa_layer(), capability, environment=installed(flash_attn_3="3.0.0"))[
        "library-missing"
    ]
    assert f"{capability[0]}.{capability[1]}" in reason.message
    assert reason.remedy == "pip install vllm"


def test_nothing_installed() -> None:
    reasons = reasons_of(FLASH_ATTN, gqa_layer(alibi=True, kv_cache_dtype="fp8"), (9, 0), environment=installed())
    assert set(reasons) == {"library-missing", "alibi", "kv-cache-dtype"}
    assert reasons["library-missing"].remedy == "pip install vllm"


def test_old_releases_do_not_count() -> None:
    reasons = reasons_of(FLASH_ATTN, gqa_layer(), (8, 0), environment=installed(vllm="0.8.0"))
    assert set(reasons) == {"library-version"}
    pinned = Environment(assume_installed=True, pins={"vllm": "0.8.0"})
    assert plan_of(FLASH_ATTN, gqa_layer(), (8, 0), environment=pinned).provider == "flash-attn (flash_attn)"
    reason = reasons_of(FLASH_ATTN, gqa_layer(), (8, 0), environment=pinned, options={"provider": "vllm"})[
        "library-version"
    ]
    assert "vllm 0.8.0 (needs >=0.26)" in reason.message
    assert reason.remedy == 'backends.FLASH_ATTN.provider = "auto"'


def test_pinned_version() -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(), (9, 0), options={"version": 2})
    assert plan.kernel_name == "fa2"
    reason = reasons_of(FLASH_ATTN, gqa_layer(), (10, 0), options={"version": 3})["pinned-kernel"]
    assert "10.0" in reason.message
    assert reason.observed == "backends.FLASH_ATTN.version = 3"
    assert reason.remedy == 'backends.FLASH_ATTN.version = "auto"'
    assert (
        reasons_of(FLASH_ATTN, gqa_layer(kv_cache_dtype="fp8"), (9, 0), options={"version": 2})["kv-cache-dtype"].remedy
        == reason.remedy
    )


def test_pinned_provider() -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(), (9, 0), options={"provider": "flash-attn"})
    assert (plan.kernel_name, plan.kernel_block_sizes) == ("fa2", (256,))
    reason = reasons_of(
        FLASH_ATTN, gqa_layer(), (9, 0), environment=installed(vllm="0.33.0"), options={"provider": "flash-attn"}
    )["library-missing"]
    assert 'backends.FLASH_ATTN.provider = "flash-attn"' in reason.message
    assert reason.remedy == 'backends.FLASH_ATTN.provider = "auto"'


@pytest.mark.parametrize("options", [{"version": 5}, {"version": "3"}, {"provider": "pip"}, {"colour": 1}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FLASH_ATTN.options(**options)


def test_compile_key_groups_what_fa2_compiles_together() -> None:
    key = FLASH_ATTN.compile_key
    assert key(gqa_layer()) is None
    assert key(gqa_layer(alibi=True)) == key(gqa_layer(alibi=True, head_size=104, num_heads=8))
    different = [{"head_size": 64}, {"dtype": "float16"}, {"non_causal": True}]
    assert len({key(gqa_layer(alibi=True, **fields)) for fields in [{}, *different]}) == 4
    assert key(gqa_layer(alibi=True, sliding_window=64)) == key(gqa_layer(alibi=True, non_causal=True))


# --- Hybrid models ------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "kernel"), [((8, 0), "fa2"), ((9, 0), "fa3"), ((12, 0), "fa2")])
def test_hybrid_offers_small_blocks_alone(capability: tuple[int, int], kernel: str) -> None:
    """vLLM's list for models with Mamba layers; no token pools either."""
    for fields in ({}, {"block_size": 16}, {"block_size": 544}, {"kv_cache_dtype": "fp8"} if kernel == "fa3" else {}):
        plan = plan_of(FLASH_ATTN, gqa_layer(**fields), capability, options={"hybrid": True})
        assert (plan.kernel_name, plan.kernel_block_sizes) == (kernel, (64, 32, 16))
    refused = reasons_of(FLASH_ATTN, gqa_layer(block_size=24), capability, options={"hybrid": True})
    assert refused["block-size"].remedy == "--block-size 32"
    assert "block-size" in reasons_of(FLASH_ATTN, gqa_layer(block_size=1), (9, 0), options={"hybrid": True})


def test_hybrid_blocks_are_smaller_than_the_tile() -> None:
    """FA3 loads a block of 64 whole where its tile is 64 keys: wide heads with a window."""
    assert plan_of(FLASH_ATTN, gqa_layer(head_size=256), (9, 0), options={"hybrid": True}).kernel_block_sizes == (
        64,
        32,
        16,
    )
    assert plan_of(
        FLASH_ATTN, gqa_layer(head_size=192, sliding_window=9), (9, 0), options={"hybrid": True}
    ).kernel_block_sizes == (64, 32, 16)
    assert plan_of(
        FLASH_ATTN, gqa_layer(head_size=256, sliding_window=9), (9, 0), options={"hybrid": True}
    ).kernel_block_sizes == (32, 16)


def test_hybrid_leaves_out_a_kernel_of_large_blocks() -> None:
    environment = installed(flash_attn="2.8.3")
    assert plan_of(FLASH_ATTN, gqa_layer(), (8, 0), environment=environment).kernel_block_sizes == (256,)
    reason = reasons_of(FLASH_ATTN, gqa_layer(), (8, 0), environment=environment, options={"hybrid": True})["hybrid"]
    assert reason.message == (
        "cache memory shared with other state (FA2 of flash-attn: takes blocks of 256 tokens, and at most 64 are safe)"
    )
    assert reason.remedy == "backends.FLASH_ATTN.hybrid = false"
    both = installed(flash_attn="2.8.3", vllm="0.33.0")
    assert (
        plan_of(FLASH_ATTN, gqa_layer(), (8, 0), environment=both, options={"hybrid": True}).provider
        == "vllm (vllm.vllm_flash_attn.flash_attn_interface)"
    )


def test_hybrid_says_nothing_about_encoders() -> None:
    plan = plan_of(FLASH_ATTN, gqa_layer(attn_type="encoder_only"), (9, 0), phase="prefill", options={"hybrid": True})
    assert plan.kernel_block_sizes == ()


# --- Windows in cross-attention -----------------------------------------------------------------


def test_fa2_has_no_windows_in_cross_attention() -> None:
    """Its LSE of a tile of queries that see no key lands elsewhere."""
    config = gqa_layer(attn_type="encoder_decoder", sliding_window=64)
    refused = reasons_of(FLASH_ATTN, config, (12, 0))
    assert list(refused) == ["sliding-window", "paged-kv"]
    assert refused["sliding-window"].message == "sliding window 64 (FA2: none in cross-attention)"
    assert plan_of(FLASH_ATTN, config, (9, 0)).kernel_name == "fa3"
    assert list(reasons_of(FLASH_ATTN, config, (9, 0), options={"version": 2})) == ["sliding-window"]
    assert plan_of(FLASH_ATTN, gqa_layer(attn_type="encoder_decoder"), (12, 0)).kernel_name == "fa2"
    assert plan_of(FLASH_ATTN, gqa_layer(sliding_window=64), (12, 0)).kernel_name == "fa2"
