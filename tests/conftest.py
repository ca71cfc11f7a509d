"""What all tests share: a clean environment, fresh interpreters, and empty virtual environments without a network."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the user's own rules files and settings, so that every machine gets the same answers."""
    home = tmp_path_factory.mktemp("home")
    (home / ".cache").mkdir()  # without it torch warns that it keeps no compiled kernels
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("ATTN_SELECT_")]:
            patch.delenv(name)
        for name in ("CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "NO_COLOR"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
        patch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        patch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        yield


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds nothing but the runtime dependencies of attn-select and hatchling."""

    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def run(self, *command: str | Path, cwd: Path | None = None, code: int = 0) -> str:
        """Run a program of this environment (``python``, ``attn-select``); return its stdout.

        Fails with its stderr where it does not end with ``code``.
        """
        program = self.path / "bin" / command[0]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        result = subprocess.run(
            [program, *command[1:]], cwd=cwd or self.path, env=variables, capture_output=True, text=True
        )
        if result.returncode != code:
            pytest.fail(f"{' '.join(map(str, command))} returned {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result.stdout

    def pip(self, *arguments: str | Path, cwd: Path | None = None) -> None:
        """Run pip on this environment. ``install`` never asks an index."""
        offline = ["--no-index", "--no-build-isolation"] if arguments[0] == "install" else []
        command = [sys.executable, "-m", "pip", "--python", self.python, *arguments, *offline]
        result = subprocess.run(command, cwd=cwd or self.path, capture_output=True, text=True)
        if result.returncode:
            pytest.fail(f"pip {' '.join(map(str, arguments))} failed\n{result.stdout}\n{result.stderr}")


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to the installed runtime dependencies and hatchling, and to nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return linked(tmp_path_factory.mktemp("dependencies"), [*project["dependencies"], "hatchling"])


def linked(folder: Path, requirements: Sequence[str]) -> Path:
    """Fill a folder with links to the installed distributions of these requirements, and of all that they need."""
    for distribution in closure(requirements):
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(Path(str(distribution.locate_file(name))))
    return folder


@pytest.fixture
def make_environment(
    tmp_path: Path, dependencies: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Environment]:
    """Return a function that makes an ``Environment``, with further requirements where it is given some. It takes 0.1
    s, and no network."""
    made = 0

    def make(*requirements: str) -> Environment:
        nonlocal made
        made += 1
        path = tmp_path / f"environment-{made}"
        venv.create(path, symlinks=True, with_pip=False)
        site = path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        folders = [dependencies]
        if requirements:
            folders.append(linked(tmp_path_factory.mktemp("further"), requirements))
        (site / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in folders))
        return Environment(path)

    return make


def closure(requirements: Sequence[str]) -> list[importlib.metadata.Distribution]:
    """Return the installed distributions that ``requirements`` name, and all that those need."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, importlib.metadata.Distribution] = {}
    pending = [Requirement(text) for text in requirements]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[name] = importlib.metadata.distribution(name)
            pending += [Requirement(text) for text in found[name].requires or ()]
    return [*found.values()]
