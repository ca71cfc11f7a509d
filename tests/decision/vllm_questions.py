"""The layers that vLLM's selector and ours are both asked about, drawn from what vLLM's can see of a layer."""

from __future__ import annotations

import random
from typing import Any

from attn_select import AttentionConfig

CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
SEED, MHA, ENCODERS, MLA, SPARSE = 33, 260, 20, 120, 60
HEADS, KV_HEADS = 32, 8
RANKS = {576: 512, 320: 256}
"""The rank of the latent by the width of its cache, with a rope part of 64."""

Question = dict[str, Any]
"""Fields of vLLM's ``AttentionSelectorConfig`` that differ from bfloat16, an ``auto`` cache, no block size and False;
for MLA also ``num_heads`` and, where vLLM is asked about prefill, ``dims``."""


def questions() -> list[Question]:
    """Return all of them, each once: decoders, encoders, MLA, sparse MLA."""
    draw = random.Random(SEED)
    found: dict[str, Question] = {}
    for number, kind in ((MHA, _decoder), (ENCODERS, _encoder), (MLA, _mla), (SPARSE, _sparse)):
        wanted = len(found) + number
        while len(found) < wanted:
            question = {name: value for name, value in kind(draw).items() if value not in (None, False, "auto")}
            found.setdefault(repr(question), question)
    return [*found.values()]


def _some(draw: random.Random, **chances: float) -> dict[str, bool]:
    return {name: draw.random() < chance for name, chance in chances.items()}


def _decoder(draw: random.Random) -> Question:
    features = {"has_sink": 0.15, "has_sliding_window": 0.25, "use_mm_prefix": 0.06, "use_per_head_quant_scales": 0.05}
    return {
        "head_size": draw.choice([128] * 6 + [64, 64, 80, 96, 112, 192, 256, 256, 512]),
        "dtype": draw.choice(["bfloat16"] * 8 + ["float16"] * 3 + ["float32"]),
        "kv_cache_dtype": draw.choice(["auto"] * 6 + ["fp8_e4m3"] * 3 + ["fp8_e5m2"]),
        "block_size": draw.choice([None] * 5 + [16, 16, 32, 64, 128, 8, 48]),
        **_some(draw, **features, use_non_causal=0.05, use_batch_invariant=0.08, use_dcp=0.08),
    }


def _encoder(draw: random.Random) -> Question:
    return {
        "head_size": draw.choice([64, 64, 72, 80, 128, 256]),
        "dtype": draw.choice(["bfloat16", "bfloat16", "float16", "float32"]),
        "attn_type": draw.choice(["encoder_only", "encoder", "encoder_decoder"]),
        **_some(draw, has_sliding_window=0.3),
    }


def _mla(draw: random.Random) -> Question:
    return {
        "use_mla": True,
        "head_size": draw.choice([576] * 9 + [320]),
        "num_heads": draw.choice([8, 16, 32, 64, 128, 128]),
        "dtype": draw.choice(["bfloat16"] * 5 + ["float16"]),
        "kv_cache_dtype": draw.choice(["auto"] * 4 + ["fp8_e4m3"] * 3 + ["fp8_e5m2"]),
        "block_size": draw.choice([None] * 5 + [16, 32, 64, 64, 128, 1]),
        "dims": draw.choice([(128, 64, 128)] * 6 + [(192, 64, 256), (128, 64, 192), (64, 64, 128)]),
        **_some(draw, use_non_causal=0.05, use_batch_invariant=0.08, use_dcp=0.12),
    }


def _sparse(draw: random.Random) -> Question:
    return {
        **{name: value for name, value in _mla(draw).items() if name not in ("dims", "use_non_causal")},
        "use_sparse": True,
        "head_size": 576,
        "kv_cache_dtype": draw.choice(["auto", "fp8_ds_mla", "fp8_ds_mla"]),
    }


def config_of(question: Question) -> AttentionConfig:
    """Return the layer as an ``AttentionConfig``.

    Raises:
        ConfigError: its fields contradict each other here.
    """
    fields: dict[str, Any] = {
        "dtype": question.get("dtype", "bfloat16"),
        "kv_cache_dtype": question.get("kv_cache_dtype", "auto"),
        "block_size": question.get("block_size"),
        "sinks": question.get("has_sink", False),
        "mm_prefix": question.get("use_mm_prefix", False),
        "per_head_quant_scales": question.get("use_per_head_quant_scales", False),
        "non_causal": question.get("use_non_causal", False),
        "batch_invariant": question.get("use_batch_invariant", False),
        "decode_context_parallel_size": 2 if question.get("use_dcp") else 1,
        "attn_type": question.get("attn_type", "decoder"),
        "sliding_window": 1024 if question.get("has_sliding_window") else None,
    }
    if not question.get("use_mla"):
        return AttentionConfig(**fields, num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=question["head_size"])
    nope, rope, value = question.get("dims", (128, 64, 128))
    dims = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    top_k = 2048 if question.get("use_sparse") else None
    rank = RANKS[question["head_size"]]
    return AttentionConfig(**fields, **dims, num_heads=question["num_heads"], kv_lora_rank=rank, sparse_top_k=top_k)
