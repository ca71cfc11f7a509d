"""The text part of a config: the whole of it, or one object inside a multimodal model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_select.errors import ModelError, shorten, show
from attn_select.layer.models.data_files import defaults, family, text_type
from attn_select.layer.models.fields import Fields


def model_type_of(config: Mapping[str, Any], where: str) -> str:
    """Return ``model_type``, empty where there is none."""
    found = config.get("model_type")
    if found is not None and not isinstance(found, str):
        raise ModelError(f"{where}: model_type = {show(found)}: expected a string")
    return found or ""


def first_architecture(config: Mapping[str, Any]) -> str:
    """Return the first of ``architectures``, empty where there is none."""
    match config.get("architectures"):
        case [str(first), *_]:
            return first
    return ""


def text_fields(raw: Mapping[str, Any], where: str) -> tuple[Fields, list[str]]:
    """Return the fields of the text part of a config, and what should be said about the choice."""
    config, wrapper = raw, model_type_of(raw, where)
    kind = wrapper
    for _ in range(3):  # Qwen2.5-Omni: thinker_config, and text_config inside it
        key = next((key for key in defaults()["text_keys"] if config.get(key) is not None), None)
        if key is None:
            break
        if not isinstance(config[key], dict):
            raise ModelError(f"{where}: {key} = {show(config[key])}: expected an object")
        beside = {name: config[name] for name in ("mtp_config",) if name in config}  # Inkling
        config, where = {**beside, **config[key]}, f"{where}: {key}"
        kind = model_type_of(config, where) or text_type(kind) or kind
    else:
        raise ModelError(f"{where}: configs inside configs inside configs")
    if config is raw:
        kind = text_type(kind) or kind
    for name in (wrapper, kind):
        if (why := defaults()["unsupported"].get(name)) is not None:
            raise ModelError(f"{where}: model type {name!r} {why}")
    fields = Fields(config, family(kind), where)
    notes = []
    if towers := [key for key in defaults()["tower_keys"] if raw.get(key)]:
        notes.append(f"only the text model's layers are counted: {', '.join(towers)} is left out")
    if not fields.family.known:
        named = f"model type {shorten(kind)!r} is not known" if kind else "the config has no model_type"
        notes.append(f"{named}: read as a Llama-like decoder by the usual field names")
    return fields, notes


def is_mm_prefix(raw: Mapping[str, Any], fields: Fields) -> bool:
    """Return whether image tokens attend to each other in both directions, as vLLM 0.33.0 decides it."""
    if isinstance(stated := raw.get("is_mm_prefix_lm"), bool):
        return stated
    if fields.raw is not raw and fields.raw.get("use_bidirectional_attention") == "vision":  # Gemma 4
        return True
    return raw.get("model_type") in defaults()["prefix_lm"]
