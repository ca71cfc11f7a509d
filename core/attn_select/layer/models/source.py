"""Where a model's config comes from: a ``config.json``, a folder that holds one, or a cached repository."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from attn_select.errors import ModelError, UnknownNameError, nearest, shorten, show
from attn_select.layer.models import hub_cache
from attn_select.layer.models.presets import find_preset, presets
from attn_select.machine.files import read_bounded

MAX_BYTES = 16 * 1024 * 1024
"""The largest file that is read. Published config files have 500 bytes to 200 KB."""


def find_path(name: str) -> str | None:
    """Return the file that ``name`` means, or None where only a preset can be meant."""
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError) as error:  # ValueError: a null byte or a lone surrogate in the name
        if isinstance(error, FileNotFoundError):
            if not _looks_like_a_path(name):
                return None
            if (cached := hub_cache.find_repository(name)) is not None:
                return cached
            if find_preset(name) is not None:
                return None
            if hub_cache.is_repository(name):
                raise _unknown_repository(name) from None
        raise ModelError(f"{shorten(name)}: {_reason(error)}", hint=_hint(name)) from None
    inside = os.path.join(name, "config.json")
    if stat.S_ISDIR(mode):
        if os.path.exists(inside):
            return inside
        if os.path.basename(os.path.abspath(name)).startswith(hub_cache.PREFIX):
            return hub_cache.config_in(name)
        if _looks_like_a_path(name):
            raise ModelError(f"{shorten(name)}: this folder holds no config.json", hint=_hint(name))
        return None
    return name if _looks_like_a_path(name) else None


def _unknown_repository(name: str) -> ModelError:
    """Return the error for ``org/name`` that is nowhere: it says how to get its config.json."""
    text = f"{shorten(name)}: no such file or folder, no preset and no cached repository has this name"
    where = shorten(hub_cache.cache_folder(), 200)
    got = f"`hf download {name} config.json` puts it into {where}, where it is found by this name"
    return ModelError(text, hint=f"{got} (nothing is downloaded here), or give the path of a config.json{_like(name)}")


def _looks_like_a_path(name: str) -> bool:
    return "/" in name or os.sep in name or name.casefold().endswith(".json")


def _hint(name: str) -> str:
    cache = f"repositories in {shorten(hub_cache.cache_folder(), 200)} are found by name, nothing is downloaded"
    return f"give the path of a config.json or of its folder ({cache}){_like(name)}"


def _like(name: str) -> str:
    near = nearest(name.rstrip("/").rpartition("/")[2], presets())
    return f"; presets like it: {', '.join(near)}" if near else ""


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    return getattr(error, "strerror", None) or shorten(error)


def unknown(name: str) -> UnknownNameError | ModelError:
    """Return the error for a name that is no preset, and no path or a folder without a config.json."""
    if os.path.isdir(name):
        return ModelError(
            f"{shorten(name)}: this folder holds no config.json, and no preset has its name", hint=_hint(name)
        )
    names = [*presets()]
    near = nearest(name, names)
    listing = f"did you mean {' or '.join(near)}?" if near else f"valid: {', '.join(names)}"
    return UnknownNameError("model", name, names, hint=f"{listing} (or the path of a config.json)")


def read_config(path: str) -> dict[str, Any]:
    """Return a ``config.json``, with the ``hf_quant_config.json`` beside it as its ``quantization_config``.

    ModelOpt 0.29 and before wrote the latter; it counts where the config has none (vLLM 0.33.0
    transformers_utils/config.py, ``get_config``).
    """
    found = read_json(path)
    beside = os.path.join(os.path.dirname(path), "hf_quant_config.json")
    if found.get("quantization_config") is None and os.path.isfile(beside):
        found["quantization_config"] = read_json(beside)
    return found


def read_json(path: str) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Nothing in it is executed. NaN and Infinity, which published files contain, pass; they are refused where a number
    is wanted.
    """
    where = shorten(path, 200)
    try:
        data = read_bounded(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: {_reason(error)}") from None
    if not data.strip():
        raise ModelError(f"{where}: the file is empty")
    if b"\0" in data[:4]:
        raise ModelError(f"{where}: not UTF-8 (looks like UTF-16 or UTF-32)", hint="save it as UTF-8")
    try:
        # utf-8-sig: Windows editors put a byte order mark in front, which changes nothing.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{where}: not UTF-8 ({shorten(error, 120)})", hint="save it as UTF-8") from None
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ModelError(f"{where}: nested too deeply to be a model's config") from None
    except ModelError as error:
        raise ModelError(f"{where}: {error.message}") from None
    except ValueError as error:  # JSONDecodeError, and integers of more than 4,300 digits
        raise ModelError(f"{where}: not JSON: {shorten(error, 120)}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{where}: expected a JSON object, got {show(found)}")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ModelError(f"key {show(repeated)} appears twice in one object")
    return found
