"""The data files beside this module: what a ``config.json`` leaves out, by model type."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

UNIFORM = ("uniform",)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Family(NamedTuple):
    """What is known of one ``model_type`` beside its config.json."""

    model_type: str  # the name in ``config.json``, of the text part where there are several
    known: bool = False  # whether it is in the data file; others are read by the field names most models share
    source: str = ""
    # values of the config class, by field name; a field that is not here is None
    defaults: Mapping[str, Any] = _NOTHING
    # how layers differ where the file has no list of layer types: a rule's name and its arguments
    layers: tuple[Any, ...] = UNIFORM
    # other names of fields, instead of the usual ones; a dot leads into an object
    names: Mapping[str, list[str]] = _NOTHING
    reader: str = "decoder"  # ``decoder``, ``encoder_only`` or ``encoder_decoder``
    # the function of ``attn_select.layer.models.variants`` that gives kinds of layers their own sizes
    variant: str | None = None
    alibi: bool = False  # ALiBi without a field that says so
    sinks: bool = False  # a learned sink logit in every layer, unless a field says otherwise
    position_bias: bool = False  # a bias per head and distance in the scores of every layer
    state: str | None = None  # the recurrence of its layers that keep a state
    # what its layers without attention are, where no ``StateConfig`` describes them
    no_recurrence: str | None = None
    spellings: Mapping[str, str] = _NOTHING  # a kind of layers as its configs write it → the kind that is meant
    # the kind of the layers that only drafts run; None: that of the last layer with attention
    drafts: str | None = None
    note: str | None = None  # what the layer configs cannot say, for the warnings


def load(file: str) -> dict[str, Any]:
    """Return one of this package's JSON files."""
    with open(os.path.join(os.path.dirname(__file__), file), encoding="utf-8") as stream:
        found: dict[str, Any] = json.load(stream)
    return found


@functools.cache
def defaults() -> dict[str, Any]:
    """Return ``defaults.json``.

    ``types`` are transformers' config classes, ``source`` its release; ``remote`` are types that it has no class for,
    each with its own source; ``wrappers`` and ``remote_wrappers`` are multimodal types with the type of their text
    part; ``unsupported`` are types that no attention config describes, with the reason.

    ``names`` are what config classes call one thing (their ``attribute_map``; vLLM's ``CONFIG_FIELD_ALIASES``, and
    ``hf_config_override`` of its config/speculative.py); ``essential`` fields decide what a layer asks for, and are
    worth a word where a class default had to stand in; fields ``of_layers`` say which layers attend, or to what, and
    are read of known model types alone; ``spellings`` are older names of kinds of layers. ``text_keys`` and
    ``tower_keys`` are the parts of multimodal configs; image tokens of the ``prefix_lm`` models see each other (vLLM
    0.33.0 model_arch_config_convertor.py, is_mm_prefix_lm).
    """
    return load("defaults.json")


@functools.lru_cache(256)  # bounded: the names come from users' files
def family(model_type: str) -> Family:
    """Return what is known of ``model_type``."""
    table = defaults()
    if (row := table["types"].get(model_type)) is not None:
        row = {"source": table["source"], **row}
    elif (row := table["remote"].get(model_type)) is not None:
        row = {**table["types"].get(row.get("like"), {}), **row}
        row.pop("like", None)
    else:
        return Family(model_type)
    row["layers"] = tuple(row.get("layers", UNIFORM))
    return Family(model_type, known=True, **row)


def text_type(wrapper: str) -> str | None:
    """Return the model type that the text part of a multimodal ``model_type`` has by default, or None."""
    table = defaults()
    found: str | None = table["wrappers"].get(wrapper) or table["remote_wrappers"].get(wrapper)
    return found
