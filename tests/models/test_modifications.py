"""What a model changes about its attention is never read in silence: a field of the layers, a warning or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_select import AttentionConfig, select
from attn_select.backends.spec import Reason
from attn_select.errors import ModelError
from attn_select.layer.models import LayerKinds, configs_from_model

Kinds = Callable[..., LayerKinds]
UNKNOWN = {"model_type": "brandnew", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16}
UNKNOWN |= {"num_key_value_heads": 4}
CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}


def codes(config: AttentionConfig, device: str = "h100") -> set[str]:
    """The codes that stand against every backend for such layers."""
    found: list[set[str]] = []
    for candidate in select(config, device).candidates:
        reasons: list[Reason] = [r for verdict in candidate.phases.values() for r in verdict.reasons]
        if not {reason.code for reason in reasons} & {"mla-only", "sparse-only", "phase-not-served"}:
            found.append({reason.code for reason in reasons})
    assert found
    return set.intersection(*found)


@pytest.mark.parametrize("model_type", ["t5", "mt5", "umt5"])
def test_biases_of_t5_have_no_kernel(kinds: Kinds, model_type: str) -> None:
    by_kind = {kind.kind: kind.config for kind in kinds({"model_type": model_type}).kinds}
    assert {kind: config.position_bias for kind, config in by_kind.items()} == {  # type: ignore[union-attr]
        "encoder": True,
        "full_attention": True,
        "cross_attention": False,
    }
    for kind in ("encoder", "full_attention"):
        config = by_kind[kind]
        assert isinstance(config, AttentionConfig)
        assert "position-bias" in codes(config)
        assert not select(config, "h100").ok


@pytest.mark.parametrize(
    "fields",
    [
        {"relative_attention_num_buckets": 32},
        {"rel_extent": 1024, "d_rel": 16},
        {"position_embedding_type": "relative_key_query"},
    ],
)
@pytest.mark.parametrize("model_type", ["brandnew", "bert"])
def test_a_bias_is_read_of_any_model_type(kinds: Kinds, fields: dict[str, Any], model_type: str) -> None:
    (config,) = kinds({**UNKNOWN, "model_type": model_type, **fields}).attention_configs
    assert config.position_bias
    (plain,) = kinds({**UNKNOWN, "model_type": model_type, "position_embedding_type": "absolute"}).attention_configs
    assert not plain.position_bias


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe", "brandnew"])
def test_dual_chunk_attention(kinds: Kinds, model_type: str) -> None:
    config = {**UNKNOWN, "model_type": model_type, "dual_chunk_attention_config": CHUNKS}
    (layer,) = kinds(config).attention_configs
    assert layer.dual_chunk
    assert "dual-chunk" in codes(layer)
    # Requests of less than a chunk attend as without it: the option says that there are no others.
    (short,) = kinds(config, overrides={"dual_chunk": False}).attention_configs
    assert select(short, "h100").ok
    assert not kinds({**config, "dual_chunk_attention_config": None}).attention_configs[0].dual_chunk
    with pytest.raises(ModelError, match="dual_chunk_attention_config = True: expected an object"):
        kinds({**config, "dual_chunk_attention_config": True})


@pytest.mark.parametrize("sinks", [True, False])
def test_a_learnable_sink_that_is_switched_off(trial: Path, kinds: Kinds, sinks: bool) -> None:
    assert [c.sinks for c in configs_from_model(str(trial / "hy4.json")).attention_configs] == [True]
    (config,) = kinds({"model_type": "hy_v4", "num_hidden_layers": 2, "learnable_sink": sinks}).attention_configs
    assert config.sinks is sinks
    (other,) = kinds({**UNKNOWN, "learnable_sink": sinks}).attention_configs
    assert other.sinks is sinks


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_type_list": [0, 0, 0, 1]},
        {"hybrid_override_pattern": "M*M*"},
        {"linear_attn_config": {"full_attn_layers": [4]}},
        {"attention_kv_lora_dim": 512, "attention_qk_dim": 128},  # openPangu Ultra MoE: MLA by other names
        {"blocksparse_block_size": 64, "dense_attention_every_n_layers": 2},  # Phi-3-small
        {"indexer_n_heads": 4},
        {"compress_ratios": [0, 4, 4, 4]},
    ],
)
def test_what_says_which_layers_attend_is_not_passed_over_in_an_unknown_type(
    kinds: Kinds, fields: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=next(iter(fields))) as caught:
        kinds({**UNKNOWN, **fields})
    assert caught.value.code == "unknown-modification"


@pytest.mark.parametrize(
    ("config", "counted", "alone"),
    [
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, {"mla": 5}, {"mla": 4}),
        ({"model_type": "qwen3_next", "mtp_num_hidden_layers": 1}, {"full_attention": 2}, {"full_attention": 1}),
        # vLLM 0.33.0 mimo_v2_mtp.py: a sliding layer.
        (
            {"model_type": "mimo_v2_flash", "num_nextn_predict_layers": 1},
            {"full_attention": 1, "sliding_attention": 4},
            {"full_attention": 1, "sliding_attention": 3},
        ),
        # Listed behind the model's own layers (Step 3.5).
        (
            {
                "model_type": "step3p5",
                "num_nextn_predict_layers": 2,
                "sliding_window": 512,
                "layer_types": ["full_attention"] * 4 + ["sliding_attention"] * 2,
            },
            {"full_attention": 4, "sliding_attention": 2},
            {"full_attention": 4},
        ),
    ],
)
def test_layers_that_only_drafts_run(
    kinds: Kinds, config: dict[str, Any], counted: dict[str, int], alone: dict[str, int]
) -> None:
    config = {**config, "num_hidden_layers": 4}
    without, with_drafts = kinds(config), kinds(config, overrides={"num_speculative_tokens": 1})
    for found, expected in ((without, alone), (with_drafts, counted)):
        seen = {k.kind: k.count for k in found.kinds if isinstance(k.config, AttentionConfig)}
        assert seen == expected
        assert any("layers that only drafts run" in warning for warning in found.warnings)
    assert max(layer for kind in with_drafts.kinds for layer in kind.layers) >= 4
    silent = kinds({**config, "num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 0, "layer_types": None})
    assert not any("only drafts run" in warning for warning in silent.warnings)


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_images_of_gemma_4_are_said_to_be_causal_in_full_layers(kinds: Kinds, model_type: str) -> None:
    def warnings(use: str | None) -> str:
        text = {"num_hidden_layers": 6, "use_bidirectional_attention": use}
        return "; ".join(kinds({"model_type": model_type, "text_config": text}).warnings)

    said = ("full_attention layers stay causal over images", "windows end images too")
    assert all(each in warnings("vision") for each in said)
    assert not any(each in warnings(None) for each in said)
    assert "stay causal" not in "; ".join(kinds({"model_type": "gemma3", "text_config": {}}).warnings)
