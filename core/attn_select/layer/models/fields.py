"""Typed access to the fields of a config, with errors that name file, field, value and what is accepted."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from attn_select.errors import ModelError, show
from attn_select.layer.models.data_files import Family, defaults

MAX_LAYERS = 10_000


class Fields:
    """A config: the file's values over the defaults of its family.

    A field that the file sets to null stays null, as in transformers: the default does not come back.
    """

    __slots__ = ("defaulted", "family", "raw", "where")

    def __init__(self, raw: Mapping[str, Any], family: Family, where: str) -> None:
        self.raw = raw
        self.family = family
        self.where = where
        self.defaulted: dict[str, Any] = {}
        """Fields that the file leaves out and that were read, with the default that was taken."""

    def get(self, field: str) -> Any:
        """Return the value of ``field``, or None."""
        return self._find(field)[1]

    def name_of(self, field: str) -> str:
        """Return the name under which the file has ``field``; the field itself where it has none."""
        return self._find(field)[0]

    def _find(self, field: str) -> tuple[str, Any]:
        """Return the name under which ``field`` was found, and its value."""
        null = None
        for name in self.family.names.get(field) or defaults()["names"].get(field, (field,)):
            value = self.raw.get(name, self)  # self: nothing there
            if value is self and "." in name:
                outer, _, inner = name.partition(".")
                inside = self.raw.get(outer)
                value = inside.get(inner, self) if isinstance(inside, dict) else self
            if value is None:
                null = null or name
            elif value is not self:
                return name, value
        if null is not None:
            return null, None
        default = self.family.defaults.get(field)
        if default is not None:
            self.defaulted[field] = default
        return field, default

    def wrong(self, name: str, value: object, accepted: str) -> ModelError:
        """Return the error for a field whose value is not ``accepted``."""
        return ModelError(f"{self.where}: {name} = {show(value)}: expected {accepted}")

    def integer(self, field: str, low: int = 1, high: int = 2**31 - 1) -> int | None:
        """Return an integer from ``low`` to ``high``, or None where there is none."""
        name, value = self._find(field)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, value, f"an integer from {low} to {high}")
        return value

    def size(self, field: str) -> int | None:
        """Return the width of a head (elements); 0 and null are None (some config classes write a missing one as 0)."""
        return self.integer(field, 0, 8192) or None

    def head_size(self, heads: int | None) -> int | None:
        """Return the width of a head: the config's own, else hidden size by heads; None where neither is there."""
        if self.integer("head_dim", 0, 8192) == 0:
            raise self.wrong("head_dim", 0, "an integer from 1 to 8192, or null")
        if (size := self.size("head_dim")) is not None or heads is None:
            return size
        hidden = self.integer("hidden_size")
        if hidden is None or self.family.variant == "zamba":
            return None
        if hidden % heads or hidden // heads > 8192:
            raise ModelError(
                f"{self.where}: hidden_size = {hidden} by num_attention_heads = {heads} is no head size "
                "(an integer from 1 to 8192), and there is no head_dim"
            )
        return hidden // heads

    def heads(self, field: str) -> int | None:
        """Return a number of heads or of layers."""
        return self.integer(field, 1, MAX_LAYERS)

    def tokens(self, field: str) -> int | None:
        """Return a number of tokens; 0 and null are None (vLLM's config/model.py reads a window of 0 so)."""
        return self.integer(field, 0) or None

    def positive(self, field: str) -> float | None:
        """Return a positive number; 0 and null are None."""
        name, value = self._find(field)
        if value is None or value is False:
            return None
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
            raise self.wrong(name, value, "a positive number, or null")
        return float(value) or None

    def flag(self, field: str) -> bool:
        """Return whether ``field`` is true; null is false."""
        name, value = self._find(field)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def list_of(self, kind: type, field: str, what: str) -> list[Any] | None:
        """Return a list of ``kind`` (int or str), or None where there is none."""
        name, value = self._find(field)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(entry) is not kind for entry in value):
            raise self.wrong(name, value, f"a list of {what}")
        return value
