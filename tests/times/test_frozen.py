"""What this package hands out is kept and shared, so nobody can change it."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import pytest

from attn_select import times

MODULES = [
    importlib.import_module(f"{times.__name__}.{module.name}") for module in pkgutil.iter_modules(times.__path__)
]
BUILT_UP = {"Region", "Table", "Tuning"}
"""What is made step by step, and not kept."""
HANDED_OUT = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type)
    and is_dataclass(kind)
    and kind.__module__ == module.__name__
    and kind.__name__ not in BUILT_UP
]


@pytest.mark.parametrize("kind", HANDED_OUT, ids=lambda kind: kind.__name__)
def test_values_are_frozen(kind: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(object.__new__(kind), fields(kind)[0].name, None)
