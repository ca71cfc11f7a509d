"""Builds all distributions once, from a copy of the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attn_select.backends.distributions import known_backends

ROOT = Path(__file__).resolve().parents[2]
SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Python 3.11.4 brought filters, and later releases want one."""
BUILD = """
import pathlib, sys
from hatchling.build import build_sdist, build_wheel
folder, *builders = sys.argv[1:]
for builder in builders:
    print({"sdist": build_sdist, "wheel": build_wheel}[builder](folder))
"""


@dataclass(frozen=True)
class Project:
    """One distribution of this repository: where it lies, and what it should hold."""

    folder: str
    """Relative to the root."""
    distribution: str
    packages: tuple[str, ...]
    """Package folders, relative to ``folder``."""
    backends: tuple[str, ...] = ()
    """In alphabetical order."""

    @property
    def normalized(self) -> str:
        """The name as files of the distribution spell it."""
        return self.distribution.replace("-", "_")


CORE = Project(".", "attn-select", ("core/attn_select", "cli/attn_select_cli"))
MEASURE = Project("measure", "attn-select-measure", ("attn_select_measure",))
PLUGINS = tuple(
    Project(
        f"plugins/{file.parent.name}",
        distribution := f"attn-select-{file.parent.name.replace('_', '-')}",
        (f"attn_select_{file.parent.name}",),
        tuple(sorted(name for name, owner in known_backends().items() if owner == distribution)),
    )
    for file in sorted(ROOT.glob("plugins/*/pyproject.toml"))
)
ENGINES = tuple(
    Project(
        f"engines/{file.parent.name}",
        f"attn-select-{file.parent.name.replace('_', '-')}",
        (f"attn_select_{file.parent.name}",),
    )
    for file in sorted(ROOT.glob("engines/*/pyproject.toml"))
)
PROJECTS = (CORE, MEASURE, *PLUGINS, *ENGINES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, projects in (("project", PROJECTS), ("plugin", PLUGINS), ("engine", ENGINES)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, projects, ids=[project.distribution for project in projects])


@dataclass(frozen=True)
class Built:
    """The archives of one project, read: file name (without the sdist's own folder) → content."""

    wheel: dict[str, bytes]
    sdist: dict[str, bytes]
    wheel_from_sdist: dict[str, bytes]
    sdist_links: tuple[str, ...]
    """Names of symbolic links in the sdist."""


@dataclass(frozen=True)
class Dist:
    """``make dist`` in a temporary folder."""

    folder: Path
    """Holds a wheel and an sdist of each project."""
    built: dict[Project, Built]


@pytest.fixture(scope="session")
def tree(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone holds, so that builds leave nothing in the checkout."""
    copy = tmp_path_factory.mktemp("clone") / "attn-select"
    copy.mkdir()
    for name in (".gitignore", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "selector_rules.toml"):
        shutil.copy2(root / name, copy / name)
    for name in ("cli", "core", "docs", "engines", "examples", "measure", "plugins"):
        ignored = shutil.ignore_patterns("__pycache__", "build", "dist", ".*_cache", ".hypothesis")
        shutil.copytree(root / name, copy / name, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="session")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Dist:
    """All projects, built: the sdist and a wheel from the tree, and a second wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    built = {}
    for project in PROJECTS:
        sdist, wheel = build(tree / project.folder, folder, "sdist", "wheel")
        unpacked = tmp_path_factory.mktemp("unpacked")
        with tarfile.open(folder / sdist) as archive:
            archive.extractall(unpacked, **SAFELY)
        (top,) = unpacked.iterdir()
        again = tmp_path_factory.mktemp("again")
        (second,) = build(top, again, "wheel")
        assert second == wheel
        built[project] = Built(
            wheel=read_wheel(folder / wheel),
            sdist={str(file.relative_to(top)): file.read_bytes() for file in top.rglob("*") if file.is_file()},
            wheel_from_sdist=read_wheel(again / second),
            sdist_links=tuple(str(file.relative_to(top)) for file in top.rglob("*") if file.is_symlink()),
        )
    return Dist(folder, built)


def build(source: Path, target: Path, *builders: str) -> list[str]:
    """Build ``sdist`` or ``wheel`` of ``source`` as a PEP 517 front end would; return the file names."""
    command = [sys.executable, "-c", BUILD, str(target), *builders]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True)
    if result.returncode:
        pytest.fail(f"building {source} failed\n{result.stdout}\n{result.stderr}")
    return result.stdout.split()


def read_wheel(path: Path) -> dict[str, bytes]:
    """Return file name → content."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
