"""Models: from a Hugging Face config or a preset's name to the distinct attention layers.

Nothing is downloaded and nothing in a config is executed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_select.errors import ConfigError, ModelError, printable, shorten, show
from attn_select.layer.models.presets import Preset, find_preset, presets

if TYPE_CHECKING:
    from attn_select.layer.config import AttentionConfig
    from attn_select.layer.layer_config import LayerConfig
    from attn_select.layer.models.fields import Fields
    from attn_select.layer.models.kv_sharing import CacheOwners
    from attn_select.layer.models.layer_kind import Reading
    from attn_select.layer.models.unserved import UnservedLayers
    from attn_select.machine.device import Device

__all__ = [
    "LayerKind",
    "LayerKinds",
    "ModelSource",
    "Preset",
    "configs_from_model",
    "layer_kinds",
    "load",
    "presets",
]


@dataclass(slots=True)
class LayerKind:
    """Layers of a model that ask for the same.

    Attributes:
        kind: of attention ``full_attention``, ``sliding_attention``, ``chunked_attention``, ``mla``, ``sparse_mla``,
            ``encoder``, ``encoder_only``, ``encoder_only_sliding`` or ``cross_attention``. The decoder's own layers in
            an encoder-decoder model are ``full_attention``. Of layers that keep a state the name of the recurrence. A
            layer that has both is counted in two kinds.
        layers: their places in the model, from 0. Layers that only drafts run stand behind the model's own. The
            encoder and the decoder of a model with both are counted apart.
        config: what each of them asks for, per tensor-parallel rank.
        owners: which of them own what they cache.
    """

    kind: str
    layers: tuple[int, ...]
    config: LayerConfig
    owners: CacheOwners

    @property
    def count(self) -> int:
        """Layers of this kind."""
        return len(self.layers)


@dataclass(slots=True)
class LayerKinds:
    """The distinct layers of a model in order of appearance, and what a user should know about the reading.

    Attributes:
        kinds: the layers.
        warnings: what should be known of them.
        unserved: layers of kinds that no ``AttentionConfig`` describes, since no backend here has a kernel for them.
        type_known: whether the tables know the model type; else it was read as a Llama-like decoder.
        unused: the overrides that no layer has, which a warning names too.
    """

    kinds: tuple[LayerKind, ...]
    warnings: tuple[str, ...]
    unserved: tuple[UnservedLayers, ...] = ()
    type_known: bool = True
    unused: tuple[str, ...] = ()

    @property
    def configs(self) -> list[LayerConfig]:
        """What each kind asks for, in the order of ``kinds``: the argument of ``select_model``."""
        return [kind.config for kind in self.kinds]

    @property
    def attention_configs(self) -> list[AttentionConfig]:
        """What each kind of attention asks for, in the order of ``kinds``; kinds that keep a state are left out."""
        from attn_select.layer.config import AttentionConfig

        return [kind.config for kind in self.kinds if isinstance(kind.config, AttentionConfig)]


@dataclass(slots=True)
class ModelSource:
    """A model's config and where it came from.

    Attributes:
        name: the preset's name, the path or repository as given, or the class of a config object.
        architecture: the first of ``architectures``, or empty.
        model_type: ``model_type``, or empty.
        raw: the config as read.
        source: where a preset's values were looked up, the path of the file, or what kind of object was given.
    """

    name: str
    architecture: str
    model_type: str
    raw: dict[str, Any]
    source: str


def configs_from_model(
    model: object,
    *,
    tensor_parallel: int = 1,
    device: Device | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> LayerKinds:
    """Return the distinct layers of a model, each with what it asks for per tensor-parallel rank.

    Layers of attention ask for an ``AttentionConfig``, layers that keep a state for a ``StateConfig``.

    Nothing is downloaded, nothing in a config is executed, and neither torch nor transformers is imported::

        found = configs_from_model("meta-llama/Llama-3.1-8B", tensor_parallel=4)
        selections = select_model(found.configs)

    Args:
        model: a preset's name (``attn-select models`` lists them) or one of the repositories that lead to it, the path
            of a ``config.json`` or of the folder that holds it, a repository ``org/name`` in the local cache of the
            Hugging Face Hub (``HF_HUB_CACHE``, ``HF_HOME``) or that repository's ``models--org--name`` folder, the
            content of a ``config.json`` as a mapping, or a transformers config (any object whose ``to_dict`` returns
            such a mapping).
        tensor_parallel: ranks that share the query heads; KV heads below it are replicated, one per rank.
        device: decides the dtype where neither ``overrides`` nor the config do; None is one that has them all.
        overrides: ``AttentionConfig`` fields that beat the model, in every layer that has them. Head counts are the
            model's totals. A window, soft cap or top-k of 0 takes it away. ``mla`` (True) gives layers with keys and
            values per head a latent, of DeepSeek-V3's dims where none are given.

    Raises:
        UnknownNameError: neither a preset, a path nor a cached repository; or an override is no field.
        ModelError: the config cannot be read or does not describe attention layers.
        ConfigError: an override or the number of ranks contradicts the model.
    """
    return layer_kinds(load(model), tensor_parallel_size=tensor_parallel, device=device, overrides=overrides)


def load(model: object) -> ModelSource:
    """Return the model that ``model`` means, as ``configs_from_model`` accepts it.

    A path is what contains a separator, ends in ``.json``, or is a folder with a ``config.json``: it beats a preset of
    the same name, and a preset beats a cached repository. A cached repository beats a preset that has its name among
    others: ``meta-llama/Llama-3.1-8B``. Presets are found in any case.

    Raises:
        UnknownNameError: a name that is none of them; lists the nearest presets.
        ModelError: the file cannot be read or holds no JSON object, a folder holds no ``config.json``, or ``model`` is
            something else.
    """
    from copy import deepcopy

    from attn_select.layer.models import hub_cache, source

    if not isinstance(model, str | os.PathLike):
        return _given(model)
    name = os.fsdecode(model)
    if (path := source.find_path(name)) is not None:
        return _source(name, source.read_config(path), path)
    if (preset := find_preset(name)) is not None:
        return _source(preset.name, deepcopy(preset.config), preset.source)
    if (path := hub_cache.find_repository(name)) is not None:
        return _source(name, source.read_config(path), path)
    raise source.unknown(name)


def _given(model: object) -> ModelSource:
    """Return the model of a config that is an object in memory."""
    if isinstance(model, Mapping):
        return _source("the config", dict(model), "a mapping")
    to_dict = getattr(model, "to_dict", None)
    found = to_dict() if callable(to_dict) and not isinstance(model, type) else None
    if not isinstance(found, Mapping):
        raise ModelError(
            f"model = {show(model)}: expected a preset's name, a path, a cached repository, the content of a "
            "config.json as a mapping, or a transformers config"
        )
    return _source(type(model).__name__, dict(found), "an object in memory")


def layer_kinds(
    source: ModelSource | None,
    *,
    tensor_parallel_size: int = 1,
    device: Device | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> LayerKinds:
    """Return ``source``'s layer kinds; without a source the one layer that ``overrides`` alone describe.

    As ``configs_from_model``.
    """
    from attn_select.layer.config import AttentionConfig
    from attn_select.layer.dtypes import canonical
    from attn_select.layer.models import dtype
    from attn_select.layer.models.build import build
    from attn_select.layer.models.checkpoint_cache import CheckpointCache, checkpoint_cache
    from attn_select.layer.models.layer_kind import Layer, Reading, StateLayer
    from attn_select.layer.models.unserved import unserved_layers

    if type(tensor_parallel_size) is not int or not 1 <= tensor_parallel_size <= 4096:
        text = f"tensor_parallel_size = {show(tensor_parallel_size)}: expected an integer from 1 to 4096"
        raise ConfigError(text, fields=["tensor_parallel_size"])
    given = {field: value for field, value in (overrides or {}).items() if value is not None}
    where: str | None = None
    notes: list[str] = []
    type_known = True
    cache = CheckpointCache()
    if source is None:
        reading = Reading([(Layer() if given.get("recurrence") is None else StateLayer(), range(1))], [])
        compute = given.get("dtype", dtype.preferred(device))
    else:
        where = shorten(source.name, 200)
        fields, reading = _read(source.raw, where, drafts=bool(given.get("num_speculative_tokens")))
        type_known = fields.family.known
        pooling = bool(reading.layers) and all(
            isinstance(layer, Layer) and layer.attn_type == "encoder_only" for layer, _ in reading.layers
        )
        compute, notes = dtype.resolve(source.raw, fields.raw, given.get("dtype"), device, pooling)
        cache = checkpoint_cache(source.raw, fields.raw)
        if "kv_cache_dtype" not in given:
            cache.check(where)
        elif cache.field and given["kv_cache_dtype"] == "auto":
            given["kv_cache_dtype"] = compute  # an engine's auto would be the checkpoint's
    rows, unused = build(
        reading.layers,
        where=where,
        tensor_parallel_size=tensor_parallel_size,
        dtype=compute,
        cache=cache,
        overrides=given,
        unserved=bool(reading.unserved),
    )
    notes += cache.notes_for([config for _, _, config in rows if isinstance(config, AttentionConfig)])
    if "mm_prefix" not in given and any(
        isinstance(config, AttentionConfig) and config.mm_prefix for _, _, config in rows
    ):
        notes.append("image tokens attend to each other in both directions (--no-mm-prefix where no image is served)")
    if unused:
        lacking = "the layer has no such field"
        if where is not None:
            what = "keys and values per head" if unused == ["mla"] else "it" if len(unused) == 1 else "them"
            lacking = f"no layer of {where} has {what}"
        notes.append(f"{', '.join(unused)}: no effect, {lacking}")
    found = [
        LayerKind(kind, tuple(places), config, reading.sharing.owners(places, config.sort == "sparse_mla"))
        for kind, places, config in rows
    ]
    stored = canonical(str(given.get("kv_cache_dtype", cache.dtype)))
    unserved = [
        unserved_layers(
            sparse, places, reading.sharing.owners(places, True), tensor_parallel_size, canonical(str(compute)), stored
        )
        for sparse, places in reading.unserved
    ]
    return LayerKinds(tuple(found), (*reading.notes, *notes), tuple(unserved), type_known, tuple(unused))


def _source(name: str, raw: dict[str, Any], origin: str) -> ModelSource:
    from attn_select.layer.models.text import first_architecture, model_type_of

    model_type = printable(model_type_of(raw, shorten(name, 200)))
    return ModelSource(printable(name), printable(first_architecture(raw)), model_type, raw, printable(origin))


def _read(raw: dict[str, Any], where: str, drafts: bool) -> tuple[Fields, Reading]:
    from attn_select.layer.models.data_files import defaults
    from attn_select.layer.models.readers import read
    from attn_select.layer.models.text import is_mm_prefix, text_fields

    fields, notes = text_fields(raw, where)
    reading = read(fields, is_mm_prefix(raw, fields), drafts)
    reading.notes[:0] = notes
    essential = defaults()["essential"]
    if taken := {name: value for name, value in fields.defaulted.items() if name in essential and value is not None}:
        values = ", ".join(f"{name} = {value}" for name, value in taken.items())
        reading.notes.append(f"not in the config, so the class defaults of {fields.family.model_type}: {values}")
    return fields, reading
