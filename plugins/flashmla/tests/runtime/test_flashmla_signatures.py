"""The emulated functions have the signatures of what is installed, so that a release that changes one is seen.

A later release may add parameters with defaults behind those that are known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from attn_select_flashmla.facts.builds import BUILDS, SGL_FLASH_MLA, FlashMLABuild, kernel_of

pytest.importorskip("torch")

import flashmla_emulated
from installed_signatures import emulated_signature, signature_of, source_of

from attn_select_flashmla.runtime.adapters import adapter_for, adapter_of

MODULES = [(build, name) for build in BUILDS for name in flashmla_emulated.MODULES[build.distribution]]


@pytest.mark.parametrize(("build", "module"), MODULES, ids=[f"{b.distribution} {m}" for b, m in MODULES])
def test_emulated_signatures_are_the_installed_ones(build: FlashMLABuild, module: str) -> None:
    tree = source_of(build.library, *module.split(".")[1:])
    for name, function in flashmla_emulated.MODULES[build.distribution][module].items():
        wanted, found = emulated_signature(function), signature_of(tree, name)
        assert found[: len(wanted)] == wanted, name
        added = [parameter for parameter, default in found[len(wanted) :] if default is None]
        assert not added, f"{name} wants {added} now"


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.distribution)
def test_adapters_take_the_emulated_builds(build: FlashMLABuild, emulate: Callable[[str], list[str]]) -> None:
    emulate(build.distribution)
    adapter = adapter_for(kernel_of(build, "dense"))
    assert adapter.build is build
    assert adapter_for(kernel_of(build, "sparse_decode")) is adapter  # one per build


def test_the_base_of_the_sparse_lse(emulate: Callable[[str], list[str]]) -> None:
    """sgl_kernel's is base 2 as its docstrings say, the others' natural."""
    bases = {}
    for build in BUILDS:
        emulate(build.distribution)
        bases[build.distribution] = adapter_of(build).sparse_lse_base2
    assert [name for name, base2 in bases.items() if base2] == ["sglang-kernel", "sgl-kernel"]


def test_sgl_flash_mla_is_asked_for_its_legacy_kernels() -> None:
    """Its others serve neither Hopper nor this format."""
    found = flashmla_emulated.MODULES[SGL_FLASH_MLA.distribution]["flash_mla.flash_mla_interface"]
    for name, function in found.items():
        if name != "get_mla_metadata":
            assert "use_legacy" in inspect.signature(function).parameters
