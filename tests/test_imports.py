"""Imports run one way, and selecting a backend imports neither torch nor a kernel library.

Seen in fresh interpreters, then read from the sources, where a branch that no test takes shows as well.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TENSORS = ("runtime", "reference", "testing")
"""The rooms of core that import torch."""
CORE = ROOT / "core" / "attn_select"
CLI = ROOT / "cli" / "attn_select_cli"
PLUGINS = {package.name: package for package in sorted(ROOT.glob("plugins/*/attn_select_*"))}
ENGINES = {package.name: package for package in sorted(ROOT.glob("engines/*/attn_select_*"))}

# What selection may load beside the standard library and the project itself. A list of what is allowed, not of what is
# forbidden, so that a kernel library nobody thought of is found as well.
LIGHT = {
    "annotated_types",
    "attn_select",
    "packaging",
    "platformdirs",
    "pluggy",
    "pydantic",
    "pydantic_core",
    "typing_extensions",
    "typing_inspection",
}

# What one file of core imports in a function: a CPU's AMX is tried by torch.
OF_EXTRAS = {CORE / "machine" / "amx.py": {"torch"}}

PROBE = """
import json, sys
before = set(sys.modules)
{statements}
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""


def loaded(statements: str) -> set[str]:
    """Run ``statements`` in a fresh interpreter; return the top-level names of the modules they loaded, the standard
    library's left out."""
    command = [sys.executable, "-c", PROBE.format(statements=statements)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    names = set(json.loads(result.stdout.splitlines()[-1])) - sys.stdlib_module_names
    return {name for name in names if not name.startswith("_sysconfigdata_")}  # the interpreter's own, unlisted


def module_name(package: Path, file: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def core_files(tensors: bool) -> list[Path]:
    """The files of core, with or without the rooms that work on tensors."""
    files = sorted(CORE.rglob("*.py"))
    return [file for file in files if tensors or file.relative_to(CORE).parts[0] not in TENSORS]


def imports(tree: ast.AST, package: str, top_level: bool) -> Iterator[str]:
    """Yield the absolute dotted names that a module imports.

    With ``top_level`` only what runs when the module is imported, so no function bodies. ``if TYPE_CHECKING`` never
    counts. ``package`` is the package that relative imports start from.
    """
    for node in ast.iter_child_nodes(tree):
        if top_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield from imports(ast.Module([branch], []), package, top_level)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            prefix = ".".join(filter(None, [base if node.level else "", node.module]))
            yield prefix
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant))
        yield from imports(node, package, top_level)


def read_imports(package: Path, file: Path, top_level: bool) -> set[str]:
    name = module_name(package, file)
    here = name if file.name == "__init__.py" else name.rpartition(".")[0]
    return set(imports(ast.parse(file.read_text(encoding="utf-8")), here, top_level))


