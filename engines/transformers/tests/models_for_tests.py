"""Small models with random weights, one per family of attention that transformers has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
"""Weights large enough that attention matters: with the usual 0.02 a model repeats one token."""
GQA = {**SMALL, "num_key_value_heads": 2}
PAIR = {
    "vocab_size": 96,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "init_std": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA))


def mistral() -> Any:
    """Every layer has a window shorter than the prompts."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**GQA, sliding_window=12))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GQA, head_dim=16))


def phi() -> Any:
    return transformers.PhiForCausalLM(transformers.PhiConfig(**SMALL))


def gemma2() -> Any:
    """Windows in every other layer, a soft cap, and a scale of its own."""
    config = transformers.Gemma2Config(
        **GQA, head_dim=16, sliding_window=12, query_pre_attn_scalar=24, attn_logit_softcapping=4.0
    )
    return transformers.Gemma2ForCausalLM(config)


def gemma3() -> Any:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**GQA, head_dim=16, sliding_window=12, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config)


def gemma3_images() -> Any:
    """Gemma 3 with a vision tower: tokens of an image, those of type 1, see each other in both directions."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**GQA, "head_dim": 16, "sliding_window": 12, "layer_types": kinds},
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=95,
        boi_token_index=93,
        eoi_token_index=94,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def llama4() -> Any:
    """Three layers inside chunks, and one without rope that sees all."""
    config = transformers.Llama4TextConfig(
        **{**GQA, "num_hidden_layers": 4}, intermediate_size_mlp=96, head_dim=16, moe_layers=[], attention_chunk_size=32
    )
    return transformers.Llama4ForCausalLM(config)


def gemma4() -> Any:
    """Head size 512 in the full layers; the last two layers read the caches of the two before them."""
    config = transformers.Gemma4TextConfig(
        **{**GQA, "num_hidden_layers": 4},
        vocab_size_per_layer_input=SMALL["vocab_size"],
        hidden_size_per_layer_input=8,
        head_dim=16,
        global_head_dim=512,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
    )
    return transformers.Gemma4ForCausalLM(config)


def gpt_oss() -> Any:
    """Sinks, and windows in every other layer."""
    config = transformers.GptOssConfig(
        **GQA, head_dim=16, sliding_window=12, num_local_experts=4, num_experts_per_tok=2, rope_parameters=None
    )
    return transformers.GptOssForCausalLM(config)


LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
INDEXED = {**LATENT, "index_topk": 12, "index_head_dim": 16, "index_n_heads": 4}


def deepseek_v3() -> Any:
    """Multi-head latent attention; transformers expands it, and values are narrower than keys."""
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**LATENT))


def deepseek_v32() -> Any:
    """Sparse MLA: every layer has an indexer that keeps 12 tokens."""
    return transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**INDEXED))


def glm_moe_dsa() -> Any:
    """GLM-5's sparse MLA: the second layer attends to what the first one's indexer chose."""
    config = transformers.GlmMoeDsaConfig(**INDEXED, indexer_types=["full", "shared", "full"])
    return transformers.GlmMoeDsaForCausalLM(config)


def bart() -> Any:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**PAIR, max_position_embeddings=256, forced_eos_token_id=None)
    )


def t5() -> Any:
    """A position bias is added to the scores: no kernel does that."""
    config = transformers.T5Config(
        vocab_size=96,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        initializer_factor=5.0,
        eos_token_id=None,
        pad_token_id=0,
        decoder_start_token_id=2,
    )
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        **PAIR, num_mel_bins=16, max_source_positions=20, max_target_positions=64, suppress_tokens=None
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SMALL))


def modernbert() -> Any:
    """Windows on both sides in two of three layers."""
    config = transformers.ModernBertConfig(**SMALL, local_attention=8, global_attn_every_n_layers=3)
    return transformers.ModernBertModel(config)


def siglip() -> Any:
    config = transformers.SiglipVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    return transformers.SiglipVisionModel(config)


DECODERS: dict[str, Callable[[], Any]] = {
    made.__name__: made for made in (llama, mistral, qwen3, phi, gemma2, gemma3, gpt_oss, deepseek_v3)
}


def built(make: Callable[[], Any]) -> Any:
    """Return the model in evaluation mode, float32 on the CPU, with the same weights each time."""
    torch.manual_seed(11)
    return make().eval()


def both(model: Any, run: Callable[[], Any]) -> list[Any]:
    """Return what ``run`` gives with eager's attention and with attn-select's."""
    found = []
    for implementation in ("eager", "attn_select"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(run())
    return found
