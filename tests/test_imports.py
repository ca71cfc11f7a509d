"""Selecting a backend imports neither torch nor a kernel library, as fresh interpreters show.

Which package imports which is import-linter's to hold: its contracts stand in pyproject.toml.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TENSORS = ("runtime", "reference", "testing")
"""The rooms of core that import torch."""
CORE = ROOT / "core" / "attn_select"
CLI = ROOT / "cli" / "attn_select_cli"
PLUGINS = {package.name: package for package in sorted(ROOT.glob("plugins/*/attn_select_*"))}

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


def test_core_is_light() -> None:
    """All modules in one interpreter."""
    files = [file for file in sorted(CORE.rglob("*.py")) if file.relative_to(CORE).parts[0] not in TENSORS]
    found = loaded("\n".join(f"import {module_name(CORE, file)}" for file in files))
    assert "attn_select" in found
    assert found <= LIGHT


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugin_registers_without_its_library(plugin: str) -> None:
    found = loaded(f"from {plugin} import plugin\nassert plugin.attn_select_register_backends()")
    assert plugin in found
    assert found <= LIGHT | {plugin}


def test_the_command_line_is_light() -> None:
    names = {module_name(CLI, file) for file in CLI.rglob("*.py")}
    # What `run` and `warm` import, and what prints on a terminal.
    apart = {f"{CLI.name}.{name}" for name in ("serving", "terminal", "warming")}
    assert names > apart
    light = "\n".join(f"import {name}" for name in sorted(names - apart))
    assert loaded(light) <= LIGHT | {CLI.name, "click"}


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
