"""The emulated signatures are those of the installed packages, and what the adapters pass fits them."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from attn_select.environment import Environment
from attn_select_flash_attn.providers import KERNELS, Kernel

pytest.importorskip("torch")

from attn_select.errors import KernelMismatchError
from attn_select_flash_attn.provider_adapters import adapter, kernel_of

emulated: Any = sys.modules["flash_attn_emulated"]
FUNCTIONS = [(provider, name) for provider, functions in emulated.SIGNATURES.items() for name in functions]


def installed(provider: str) -> ModuleType:
    """Import a provider's real module, or skip."""
    if provider in ("sglang-kernel", "sgl-kernel") and Environment().version(provider) is None:
        pytest.skip(f"{provider} is not installed")
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


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.label)
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "packed"])
def test_every_adapter_fits_its_emulated_functions(kernel: Kernel, paged: bool, emulate: Callable[[str], Any]) -> None:
    emulate(kernel.library.distribution)
    made = adapter(kernel, paged=paged)
    assert made.kernel is kernel
    assert adapter(kernel, paged=paged) is made


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.label)
def test_a_function_that_takes_other_arguments_is_refused_by_name(
    kernel: Kernel, emulate: Callable[[str], Any]
) -> None:
    emulate(kernel.library.distribution)
    module: Any = sys.modules[kernel.module]

    def changed(q: Any, k: Any, v: Any, cu_seqlens_q: Any, max_seqlen_q: Any) -> None: ...

    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        setattr(module, name, changed)
    with pytest.raises(
        KernelMismatchError, match=f"{kernel.label}: .*takes no argument .*softmax_scale.*; it takes q"
    ) as info:
        adapter(kernel, paged=True)
    assert kernel.library.distribution in str(info.value.hint)
    assert "provider" in str(info.value.hint)


def test_a_function_that_is_gone_is_named(emulate: Callable[[str], Any]) -> None:
    emulate("flash-attn-3")
    del sys.modules["flash_attn_interface"].flash_attn_with_kvcache  # type: ignore[attr-defined]
    with pytest.raises(KernelMismatchError, match=r"flash_attn_interface\.flash_attn_with_kvcache does not exist"):
        adapter(KERNELS[0], paged=True)


def test_a_function_that_takes_anything_is_called(emulate: Callable[[str], Any]) -> None:
    emulate("flash-attn-3")
    sys.modules["flash_attn_interface"].flash_attn_with_kvcache = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    assert adapter(KERNELS[0], paged=True).kernel is KERNELS[0]


def test_a_build_without_its_kernels_says_why(emulate: Callable[[str], Any]) -> None:
    emulate("vllm")
    module: Any = sys.modules["vllm.vllm_flash_attn.flash_attn_interface"]
    module.FA2_AVAILABLE, module.FA2_UNAVAILABLE_REASON = False, "libcudart.so.99 is missing"
    fa2 = next(kernel for kernel in KERNELS if kernel.label == "FA2 of vllm")
    with pytest.raises(KernelMismatchError, match=r"has no FA2 here: libcudart\.so\.99 is missing"):
        adapter(fa2, paged=True)


def test_an_old_version_is_refused(emulate: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    emulate("vllm")
    versions = {"vllm": "0.10.1"}
    monkeypatch.setattr("attn_select.environment.installed_version", versions.get)
    monkeypatch.setattr("attn_select.environment.has_module", lambda name: True)
    fa3 = next(kernel for kernel in KERNELS if kernel.label == "FA3 of vllm")
    with pytest.raises(KernelMismatchError, match=r"vllm 0\.10\.1 is installed, >=0\.26 is needed"):
        adapter(fa3, paged=True)


def test_a_library_that_is_not_there_is_an_import_error() -> None:
    adapter.cache_clear()
    missing = next(kernel for kernel in KERNELS if kernel.label == "FA3 of flash-attn-3")
    if Environment().version("flash-attn-3") is not None:
        pytest.skip("flash-attn-3 is installed")
    with pytest.raises(ImportError):
        adapter(missing, paged=True)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.label)
def test_the_plan_names_the_kernel(kernel: Kernel) -> None:
    layers: Any = sys.modules["flash_attn_layers"]
    from attn_select_flash_attn.flash_attn import FLASH_ATTN

    gpu = "h100" if kernel.version == 3 else "a100"
    provider = kernel.library.distribution
    selection = layers.selected(FLASH_ATTN, layers.layer_config(), gpu=gpu, provider=provider, version=kernel.version)
    assert kernel_of(selection.plans["decode"]) is kernel


def test_a_plan_of_another_plugin_is_refused() -> None:
    layers: Any = sys.modules["flash_attn_layers"]
    from attn_select_flash_attn.flash_attn import FLASH_ATTN

    plan = layers.selected(FLASH_ATTN, layers.layer_config()).plans["decode"]
    plan.provider = "acme (acme.attention)"
    with pytest.raises(KernelMismatchError, match=r"'acme \(acme.attention\)'"):
        kernel_of(plan)
