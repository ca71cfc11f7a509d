"""The presets: published configs of well-known models, as far as attention goes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from attn_select.layer.models.data_files import load


@dataclass(slots=True)
class Preset:
    """One preset."""

    name: str
    # others that lead to it: repositories of the Hugging Face Hub whose attention is the same, short forms
    names: tuple[str, ...]
    description: str
    source: str  # where its values were looked up


@functools.cache
def preset_rows() -> dict[str, dict[str, Any]]:
    """Return the data file's rows by name: ``names``, ``description``, ``source``, and ``config`` as in config.json."""
    return {row["name"]: row for row in load("presets.json")["presets"]}


@functools.cache
def _by_every_name() -> dict[str, dict[str, Any]]:
    rows = preset_rows()
    return {_folded(other): row for row in rows.values() for other in row.get("names", ())} | rows


def _folded(name: str) -> str:
    return name.strip().casefold().replace("_", "-").replace(" ", "-")


def find_preset(name: str) -> dict[str, Any] | None:
    """Return the row that ``name`` means in any case, with spaces or underscores for hyphens, or None."""
    return _by_every_name().get(_folded(name))


def presets() -> dict[str, Preset]:
    """Return every preset by name, in the data file's order."""
    return {
        name: Preset(name, tuple(row.get("names", ())), row["description"], row["source"])
        for name, row in preset_rows().items()
    }
