"""Wrong values in a config: the field, the value and what is accepted, never anything but the documented errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attn_select.errors import ModelError
from attn_select.layer.models import LayerKinds

Kinds = Callable[..., LayerKinds]
GENERIC = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_attention_heads": "32"}, "num_attention_heads = '32': expected an integer from 1 to 10000"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0: expected an integer from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: expected an integer from 1 to 10000"),
        ({"num_key_value_heads": 5}, "num_key_value_heads = 5 does not divide num_attention_heads = 32"),
        ({"head_dim": 0}, "head_dim = 0: expected an integer from 1 to 8192, or null"),
        ({"hidden_size": 4097}, "hidden_size = 4097 by num_attention_heads = 32 is no head size"),
        ({"sliding_window": -1}, "sliding_window = -1: expected an integer from 0"),
        ({"use_sliding_window": "yes"}, "use_sliding_window = 'yes': expected true or false"),
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping = -1: expected a positive number"),
        ({"layer_types": "full_attention"}, "layer_types = 'full_attention': expected a list of layer types"),
        (
            {"layer_types": ["full_attention"] * 31 + ["fuzzy"]},
            "layer_types[31] = 'fuzzy': expected one of full_attention",
        ),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for num_hidden_layers = 32"),
        ({"layer_types": ["linear_attention"] * 32}, "32 linear_attention, which are a recurrence that is not known"),
        ({"kv_lora_rank": 512}, "qk_nope_head_dim, qk_rope_head_dim, v_head_dim missing beside kv_lora_rank = 512"),
        ({"num_attention_heads_per_layer": [8]}, "num_attention_heads_per_layer has 1 entries for 32 layers"),
        ({"num_key_value_heads_per_layer": [0] * 32}, "num_key_value_heads_per_layer[0] = 0: expected an integer"),
        ({"model_type": "mamba"}, "model type 'mamba' has no attention layers"),
        ({"model_type": "deberta-v2"}, "model type 'deberta-v2' uses disentangled attention"),
        (
            {"model_type": "jamba", "attn_layer_offset": 9},
            "no backend has a kernel for its layers (32 linear_attention",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "E-"},
            "no layer has attention or a state (1 moe, 1 mlp)",
        ),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M?"}, "hybrid_override_pattern = 'M?'"),
        ({"model_type": "gpt_neo", "attention_types": [["global", 2]]}, "attention_types = [['global', 2]]"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 2]]}, "attention_types names 2 layers for"),
        ({"model_type": "mimo_v2_flash", "hybrid_layer_pattern": [1]}, "hybrid_layer_pattern = "),
        ({"model_type": "nemotron-nas", "num_attention_heads": 8}, "block_configs = None: expected a list"),
        (
            {
                "model_type": "nemotron-nas",
                "num_attention_heads": 8,
                "block_configs": [{"attention": {"n_heads_in_group": 3}}],
            },
            "n_heads_in_group = 3: expected a divisor of 8 heads",
        ),
        ({"text_config": {"text_config": {"text_config": {}}}}, "configs inside configs inside configs"),
    ],
)
def test_wrong_values(kinds: Kinds, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        kinds({"model_type": "llama", **config})
    assert caught.value.message.startswith("a config: ")
    assert said in caught.value.message
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    ("missing", "said", "hint"),
    [
        (
            "num_attention_heads",
            "num_attention_heads and head_dim (or hidden_size) missing",
            "--num-heads and --head-size",
        ),
        ("hidden_size", "head_dim (or hidden_size) missing", "--head-size"),
        ("num_hidden_layers", "num_hidden_layers is missing", "no --model"),
    ],
)
def test_missing_essentials_of_an_unknown_model(kinds: Kinds, missing: str, said: str, hint: str) -> None:
    config = {field: value for field, value in GENERIC.items() if field != missing}
    with pytest.raises(ModelError) as caught:
        kinds({**config, "model_type": "brandnew"})
    assert said in caught.value.message
    assert hint in str(caught.value.hint)


def test_unknown_model_type_is_read_generically(kinds: Kinds) -> None:
    found = kinds({**GENERIC, "model_type": "brandnew", "num_key_value_heads": 2, "sliding_window": 100})
    assert [(kind.kind, kind.count, kind.config.num_kv_heads) for kind in found.kinds] == [("sliding_attention", 4, 2)]
    assert found.warnings == (
        "model type 'brandnew' is not known: read as a Llama-like decoder by the usual field names",
    )
    found = kinds(GENERIC)
    assert found.warnings == ("the config has no model_type: read as a Llama-like decoder by the usual field names",)


def test_unknown_model_type_with_mla_and_layer_types(kinds: Kinds) -> None:
    mla = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
    found = kinds({**GENERIC, **mla, "model_type": "brandnew", "index_topk": 1024})
    assert [(kind.kind, kind.count, kind.config.head_size) for kind in found.kinds] == [("sparse_mla", 4, 576)]
    types = ["sliding_attention", "deepseek_sparse_attention", "attention", "mamba"]
    found = kinds({**GENERIC, **mla, "model_type": "brandnew", "layer_types": types, "sliding_window": 8})
    assert [(kind.kind, kind.count) for kind in found.kinds] == [("mla_sliding", 1), ("mla", 2)]
    found = kinds({**GENERIC, "model_type": "brandnew", "layer_types": [*types[2:], "conv", "indexed_attention"]})
    assert [(kind.kind, kind.count) for kind in found.kinds] == [("full_attention", 1)]
    assert [(each.kind, each.layers) for each in found.unserved] == [("indexed_attention", (3,))]
    assert found.warnings[1] == "1 of 4 layers have no kernel here: 1 indexed_attention"
    assert "2 of 4 layers are left out, since no backend has a kernel for them: 1 linear_attention" in found.warnings[2]


def test_null_is_not_the_default(kinds: Kinds) -> None:
    """As in transformers: Mistral's window is 4096 where it is left out, and none where it is null."""
    shape = {"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32}
    assert kinds(shape).kinds[0].config.sliding_window == 4096
    assert kinds({**shape, "sliding_window": None}).kinds[0].config.sliding_window is None
    assert kinds({**shape, "num_key_value_heads": None}).kinds[0].config.num_kv_heads == 32
    assert kinds({**shape, "sliding_window": 0}).kinds[0].kind == "full_attention"


@pytest.mark.parametrize(("value", "cap"), [(0.5, 0.5), (30, 30.0), (0, None), (None, None), (False, None)])
def test_a_positive_number_may_be_small_or_left_out(kinds: Kinds, value: Any, cap: float | None) -> None:
    found = kinds({**GENERIC, "model_type": "gemma2", "attn_logit_softcapping": value})
    assert {kind.config.logits_soft_cap for kind in found.kinds} == {cap}


def test_listed_layers_count_themselves(kinds: Kinds) -> None:
    config = {field: value for field, value in GENERIC.items() if field != "num_hidden_layers"}
    found = kinds({**config, "model_type": "brandnew", "layer_types": ["full_attention"] * 3})
    assert [(kind.kind, kind.count) for kind in found.kinds] == [("full_attention", 3)]


def test_sliding_layers_without_a_window(kinds: Kinds) -> None:
    types = ["sliding_attention", "full_attention"]
    found = kinds({**GENERIC, "model_type": "llama", "num_hidden_layers": 2, "layer_types": types})
    assert [(kind.kind, kind.count) for kind in found.kinds] == [("full_attention", 2)]
    assert found.warnings == ("1 sliding_attention layers, but no sliding_window: counted as full attention",)


def test_head_dim_of_mla_is_ignored(kinds: Kinds) -> None:
    """It is the width of the rotary part, or hidden size by heads: neither is the width of the cache."""
    for head_dim in (64, 56, None):
        found = kinds({"model_type": "deepseek_v3", "head_dim": head_dim})
        assert found.kinds[0].config.head_size == 576
