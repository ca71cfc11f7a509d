"""Reads ``[backends.NAME]`` tables through each plugin's own options model."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from attn_select.errors import RulesError, UnknownNameError, shorten
from attn_select.rules.layers import RuleSet
from attn_select.spec import BackendOptions, BackendSpec


def read_options(rules: RuleSet, specs: Mapping[str, BackendSpec]) -> dict[str, BackendOptions]:
    """Return every registered backend's options, defaults where the rules set none.

    Raises:
        RulesError: an unknown key or a value that the model rejects; names file, line, key, value and what is accepted.
    """
    options: dict[str, BackendOptions] = {}
    problems: list[tuple[str, int | None, str]] = []
    for name, spec in specs.items():
        table = rules.options.get(name)
        try:
            options[name] = spec.options(**(table.values if table else {}))
        except ValidationError as error:
            for item in error.errors(include_url=False):
                key = str(item["loc"][0]) if item["loc"] else ""
                file, line = table.origins.get(key, ("", None)) if table else ("", None)
                problems.append((file, line, _message(name, spec, key, item["type"], item["msg"], item["input"])))
    if problems:
        lines = [f"{file}:{line}: {text}" if line else text for file, line, text in problems]
        raise RulesError("\n  ".join(lines), problems=problems, hint="`attn-select backends NAME` lists a backend's options")
    return options


def _message(backend: str, spec: BackendSpec, key: str, kind: str, text: str, value: object) -> str:
    if kind == "extra_forbidden":
        valid = list(spec.options.model_fields)
        hint = UnknownNameError("option", key, valid).hint if valid else "it has no options"
        return f"backends.{backend}: unknown option {shorten(repr(key))}; {hint}"
    return f"backends.{backend}.{key} = {shorten(repr(value))}: {text[:1].lower()}{text[1:]}"
