"""What the golden files do not show: sources, declared libraries, options that are none, what compiles together."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from attn_select.backends.spec import BackendSpec
from attn_select.testing import check_sources, gqa_layer
from attn_select_flash_attn.facts.builds import BUILDS, LIBRARIES, ProviderName
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN
from attn_select_flash_attn.plugin import attn_select_register_backends


@pytest.mark.parametrize("spec", attn_select_register_backends(), ids=lambda spec: spec.name)
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
