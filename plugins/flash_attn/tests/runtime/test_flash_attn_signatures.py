"""The emulated signatures are those of the installed packages, and what the adapters pass fits them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from attn_select.machine.environment import Environment
from attn_select_flash_attn.facts.builds import BUILDS, VLLM_WITH_FA4, FlashAttnBuild, kernel_of

pytest.importorskip("torch")

import flash_attn_emulated as emulated

from attn_select.errors import KernelMismatchError
from attn_select_flash_attn.runtime.adapters import adapter_for

by_build = pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.label)
FUNCTIONS = [(provider, name) for provider, functions in emulated.SIGNATURES.items() for name in functions]


def installed(provider: str) -> ModuleType:
    """Import a provider's real module, or skip."""
    if provider in ("sglang-kernel", "sgl-kernel") and Environment().version(provider) is None:
        pytest.skip(f"{provider} is not installed")
    if provider == "vllm with FA4" and not Environment().has(VLLM_WITH_FA4):
        pytest.skip("no vLLM from 0.33 on is installed")
    try:
        return importlib.import_module(emulated.MODULES[provider])
    except ImportError as error:
        pytest.skip(f"{provider} cannot be imported: {error}")


@pytest.mark.parametrize(("provider", "name"), FUNCTIONS)
def test_the_installed_function_takes_what_the_emulated_one_takes(provider: str, name: str) -> None:
    real = inspect.signature(getattr(installed(provider), name)).parameters
    recorded = emulated.signature(provider, name).parameters
    assert [p for p in real if p in recorded] == list(recorded), "a parameter is gone, or their order changed"
    required = [p for p in recorded.values() if p.default is p.empty]
    assert [p.name for p in real.values() if p.default is p.empty] == [p.name for p in required]
    positional = list(recorded)[: len(required)]
    assert list(real)[: len(required)] == positional
    for parameter in recorded.values():
        assert real[parameter.name].default == parameter.default, parameter.name


@by_build
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "packed"])
def test_every_adapter_fits_its_emulated_functions(
    build: FlashAttnBuild, paged: bool, emulate: Callable[[str], Any]
) -> None:
    emulate(build.distribution)
    made = adapter_for(kernel_of(build, paged=paged))
    assert (made.build, made.paged) == (build, paged)
    assert adapter_for(kernel_of(build, paged=paged)) is made


@by_build
def test_a_function_that_takes_other_arguments_is_refused_by_name(
    build: FlashAttnBuild, emulate: Callable[[str], Any]
) -> None:
    emulate(build.distribution)
    module: Any = sys.modules[build.module]

    def changed(q: Any, k: Any, v: Any, cu_seqlens_q: Any, max_seqlen_q: Any) -> None: ...

    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache", "_flash_attn_fwd"):
        setattr(module, name, changed)
    with pytest.raises(
        KernelMismatchError, match=rf"{build.label}: .*takes no argument .*softmax_scale.* It takes \(q, "
    ) as info:
        adapter_for(kernel_of(build, paged=True))
    assert build.distribution in str(info.value.hint)
    assert "provider" in str(info.value.hint)


def test_a_function_that_takes_anything_is_called(emulate: Callable[[str], Any]) -> None:
    emulate("flash-attn-3")
    sys.modules["flash_attn_interface"].flash_attn_with_kvcache = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    assert adapter_for(kernel_of(BUILDS[0], paged=True)).build is BUILDS[0]


def test_a_build_without_its_kernels_says_why(emulate: Callable[[str], Any]) -> None:
    emulate("vllm")
    module: Any = sys.modules["vllm.vllm_flash_attn.flash_attn_interface"]
    module.FA2_AVAILABLE, module.FA2_UNAVAILABLE_REASON = False, "libcudart.so.99 is missing"
    fa2 = next(build for build in BUILDS if build.label == "FA2 of vllm")
    with pytest.raises(KernelMismatchError, match=r"has no FA2 here: libcudart\.so\.99 is missing"):
        adapter_for(kernel_of(fa2, paged=True))
