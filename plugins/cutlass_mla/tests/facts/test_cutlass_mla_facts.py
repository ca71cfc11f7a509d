"""What the golden file does not show: sources, the order of the builds, options and a variable that are none."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from attn_select.testing import check_sources, mla_layer, reasons_of
from attn_select_cutlass_mla.facts.builds import BUILDS, LIBRARIES
from attn_select_cutlass_mla.plugin import attn_select_register_backends

(CUTLASS_MLA,) = attn_select_register_backends()


def test_every_fact_has_a_source() -> None:
    check_sources(CUTLASS_MLA, *BUILDS, least=30)


def test_builds_are_the_alternatives_in_order() -> None:
    assert [library.distribution for library in LIBRARIES[1]] == ["vllm", "sgl-kernel", "flashinfer-python"]
    assert tuple(build.library for build in BUILDS) == LIBRARIES[1]
    assert all(build.module.split(".")[0] == build.library.module for build in BUILDS)


def test_a_long_variable_is_shortened() -> None:
    found = reasons_of(CUTLASS_MLA, mla_layer(), "sm100", variables={"FORCE_NUM_KV_SPLITS": "9" * 5000})
    assert len(found["environment-variable"].message) < 300


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
