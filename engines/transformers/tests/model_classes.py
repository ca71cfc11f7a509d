"""Every model class of the installed release with a tiny config, as far as it can be made without a hub."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

# By field name, in any config: sizes that keep a model small and its divisions whole.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "audio_vocab_size", "type_vocab_size"), 96),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "embedding_size"), 64),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "hidden_sizes_of_text"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"), 256),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
    "pad_token_id": 0,
    "head_dim": 16,
    "decoder_start_token_id": 2,
    "d_kv": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "rotary_dim": 8,
    "sliding_window": 12,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "initializer_range": 0.3,
    "init_std": 0.3,
}
# Where a field of the same name needs another value in one family.
OWN: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "squeezebert": {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")},
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 8, "shape_size": 16},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 19},
    "big_bird": {"attention_type": "original_full"},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
}
MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES")


def model_types() -> list[str]:
    """Return the model types of the release, whose classes are not imported yet."""
    return sorted({model_type for mapping in MAPPINGS for model_type in getattr(modeling_auto, mapping)})


def model_class(model_type: str) -> Any:
    """Return a model class of a model type: the one that writes text, if there is one; None where there is none."""
    for mapping in MAPPINGS:
        names = getattr(modeling_auto, mapping).get(model_type)
        if names is None:
            continue
        found = getattr(transformers, names if isinstance(names, str) else names[0], None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is not None:
            return found
    return None


VARIANTS = (
    frozenset(),
    frozenset({"head_dim", "layer_types", "sliding_window"}),
    frozenset({"head_dim", "layer_types", "sliding_window", "bos_token_id", "eos_token_id", "pad_token_id"}),
    frozenset({"num_key_value_heads", "head_dim", "layer_types", "hidden_size", "dim", "image_size", "patch_size"}),
)
"""Fields that keep their defaults; families differ in what fits together."""


def tiny_configs(model_class: Any) -> Iterator[Any]:
    """Yield configs of the class with small sizes, its parts included; the class may accept some of them alone."""
    for kept in VARIANTS:
        try:
            yield model_class.config_class(**_small(model_class.config_class(), kept))
        except Exception:  # transformers checks configs in ways of its own
            continue


def _small(config: Any, kept: frozenset[str]) -> dict[str, Any]:
    values = dict(OWN.get(config.model_type, {}))
    latent = _held(config, "kv_lora_rank") is not None
    for name, value in SMALL.items():
        held = _held(config, name)
        if (
            name in kept
            or name in values
            or name in getattr(config, "attribute_map", {})
            or not _has_field(config, name)
        ):
            continue
        if isinstance(held, bool) or (held is not None and not isinstance(held, int | float)):
            continue
        if held is None and name not in ("num_key_value_heads", "head_dim", "pad_token_id"):
            continue
        if latent and name == "head_dim":
            continue
        values[name] = SMALL["num_attention_heads"] if latent and name == "num_key_value_heads" else value
    kinds = _held(config, "layer_types")
    if kinds and "layer_types" not in kept and _has_field(config, "layer_types"):
        values["layer_types"] = [*dict.fromkeys(kinds)][:2] * (2 if len(set(kinds)) == 1 else 1)
    rope = _held(config, "rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        values["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}
    for part in getattr(config, "sub_configs", {}):
        inner = getattr(config, part, None)
        if inner is not None:
            values[part] = {**_small(inner, kept), "model_type": inner.model_type}
    return values


def _held(config: Any, name: str) -> Any:
    """Return a field's value, None where there is none or one per layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # a class of its own per release
        return None


def _has_field(config: Any, name: str) -> bool:
    found = getattr(type(config), name, None)
    return _held(config, name) is not None or (hasattr(config, name) and not isinstance(found, property))


MOST_PARAMETERS = 30e6


def made(model_class: Any) -> tuple[Any, dict[str, Any], Any] | None:
    """Return a model with eager attention, inputs that it runs on and its output; None where none of ours fit it."""
    for config in tiny_configs(model_class):
        try:
            with torch.device("meta"):
                sizes = model_class._from_config(deepcopy(config), attn_implementation="eager")
            if sum(parameter.numel() for parameter in sizes.parameters()) > MOST_PARAMETERS:
                continue
            torch.manual_seed(11)
            model = model_class._from_config(config, attn_implementation="eager").eval()
        except Exception:  # as above
            continue
        for batch in inputs(model):
            try:
                if (found := output(model, batch)) is not None:
                    return model, batch, found
            except Exception:  # a batch of another kind is wanted
                continue
    return None


def output(model: Any, batch: dict[str, Any]) -> Any:
    """Return what a model says of tokens that are no padding; None where it gives no tensor."""
    torch.manual_seed(5)  # routers of some mixtures draw
    with torch.no_grad():
        found = model(**batch)
    values = [found.get(name) for name in ("logits", "last_hidden_state")] + [*found.values()]
    tensors = [value for value in values if torch.is_tensor(value) and value.is_floating_point()]
    mask = batch.get("attention_mask")
    if tensors and mask is not None and tensors[0].shape[:2] == mask.shape:
        return tensors[0][mask.bool()]
    return tensors[0] if tensors else None


def inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Yield batches to try: text with padding on the right, pictures, sound."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 90, (3, 19), generator=generator)
    seen = torch.ones_like(ids)
    seen[1, 14:] = 0
    seen[2, 8:] = 0
    text = {"input_ids": ids * seen, "attention_mask": seen}
    name = getattr(model, "main_input_name", "input_ids")
    if name == "pixel_values":
        yield {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
        yield {"pixel_values": torch.randn(2, 3, 224, 224, generator=generator)}
    elif name in ("input_values", "input_features"):
        yield {name: torch.randn(2, 4000, generator=generator)}
        yield {name: torch.randn(2, getattr(model.config, "num_mel_bins", 80), 3000, generator=generator)}
    yield text
    pixels = {"pixel_values": torch.randn(3, 3, 32, 32, generator=generator)}
    yield {**text, **pixels}
    yield pixels
    yield {**text, "decoder_input_ids": ids[:, :7]}
    yield {"input_ids": ids}
