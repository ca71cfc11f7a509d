"""A JSON Schema of rules files, for editors that complete and check TOML (Taplo and others)."""

from __future__ import annotations

from typing import Any

from attn_select.config import PHASES
from attn_select.registry import Registry
from attn_select.rules import conditions
from attn_select.rules.layers import VERSION
from attn_select.rules.lint import known_names
from attn_select.rules.rule import EFFECTS

_COMPARED = {"type": "string", "description": 'a comparison such as "<=16", or several: ">=64,<=128"'}


def rules_schema(registry: Registry) -> dict[str, Any]:
    """Return the schema, with the backend names and options of the plugins in ``registry``."""
    names = {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"enum": known_names(registry)}}
    rule = {
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "minLength": 1, "description": "unique in the file; a later file's rule of this name replaces it"},
            "phase": {"enum": list(PHASES), "description": "leave out for both phases"},
            "when": _when(),
            **{effect: {**names, "description": text} for effect, text in _EFFECT_TEXTS.items()},
            "because": {"type": "string", "description": "shown by `attn-select explain`"},
            "enabled": {"type": "boolean", "description": "false removes the rule of this name from earlier files"},
        },
    }
    options = {name: spec.options.model_json_schema() for name, spec in registry.specs.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "attn-select rules",
        "type": "object",
        "required": ["version"],
        "additionalProperties": False,
        "properties": {
            "version": {"const": VERSION},
            "rules": {"type": "array", "items": rule},
            "backends": {"type": "object", "properties": options, "propertyNames": {"enum": known_names(registry)}},
        },
    }


_EFFECT_TEXTS = dict(
    zip(
        EFFECTS,
        (
            "the order; the first matching priority rule wins, last file first",
            "put in front of the order, inserting missing names",
            "moved to the end of the order",
            "rejected, whatever prefers them",
        ),
        strict=True,
    )
)


def _when() -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for field in conditions.FIELDS:
        if field == "library":
            versions = _any_of({"type": "string", "description": 'a PEP 440 range such as "<0.6.3"'})
            properties[field] = {"type": "object", "additionalProperties": versions}
        elif conditions.is_boolean(field):
            properties[field] = _any_of({"type": "boolean"})
        elif conditions.is_number(field):
            properties[field] = _any_of({"type": "number"}, _COMPARED)
        elif names := conditions.accepted_names(field):
            properties[field] = _any_of({"enum": list(names)}, {"type": "string", "pattern": r"[*?\[]"})
        else:
            properties[field] = _any_of({"type": "string"})
    return {"type": "object", "additionalProperties": False, "properties": properties, "description": "all must match; a list means any"}


def _any_of(*schemas: dict[str, Any]) -> dict[str, Any]:
    one = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {"anyOf": [one, {"type": "array", "minItems": 1, "items": one}]}
