"""The latent cache as FA3 takes it with a query of its own for V (``q_v``): rope parts as Q and K, the latent as V."""

from __future__ import annotations

from torch import Tensor

from attn_select.layer.config import AttentionConfig

WITHOUT_ROPE = 64
"""Width of Q and K where a layer has no rope part: Q is zeros, which leave the scores of the latent alone, and K the
latent's first columns (vLLM 0.33.0 flashattn_mla_sparse.py)."""


def rope_width(config: AttentionConfig) -> int:
    """Return the width of the kernel's Q and K."""
    return config.qk_rope_head_dim or WITHOUT_ROPE


def query_parts(query: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return the latent's part ``(T, H, rank)`` and the rope part ``(T, H, rope_width)`` of an absorbed query."""
    latent, rope = query.tensor_split([config.kv_lora_rank or 0], dim=-1)
    return latent, rope if config.qk_rope_head_dim else query.new_zeros(*query.shape[:2], WITHOUT_ROPE)


def cache_parts(latents: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return V ``(..., rank)`` and K ``(..., rope_width)`` of latents ``(..., rank + rope)``."""
    latent, rope = latents.tensor_split([config.kv_lora_rank or 0], dim=-1)
    return latent, rope if config.qk_rope_head_dim else latents[..., :WITHOUT_ROPE]
