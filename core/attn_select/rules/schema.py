"""A JSON Schema of rules files, for editors that complete and check TOML (Taplo and others)."""

from __future__ import annotations

from typing import Any

from attn_select.backends.registry import Registry
from attn_select.layer.config import PHASES
from attn_select.rules import conditions
from attn_select.rules.document import VERSION
from attn_select.rules.lint import known_names
from attn_select.rules.rule import EFFECTS, Effect

_LISTS: dict[Effect, str] = {
    "priority": "leads the order; the first matching priority rule wins, last file first",
    "prefer": "put in front of the order, inserting missing names",
    "avoid": "moved to the end of the order",
    "deny": "rejected, whatever prefers them",
}


def rules_schema(registry: Registry) -> dict[str, Any]:
    """Return the schema, with the backend names and options of the plugins in ``registry``."""
    known = known_names(registry)
    names = {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"enum": known}}
    properties: dict[str, Any] = {
        "name": _text("unique in the file; a later file's rule of this name replaces it", minLength=1),
        "phase": {"enum": list(PHASES), "description": "leave out for both phases"},
        "when": _when(),
        **{effect: {**names, "description": text} for effect, text in _LISTS.items()},
        "evidence": {
            "const": False,
            "description": "false keeps predicted times out of the choice",
        },
        "only": {"type": "boolean", "description": "true: what the priority does not list is never chosen by itself"},
        "because": _text("shown by `attn-select explain`"),
        "enabled": {"type": "boolean", "description": "false removes the rule of this name from earlier files"},
    }
    rule = {
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": properties,
        "if": {"required": ["enabled"], "properties": {"enabled": {"const": False}}},
        "else": {"oneOf": [{"required": [effect]} for effect in EFFECTS]},
    }
    options: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name, spec in registry.specs.items():
        try:
            options[name] = spec.options.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        except Exception:  # a type of the plugin's that has no JSON Schema: every table passes
            options[name] = {"type": "object"}
        inner = options[name].pop("$defs", {})
        definitions |= {f"{name}.{model}": definition for model, definition in inner.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "attn-select rules",
        "type": "object",
        "required": ["version"],
        "additionalProperties": False,
        "properties": {
            "version": {"const": VERSION},
            "distributions": _distributions("for attention"),
            "distributions_of_states": _distributions("for layers that keep a state"),
            "rules": {"type": "array", "items": rule},
            "backends": {"type": "object", "properties": options, "propertyNames": {"enum": known}},
        },
        "$defs": definitions,
    }


def _distributions(what: str) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": {"type": "array", "items": {"type": "string"}},
        "description": f"which distribution brings each backend {what}; has an effect in the packaged rules only",
    }


def _when() -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for field in conditions.FIELDS:
        if field == "library":
            versions = _one_or_more(_text('a PEP 440 range such as "<0.7"'))
            properties[field] = {"type": "object", "additionalProperties": versions}
        elif conditions.is_boolean(field):
            properties[field] = _one_or_more({"type": "boolean"})
        elif conditions.is_number(field):
            compared = _text('a comparison such as "<=16", or several: ">=64,<=128"')
            properties[field] = _one_or_more({"anyOf": [{"type": "number"}, compared]})
        elif names := conditions.accepted_names(field):
            pattern = {"type": "string", "pattern": r"[*?\[]"}
            properties[field] = _one_or_more({"anyOf": [{"enum": list(names)}, pattern]})
        else:
            properties[field] = _one_or_more({"type": "string"})
    description = "all must match; a list means any of its values"
    return {"type": "object", "additionalProperties": False, "properties": properties, "description": description}


def _text(description: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", **more, "description": description}


def _one_or_more(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "array", "minItems": 1, "items": schema}]}
