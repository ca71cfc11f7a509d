"""The emulated entries take what FlashInfer's do, by its source: it is read and not imported, which wants CUDA's parts.

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

from attn_select_flashinfer.runtime import library

fi: Any = sys.modules["flashinfer_emulated"]
PARTS = ("fp4", "plan", "native", "ragged", "trtllm", "cascade", "mla")
MODULES = {part: sys.modules[f"flashinfer_emulated_{part}"] for part in PARTS}
FILES = {
    "native": {
        "prefill": ("BatchPrefillWithPagedKVCacheWrapper",),
        "decode": ("BatchDecodeWithPagedKVCacheWrapper",),
        "attention/_core": ("BatchAttentionWithAttentionSinkWrapper",),
    },
    "fp4": {"utils": ("FP4Tensor",)},
    "ragged": {"prefill": ("BatchPrefillWithRaggedKVCacheWrapper",)},
    "trtllm": {
        "prefill": ("trtllm_batch_context_with_kv_cache", "trtllm_ragged_attention_deepseek"),
        "decode": ("trtllm_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache"),
    },
    "cascade": {"cascade": ("merge_state_in_place",)},
}
"""By emulated module and FlashInfer's file, the entries."""
METHODS = ("__init__", "plan", "run", "reset_workspace_buffer")
ENTRIES = [
    (emulated, file, name, method)
    for emulated, files in FILES.items()
    for file, names in files.items()
    for name in names
    for method in (METHODS if isinstance(getattr(MODULES[emulated], name), type) else ("",))
    if method in ("", "__init__") or name not in ("BatchAttentionWithAttentionSinkWrapper", "FP4Tensor")
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


def real_signature(file: str, name: str, method: str) -> Signature:
    """Return each parameter's name and default; ``*args`` has its star."""
    tree = ast.parse(root().joinpath(f"{file}.py").read_text(encoding="utf-8"))
    node = definition(tree.body, name)
    arguments = (definition(node.body, method) if method else node).args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults = [None] * (len(names) - len(arguments.defaults)) + [ast.unparse(each) for each in arguments.defaults]
    found: Signature = [*zip(names, defaults, strict=True)]
    if arguments.vararg is not None:
        found.append((f"*{arguments.vararg.arg}", None))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, None if default is None else ast.unparse(default)))
    return found


def emulated_signature(function: Any) -> Signature:
    found: Signature = []
    for parameter in inspect.signature(function).parameters.values():
        default = None if parameter.default is parameter.empty else str(parameter.default)
        quoted = repr(parameter.default) if isinstance(parameter.default, str) else default
        found.append((f"*{parameter.name}" if parameter.kind is parameter.VAR_POSITIONAL else parameter.name, quoted))
    return found


@pytest.mark.parametrize(
    ("emulated", "file", "name", "method"), ENTRIES, ids=[".".join(filter(None, entry[2:])) for entry in ENTRIES]
)
def test_the_emulated_signature_is_the_installed_one(emulated: str, file: str, name: str, method: str) -> None:
    entry = getattr(MODULES[emulated], name)
    wanted, found = emulated_signature(getattr(entry, method) if method else entry), real_signature(file, name, method)
    assert found[: len(wanted)] == wanted
    added = [parameter for parameter, default in found[len(wanted) :] if default is None]
    assert not added, f"{name} wants {added} now"


def test_the_numbers_that_the_emulation_rests_on() -> None:
    include = root() / "data" / "include" / "flashinfer"
    if not include.exists():
        pytest.skip(f"{include.parent} has no sources")
    inf = include.joinpath("math.cuh").read_text(encoding="utf-8")
    assert f"constexpr float inf = {-fi.NEGATIVE:.0e};".replace("e+0", "e") in inf
    decode = root().joinpath("decode.py").read_text(encoding="utf-8")
    assert "workspace_u8[: 8 * 1024 * 1024]  # reserve 8MB for semaphore" in decode
    sizes = include.joinpath("utils.cuh").read_text(encoding="utf-8").split("#define DISPATCH_HEAD_DIM(")[1]
    cases = [line.split()[1].rstrip(":") for line in sizes.split("default:")[0].splitlines() if " case " in line]
    assert {str(size) for size in MODULES["plan"].HEAD_SIZES} <= set(cases)
    pages = root().joinpath("jit/xqa.py").read_text(encoding="utf-8")
    assert f"page_size not in {list(MODULES['trtllm'].XQA_PAGES)}" in pages


@pytest.mark.parametrize("entry", library.PARAMETERS)
def test_what_is_passed_fits_the_emulated_entry(entry: str) -> None:
    found = [getattr(module, entry) for module in MODULES.values() if hasattr(module, entry)]
    for emulated in found:
        for method, wanted in library.PARAMETERS[entry].items():
            called = getattr(emulated, method) if method else emulated
            assert not set(wanted.split()) - set(inspect.signature(called).parameters)
    assert found, f"{entry} is not emulated"


def test_an_entry_that_takes_other_arguments_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = type("BatchDecodeWithPagedKVCacheWrapper", (), {"plan": lambda self, indptr, page_size: None})
    monkeypatch.setattr(library, "_attribute", lambda module, name: changed)
    with pytest.raises(Exception, match=r"BatchDecodeWithPagedKVCacheWrapper\.\w+ takes no argument ") as info:
        library._checked("BatchDecodeWithPagedKVCacheWrapper")
    assert type(info.value).__name__ == "KernelMismatchError"
    assert "flashinfer-python" in str(getattr(info.value, "hint", ""))
