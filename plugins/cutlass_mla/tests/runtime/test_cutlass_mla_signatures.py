"""The emulated functions have the signatures of what is installed, so that a release that changes one is seen."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from attn_select_cutlass_mla.facts.builds import BUILDS, FLASHINFER, CutlassMLABuild, CutlassMLAKernel, kernel_of

pytest.importorskip("torch")

import cutlass_mla_emulated as emulated
from installed_signatures import emulated_signature, signature_of, source_of

from attn_select.errors import KernelMismatchError
from attn_select_cutlass_mla.runtime.adapters import adapter_for

Emulate = Callable[[str], list[dict[str, Any]]]
by_build = pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.distribution)
FILES = {"vllm": "_custom_ops", "sgl-kernel": "attention", "flashinfer-python": "mla/_core"}


@by_build
def test_emulated_signatures_are_the_installed_ones(build: CutlassMLABuild) -> None:
    tree = source_of(build.library, FILES[build.distribution])
    module, functions = emulated.MODULES[build.distribution]
    assert module == build.module
    for name, function in functions.items():
        assert signature_of(tree, name) == emulated_signature(function), name


def test_flashinfers_module_function_is_called_as_its_wrapper_calls_it() -> None:
    """The function is compiled, and has no signature to ask for."""
    tree = source_of(FLASHINFER, FILES["flashinfer-python"])
    name = "cutlass_mla_paged_attention"
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(f".{name}")]
    passed = [[ast.unparse(argument).split(".")[-1].lstrip("_") for argument in call.args] for call in calls]
    own = [*inspect.signature(emulated.cutlass_mla_paged_attention).parameters]
    renamed = {"float_workspace_buffer": "workspace", "output_scale": "o_scale"}
    assert [[renamed.get(argument, argument) for argument in arguments] for arguments in passed] == [own]


# --- What adapters refuse ---------------------------------------------------------------------


@by_build
def test_adapters_take_the_emulated_functions(build: CutlassMLABuild, emulate: Emulate) -> None:
    emulate(build.distribution)
    kernel = kernel_of(build, -1)
    adapter = adapter_for(kernel)
    assert (adapter.build, adapter.kernel) == (build, kernel)
    assert adapter_for(kernel) is adapter


def change(monkeypatch: pytest.MonkeyPatch, distribution: str, **functions: Any) -> None:
    """Replace functions of an emulated module; None removes one."""
    module, own = emulated.MODULES[distribution]
    made = {name: function for name, function in {**own, **functions}.items() if function is not None}
    monkeypatch.setitem(emulated.MODULES, distribution, (module, made))


@pytest.mark.parametrize(
    ("distribution", "name"),
    [
        ("vllm", "sm100_cutlass_mla_decode"),
        ("vllm", "sm100_cutlass_mla_get_workspace_size"),
        ("sgl-kernel", "cutlass_mla_decode"),
        ("sgl-kernel", "cutlass_mla_get_workspace_size"),
        ("flashinfer-python", "get_mla_module"),
    ],
)
def test_missing_and_changed_functions_are_named(
    monkeypatch: pytest.MonkeyPatch, emulate: Emulate, distribution: str, name: str
) -> None:
    def changed(query: Any, more: Any) -> None: ...

    change(monkeypatch, distribution, **{name: changed})
    emulate(distribution)
    with pytest.raises(KernelMismatchError, match=rf"CUTLASS MLA of {distribution}: .*{name} has another") as caught:
        adapter_for(CutlassMLAKernel(distribution, -1))
    assert "It takes (query, more)" in caught.value.message
    assert f"is written for {distribution}>=" in (caught.value.hint or "")
    change(monkeypatch, distribution, **{name: None})
    emulate(distribution)
    with pytest.raises(KernelMismatchError, match=rf"{name} does not exist"):
        adapter_for(CutlassMLAKernel(distribution, -1))


@pytest.mark.parametrize("error", [AttributeError("no such operator"), RuntimeError("CUDA version must be >= 12.4")])
def test_a_build_without_the_kernel_is_named(
    monkeypatch: pytest.MonkeyPatch, emulate: Emulate, error: Exception
) -> None:
    def absent(max_seq_len: Any, num_batches: Any, sm_count: Any, num_kv_splits: Any) -> Any:
        raise error

    change(monkeypatch, "vllm", sm100_cutlass_mla_get_workspace_size=absent)
    emulate("vllm")
    with pytest.raises(KernelMismatchError, match=rf"built without this kernel \(\w+: {error}\)"):
        adapter_for(CutlassMLAKernel("vllm", -1))


def test_a_module_without_the_function_is_named(monkeypatch: pytest.MonkeyPatch, emulate: Emulate) -> None:
    change(monkeypatch, "flashinfer-python", get_mla_module=lambda: object())
    emulate("flashinfer-python")
    with pytest.raises(KernelMismatchError, match="has no cutlass_mla_paged_attention"):
        adapter_for(CutlassMLAKernel("flashinfer-python", -1))


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch, emulate: Emulate) -> None:
    versions = {"vllm": "0.10.1"}
    monkeypatch.setattr("attn_select.machine.environment.installed_version", versions.get)
    monkeypatch.setattr("attn_select.machine.environment.has_module", lambda name: True)
    emulate("vllm")
    with pytest.raises(KernelMismatchError, match=r"vllm 0\.10\.1 is installed, >=0\.11 is needed"):
        adapter_for(CutlassMLAKernel("vllm", -1))
