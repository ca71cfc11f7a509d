"""Reads a golden file of ``attn-select diff``: what ``attn-select explain --json`` wrote earlier."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attn_select.errors import ConfigError, shorten, show
from attn_select.machine.files import read_bounded

_EXPECTED = {
    "missing": "missing",
    "model_type": "expected an object",
    "dict_type": "expected an object",
    "list_type": "expected a list",
    "too_short": "expected at least one layer",
    "string_type": "expected a string",
    "int_type": "expected an integer",
    "bool_type": "expected true or false",
    "literal_error": "expected 1",
}
"""What pydantic's kinds of errors mean here; others keep pydantic's words."""


class _Part(BaseModel):
    """A part of the document with the keys that ``diff`` reads; others may stand beside them."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _PhasePlan(_Part):
    path: str
    provider: str | None
    query_dtype: str
    returns_lse: bool
    cuda_graph: str
    workspace_bytes: int
    block_table_width_multiple: int


class _Plan(_Part):
    phases: dict[str, _PhasePlan]
    block_size: int | None
    kv_layout: str | None
    cache_shape: list[Any] | None
    cache_dtype: str | None
    bytes_per_token: int | None


class _Reason(_Part):
    message: str


class _Verdict(_Part):
    rank: int | None
    reasons: list[_Reason]


class _Candidate(_Part):
    backend: str
    phases: dict[str, _Verdict]


class _Rule(_Part):
    name: str
    file: str
    line: int


class _Layer(_Part):
    kind: str
    count: int
    selected: dict[str, str | None]
    plan: _Plan
    candidates: list[_Candidate]
    rules: list[_Rule]

    @model_validator(mode="after")
    def _plans_of_the_selected(self) -> _Layer:
        for phase, name in self.selected.items():
            if name is not None and phase not in self.plan.phases:
                raise ValueError(f"selected.{phase} is {show(name)}, and plan.phases has no {show(phase)}")
        return self


class _Golden(_Part):
    schema_version: Literal[1]
    layers: list[_Layer] = Field(min_length=1)


MAX_BYTES = 1 << 24
"""Of a golden file; one of a model with many kinds of layers has 200 KB."""


def read_golden(path: str) -> dict[str, Any]:
    """Return the document in ``path``."""
    try:
        document = json.loads(read_bounded(path, MAX_BYTES).decode("utf-8"))
        _Golden.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        expected = _EXPECTED.get(first["type"], first["msg"].removeprefix("Value error, "))
        problem = f"{_field(first['loc'])}: {expected}"
        if first["type"] not in ("missing", "value_error"):
            problem += f", got {show(first['input'])}"
        raise _refused(path, problem) from None
    except OSError as error:
        raise _refused(path, error.strerror or shorten(error)) from None
    except RecursionError:
        raise _refused(path, "nested too deeply") from None
    except UnicodeDecodeError:
        raise _refused(path, "not UTF-8: save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise _refused(path, f"not JSON: {shorten(error)}") from None
    except ValueError as error:  # too large, no regular file, a null byte in the path
        raise _refused(path, shorten(error)) from None
    return dict(document)


def _field(place: tuple[int | str, ...]) -> str:
    """Return ``layers[0].plan.phases`` for its parts."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{shorten(part)}" for part in place)
    return text.removeprefix(".") or "the document"


def _refused(path: str, problem: str) -> ConfigError:
    return ConfigError(
        f"golden = {show(path, 1000)}: {problem}",
        fields=["golden"],
        hint="a golden file is what `attn-select explain --json` writes for one model on one GPU",
    )
