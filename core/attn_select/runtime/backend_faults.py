"""What is wrong with a backend's own code, named with the backend and the distribution that brings it.

Classes are compared with the protocol once, when a backend is loaded. What they raise or return later is looked at
where it is too late for anything else, so that a step pays nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NoReturn

import torch

from attn_select.backends.spec import BackendSpec
from attn_select.errors import AttnSelectError, BackendError, PluginError, shorten, show
from attn_select.machine import variables


def load_backend(spec: BackendSpec, base: type, **parts: tuple[type, ...]) -> Any:
    """Return the class that a spec's ``load`` names, made ready; ``parts`` are its attributes that are classes."""
    # Each part inherits from one of the classes given. Raises as ``BackendSpec.get_class`` does, and PluginError where
    # the class is not what the runtime calls: another base class, a missing part or method, another signature.
    found = spec.get_class()
    if problem := _problem(found, base, tuple(parts.items())):
        raise PluginError(spec.bug(problem))
    return found


@cache
def _problem(backend: Any, base: type, parts: tuple[tuple[str, tuple[type, ...]], ...]) -> str | None:
    if not (isinstance(backend, type) and issubclass(backend, base)):
        return f"load names {show(backend)} (accepted: a subclass of {_path(base)})"
    for name, bases in parts:
        part: Any = getattr(backend, name, None)
        own = [each for each in bases if isinstance(part, type) and issubclass(part, each)]
        if not own:
            accepted = " or ".join(map(_path, bases))
            return f"{backend.__name__}.{name} = {show(part)} (accepted: a subclass of {accepted})"
        if missing := sorted(getattr(part, "__abstractmethods__", ())):
            return f"{part.__name__} has no {' and no '.join(missing)}"
        for problem in _signature_problems(part, own[0]):
            return problem
    return None


def _signature_problems(part: type, base: type) -> Iterator[str]:
    """Yield a problem for each method that cannot be called as the base's is, with all that it takes."""
    # A private method is the plugin's own matter, but ``__init__`` is called by the runtime. ``bind`` compares names
    # and places alone, so that names serve as values.
    for name, method in vars(base).items():
        own = getattr(part, name)
        if not inspect.isfunction(method) or own is method or (name.startswith("_") and name != "__init__"):
            continue
        passed = inspect.signature(method).parameters.values()
        by_name = {each.name: None for each in passed if each.kind is each.KEYWORD_ONLY}
        by_place = [each.name for each in passed if each.kind is each.POSITIONAL_OR_KEYWORD]
        try:
            inspect.signature(own).bind(*by_place, **by_name)
        except TypeError as error:
            given = ", ".join([*by_place[1:], *(f"{each}=…" for each in by_name)])
            yield f"{part.__name__}.{name}() is called with ({given}), and: {error}"
        except ValueError:  # no signature: written in C
            continue


def _path(base: type) -> str:
    return f"{base.__module__}.{base.__name__}"


def blame(spec: BackendSpec, call: str, error: Exception) -> None:
    """Raise BackendError for what a backend raised; return for what is documented: errors of ours, and of memory."""
    if isinstance(error, (AttnSelectError, ImportError, MemoryError, torch.OutOfMemoryError)):
        return
    raise BackendError(
        f"backend {spec.owner}: {call} raised {type(error).__name__}: {shorten(error, 300)}",
        hint=f"with {variables.CHECK}=1 arguments are checked first: if they are right, this is a bug of that plugin",
    ) from error


def call(spec: BackendSpec, name: str, wanted: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a backend's method returns; BackendError where it raises, PluginError where it returns None."""
    # ``wanted`` is what it is to return; empty: None may be.
    try:
        found = method(*arguments)
    except Exception as error:
        blame(spec, name, error)
        raise
    return returned_nothing(spec, name, wanted) if found is None and wanted else found


def returned_nothing(spec: BackendSpec, call: str, wanted: str) -> NoReturn:
    """Raise PluginError for a call that returned None instead of ``wanted``."""
    raise PluginError(spec.bug(f"{call} returned None (accepted: {wanted})"))
