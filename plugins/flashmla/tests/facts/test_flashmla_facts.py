"""What the golden files do not show: sources, declared libraries, options that are none."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from attn_select.backends.spec import BackendSpec
from attn_select.testing import check_sources
from attn_select_flashmla.facts.builds import BUILDS, LIBRARIES
from attn_select_flashmla.plugin import attn_select_register_backends

SPECS = {spec.name: spec for spec in attn_select_register_backends()}


def test_every_fact_has_a_source() -> None:
    check_sources(SPECS["FLASHMLA"], *BUILDS, least=30)
    check_sources(SPECS["FLASHMLA_SPARSE"], least=30)


def test_builds_come_from_declared_libraries() -> None:
    assert tuple(build.library for build in BUILDS) == LIBRARIES[1]
    assert all(build.module.split(".")[0] == build.library.module for build in BUILDS)


@pytest.mark.parametrize("options", [{"provider": "pip"}, {"version": 3}])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_bad_options(spec: BackendSpec, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        spec.options(**options)
