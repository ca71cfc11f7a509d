"""Kinds of sparse attention without a kernel here: Qwen4Exp, MiniMax M3, DeepSeek-V4 and V4.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attn_select.errors import ModelError
from attn_select.layer.models import LayerKinds

Kinds = Callable[..., LayerKinds]
QSA = {
    "model_type": "qwen4_exp_text",
    "num_hidden_layers": 8,
    "indexer_n_heads": 4,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
SPARSE_TYPES = ("full_attention", "qwen_sparse_attention", "indexed_attention", "deepseek_sparse_attention")
M3 = {"model_type": "minimax_m3_vl_text", "num_hidden_layers": 5}
V41 = {
    "model_type": "deepseek_v41",
    "text_config": {
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "head_dim": 512,
        "sliding_window": 128,
        "index_topk": 512,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "compress_ratios": [0, 2, 2, 1, 1, 1, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
    },
}


@pytest.mark.parametrize("spelled", [None, *SPARSE_TYPES])
def test_sparse_layers_of_qwen4exp_in_every_form(kinds: Kinds, spelled: str | None) -> None:
    listed = {} if spelled is None else {"layer_types": (["linear_attention"] * 3 + [spelled]) * 2}
    (sparse,) = kinds({**QSA, **listed}).unserved
    assert (sparse.kind, sparse.layers) == ("qsa", (3, 7))
    # Qwen4ExpTextConfig: "Setting this enables QSA on full-attention layers".
    dense = kinds({**QSA, **listed, "indexer_n_heads": None})
    assert dense.unserved == ()
    assert [(kind.kind, kind.count) for kind in dense.kinds] == [("gated_delta_net", 6), ("full_attention", 2)]


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 4]},
        {"sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1, 1], "sparse_topk_blocks": 16}},
    ],
)
def test_blocks_of_minimax_m3(kinds: Kinds, fields: dict[str, Any]) -> None:
    found = kinds({**M3, **fields, "dtype": "bfloat16"}, tensor_parallel_size=8)
    assert [(kind.kind, kind.layers) for kind in found.kinds] == [("full_attention", (0,))]
    (sparse,) = found.unserved
    assert (sparse.kind, sparse.count, sparse.num_heads, sparse.num_kv_heads) == ("msa", 4, 8, 1)
    assert (sparse.tokens, sparse.block_size, sparse.indexer_heads) == (16 * 128, 128, 4)
    assert (sparse.bytes_per_token, sparse.indexer_bytes_per_token) == (2 * 128 * 2, 128 * 2)


@pytest.mark.parametrize(
    ("fields", "csa", "hca", "window"),
    [
        ({}, (3, 5), (0, 1, 2, 4), ()),  # DeepseekV4Config: two HCA layers, then both in turn
        ({"compress_ratios": [0, 4, 128, 4, 128, 4, 0]}, (1, 3, 5), (2, 4), (0,)),  # the last is for drafts
        (
            {
                "layer_types": [
                    "sliding_attention",
                    "heavily_compressed_attention",
                    *["compressed_sparse_attention"] * 4,
                ]
            },
            (2, 3, 4, 5),
            (1,),
            (0,),
        ),
    ],
)
def test_layers_of_deepseek_v4(
    kinds: Kinds, fields: dict[str, Any], csa: tuple[int, ...], hca: tuple[int, ...], window: tuple[int, ...]
) -> None:
    found = kinds({"model_type": "deepseek_v4", "num_hidden_layers": 6, "dtype": "bfloat16", **fields})
    assert found.kinds == ()
    by_kind = {each.kind: each for each in found.unserved}
    places = {"deepseek_v4_csa": csa, "deepseek_v4_hca": hca, "deepseek_v4_window": window}
    assert {kind: each.layers for kind, each in by_kind.items()} == {k: v for k, v in places.items() if v}
    # One vector of 512 is key and value of 4 tokens, or of 128; of the former an indexer chooses 512.
    chosen, every = by_kind["deepseek_v4_csa"], by_kind["deepseek_v4_hca"]
    assert (chosen.tokens, chosen.block_size, chosen.bytes_per_token) == (512 * 4, 4, 512 * 2 / 4)
    assert (every.tokens, every.block_size, every.bytes_per_token) == (None, 128, 512 * 2 / 128)
    assert {each.window for each in found.unserved} == {128}
    assert {each.num_kv_heads for each in found.unserved} == {1}
    if window:
        assert by_kind["deepseek_v4_window"].bytes_per_token is None


def test_keys_that_layers_of_deepseek_v41_share(kinds: Kinds) -> None:
    found = kinds(V41)
    assert [(each.kind, each.layers, each.block_size, each.tokens) for each in found.unserved] == [
        ("deepseek_v41_window", (0,), None, None),
        ("deepseek_v41_sparse", (1, 2), 2, 1024),
        ("deepseek_v41_sparse", (3, 4, 5), 1, 512),
    ]
    assert [each.owners for each in found.unserved[1:]] == [(1, 1, {2: 1}), (1, 1, {4: 3, 5: 3})]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4]},
        {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [0, 5]},
        {"model_type": "deepseek_v4", "num_hidden_layers": 4, "compress_rates": {"compressed_sparse_attention": 0}},
        {"model_type": "deepseek_v41", "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 512},
        {**V41["text_config"], "model_type": "deepseek_v41", "kv_source_layer_ids": [2]},  # type: ignore[dict-item]
    ],
)
def test_what_cannot_be_is_refused_by_name(kinds: Kinds, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"compress_rat|kv_source_layer_ids"):
        kinds(config)
