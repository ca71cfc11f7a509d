"""Write what FlashInfer's entries take in one release, read from its wheel, which need not be installed.

    pip download --no-deps flashinfer-python==0.7.2.post1 -d wheels
    python plugins/flashinfer/tests/make_signatures.py wheels/flashinfer_python-*.whl

For each wheel this writes ``signatures/VERSION.json``: by module, entry and method each parameter with its default, and
by wrapper and method which of the attributes it names that the plugin replaces or reads. The wheels themselves (15 and
62 MB, with CUDA sources) are too large for a test dependency.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "signatures"
ENTRIES = {
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
    "mla": ("BatchMLAPagedAttentionWrapper", "MLAPlanMetadata", "trtllm_batch_decode_with_kv_cache_mla"),
    "utils": ("FP4Tensor",),
    "cascade": ("merge_state_in_place",),
    "gdn_prefill": ("chunk_gated_delta_rule",),
    "gdn_decode": ("gated_delta_rule_decode_pretranspose",),
    "kda": ("recurrent_kda",),
    "mamba": ("selective_state_update", "ssd_combined_fwd"),
}
"""By FlashInfer's module or package, the entries; one that a release does not have is left out."""
METHODS = ("__init__", "plan", "run", "reset_workspace_buffer", "csr")
ATTRIBUTES = (
    "_int_workspace_buffer",
    "_pin_memory_int_workspace_buffer",
    "_causal",
    "_plan_info",
    "_planned_backend",
    "_kv_indices_buf",
    "_sm_scale",
)
MECHANICS = "_BatchMLAGeneratedFaMechanics"
"""What the MLA wrapper plans since 0.7, for fa2 and fa3."""
Signature = list[tuple[str, str | None]]


def definition(body: list[ast.stmt], name: str) -> Any:
    """Return the last definition of a name, as those before it are overloads; None where there is none."""
    found = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name]
    return found[-1] if found else None


def signature(node: ast.FunctionDef) -> Signature:
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


def read(wheel: Path) -> dict[str, Any]:
    """Return ``{"version", "signatures": {module: {entry: {method: [[parameter, default]]}}}, "attributes": …}``."""
    found: dict[str, Any] = {"version": wheel.name.split("-")[1], "signatures": {}, "attributes": {}}
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".py"))
        for module, entries in ENTRIES.items():
            files = [name for name in names if name.startswith((f"flashinfer/{module}.py", f"flashinfer/{module}/"))]
            body = [node for name in files for node in ast.parse(archive.read(name)).body]
            known = {name: definition(body, name) for name in entries}
            present = {name: node for name, node in known.items() if node is not None}
            found["signatures"][module] = {name: _methods(node) for name, node in present.items()}
            for name, node in present.items():
                if isinstance(node, ast.ClassDef) and (named := _named(node)):
                    found["attributes"][name] = named
            if (planned := definition(body, MECHANICS)) is not None:
                run = definition(planned.body, "_run_generated_fa")
                found["attributes"][MECHANICS] = {"run": _attributes(run)}
            if mirrored := _mirrored(body):
                found["attributes"]["mirrored"] = mirrored
    return found


def _methods(node: ast.FunctionDef | ast.ClassDef) -> dict[str, Signature]:
    if isinstance(node, ast.FunctionDef):
        return {"": signature(node)}
    methods = {name: definition(node.body, name) for name in METHODS}
    return {name: signature(_whole(node, method)) for name, method in methods.items() if method is not None}


def _whole(node: ast.ClassDef, method: ast.FunctionDef) -> ast.FunctionDef:
    """Return the method, or the one that it passes ``**kwargs`` on to."""
    inner = definition(node.body, f"_{method.name}_impl") if method.args.kwarg is not None else None
    return method if inner is None else inner


def _named(node: ast.ClassDef) -> dict[str, list[str]]:
    methods = {name: definition(node.body, name) for name in METHODS}
    found = {name: _attributes(_whole(node, method)) for name, method in methods.items() if method is not None}
    return {name: attributes for name, attributes in found.items() if attributes}


def _attributes(node: ast.AST) -> list[str]:
    return sorted({each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)} & set(ATTRIBUTES))


def _mirrored(body: list[ast.stmt]) -> list[str]:
    """Return the attributes that the MLA wrapper takes over from its planned back end, as it lists them."""
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MIRRORED_BACKEND_ATTRS":
            return sorted(set(ast.literal_eval(node.value)) & set(ATTRIBUTES))
    return []


def text(found: dict[str, Any]) -> str:
    """Return the file: one parameter list per line."""
    lines = [
        "{",
        f'  "version": {json.dumps(found["version"])},',
        f'  "attributes": {json.dumps(found["attributes"])},',
    ]
    rows = [
        f"    {json.dumps(f'{module}.{name}' + (f'.{method}' if method else ''))}: {json.dumps(parameters)}"
        for module, entries in found["signatures"].items()
        for name, methods in entries.items()
        for method, parameters in methods.items()
    ]
    return "\n".join([*lines, '  "signatures": {', ",\n".join(rows), "  }", "}", ""])


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    FOLDER.mkdir(exist_ok=True)
    for wheel in map(Path, sys.argv[1:]):
        made = read(wheel)
        target = FOLDER / f"{made['version']}.json"
        target.write_text(text(made), encoding="utf-8")
        print(f"{target}: {sum(map(len, made['signatures'].values()))} entries")
