"""The emulated MLA entries take what FlashInfer's do, by its source: to import it takes CUDA's parts.

A later release may add parameters with defaults behind those that are known.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from attn_select_flashinfer.runtime import library, plans

emulated: Any = sys.modules["flashinfer_emulated_mla"]
emulated_decode: Any = sys.modules["flashinfer_emulated_mla_decode"]
WRAPPER = "BatchMLAPagedAttentionWrapper"
ENTRIES = [
    *[("mla", WRAPPER, method) for method in ("__init__", "plan", "run")],
    ("mla", "trtllm_batch_decode_with_kv_cache_mla", ""),
    ("prefill", "fmha_varlen", ""),
]
"""FlashInfer's module, the entry, its method."""
Signature = list[tuple[str, str | None]]


def root() -> Path:
    """Return the installed package's folder, or skip."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        pytest.skip("flashinfer-python is not installed")
    return Path(found.origin).parent


def definition(module: str, name: str) -> Any:
    """Return the last definition of a name in a module or package: those before it are overloads."""
    files = [root() / f"{module}.py", *sorted((root() / module).rglob("*.py"))]
    bodies = [ast.parse(file.read_text(encoding="utf-8")).body for file in files if file.exists()]
    found = [
        node
        for body in bodies
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
    ]
    assert found, f"flashinfer.{module}.{name} is not defined"
    return found[-1]


def methods(name: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in definition("mla", name).body if isinstance(node, ast.FunctionDef)}


def real_signature(node: ast.FunctionDef) -> Signature:
    """Return each parameter's name and default; those by name only have a star."""
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults = [None] * (len(names) - len(arguments.defaults)) + [ast.unparse(each) for each in arguments.defaults]
    found: Signature = [*zip(names, defaults, strict=True)]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((f"*{argument.arg}", None if default is None else ast.unparse(default)))
    return found


def emulated_signature(function: Any) -> Signature:
    found: Signature = []
    for parameter in inspect.signature(function).parameters.values():
        star = "*" if parameter.kind is parameter.KEYWORD_ONLY else ""
        found.append((star + parameter.name, None if parameter.default is parameter.empty else repr(parameter.default)))
    return found


@pytest.mark.parametrize(("module", "name", "method"), ENTRIES, ids=[".".join(filter(None, each)) for each in ENTRIES])
def test_the_emulated_signature_is_the_installed_one(module: str, name: str, method: str) -> None:
    entry = getattr(emulated, name)
    wanted = emulated_signature(getattr(entry, method) if method else entry)
    found = real_signature(methods(name)[method] if method else definition(module, name))
    by_place = [each for each in wanted if not each[0].startswith("*")]
    assert found[: len(by_place)] == by_place
    assert set(wanted) <= set(found)
    added = [parameter for parameter, default in found if default is None and (parameter, None) not in wanted]
    assert not added, f"{name} wants {added} now"


def test_the_wrapper_keeps_its_schedules_where_the_runtime_replaces_them() -> None:
    """The ring swaps the pinned schedule before a plan, decode's wrappers share one on the device."""
    assigned = {
        node.attr
        for node in ast.walk(methods(WRAPPER)["__init__"])
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert {plans._ATTRIBUTE, "_int_workspace_buffer"} <= assigned
    read = {
        method: {node.attr for node in ast.walk(methods(WRAPPER)[method]) if isinstance(node, ast.Attribute)}
        for method in ("plan", "run")
    }
    assert {plans._ATTRIBUTE, "_int_workspace_buffer"} <= read["plan"]
    assert "_int_workspace_buffer" in read["run"]
    assert plans._ATTRIBUTE not in read["run"]


def test_the_numbers_that_the_emulation_rests_on() -> None:
    data = root() / "data"
    if not (data / "include").exists():
        pytest.skip(f"{data} has no sources")
    scheduler = (data / "include/flashinfer/attention/scheduler.cuh").read_text(encoding="utf-8")
    plan = scheduler.split("inline cudaError_t MLAPlan(")[1].split("\ninline ")[0]
    for text in (f"max_total_num_works = {emulated.MAX_WORKS};", "avg_packed_qo_len > 64", "cta_tile_q = 64;"):
        assert text in plan, f"MLAPlan has no {text!r}"
    launcher = (data / "csrc/trtllm_fmha_kernel_launcher.cu").read_text(encoding="utf-8")
    assert f"max_batch_size = {emulated_decode.MAX_BATCH};" in launcher


@pytest.mark.parametrize("entry", sorted({name for _, name, _ in ENTRIES}))
def test_what_is_checked_at_import_exists_there(entry: str) -> None:
    module = library.MODULES[entry].removeprefix("flashinfer.")
    for method, wanted in library.PARAMETERS[entry].items():
        node = methods(entry)[method] if method else definition(module, entry)
        assert not set(wanted.split()) - {name.removeprefix("*") for name, _ in real_signature(node)}
