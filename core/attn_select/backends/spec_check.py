"""Checks what a plugin registered, so that no later step meets a spec of the wrong shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from attn_select.backends.spec import (
    BackendOptions,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Library,
    StateCapabilities,
)
from attn_select.errors import shorten, show
from attn_select.layer import dtypes
from attn_select.layer.config import ATTENTION_TYPES, PHASES
from attn_select.layer.state import RECURRENCES

_VERSIONS = r"(?:\s*(?:~=|===?|!=|<=?|>=?)\s*[A-Za-z0-9.!+*_-]+\s*(?:,(?!$)|$))*"


def problems_of(spec: object) -> list[str]:
    """Return all that keeps ``spec`` from being a usable ``BackendSpec``: what was seen and what is accepted."""
    if not isinstance(spec, BackendSpec):
        return [f"registered {show(spec)} (accepted: BackendSpec)"]
    problems = [*_spec_problems(spec)]
    return [f"backend {show(spec.name)}: {problem}" for problem in problems]


def _spec_problems(spec: BackendSpec) -> Iterator[str]:
    if not isinstance(spec.name, str) or not re.fullmatch(r"[A-Z][A-Z0-9_]{0,63}", spec.name):
        yield "name (accepted: A-Z, 0-9 and _, starting with a letter)"
    if not isinstance(spec.summary, str):
        yield f"summary = {show(spec.summary)} (accepted: a string)"
    if not isinstance(spec.capabilities, Mapping) or not spec.capabilities:
        yield f"capabilities = {show(spec.capabilities)} (accepted: a mapping of phase to Capabilities)"
    else:
        for phase, capabilities in spec.capabilities.items():
            if phase not in PHASES:
                yield f"phase {show(phase)} (accepted: {', '.join(PHASES)})"
            elif not isinstance(capabilities, (Capabilities, StateCapabilities)):
                yield f"capabilities[{phase!r}] = {show(capabilities)} (accepted: Capabilities, StateCapabilities)"
            else:
                yield from (f"capabilities[{phase!r}].{problem}" for problem in _fact_problems(capabilities))
    if not isinstance(spec.load, str) or not re.fullmatch(r"\w+(\.\w+)*:\w+", spec.load):
        yield f"load = {show(spec.load)} (accepted: the import path of the runtime, MODULE:CLASS)"
    for attribute in ("plan", "compile_key"):
        if not callable(getattr(spec, attribute)):
            yield f"{attribute} = {show(getattr(spec, attribute))} (accepted: a callable)"
    if spec.rank is not None and not _is_rank(spec.rank):
        accepted = '("before", NAME), ("after", NAME) or None'
        yield f"rank = {show(spec.rank)} (accepted: {accepted})"
    if not isinstance(spec.variables, tuple) or not all(isinstance(name, str) and name for name in spec.variables):
        yield f"variables = {show(spec.variables)} (accepted: a tuple of names of environment variables)"
    yield from _library_problems(spec.libraries)
    if not (isinstance(spec.options, type) and issubclass(spec.options, BackendOptions)):
        yield f"options = {show(spec.options)} (accepted: a subclass of BackendOptions)"
    elif required := [name for name, item in spec.options.model_fields.items() if item.is_required()]:
        yield f"options without a default: {', '.join(required)} (accepted: a default for every option)"


def _names(valid: tuple[str, ...], least: int = 0) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and len(value) >= least and all(name in valid for name in value)


def _is_rank(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and value[0] in ("before", "after")
        and isinstance(value[1], str)
        and value[1] != ""
    )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_FACTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "compute_capabilities": (lambda value: isinstance(value, ComputeCapabilities), "ComputeCapabilities"),
    "head_sizes": (lambda value: isinstance(value, HeadSizes), "HeadSizes"),
    "v_head_sizes": (lambda value: isinstance(value, HeadSizes), "HeadSizes"),
    "recurrences": (_names(RECURRENCES, 1), f"a tuple of {', '.join(RECURRENCES)}"),
    "state_dtypes": (_names(dtypes.DTYPES, 1), f"a tuple of {', '.join(dtypes.DTYPES)}"),
    "dtypes": (_names(dtypes.DTYPES, 1), f"a tuple of {', '.join(dtypes.DTYPES)}"),
    "kv_cache_dtypes": (_names(dtypes.KV_CACHE_DTYPES), f"a tuple of {', '.join(dtypes.KV_CACHE_DTYPES)}"),
    "quantized_kv_cache_on": (lambda value: isinstance(value, ComputeCapabilities), "ComputeCapabilities"),
    "block_sizes": (
        lambda value: isinstance(value, tuple) and all(_is_count(size, 1) for size in value),
        "a tuple of integers from 1",
    ),
    "attn_types": (_names(ATTENTION_TYPES, 1), f"a tuple of {', '.join(ATTENTION_TYPES)}"),
    "output_quantizations": (
        _names(dtypes.OUTPUT_QUANTIZATIONS),
        f"a tuple of {', '.join(dtypes.OUTPUT_QUANTIZATIONS)}",
    ),
    "speculative_tokens": (_is_count, "an integer from 0"),
}


def _fact_problems(capabilities: Capabilities | StateCapabilities) -> Iterator[str]:
    for item in fields(capabilities):
        fact = getattr(capabilities, item.name)
        if item.name in ("mla", "sparse", "reads_cache"):
            if not isinstance(fact, bool):
                yield f"{item.name} = {show(fact)} (accepted: a bool)"
            continue
        accepts, accepted = _FACTS.get(item.name, (_is_bool, "a bool"))
        if not isinstance(fact, Fact) or not isinstance(fact.source, str):
            yield f"{item.name} = {show(fact)} (accepted: a Fact with its source)"
        elif not fact.source.strip():
            yield f"{item.name} has no source (accepted: the paper, file or machine that says so)"
        elif not accepts(fact.value):
            yield f"{item.name} = {show(fact.value)} (accepted: {accepted})"
        elif item.name == "block_sizes" and getattr(capabilities, "reads_cache", True) and not fact.value:
            yield "block_sizes = () (accepted: at least one, unless reads_cache is False)"
        elif item.name in ("compute_capabilities", "quantized_kv_cache_on", "head_sizes", "v_head_sizes"):
            try:  # ranges and sizes of the wrong shape show when they are asked
                str(fact.value)
                fact.value.accepts(128 if item.name.endswith("head_sizes") else (9, 0))
            except (TypeError, ValueError, ZeroDivisionError) as error:
                yield f"{item.name} = {show(fact.value)}: {shorten(error)}"


def _library_problems(groups: object) -> Iterator[str]:
    wrong = "(accepted: a list of lists of Library, none of them empty)"
    if not isinstance(groups, (list, tuple)):
        yield f"libraries = {show(groups)} {wrong}"
        return
    for group in groups:
        if not isinstance(group, (list, tuple)) or not group:
            yield f"libraries has {show(group)} {wrong}"
            continue
        for library in group:
            if not isinstance(library, Library):
                yield f"libraries has {show(library)} {wrong}"
                continue
            texts = (library.distribution, library.module, library.install, library.version)
            if not all(isinstance(text, str) for text in texts) or not library.distribution.strip():
                yield f"{show(library)} (accepted: strings, with a distribution)"
            elif not library.module.isidentifier():
                yield f"module {show(library.module)} of {library.distribution} (accepted: a top-level import name)"
            elif not re.fullmatch(_VERSIONS, library.version):
                yield f"version {show(library.version)} of {library.distribution} (accepted: a PEP 440 range)"
