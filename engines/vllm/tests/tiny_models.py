"""Tiny models with saved random weights, as folders that engines read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

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
    # As every Gemma 3 is, and as SGLang reads one.
    "gemma3 tied": lambda: Gemma3TextConfig(
        **_SIZES,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=32,
    ),
}


def save(kind: str, folder: Path) -> Path:
    """Write a model of a kind to a folder; return it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02 if "norm" in name else SPREAD)
        if "norm" in name and "gemma" not in kind:
            parameter.data += 1.0
        if "embed" in name and model.config.tie_word_embeddings:
            parameter.data *= 0.05  # else the last token's own embedding makes it the next one
    model.to(torch.float32).save_pretrained(folder)
    return folder
