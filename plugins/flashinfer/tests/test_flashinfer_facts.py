"""What the golden files do not show: sources, how releases compare, options that are none, the place among others."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select import select
from attn_select.backends.spec import Fact
from attn_select.layer.state import StateConfig
from attn_select.machine.environment import Environment
from attn_select.testing import check_sources, gqa_layer, mla_layer
from attn_select_flashinfer.facts import libraries, mla_kernels
from attn_select_flashinfer.plugin import attn_select_register_backends

SPECS = {spec.name: spec for spec in attn_select_register_backends()}


def test_every_fact_has_a_source() -> None:
    for name, holders in {
        "FLASHINFER": [],
        "FLASHINFER_MLA": [*mla_kernels.KERNELS.values(), *mla_kernels.PREFILL_KERNELS.values()],
        "FLASHINFER_MLA_SPARSE": [],
    }.items():
        check_sources(SPECS[name], *holders, least=30)
    found = [value for value in (*vars(libraries).values(), *vars(mla_kernels).values()) if isinstance(value, Fact)]
    assert len(found) > 5
    assert all(len(fact.source) >= 10 for fact in found)


@pytest.mark.parametrize("text", ["0.6.14", "0.6.15rc1", "0.7.2.post1", "1.0", "0.6.14+cu130"])
def test_releases_compare_by_their_numbers(text: str) -> None:
    environment = Environment(assume_installed=True, pins={"flashinfer-python": text})
    expected = {"0.6.15rc1": (0, 6, 15), "0.7.2.post1": (0, 7, 2), "1.0": (1, 0)}
    assert libraries.release(environment) == expected.get(text, (0, 6, 14))
    assert libraries.release(Environment(assume_installed=True)) == libraries.NEWEST


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("FLASHINFER", {"use_trtllm": "yes"}),
        ("FLASHINFER", {"prefill_kernel": "fa4"}),
        ("FLASHINFER", {"native_workspace_bytes": 1024}),
        ("FLASHINFER", {"trtllm_workspace_bytes": "394MiB"}),
        ("FLASHINFER", {"use_xqa": True}),
        ("FLASHINFER_MLA", {"decode_kernel": "cutlass"}),
        ("FLASHINFER_MLA", {"prefill_kernel": "xqa"}),
        ("FLASHINFER_MLA", {"workspace_bytes": 1}),
        ("FLASHINFER_MLA_SPARSE", {"workspace_bytes": "64 MiB"}),
    ],
    ids=str,
)
def test_options_that_are_none(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        SPECS[name].options(**values)


@pytest.mark.parametrize(
    ("layer", "gpu", "selected"),
    [
        (mla_layer(num_heads=16), "b200", "FLASHINFER_MLA"),
        (mla_layer(kv_cache_dtype="fp8"), "b300", "FLASHINFER_MLA"),
        (mla_layer(sparse_top_k=2048, kv_cache_dtype="fp8"), "b200", "FLASHINFER_MLA_SPARSE"),
        (gqa_layer(num_heads=16, num_kv_heads=2, head_size=256, block_size=16), "b200", "FLASHINFER"),
        (
            StateConfig(recurrence="gated_delta_net", num_heads=16, num_v_heads=32, head_size=128),
            "h100",
            "TRITON_STATE",
        ),
    ],
    ids=str,
)
def test_what_is_chosen_for_decode(layer: Any, gpu: str, selected: str) -> None:
    assert select(layer, gpu).selected["decode"] == selected
