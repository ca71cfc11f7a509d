"""This project's plugins: which distribution brings each backend, and how to install it."""

from __future__ import annotations

import functools
import os
import tomllib
from pathlib import Path

NOT_ON_AN_INDEX = (
    "attn-select and its plugins are on no package index yet. `make dist` in a clone of the repository builds their "
    "wheels into its folder dist; with PIP_FIND_LINKS=/path/to/dist in the environment, `pip install` finds them there."
)
NEEDS_GPU = "needs a GPU machine"
"""What is added to the install command of a kernel library that is of no use without a GPU."""


_OF_STATES = "distributions_of_states"


@functools.cache
def _tables() -> dict[str, dict[str, list[str]]]:
    """Return the tables of distributions in the packaged rules. The rules below them are not parsed here."""
    text = (Path(__file__).parent.parent / "selector_rules.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text.partition("\n[[")[0])
    return {name: found[name] for name in ("distributions", _OF_STATES)}


@functools.cache
def known_backends() -> dict[str, str]:
    """Return the backends that are known by name, also where their plugin is not installed, with its distribution."""
    return {
        backend: distribution
        for table in _tables().values()
        for distribution, backends in table.items()
        for backend in backends
    }


def registered_name(written: str) -> str:
    """Return a backend's name as backends are registered, of one in any case and with hyphens for underscores."""
    return written.strip().upper().replace("-", "_")


def is_of_states(backend: str) -> bool:
    """Whether a backend that is known by name is for layers that keep a state, and not for attention."""
    return any(backend in backends for backends in _tables()[_OF_STATES].values())


def install_command(distribution: str) -> str:
    """Return the command that installs a plugin of this project: by its folder in a clone, elsewhere by its name."""
    import shlex  # only needed where a plugin is missing

    folder = folder_in_clone(distribution)
    return f"pip install {distribution if folder is None else shlex.quote(folder)}"


def folder_in_clone(distribution: str) -> str | None:
    """Return the folder of a distribution in the clone that this package runs from, None where there is no clone."""
    clone, name = Path(__file__).resolve().parents[3], distribution.removeprefix("attn-select-").replace("-", "_")
    folder = next((f for f in (clone / "plugins" / name, clone / name) if (f / "pyproject.toml").is_file()), None)
    if folder is None:
        return None
    return f"./{folder.relative_to(clone)}" if os.path.realpath(os.curdir) == str(clone) else str(folder)
