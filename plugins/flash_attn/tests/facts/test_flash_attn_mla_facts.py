"""FLASH_ATTN_MLA through the gate."""

from __future__ import annotations

from typing import Any

import pytest
from flash_attn_layers import installed

from attn_select.backends.spec import BackendPlan
from attn_select.layer.layouts import MLA
from attn_select.machine.environment import Environment
from attn_select.testing import ask, mla_layer, plan_of, reasons_of
from attn_select_flash_attn.facts.flash_attn_mla import FLASH_ATTN_MLA


def test_mla_decode_on_hopper() -> None:
    plan = plan_of(FLASH_ATTN_MLA, mla_layer(), (9, 0))
    assert (plan.kernel_name, plan.kv_layouts, plan.kernel_block_sizes) == ("fa3", (MLA,), (64, 32, 16, 1))
    assert (plan.cuda_graph, plan.returns_lse, plan.query_dtype) == ("UNIFORM_BATCH", True, "bfloat16")


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_mla_decode_elsewhere(capability: tuple[int, int]) -> None:
    assert set(reasons_of(FLASH_ATTN_MLA, mla_layer(), capability)) == {"compute-capability"}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv-cache-dtype"),
        ({"qk_rope_head_dim": 72}, "qk-rope-head-dim"),
        ({"qk_rope_head_dim": 20, "kv_lora_rank": 500}, "qk-rope-head-dim"),
        ({"kv_lora_rank": 248, "qk_rope_head_dim": 64}, "kv-lora-rank"),
        ({"kv_lora_rank": 520, "qk_rope_head_dim": 32}, "kv-lora-rank"),
        ({"sinks": True}, "sinks"),
        ({"alibi": True}, "alibi"),
        ({"sliding_window": 64}, "sliding-window"),
        ({"sparse_top_k": 2048}, "sparse-unsupported"),
    ],
)
def test_mla_decode_rejects(fields: dict[str, Any], code: str) -> None:
    assert code in reasons_of(FLASH_ATTN_MLA, mla_layer(**fields), (9, 0))


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_lora_rank": 256, "qk_rope_head_dim": 32},
        {"block_size": 1},
        {"dtype": "float16"},
        {"num_heads": 128},
        {"num_speculative_tokens": 2},
        {"batch_invariant": True},
        {"decode_context_parallel_size": 8},
        {"non_causal": True},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_mla_decode_accepts(fields: dict[str, Any]) -> None:
    assert isinstance(ask(FLASH_ATTN_MLA, mla_layer(**fields), (9, 0)), BackendPlan)


def test_mla_decode_needs_fa3() -> None:
    environment = installed(flash_attn="2.8.3")
    reason = reasons_of(FLASH_ATTN_MLA, mla_layer(), (9, 0), environment=environment)["library-missing"]
    assert "FA3" in reason.message
    assert reason.remedy == "pip install vllm"
    plan = plan_of(FLASH_ATTN_MLA, mla_layer(), (9, 0), environment=environment, phase="prefill")
    assert plan.kernel_name == "fa2-varlen"


@pytest.mark.parametrize(
    ("capability", "kernel", "padded"),
    [((8, 0), "fa2-varlen", True), ((9, 0), "fa3-varlen", False), ((12, 0), "fa2-varlen", True)],
)
def test_mla_prefill(capability: tuple[int, int], kernel: str, padded: bool) -> None:
    plan = plan_of(FLASH_ATTN_MLA, mla_layer(), capability, phase="prefill")
    assert plan.kernel_name == kernel
    assert (plan.kv_layouts, plan.kernel_block_sizes) == ((), ())
    assert any("from 128 to 192" in note for note in plan.notes) is padded


@pytest.mark.parametrize(
    ("dims", "outcome"),
    [
        ((64, 32, 64), "V is padded from 64 to 96 columns, as wide as QK"),
        ((192, 64, 256), None),
        ((64, 64, 128), None),
        ((192, 72, 128), "qk-head-size"),
        ((100, 64, 128), "qk-head-size"),
        ((128, 64, 200), "v-head-size"),
    ],
)
def test_mla_prefill_dims(dims: tuple[int, int, int], outcome: str | None) -> None:
    config = mla_layer(qk_nope_head_dim=dims[0], qk_rope_head_dim=dims[1], v_head_dim=dims[2])
    found = ask(FLASH_ATTN_MLA, config, (9, 0), environment=Environment(assume_installed=True), phase="prefill")
    if isinstance(found, BackendPlan):
        assert [note for note in found.notes if "padded" in note] == ([outcome] if outcome else [])
    else:
        assert [reason.code for reason in found] == [outcome]


def test_mla_prefill_does_not_read_the_cache() -> None:
    config = mla_layer(kv_cache_dtype="fp8", block_size=3)
    assert isinstance(ask(FLASH_ATTN_MLA, config, (8, 0), phase="prefill"), BackendPlan)
    assert "kv-cache-dtype" in reasons_of(FLASH_ATTN_MLA, config, (9, 0))


def test_mla_prefill_version_pin() -> None:
    pin = {"prefill_version": 2}
    assert plan_of(FLASH_ATTN_MLA, mla_layer(), (9, 0), phase="prefill", options=pin).kernel_name == "fa2-varlen"
    assert plan_of(FLASH_ATTN_MLA, mla_layer(), (9, 0), options=pin).kernel_name == "fa3"
    reason = reasons_of(FLASH_ATTN_MLA, mla_layer(), (12, 0), phase="prefill", options={"prefill_version": 3})[
        "pinned-kernel"
    ]
    assert reason.remedy == 'backends.FLASH_ATTN_MLA.prefill_version = "auto"'


@pytest.mark.parametrize(
    ("fields", "safe"),
    [
        ({"num_heads": 16}, True),
        ({"num_heads": 65}, False),
        ({"num_heads": 16, "num_speculative_tokens": 3}, True),
        ({"num_heads": 16, "num_speculative_tokens": 4}, False),
        ({"num_heads": 16, "decode_context_parallel_size": 8}, False),
        ({"num_heads": 4, "batch_invariant": True}, False),
        ({"num_heads": 128, "block_size": 64}, False),
        ({"num_heads": 128, "block_size": 192}, False),
        ({"num_heads": 128, "block_size": 32}, True),
        ({"num_heads": 128, "block_size": 96}, True),
        ({"num_heads": 128, "kv_lora_rank": 256}, True),
        ({"num_heads": 128, "kv_lora_rank": 264}, False),
    ],
)
def test_decode_says_where_unused_rows_of_a_page_are_loaded(fields: dict[str, Any], safe: bool) -> None:
    config = mla_layer(**fields)
    plan = plan_of(FLASH_ATTN_MLA, config, (9, 0))
    assert plan.nan_tail_safe is safe
    assert any("block_size 32" in note for note in plan.notes) is not safe
    assert not FLASH_ATTN_MLA.capabilities["decode"].nan_tail_safe.value
    assert plan_of(FLASH_ATTN_MLA, config, (9, 0), phase="prefill").nan_tail_safe  # reads no cache
