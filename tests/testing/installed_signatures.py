"""What installed functions take, read from their sources: importing them needs a CUDA device's libraries."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_select.machine.environment import Environment, Library

Signature = list[tuple[str, str | None]]
"""Each parameter's name and default; a star before the name of one that collects the rest."""


def source_of(library: Library, *path: str) -> ast.Module:
    """Return the source of a module that lies at ``path`` in a library; skip where that is not installed."""
    if not Environment().has(library):
        pytest.skip(f"{library.distribution} is not installed")
    spec = importlib.util.find_spec(library.module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).parent.joinpath(*path).with_suffix(".py").read_text(encoding="utf-8"))


def signature_of(tree: ast.Module, function: str) -> Signature:
    """Return what a function of a module takes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            arguments = node.args
            names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
            defaults = [None] * (len(names) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
            rest = [(f"*{a.arg}", None) for a in (arguments.vararg, arguments.kwarg) if a is not None]
            return [*zip(names, defaults, strict=True), *rest]
    pytest.fail(f"{function} does not exist")


def emulated_signature(function: Callable[..., Any]) -> Signature:
    """Return what a Python function takes."""
    found: Signature = []
    for parameter in inspect.signature(function).parameters.values():
        collects = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        default = None if parameter.default is parameter.empty else repr(parameter.default)
        found.append((f"*{parameter.name}" if collects else parameter.name, default))
    return found
