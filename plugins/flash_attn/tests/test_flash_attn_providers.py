"""Which build of FlashAttention serves, what is recommended where none does, pins, and hybrid models."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from attn_select import gate
from attn_select.config import AttentionConfig
from attn_select.device import Device
from attn_select.environment import Environment
from attn_select.spec import BackendPlan, Reason
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN


def gpu(major: int, minor: int = 0) -> Device:
    return Device(f"sm{major}{minor}", (major, minor))


def layer(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 32, "num_kv_heads": 8, "head_size": 128, **fields})


def ask(
    config: AttentionConfig,
    device: Device,
    environment: Environment | None = None,
    *,
    phase: Any = "decode",
    **options: Any,
) -> BackendPlan | list[Reason]:
    environment = environment or Environment(assume_installed=True)
    return gate.check(FLASH_ATTN, config, device, environment, FLASH_ATTN.options(**options), phase)


def plan_of(*args: Any, **kwargs: Any) -> BackendPlan:
    outcome = ask(*args, **kwargs)
    assert isinstance(outcome, BackendPlan), outcome
    return outcome


def reasons_of(*args: Any, **kwargs: Any) -> dict[str, Reason]:
    outcome = ask(*args, **kwargs)
    assert isinstance(outcome, list), outcome
    assert len({reason.code for reason in outcome}) == len(outcome)
    return {reason.code: reason for reason in outcome}


@pytest.mark.parametrize(
    ("there", "capability", "path", "provider"),
    [
        ({"flash_attn_3": "3.0.0"}, (9, 0), "FA3", "flash-attn-3 (flash_attn_interface)"),
        ({"flash_attn_3": "3.0.0", "vllm": "0.33.0"}, (9, 0), "FA3", "flash-attn-3 (flash_attn_interface)"),
        ({"vllm": "0.33.0", "flash_attn": "2.8.3"}, (9, 0), "FA3", "vllm (vllm.vllm_flash_attn.flash_attn_interface)"),
        ({"vllm": "0.33.0", "flash_attn": "2.8.3"}, (8, 0), "FA2", "vllm (vllm.vllm_flash_attn.flash_attn_interface)"),
        ({"sglang_kernel": "0.4.10"}, (9, 0), "FA3", "sglang-kernel (sgl_kernel.flash_attn)"),
        ({"sgl_kernel": "0.3.21"}, (8, 6), "FA3", "sgl-kernel (sgl_kernel.flash_attn)"),
        ({"flash_attn": "2.8.3"}, (9, 0), "FA2", "flash-attn (flash_attn)"),
        ({"flash_attn": "2.8.3"}, (12, 0), "FA2", "flash-attn (flash_attn)"),
    ],
)
def test_the_first_installed_build_serves(
    installed: Any, there: dict[str, str], capability: tuple[int, int], path: str, provider: str
) -> None:
    plan = plan_of(layer(), gpu(*capability), installed(**there))
    assert (plan.path, plan.provider) == (path, provider)


def test_fa2_on_hopper_says_that_fa3_is_missing(installed: Any) -> None:
    assert plan_of(layer(), gpu(9), installed(flash_attn="2.8.3")).because == "no installed package has FA3"


def test_output_copies_are_mentioned(installed: Any) -> None:
    assert any("copied" in note for note in plan_of(layer(), gpu(8), installed(flash_attn="2.8.3")).notes)
    assert not plan_of(layer(), gpu(8), installed(vllm="0.33.0")).notes


def test_another_build_is_recommended(installed: Any) -> None:
    environment = installed(flash_attn_3="3.0.0")
    assert reasons_of(layer(sinks=True), gpu(9), environment)["sinks"].remedy == "pip install vllm"
    assert reasons_of(layer(alibi=True), gpu(9), environment)["alibi"].remedy == "pip install vllm"


@pytest.mark.parametrize("capability", [(8, 0), (11, 0)])
def test_installed_but_not_for_this_device(installed: Any, capability: tuple[int, int]) -> None:
    reason = reasons_of(layer(), gpu(*capability), installed(flash_attn_3="3.0.0"))["library-missing"]
    assert f"{capability[0]}.{capability[1]}" in reason.message
    assert reason.remedy == "pip install vllm"


def test_nothing_installed(installed: Any) -> None:
    reasons = reasons_of(layer(alibi=True, kv_cache_dtype="fp8"), gpu(9), installed())
    assert set(reasons) == {"library-missing", "alibi", "kv-cache-dtype"}
    assert reasons["library-missing"].remedy == "pip install vllm"


def test_old_releases_do_not_count(installed: Any) -> None:
    reasons = reasons_of(layer(), gpu(8), installed(vllm="0.8.0"))
    assert set(reasons) == {"library-version"}
    pinned = Environment(assume_installed=True, pins={"vllm": "0.8.0"})
    assert plan_of(layer(), gpu(8), pinned).provider == "flash-attn (flash_attn)"
    reason = reasons_of(layer(), gpu(8), pinned, provider="vllm")["library-version"]
    assert "vllm 0.8.0 (needs >=0.26)" in reason.message
    assert reason.remedy == 'backends.FLASH_ATTN.provider = "auto"'


def test_pinned_version() -> None:
    plan = plan_of(layer(), gpu(9), version=2)
    assert (plan.path, plan.because) == ("FA2", "backends.FLASH_ATTN.version = 2")
    reason = reasons_of(layer(), gpu(10), version=3)["pinned-kernel"]
    assert "10.0" in reason.message
    assert reason.observed == "backends.FLASH_ATTN.version = 3"
    assert reason.remedy == 'backends.FLASH_ATTN.version = "auto"'
    assert reasons_of(layer(kv_cache_dtype="fp8"), gpu(9), version=2)["kv-cache-dtype"].remedy == reason.remedy


def test_pinned_provider(installed: Any) -> None:
    plan = plan_of(layer(), gpu(9), provider="flash-attn")
    assert (plan.path, plan.kernel_block_sizes) == ("FA2", (256,))
    reason = reasons_of(layer(), gpu(9), installed(vllm="0.33.0"), provider="flash-attn")["library-missing"]
    assert 'backends.FLASH_ATTN.provider = "flash-attn"' in reason.message
    assert reason.remedy == 'backends.FLASH_ATTN.provider = "auto"'


@pytest.mark.parametrize("options", [{"version": 4}, {"version": "3"}, {"provider": "pip"}, {"colour": 1}])
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FLASH_ATTN.options(**options)


def test_compile_key_groups_what_fa2_compiles_together() -> None:
    key = FLASH_ATTN.compile_key
    assert key(layer()) is None
    assert key(layer(alibi=True)) == key(layer(alibi=True, head_size=104, num_heads=8))
    different = [{"head_size": 64}, {"dtype": "float16"}, {"non_causal": True}]
    assert len({key(layer(alibi=True, **fields)) for fields in [{}, *different]}) == 4
    assert key(layer(alibi=True, sliding_window=64)) == key(layer(alibi=True, non_causal=True))


# --- Hybrid models ------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "path"), [((8, 0), "FA2"), ((9, 0), "FA3"), ((12, 0), "FA2")])
def test_hybrid_offers_small_blocks_alone(capability: tuple[int, int], path: str) -> None:
    """vLLM's list for models with Mamba layers; no token pools either."""
    for fields in ({}, {"block_size": 16}, {"block_size": 544}, {"kv_cache_dtype": "fp8"} if path == "FA3" else {}):
        plan = plan_of(layer(**fields), gpu(*capability), hybrid=True)
        assert (plan.path, plan.kernel_block_sizes) == (path, (64, 32, 16))
    refused = reasons_of(layer(block_size=24), gpu(*capability), hybrid=True)
    assert refused["block-size"].remedy == "--block-size 32"
    assert "block-size" in reasons_of(layer(block_size=1), gpu(9), hybrid=True)


