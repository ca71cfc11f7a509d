"""The presets: published configs of well-known models, as far as attention goes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from attn_select.layer.models.data_files import load


@dataclass(slots=True)
class Preset:
    """One preset: its name, its model, and the source of its values."""

    name: str
    description: str
    source: str


@functools.cache
def preset_rows() -> dict[str, dict[str, Any]]:
    """Return the data file's rows by name: ``description``, ``source`` and ``config``, as in a config.json."""
    return {row["name"]: row for row in load("presets.json")["presets"]}


def find_preset(name: str) -> dict[str, Any] | None:
    """Return the row that ``name`` means in any case, with spaces or underscores for hyphens, or None."""
    return preset_rows().get(name.strip().casefold().replace("_", "-").replace(" ", "-"))


def presets() -> dict[str, Preset]:
    """Return every preset by name, in the data file's order."""
    return {name: Preset(name, row["description"], row["source"]) for name, row in preset_rows().items()}
