"""FLASH_ATTN_MLA_SPARSE through the gate."""

from __future__ import annotations

from typing import Any

import pytest
from flash_attn_layers import installed

from attn_select.backends.spec import BackendPlan
from attn_select.layer.layouts import MLA
from attn_select.testing import ask, mla_layer, plan_of, reasons_of
from attn_select_flash_attn.facts.flash_attn_mla_sparse import FLASH_ATTN_MLA_SPARSE

SPARSE: dict[str, Any] = {"sparse_top_k": 2048, "num_heads": 8}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_hopper(phase: Any) -> None:
    plan = plan_of(FLASH_ATTN_MLA_SPARSE, mla_layer(**SPARSE), (9, 0), phase)
    assert (plan.kernel_name, plan.kv_layouts) == ("fa3", (MLA,))
    assert (plan.cuda_graph, plan.returns_lse, plan.nan_tail_safe) == ("UNIFORM_BATCH", True, True)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_blackwell(capability: tuple[int, int], phase: Any) -> None:
    plan = plan_of(FLASH_ATTN_MLA_SPARSE, mla_layer(**SPARSE), capability, phase)
    assert (plan.kernel_name, plan.kv_layouts, plan.cuda_graph) == ("fa4-gather", (MLA,), "UNIFORM_BATCH")
    assert plan.returns_lse
    assert plan.unverified


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"num_heads": 20}, "num-heads"),
        ({"dtype": "float16"}, "dtype"),
        ({"sparse_top_k": 1000}, "sparse-top-k"),
        ({"kv_lora_rank": 256}, "kv-lora-rank"),
        ({"qk_rope_head_dim": 32}, "qk-rope-head-dim"),
        ({"batch_invariant": True}, "batch-invariant"),
    ],
    ids=str,
)
def test_what_blackwell_refuses(fields: dict[str, Any], code: str) -> None:
    assert set(reasons_of(FLASH_ATTN_MLA_SPARSE, mla_layer(**{**SPARSE, **fields}), (10, 0))) == {code}


def test_blackwell_wants_a_vllm_with_fa4() -> None:
    found = reasons_of(FLASH_ATTN_MLA_SPARSE, mla_layer(**SPARSE), (10, 0), environment=installed(vllm="0.32.0"))
    assert found["library-version"].remedy == "pip install --upgrade vllm"


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_elsewhere(capability: tuple[int, int]) -> None:
    assert set(reasons_of(FLASH_ATTN_MLA_SPARSE, mla_layer(**SPARSE), capability)) == {"compute-capability"}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv-cache-dtype"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv-cache-dtype"),
        ({"sparse_top_k": None}, "sparse-only"),
        ({"sinks": True}, "sinks"),
        ({"kv_lora_rank": 248}, "kv-lora-rank"),
        ({"qk_rope_head_dim": 72}, "qk-rope-head-dim"),
        ({"decode_context_parallel_size": 2}, "decode-context-parallel"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], code: str) -> None:
    assert code in reasons_of(FLASH_ATTN_MLA_SPARSE, mla_layer(**{**SPARSE, **fields}), (9, 0))


@pytest.mark.parametrize(
    "fields",
    [{"num_heads": 128}, {"dtype": "float16"}, {"block_size": 1}, {"batch_invariant": True}, {"sparse_top_k": 7}],
    ids=str,
)
def test_what_is_accepted(fields: dict[str, Any]) -> None:
    assert isinstance(ask(FLASH_ATTN_MLA_SPARSE, mla_layer(**{**SPARSE, **fields}), (9, 0)), BackendPlan)


def test_it_needs_fa3() -> None:
    environment = installed(flash_attn="2.8.3")
    found = reasons_of(FLASH_ATTN_MLA_SPARSE, mla_layer(**SPARSE), (9, 0), environment=environment)
    assert found["library-missing"].remedy == "pip install vllm"


def test_a_provider_can_be_pinned() -> None:
    pin = {"provider": "vllm"}
    assert plan_of(FLASH_ATTN_MLA_SPARSE, mla_layer(**SPARSE), (9, 0), options=pin).provider.startswith("vllm")
