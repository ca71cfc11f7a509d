"""Which layers own what they cache: Gemma 3n and 4, Mistral Large 4, and indexers that serve several layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_select import select_model
from attn_select.errors import ModelError
from attn_select.layer.models import LayerKinds, configs_from_model

Kinds = Callable[..., LayerKinds]


def kib_per_token(found: LayerKinds) -> float:
    selections = select_model(found.configs, "h100")
    bytes_per_layer = [s.bytes_per_token or 0 for s in selections]
    return sum(k.owners.caches * b for k, b in zip(found.kinds, bytes_per_layer, strict=True)) / 1024


@pytest.mark.parametrize(
    ("name", "kib", "sources"),
    [
        # vLLM 0.33.0 model_executor/models/gemma4.py: the last layer of the kind before the first that shares.
        ("g4", 18, {13: [*range(15, 19), *range(20, 24), *range(25, 29), *range(30, 34)], 14: [19, 24, 29, 34]}),
        # 30 layers, of which the last 10 share: 18 is sliding, 19 full.
        ("g3n", 40, {18: [20, 21, 22, 23, 25, 26, 27, 28], 19: [24, 29]}),
    ],
)
def test_configs_of_the_trial(trial: Path, name: str, kib: float, sources: dict[int, list[int]]) -> None:
    found = configs_from_model(str(trial / f"{name}.json"))
    assert kib_per_token(found) == kib
    merged = {layer: source for kind in found.kinds for layer, source in kind.owners.kv_sources.items()}
    assert merged == {layer: source for source, layers in sources.items() for layer in layers}
    assert sorted(layer for kind in found.kinds for layer in kind.layers) == [*range(sum(k.count for k in found.kinds))]


def test_sources_that_are_listed(kinds: Kinds) -> None:
    """Mistral Large 4 (transformers 5.24.0, MistralLarge4TextConfig)."""
    config = {"model_type": "mistral_large4_text", "num_hidden_layers": 4, "kv_source_layers": [0, 0, 2, 2]}
    (kind,) = kinds({**config, "indexer_types": ["full", "shared", "shared", "full"]}).kinds
    assert kind.owners == (2, 2, {1: 0, 3: 2})


@pytest.mark.parametrize(
    ("fields", "indexers"),
    [
        ({"model_type": "deepseek_v32"}, 8),
        # max(layer - 2 + 1, 0) % 4 == 0: layers 0, 1 and 5
        ({"model_type": "glm_moe_dsa", "index_topk_freq": 4}, 3),
        ({"model_type": "glm_moe_dsa", "index_topk_freq": 4, "index_skip_topk_offset": 3}, 4),
        ({"model_type": "deepseek_v32", "index_topk_pattern": "FSSFSSSS"}, 2),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full"] * 3 + ["shared"] * 5}, 3),
        ({"model_type": "hy_v4"}, 3),  # HYV4Config: 0, 1, 5
    ],
)
def test_indexers_that_serve_several_layers(kinds: Kinds, fields: dict[str, Any], indexers: int) -> None:
    (kind,) = kinds({**fields, "num_hidden_layers": 8}).kinds
    assert kind.owners == (8, indexers, {})


@pytest.mark.parametrize(
    "fields",
    [
        {"num_kv_shared_layers": 8},
        {"num_kv_shared_layers": -1},
        {"num_kv_shared_layers": 6},  # the layers before it are sliding ones, and full ones would share
        {"kv_source_layers": [0, 0, 1, 0, 0, 0, 0, 0]},
        {"kv_source_layers": [0, 1]},
        {"indexer_types": ["half"] * 8},
    ],
)
def test_what_cannot_be_is_refused_by_name(kinds: Kinds, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(fields))):
        kinds({"model_type": "gemma4_text", "num_hidden_layers": 8, **fields})
