"""The presets: published configs of well-known models, as far as attention goes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_select.layer.models.data_files import load


@dataclass(slots=True)
class Preset:
    """One preset."""

    name: str
    description: str
    source: str  # where its values were looked up
    config: dict[str, Any]  # as in ``config.json``
    # others that lead to it: repositories of the Hugging Face Hub whose attention is the same, short forms
    names: Sequence[str] = ()


@functools.cache
def presets() -> dict[str, Preset]:
    """Return every preset by name, in the data file's order."""
    return {row["name"]: Preset(**row) for row in load("presets.json")["presets"]}


@functools.cache
def _by_every_name() -> dict[str, Preset]:
    return {_folded(other): preset for preset in presets().values() for other in preset.names} | presets()


def _folded(name: str) -> str:
    return name.strip().casefold().replace("_", "-").replace(" ", "-")


def find_preset(name: str) -> Preset | None:
    """Return the preset that ``name`` means in any case, with spaces or underscores for hyphens, or None."""
    return _by_every_name().get(_folded(name))
