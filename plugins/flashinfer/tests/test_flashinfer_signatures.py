"""The emulated entries take what FlashInfer's do, by its source: to import it takes CUDA's parts."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_emulated as fi
from flashinfer_emulated import trtllm, wrappers

from attn_select.errors import KernelMismatchError
from attn_select.providers import KernelBuild
from attn_select.runtime.providers import InstalledBuild
from attn_select_flashinfer.facts.libraries import FLASHINFER_PYTHON
from attn_select_flashinfer.runtime import library, plans

MLA = "BatchMLAPagedAttentionWrapper"
FILES = {
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_ragged_attention_deepseek",
        "fmha_varlen",
    ),
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "trtllm_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache",
    ),
    "mla": (MLA, "trtllm_batch_decode_with_kv_cache_mla"),
    "utils": ("FP4Tensor",),
    "cascade": ("merge_state_in_place",),
}
"""By FlashInfer's module, the entries."""
METHODS = ("__init__", "plan", "run", "reset_workspace_buffer")
EMULATED = fi.entries()
ENTRIES = [
    (file, name, method)
    for file, names in FILES.items()
    for name in names
    for method in (METHODS if isinstance(EMULATED[name], type) else ("",))
    if not method or hasattr(EMULATED[name], method)
]
Signature = list[tuple[str, str | None]]


def root() -> Path:
    """Return the installed package's folder, or skip."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        pytest.skip("flashinfer-python is not installed")
    return Path(found.origin).parent


def definition(body: list[ast.stmt], name: str) -> Any:
    """Return the last definition of a name: those before it are overloads."""
    found = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name]
    assert found, f"{name} does not exist"
    return found[-1]


def real(file: str, name: str, method: str = "") -> Any:
    """Return the definition of an entry, or of its method, in a module or package of FlashInfer."""
    files = [root() / f"{file}.py", *sorted((root() / file).rglob("*.py"))]
    body = [node for each in files if each.exists() for node in ast.parse(each.read_text(encoding="utf-8")).body]
    found = definition(body, name)
    return definition(found.body, method) if method else found


def real_signature(node: ast.FunctionDef) -> Signature:
    """Return each parameter's name and default: ``*args`` has one star, those by name alone have two."""
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults = [None] * (len(names) - len(arguments.defaults)) + [ast.unparse(each) for each in arguments.defaults]
    found: Signature = [*zip(names, defaults, strict=True)]
    if arguments.vararg is not None:
        found.append((f"*{arguments.vararg.arg}", None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((f"**{argument.arg}", None if default is None else ast.unparse(default)))
    return found


def emulated_signature(function: Any) -> Signature:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.KEYWORD_ONLY: "**"}
    return [
        (
            stars.get(parameter.kind, "") + parameter.name,
            None if parameter.default is parameter.empty else repr(parameter.default),
        )
        for parameter in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(("file", "name", "method"), ENTRIES, ids=[".".join(filter(None, each)) for each in ENTRIES])
def test_the_emulated_signature_is_the_installed_one(file: str, name: str, method: str) -> None:
    entry = EMULATED[name]
    wanted, found = (
        emulated_signature(getattr(entry, method) if method else entry),
        real_signature(real(file, name, method)),
    )
    by_place = [each for each in wanted if not each[0].startswith("**")]
    assert found[: len(by_place)] == by_place
    assert set(wanted) <= set(found)
    added = [parameter for parameter, default in found if default is None and (parameter, None) not in wanted]
    assert not added, f"{name} wants {added} now"


@pytest.mark.parametrize("entry", library.PARAMETERS)
def test_what_is_passed_fits_the_emulated_entry(entry: str) -> None:
    for method, wanted in library.PARAMETERS[entry].items():
        called = getattr(EMULATED[entry], method) if method else EMULATED[entry]
        assert not set(wanted.split()) - set(inspect.signature(called).parameters)


def test_the_wrappers_keep_their_schedules_where_the_runtime_replaces_them() -> None:
    """The ring swaps the pinned schedule before a plan, and the MLA wrappers of decode share one on the device."""
    assigned = {
        node.attr
        for node in ast.walk(real("mla", MLA, "__init__"))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert {plans._ATTRIBUTE, "_int_workspace_buffer"} <= assigned
    read = {
        method: {node.attr for node in ast.walk(real("mla", MLA, method)) if isinstance(node, ast.Attribute)}
        for method in ("plan", "run")
    }
    assert {plans._ATTRIBUTE, "_int_workspace_buffer"} <= read["plan"]
    assert "_int_workspace_buffer" in read["run"]
    assert plans._ATTRIBUTE not in read["run"]


def test_the_numbers_that_the_emulation_rests_on() -> None:
    data = root() / "data"
    if not (data / "include").exists():
        pytest.skip(f"{data} has no sources")

    def source(path: str) -> str:
        return (root() / path).read_text(encoding="utf-8")

    inf = f"constexpr float inf = {-fi.NEGATIVE:.0e};".replace("e+0", "e")
    assert inf in source("data/include/flashinfer/math.cuh")
    assert "workspace_u8[: 8 * 1024 * 1024]  # reserve 8MB for semaphore" in source("decode.py")
    sizes = source("data/include/flashinfer/utils.cuh").split("#define DISPATCH_HEAD_DIM(")[1]
    cases = [line.split()[1].rstrip(":") for line in sizes.split("default:")[0].splitlines() if " case " in line]
    assert {str(size) for size in wrappers.HEAD_SIZES} <= set(cases)
    assert f"page_size not in {list(trtllm.XQA_PAGES)}" in source("jit/xqa.py")
    scheduler = source("data/include/flashinfer/attention/scheduler.cuh")
    plan = scheduler.split("inline cudaError_t MLAPlan(")[1].split("\ninline ")[0]
    for text in (f"max_total_num_works = {wrappers.MAX_WORKS};", "avg_packed_qo_len > 64", "cta_tile_q = 64;"):
        assert text in plan, f"MLAPlan has no {text!r}"
    assert f"max_batch_size = {trtllm.MAX_BATCH};" in source("data/csrc/trtllm_fmha_kernel_launcher.cu")


def test_an_entry_that_takes_other_arguments_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = ModuleType("flashinfer")
    changed.BatchDecodeWithPagedKVCacheWrapper = type(  # type: ignore[attr-defined]
        "Changed", (), {"plan": lambda self, indptr, page_size: None}
    )
    monkeypatch.setattr(InstalledBuild, "imported", lambda self, module: changed)
    installed = library._Installed(KernelBuild(kernel="FlashInfer", library=FLASHINFER_PYTHON, module="flashinfer"))
    message = r"flashinfer\.BatchDecodeWithPagedKVCacheWrapper\.\w+ has another signature: it takes no argument "
    with pytest.raises(KernelMismatchError, match=message) as info:
        library._entry(installed, "BatchDecodeWithPagedKVCacheWrapper")
    assert info.value.hint == "pip install --upgrade flashinfer-python"
    with pytest.raises(KernelMismatchError, match=r"flashinfer\.merge_state_in_place does not exist"):
        library._entry(installed, "merge_state_in_place")
