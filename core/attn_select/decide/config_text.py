"""What a layer asks for, in a line for people."""

from __future__ import annotations

from attn_select.layer.config import AttentionConfig
from attn_select.layer.features import FEATURES
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.state import StateConfig


def config_text(config: LayerConfig) -> str:
    """Return one line that says what the layer asks for."""
    parts = _of_state(config) if isinstance(config, StateConfig) else _of_attention(config)
    return ", ".join([*parts, *([f"CUDA graphs {config.cuda_graph}"] if config.cuda_graph != "NEVER" else [])])


def _of_state(config: StateConfig) -> list[str]:
    heads = (
        f"{config.num_heads} key heads of {config.head_size}, {config.num_v_heads} value heads of {config.v_head_size}"
    )
    parts = [heads, config.dtype, f"state {config.state_dtype}"]
    if config.conv_kernel_size:
        parts.append(f"convolution of {config.conv_kernel_size} tokens")
    if config.num_speculative_tokens:
        parts.append(f"{config.num_speculative_tokens} speculative tokens")
    return parts


def _of_attention(config: AttentionConfig) -> list[str]:
    if config.mla:
        parts = [
            f"{config.num_heads} query heads, MLA latent {config.kv_lora_rank} + {config.qk_rope_head_dim}",
            f"prefill QK {config.qk_nope_head_dim} + {config.qk_rope_head_dim}, V {config.v_head_dim}",
        ]
    else:
        kv_heads = f"{config.num_kv_heads} KV head{'' if config.num_kv_heads == 1 else 's'}"
        parts = [f"{config.num_heads} query heads, {kv_heads}, head size {config.head_size}"]
        if config.v_head_size is not None:
            parts.append(f"V head size {config.v_head_size}")
    parts.append(config.dtype)
    if config.has_cache:
        parts.append(f"KV cache {config.kv_cache_dtype}")
    if config.attn_type != "decoder":
        parts.append(config.attn_type)
    if config.block_size is not None:
        parts.append(f"block size {config.block_size}")
    if config.sparse_top_k is not None:
        parts.append(f"sparse top-k {config.sparse_top_k}")
    values = [(feature, getattr(config, feature.field)) for feature in FEATURES]
    return parts + [feature.says.format(value) for feature, value in values if value != feature.off]
