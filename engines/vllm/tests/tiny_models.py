"""Tiny models with saved random weights, as folders that engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV2Config,
    Gemma3TextConfig,
    LlamaConfig,
    ModernBertConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

SPREAD = 0.15
"""Standard deviation of the weights. Far smaller ones repeat two tokens and prove nothing."""
VOCABULARY = 512
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": SPREAD,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=32,
        tie_word_embeddings=False,
    ),
    "llama of one layer": lambda: LlamaConfig(**{**_SIZES, "num_hidden_layers": 1}),
    "llama of one KV head": lambda: LlamaConfig(**{**_SIZES, "num_key_value_heads": 1}),
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=False),
    "bert": lambda: BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
    ),
    "modernbert": lambda: ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        local_attention=16,
        pad_token_id=0,
        reference_compile=False,
    ),
    # As every Gemma 3 is, and as SGLang reads one.
    "gemma3 tied": lambda: Gemma3TextConfig(
        **_SIZES,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=32,
    ),
    # Sinks in every layer. Not every release of transformers that an engine wants has the class.
    "granite with sinks": lambda: transformers.GraniteSWAConfig(  # type: ignore[attr-defined]
        **{name: value for name, value in _SIZES.items() if name != "head_dim"},
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_multiplier=32**-0.5,
        tie_word_embeddings=False,
    ),
    # Multi-head latent attention without experts, and what SGLang reads of a config beside the rest.
    "deepseek": lambda: DeepseekV2Config(
        **{name: value for name, value in _SIZES.items() if name not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=3,
        moe_layer_freq=1,
        n_routed_experts=4,
        num_experts_per_tok=1,
        topk_method="greedy",
        scoring_func="softmax",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    ),
}


ENCODERS = ("bert", "modernbert")


def save(kind: str, folder: Path) -> Path:
    """Write a model of a kind to a folder; return it."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    model = (AutoModel if kind in ENCODERS else AutoModelForCausalLM).from_config(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02 if "norm" in name else SPREAD)
        if "norm" in name and "gemma" not in kind:
            parameter.data += 1.0
        if "sinks" in name:
            parameter.data = torch.randn_like(parameter).bfloat16().float()  # SGLang keeps bfloat16
        if "embed" in name and model.config.tie_word_embeddings:
            parameter.data *= 0.05  # else the last token's own embedding makes it the next one
    model.to(torch.float32).save_pretrained(folder)
    if kind in ENCODERS:
        _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    words = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)


def save_whisper(folder: Path) -> Path:
    """Write a Whisper, whose decoder attends to what its encoder makes of a sound."""
    torch.manual_seed(0)
    parts = ("encoder", "decoder")
    sizes = {f"{p}_{n}": v for p in parts for n, v in {"layers": 2, "ffn_dim": 256, "attention_heads": 4}.items()}
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=128,
        max_target_positions=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **sizes,
    )
    model = WhisperForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "layer_norm" not in name and "encoder.embed_positions" not in name:
            torch.nn.init.normal_(parameter, 0.0, SPREAD / 4 if "embed_tokens" in name else SPREAD)
    model.to(torch.float32).save_pretrained(folder)
    _save_tokenizer(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    settings = folder / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"processor_class": "WhisperProcessor"}))
    return folder


def save_eagle(target: Path, folder: Path) -> Path:
    """Write an EAGLE head for a saved Llama of one layer: that layer, on the embedding alone, so it is often right.

    A head has no norm before its attention, whose weights take over what the target's norm does to an embedding.
    """
    weights = load_file(target / "model.safetensors")
    hidden = _SIZES["hidden_size"]
    made = {"fc.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)}
    made["embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    for name, tensor in weights.items():
        if name.startswith("model.layers.0.") and "input_layernorm" not in name:
            scale = SPREAD if any(part in name for part in ("q_proj", "k_proj", "v_proj")) else 1.0
            made[name.removeprefix("model.")] = tensor / scale
    return _save(made, target, folder, num_hidden_layers=1)


def save_mtp(target: Path, folder: Path) -> Path:
    """Write a saved Qwen2 as a MiMo, whose layer for the token after next is the target's first one."""
    torch.manual_seed(1)
    weights = load_file(target / "model.safetensors")
    hidden, layer = _SIZES["hidden_size"], "model.mtp_layers.0."
    made = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in weights.items():
        if name.startswith("model.layers.0."):
            made[layer + name.removeprefix("model.layers.0.")] = tensor.clone()
    made |= {f"{layer}{name}.weight": torch.ones(hidden) for name in ("token_layernorm", "hidden_layernorm")}
    made[f"{layer}final_layernorm.weight"] = torch.ones(hidden)
    made[f"{layer}input_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.1
    return _save(made, target, folder, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)


def save_again(target: Path, folder: Path, **changes: Any) -> Path:
    """Write a saved model with other values in its config."""
    return _save(load_file(target / "model.safetensors"), target, folder, **changes)


def _save(weights: dict[str, torch.Tensor], target: Path, folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**json.loads((target / "config.json").read_text()), **changes}))
    return folder
