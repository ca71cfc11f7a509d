"""No package's modules import each other in a circle, so that its files can be read one after the other.

An import inside a function or under ``TYPE_CHECKING`` counts like any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    package.name: package
    for pattern in (
        "core/attn_select",
        "cli/attn_select_cli",
        "measure/attn_select_measure",
        "plugins/*/attn_select_*",
        "engines/*/attn_select_*",
    )
    for package in sorted(ROOT.glob(pattern))
}
Graph = dict[str, set[str]]
"""The modules of a package, each with those that it imports."""


def modules_of(package: Path) -> dict[str, Path]:
    """Return the file of each module of a package by its dotted name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(node: ast.AST, package: str) -> Iterator[str]:
    """Yield what ``node`` imports, as dotted names.

    ``package`` is the package that relative imports start from. A name that is made at run time has ``*`` in the places
    that are not known.
    """
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = package.rsplit(".", child.level - 1)[0] if child.level > 1 else package
            prefix = ".".join(filter(None, [base if child.level else "", child.module]))
            yield from (f"{prefix}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(("import_module", "__import__")):
            yield from (made_name(argument) for argument in child.args[:1])


def made_name(argument: ast.expr) -> str:
    """Return the module name that is passed to ``import_module``, ``*`` for what is only known at run time."""
    if isinstance(argument, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in argument.values)
    return str(argument.value) if isinstance(argument, ast.Constant) else "*"


def graph_of(package: Path) -> Graph:
    """Return what each module of a package imports of the others."""
    modules = modules_of(package)
    graph: Graph = {name: set() for name in modules}
    for name, file in modules.items():
        here = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for found in imported(ast.parse(file.read_text(encoding="utf-8")), here):
            if found.partition(".")[0] != package.name:
                continue
            pattern = re.escape(found).replace(r"\*", r"\w+")
            # "a.b.c" is the module c of a.b, or the name c in the module a.b.
            targets = [m for m in modules if re.fullmatch(pattern, m)] or [found.rpartition(".")[0]]
            if "*" in found and name in targets:
                targets.remove(name)
            graph[name].update(t for t in targets if t in modules)
    return graph


def circle_in(graph: Graph) -> list[str]:
    """Return the modules of one circle, each importing the next and the last the first; empty where there is none."""
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name not in done:
            for target in sorted(graph[name]):
                if circle := follow(target, [*path, name]):
                    return circle
            done.add(name)
        return []

    return next((circle for name in sorted(graph) if (circle := follow(name, []))), [])


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_make_no_circle(package: str) -> None:
    circle = circle_in(graph_of(PACKAGES[package]))
    assert not circle, " imports ".join([*circle, circle[0]])


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"a": "from package import b", "b": "import package.c", "c": ""}, []),
        ({"a": "from package import b", "b": "def f():\n    from package.a import name"}, ["a", "b"]),
        ({"a": "from .b import name", "b": "from . import a"}, ["a", "b"]),
        ({"a": "import importlib\nimportlib.import_module('package.b')", "b": "import package.a"}, ["a", "b"]),
        ({"a": "import importlib\nimportlib.import_module(f'package.{name}')", "b": "import package.a"}, ["a", "b"]),
        ({"a": "if TYPE_CHECKING:\n    import package.b", "b": "import package.a"}, ["a", "b"]),
    ],
)  # fmt: skip
def test_a_circle_is_found(files: dict[str, str], circle: list[str], tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    found = circle_in(graph_of(package))
    assert found == [f"package.{name}" for name in circle]
