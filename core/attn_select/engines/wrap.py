"""Replacing a function of an engine by one that may call it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

_WRAPPED = "_attn_select_wrapped"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, ...)``; a second time changes nothing."""
    # Raises AttributeError where there is none.
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return
    of_class = inspect.ismethod(original)  # bound to the class: without it the class is an argument like any other
    function = original.__func__ if of_class else original

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return around(function, *arguments, **options)

    setattr(wrapper, _WRAPPED, True)
    setattr(owner, name, classmethod(wrapper) if of_class else wrapper)