def top_names(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_core_is_light() -> None:
    """All modules in one interpreter; ``test_core_knows_no_kernel_library`` names the one that is not."""
    found = loaded("\n".join(f"import {module_name(CORE, file)}" for file in core_files(tensors=False)))
    assert "attn_select" in found
    assert found <= LIGHT


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugin_registers_without_its_library(plugin: str) -> None:
    found = loaded(f"from {plugin} import plugin\nassert plugin.attn_select_register_backends()")
    assert plugin in found
    assert found <= LIGHT | {plugin}


def test_the_command_line_is_light() -> None:
    names = {module_name(CLI, file) for file in CLI.rglob("*.py")}
    apart = {
        f"{CLI.name}.{name}" for name in ("serving", "warming", "rules_file")
    }  # what `run` and `rules prefer` import
    assert names > apart
    light = "\n".join(f"import {name}" for name in sorted(names - apart))
    assert loaded(light) <= LIGHT | {CLI.name, "click"}
    assert loaded(f"import {CLI.name}.rules_file") <= LIGHT | {CLI.name, "click", "tomlkit"}


def test_explain_is_light() -> None:
    """Whole decisions, through a pipe: every plugin's facts, and nobody's library."""
    calls = [f"run(['explain', '--model', 'deepseek-v3', '--gpu', '{gpu}']) == 0" for gpu in ("h100", "b200", "auto")]
    found = loaded(f"from attn_select_cli.main import run\nassert {' and '.join(calls)}")
    assert set(PLUGINS) <= found
    assert found <= LIGHT | {CLI.name, "click", *PLUGINS}


def test_a_gpu_that_is_not_here_needs_no_version_parser() -> None:
    """``packaging`` takes 8 ms to import. No packaged rule is compared with a version that is not known."""
    found = loaded(
        "from attn_select_cli.main import run\nassert run(['explain', '--model', 'llama-3-8b', '--gpu', 'h100']) == 0"
    )
    assert "pydantic" in found
    assert "packaging" not in found


def test_the_oracle_needs_no_pytest() -> None:
    pytest.importorskip("torch")
    light = "import sys, attn_select.testing\nassert not {'pytest', 'attn_select.runtime'} & set(sys.modules)"
    assert {"torch", "pytest"} <= loaded(f"{light}\nfrom attn_select.testing import BackendConformance")


def test_core_imports_nobody_above_it() -> None:
    for file in core_files(tensors=True):
        found = top_names(read_imports(CORE, file, top_level=False))
        assert not found & {"attn_select_cli", "attn_select_measure", "click", "rich", "tomlkit", *PLUGINS, *ENGINES}, (
            file
        )


def test_core_knows_no_kernel_library() -> None:
    allowed = LIGHT | sys.stdlib_module_names
    for file in core_files(tensors=False):
        assert top_names(read_imports(CORE, file, top_level=False)) <= allowed | OF_EXTRAS.get(file, set()), file
        loaded_at_once = read_imports(CORE, file, top_level=True)
        assert top_names(loaded_at_once) <= allowed, file
        assert not [n for n in loaded_at_once if n.startswith(tuple(f"attn_select.{room}" for room in TENSORS))], file


def test_the_command_line_imports_nobody_beside_core() -> None:
    for file in CLI.rglob("*.py"):
        assert not top_names(read_imports(CLI, file, top_level=False)) & {"attn_select_measure", *PLUGINS, *ENGINES}, (
            file
        )


def test_times_and_rules_know_nothing_of_each_other() -> None:
    for room, other in (("times", "rules"), ("rules", "times")):
        for file in (CORE / room).rglob("*.py"):
            found = read_imports(CORE, file, top_level=False)
            assert not [name for name in found if name.startswith(f"attn_select.{other}")], file


@pytest.mark.parametrize("name", [*PLUGINS, *ENGINES])
def test_plugins_and_engines_import_core_alone(name: str) -> None:
    package = (PLUGINS | ENGINES)[name]
    files = sorted(package.rglob("*.py"))
    assert files
    for file in files:
        found = top_names(read_imports(package, file, top_level=False))
        assert not found & ({"attn_select_cli", "attn_select_measure", *PLUGINS, *ENGINES} - {name}), file


@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_a_plugin_loads_at_once_is_light(plugin: str) -> None:
    """Follow the imports that run with ``plugin.py``: none leads to torch or a kernel library."""
    package = PLUGINS[plugin]
    files = {module_name(package, file): file for file in package.rglob("*.py")}
    assert f"{plugin}.plugin" in files
    pending, seen = {plugin, f"{plugin}.plugin"}, set()
    while pending:
        name = pending.pop()
        seen.add(name)
        found = read_imports(package, files[name], top_level=True)
        assert top_names(found) <= LIGHT | {plugin} | sys.stdlib_module_names, name
        assert not [n for n in found if n.startswith(tuple(f"attn_select.{room}" for room in TENSORS))], name
        parents = {name.rsplit(".", depth)[0] for name in found for depth in range(name.count(".") + 1)}
        pending |= (parents & files.keys()) - seen


@pytest.mark.parametrize("plugin", PLUGINS)
def test_facts_kernels_and_runtime_import_one_way(plugin: str) -> None:
    """Kernels import neither facts nor the runtime, and facts import neither kernels nor the runtime."""
    for folder, others in (("kernels", ("facts", "runtime")), ("facts", ("kernels", "runtime"))):
        for file in sorted((PLUGINS[plugin] / folder).glob("*.py")):
            found = read_imports(PLUGINS[plugin], file, top_level=False)
            assert not [n for n in found if n.startswith(tuple(f"{plugin}.{other}" for other in others))], file


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugins_import_what_the_page_lists(plugin: str) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text("utf-8")
    listed = set(re.findall(r"`(attn_select[a-z_.]*)`", page[page.index("## What a plugin may import") :]))
    for file in PLUGINS[plugin].rglob("*.py"):
        found = read_imports(PLUGINS[plugin], file, top_level=False)
        named = {name for name in found if name.split(".")[0] == "attn_select"}
        modules = {name for name in named if (CORE.parent / name.replace(".", "/")).with_suffix(".py").is_file()}
        assert modules <= listed, file


def underscores_of_others(file: Path) -> Iterator[str]:
    """Yield each attribute with an underscore that a file reads of an object whose class stands elsewhere in core."""
    tree = ast.parse(file.read_text("utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not re.match(r"_[a-z]", node.attr) or node.attr in own:
            continue
        if ast.unparse(node.value) not in ("self", "cls", "super()"):
            yield f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_no_underscore_of_one_object_is_read_by_another_file() -> None:
    outside = ("os._exit", "._replace", "._asdict", "_get_backend")  # of the standard library and of torch
    found = [text for file in CORE.rglob("*.py") for text in underscores_of_others(file) if not text.endswith(outside)]
    assert not found


SCRIPTS = ("docs/*.py", "measure/bench/*.py", "tests/bench/*.py", "plugins/*/bench/*.py")


@pytest.mark.parametrize("folder", SCRIPTS)
def test_scripts_that_no_test_runs_import_names_that_exist(folder: str) -> None:
    missing = []
    for file in sorted(ROOT.glob(folder)):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attn_select"):
                module = importlib.import_module(str(node.module))
                modules = {each.name for each in pkgutil.iter_modules(getattr(module, "__path__", []))}
                names = [each.name for each in node.names if not hasattr(module, each.name)]
                missing += [f"{file}:{node.lineno} {node.module}.{name}" for name in names if name not in modules]
    assert not missing