def test_hybrid_blocks_are_smaller_than_the_tile() -> None:
    """FA3 loads a block of 64 whole where its tile is 64 keys: wide heads with a window."""
    assert plan_of(layer(head_size=256), gpu(9), hybrid=True).kernel_block_sizes == (64, 32, 16)
    assert plan_of(layer(head_size=192, sliding_window=9), gpu(9), hybrid=True).kernel_block_sizes == (64, 32, 16)
    assert plan_of(layer(head_size=256, sliding_window=9), gpu(9), hybrid=True).kernel_block_sizes == (32, 16)


def test_hybrid_leaves_out_a_kernel_of_large_blocks(installed: Any) -> None:
    environment = installed(flash_attn="2.8.3")
    assert plan_of(layer(), gpu(8), environment).kernel_block_sizes == (256,)
    reason = reasons_of(layer(), gpu(8), environment, hybrid=True)["hybrid"]
    assert reason.message == "cache memory shared with other state (FA2 of flash-attn: blocks of 256 tokens)"
    assert reason.remedy == "backends.FLASH_ATTN.hybrid = false"
    both = installed(flash_attn="2.8.3", vllm="0.33.0")
    assert plan_of(layer(), gpu(8), both, hybrid=True).provider == "vllm (vllm.vllm_flash_attn.flash_attn_interface)"


def test_hybrid_says_nothing_about_encoders() -> None:
    plan = plan_of(layer(attn_type="encoder_only"), gpu(9), phase="prefill", hybrid=True)
    assert plan.kernel_block_sizes == ()


# --- Windows in cross-attention -----------------------------------------------------------------


def test_fa2_has_no_windows_in_cross_attention(installed: Any) -> None:
    """Its LSE of a tile of queries that see no key lands elsewhere."""
    config = layer(attn_type="encoder_decoder", sliding_window=64)
    refused = reasons_of(config, gpu(12))
    assert list(refused) == ["sliding-window"]
    assert refused["sliding-window"].message == "sliding window 64 (FA2: none in cross-attention)"
    assert plan_of(config, gpu(9)).path == "FA3"
    assert list(reasons_of(config, gpu(9), version=2)) == ["sliding-window"]
    assert plan_of(layer(attn_type="encoder_decoder"), gpu(12)).path == "FA2"
    assert plan_of(layer(sliding_window=64), gpu(12)).path == "FA2"
