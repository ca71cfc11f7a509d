"""Models: from a Hugging Face ``config.json`` or a preset's name to the distinct attention layers.

Nothing is downloaded and nothing in a config is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_select.errors import ConfigError, shorten, show
from attn_select_cli.model_configs.presets import Preset, find_preset, presets

if TYPE_CHECKING:
    from attn_select.config import AttentionConfig
    from attn_select.device import Device
    from attn_select_cli.model_configs.fields import Fields
    from attn_select_cli.model_configs.layer import Reading

__all__ = ["LayerKind", "LayerKinds", "ModelSource", "Preset", "layer_kinds", "load", "presets"]

_ESSENTIAL = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "num_key_value_heads",
    "sliding_window",
)
"""Fields that decide which attention a layer asks for: worth a word where a class default had to stand in."""


@dataclass(slots=True)
class LayerKind:
    """Layers of a model that ask for the same attention.

    Attributes:
        kind: ``full_attention``, ``sliding_attention``, ``chunked_attention``, ``mla``, ``sparse_mla``, ``encoder``,
            ``encoder_only``, ``encoder_only_sliding`` or ``cross_attention``. The decoder's own layers in an
            encoder-decoder model are ``full_attention``.
        count: layers of this kind.
        config: what each of them asks for, per tensor-parallel rank.
    """

    kind: str
    count: int
    config: AttentionConfig


@dataclass(slots=True)
class LayerKinds:
    """The distinct layers of a model in order of appearance, and what a user should know about the reading."""

    kinds: tuple[LayerKind, ...]
    warnings: tuple[str, ...]


@dataclass(slots=True)
class ModelSource:
    """A model's config and where it came from.

    Attributes:
        name: the preset's name, or the path as given.
        architecture: the first of ``architectures``, or empty.
        model_type: ``model_type``, or empty.
        raw: the config as read.
        source: where a preset's values were looked up, or the path of the file.
    """

    name: str
    architecture: str
    model_type: str
    raw: dict[str, Any]
    source: str

    def layer_kinds(
        self,
        *,
        tensor_parallel_size: int = 1,
        device: Device | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> LayerKinds:
        """Return the distinct layer kinds of the model.

        Args:
            tensor_parallel_size: ranks that share the query heads; KV heads below it are replicated.
            device: decides the dtype where neither the flags nor the config do; None is one that has them all.
            overrides: ``AttentionConfig`` fields that beat the model, in every layer that has them. Head counts are the
                model's totals. A window, soft cap or top-k of 0 takes it away.

        Raises:
            ModelError: the config does not describe attention layers.
            ConfigError: an override or the number of ranks contradicts the model.
            UnknownNameError: an override is no field.
        """
        return layer_kinds(self, tensor_parallel_size=tensor_parallel_size, device=device, overrides=overrides)


def load(name_or_path: str) -> ModelSource:
    """Return the model that a preset's name, the path of a ``config.json`` or of its folder means.

    A path is what contains a separator, ends in ``.json``, or is a folder with a ``config.json``: it beats a preset of
    the same name. Presets are found in any case.

    Raises:
        UnknownNameError: neither; lists the nearest presets.
        ModelError: the file cannot be read or holds no JSON object, or a folder holds no ``config.json``.
    """
    from copy import deepcopy

    from attn_select_cli.model_configs import source

    if (path := source.find_path(name_or_path)) is not None:
        return _source(name_or_path, source.read_json(path), path)
    if (row := find_preset(name_or_path)) is None:
        raise source.unknown(name_or_path)
    return _source(row["name"], deepcopy(row["config"]), row["source"])


def layer_kinds(
    source: ModelSource | None,
    *,
    tensor_parallel_size: int = 1,
    device: Device | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> LayerKinds:
    """Return ``source``'s layer kinds; without a source the one layer that ``overrides`` alone describe.

    As ``ModelSource.layer_kinds``.
    """
    from attn_select_cli.model_configs import dtype
    from attn_select_cli.model_configs.build import build
    from attn_select_cli.model_configs.layer import Layer, Reading

    if type(tensor_parallel_size) is not int or not 1 <= tensor_parallel_size <= 4096:
        text = f"tensor_parallel_size = {show(tensor_parallel_size)}: expected an integer from 1 to 4096"
        raise ConfigError(text, fields=["tensor_parallel_size"])
    given = {field: value for field, value in (overrides or {}).items() if value is not None}
    where: str | None = None
    notes: list[str] = []
    if source is None:
        reading = Reading([(Layer(), 1)], [])
        compute = given.get("dtype", dtype.preferred(device))
    else:
        where = shorten(source.name, 200)
        fields, reading = _read(source.raw, where)
        pooling = all(layer.attn_type == "encoder_only" for layer, _ in reading.layers)
        compute, notes = dtype.resolve(source.raw, fields.raw, given.get("dtype"), device, pooling)
    rows, more = build(
        reading.layers, where=where, tensor_parallel_size=tensor_parallel_size, dtype=compute, overrides=given
    )
    if "mm_prefix" not in given and any(config.mm_prefix for _, _, config in rows):
        notes.append("image tokens attend to each other in both directions (--no-mm-prefix where no image is served)")
    return LayerKinds(tuple(LayerKind(*row) for row in rows), (*reading.notes, *notes, *more))


def _source(name: str, raw: dict[str, Any], origin: str) -> ModelSource:
    from attn_select_cli.model_configs.text import first_architecture, model_type_of

    return ModelSource(name, first_architecture(raw), model_type_of(raw, shorten(name, 200)), raw, origin)


def _read(raw: dict[str, Any], where: str) -> tuple[Fields, Reading]:
    from attn_select_cli.model_configs.readers import read
    from attn_select_cli.model_configs.text import is_mm_prefix, text_fields

    fields, notes = text_fields(raw, where)
    reading = read(fields, is_mm_prefix(raw, fields))
    reading.notes[:0] = notes
    if taken := {name: value for name, value in fields.defaulted.items() if name in _ESSENTIAL and value is not None}:
        values = ", ".join(f"{name} = {value}" for name, value in taken.items())
        reading.notes.append(f"not in the config, so the class defaults of {fields.family.model_type}: {values}")
    return fields, reading
