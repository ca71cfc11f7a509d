"""Reads ``[backends.NAME]`` tables through each plugin's own options model."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from attn_select.backends.spec import BackendOptions, BackendSpec
from attn_select.errors import RulesError, UnknownNameError, show
from attn_select.rules.document import Problem, problem_text
from attn_select.rules.layers import RuleSet


def read_options(rules: RuleSet, specs: Mapping[str, BackendSpec]) -> dict[str, BackendOptions]:
    """Return every registered backend's options, defaults where the rules set none."""
    options: dict[str, BackendOptions] = {}
    problems: list[Problem] = []
    for name, spec in specs.items():
        table = rules.options.get(name)
        if table is None:  # the defaults, without building a validator for them
            options[name] = spec.options.model_construct()
            continue
        try:
            options[name] = spec.options(**table.values)
        except ValidationError as error:
            for item in error.errors():
                key = str(item["loc"][0]) if item["loc"] else ""
                text = _message(spec, key, item["type"], item["msg"], item["input"])
                problems.append((*table.origins.get(key, table.origin), f"backends.{name}{text}"))
        except Exception as error:  # a validator of the plugin's that breaks on what a user wrote
            text = f": the plugin's options model raised {type(error).__name__}: {show(error)}"
            problems.append((*table.origin, f"backends.{name}{text}"))
    if problems:
        lines = [*map(problem_text, problems)]
        hint = "`attn-select backends NAME` lists a backend's options"
        raise RulesError("\n  ".join(lines), problems=problems, hint=hint)
    return options


def _message(spec: BackendSpec, key: str, kind: str, text: str, value: object) -> str:
    if kind == "extra_forbidden":
        valid = list(spec.options.model_fields)
        hint = UnknownNameError("option", key, valid).hint if valid else "it has no options"
        return f": unknown option {show(key)}; {hint}"
    text = text.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = f"{text[:1].lower()}{text[1:]}"
    return f".{key} = {show(value)}: {text}" if key else f": {text}"
