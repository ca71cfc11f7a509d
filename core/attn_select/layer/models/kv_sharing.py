"""Layers that read another layer's KV cache, or take the choice of another layer's indexer: they cache nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from attn_select.errors import ModelError
from attn_select.layer.models.fields import Fields


class CacheOwners(NamedTuple):
    """Which layers of one kind own what they cache."""

    caches: int  # how many have a KV cache (or a state) of their own
    indexers: int  # how many have an indexer with a cache of its own; 0 where the kind is not sparse
    # layer → the layer whose KV cache it reads, by their places in the model; it writes nothing
    kv_sources: Mapping[int, int]


class Sharing(NamedTuple):
    """What a model's layers share, by their places."""

    kv_sources: Mapping[int, int]  # as in ``CacheOwners``
    without_indexer: frozenset[int]  # sparse layers that attend to the tokens which an earlier layer's indexer chose

    def owners(self, layers: Sequence[int], sparse: bool) -> CacheOwners:
        """Return what the layers at these places own."""
        sources = {layer: self.kv_sources[layer] for layer in layers if layer in self.kv_sources}
        indexers = sum(layer not in self.without_indexer for layer in layers) if sparse else 0
        return CacheOwners(len(layers) - len(sources), indexers, sources)


NOTHING_SHARED = Sharing({}, frozenset())


def sharing(fields: Fields, kinds: Sequence[str]) -> Sharing:
    """Return what layers of these kinds, in order, share."""
    return Sharing(_kv_sources(fields, kinds), _without_indexer(fields, len(kinds)))


def _kv_sources(fields: Fields, kinds: Sequence[str]) -> dict[int, int]:
    if (listed := fields.list_of(int, "kv_source_layers", "layer numbers, one per layer")) is not None:
        return _listed_sources(fields, listed, len(kinds))
    if (owning := fields.list_of(int, "kv_source_layer_ids", "layer numbers")) is not None:
        return _nearest_sources(fields, owning, kinds)
    shared = fields.integer("num_kv_shared_layers", 0) or 0
    if not shared:
        return {}
    if shared >= len(kinds):
        raise fields.wrong("num_kv_shared_layers", shared, f"an integer from 0 to {len(kinds) - 1}")
    # Gemma 3n, Gemma 4: the last layers read the last cache before them that is of their kind (vLLM 0.33.0
    # model_executor/models/gemma4.py; kv_sharing_modes of transformers 5.24.0 configuration_gemma4.py).
    first = len(kinds) - shared
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    if missing := [kind for kind in kinds[first:] if kind not in last]:
        text = f"num_kv_shared_layers = {shared}: no {missing[0]} layer is left that owns a KV cache"
        raise ModelError(f"{fields.where}: {text}")
    return {layer: last[kinds[layer]] for layer in range(first, len(kinds))}


def _listed_sources(fields: Fields, listed: Sequence[int], count: int) -> dict[int, int]:
    """Mistral Large 4: a layer's own number, or that of the earlier layer whose cache it reads."""
    if len(listed) != count:
        raise ModelError(f"{fields.where}: kv_source_layers has {len(listed)} entries for {count} layers")
    for layer, source in enumerate(listed):
        if not 0 <= source <= layer or listed[source] != source:
            accepted = f"{layer}, or an earlier layer that owns its cache"
            raise fields.wrong(f"kv_source_layers[{layer}]", source, accepted)
    return {layer: source for layer, source in enumerate(listed) if layer != source}


def _nearest_sources(fields: Fields, owning: Sequence[int], kinds: Sequence[str]) -> dict[int, int]:
    """DeepSeek-V4.1: sparse layers read the nearest cache before them (vLLM's models/deepseek_v41/attention.py)."""
    sources: dict[int, int] = {}
    for layer, kind in enumerate(kinds):
        if not kind.startswith("deepseek_v41_sparse") or layer in owning:
            continue
        source = max((each for each in owning if each < layer), default=None)
        if source is None:
            raise fields.wrong("kv_source_layer_ids", list(owning), f"a layer up to {layer}, the first sparse one")
        sources[layer] = source
    return sources


def _without_indexer(fields: Fields, count: int) -> frozenset[int]:
    """DeepSeek-V3.2 and its kin (IndexCache, arXiv 2603.12201): vLLM 0.33.0 models/deepseek_v32/attention.py."""
    if (choosing := fields.list_of(int, "index_source_layer_ids", "layer numbers")) is not None:
        owning = fields.list_of(int, "kv_source_layer_ids", "layer numbers") or []  # keys are cached where both are
        return frozenset(range(count)) - (set(choosing) & set(owning))
    types = fields.list_of(str, "indexer_types", "'full' and 'shared', one per layer")
    pattern = fields.get("index_topk_pattern")
    if types is None and isinstance(pattern, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if types is not None:
        if len(types) < count or set(types) - {"full", "shared"}:
            name = "indexer_types" if fields.get("indexer_types") is not None else "index_topk_pattern"
            raise fields.wrong(name, types, f"'full' or 'shared' for each of {count} layers")
        return frozenset(layer for layer in range(count) if types[layer] == "shared")
    if fields.family.model_type.startswith("hy_v4"):  # HYV4Config: layer 0, and every fourth from 1 on, has one
        return frozenset(layer for layer in range(1, count) if (layer - 1) % 4)
    every, offset = fields.integer("index_topk_freq") or 1, fields.integer("index_skip_topk_offset", 0)
    offset = 2 if offset is None else offset
    return frozenset(layer for layer in range(count) if max(layer - offset + 1, 0) % every)
