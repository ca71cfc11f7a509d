"""The local cache of the Hugging Face Hub: where a repository's ``config.json`` lies. Nothing is downloaded.

The folders are huggingface_hub's ("Understand caching" in its documentation; ``constants.py``):
``models--ORG--NAME/refs/REVISION`` holds a commit, ``models--ORG--NAME/snapshots/COMMIT/`` the files.
"""

from __future__ import annotations

import os
import re

from attn_select.errors import ModelError, shorten

PREFIX = "models--"
_REPOSITORY = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


def cache_folder() -> str:
    """Return the folder that huggingface_hub caches repositories in.

    ``HF_HUB_CACHE`` (or its older name ``HUGGINGFACE_HUB_CACHE``), else ``hub`` in ``HF_HOME``, else in
    ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if found := os.environ.get(variable):
            return _expanded(found)
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface")
    return os.path.join(_expanded(home), "hub")


def is_repository(name: str) -> bool:
    """Whether ``name`` is written as the Hub writes a repository: ``org/name``."""
    return "/" in name and _may_be_cached(name) and not name.casefold().endswith(".json") and name[0] != "."


def _may_be_cached(name: str) -> bool:
    return _REPOSITORY.fullmatch(name) is not None and "--" not in name


def find_repository(name: str) -> str | None:
    """Return the cached ``config.json`` of the repository ``org/name`` (or ``name`` alone), or None."""
    if not _may_be_cached(name):
        return None
    folder = os.path.join(cache_folder(), PREFIX + name.replace("/", "--"))
    return config_in(folder) if os.path.isdir(folder) else None


def config_in(folder: str) -> str:
    """Return the ``config.json`` in a repository's cache folder: of ``main``, else of the only snapshot."""
    where = shorten(folder, 200)
    snapshots = os.path.join(folder, "snapshots")
    try:
        with open(os.path.join(folder, "refs", "main"), encoding="utf-8") as file:
            main = os.path.join(snapshots, file.read(100).strip(), "config.json")
    except (OSError, ValueError):
        main = ""
    if main and os.path.isfile(main):
        return main
    revisions = sorted(os.listdir(snapshots)) if os.path.isdir(snapshots) else []
    files = [path for r in revisions if os.path.isfile(path := os.path.join(snapshots, r, "config.json"))]
    if not files:
        name = os.path.basename(folder).removeprefix(PREFIX).replace("--", "/")
        raise ModelError(
            f"{where}: this cached repository holds no config.json", hint=f"download it: hf download {name} config.json"
        )
    if len(files) > 1:
        folders = ", ".join(os.path.dirname(file) for file in files)
        raise ModelError(
            f"{where}: several revisions are cached and none of them is main", hint=f"give the path of one: {folders}"
        )
    return files[0]


def _expanded(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))
