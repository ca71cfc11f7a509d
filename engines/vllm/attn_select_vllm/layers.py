"""What vLLM says of a layer, as an ``AttentionConfig`` per rank.

vLLM's selector asks with an ``AttentionSelectorConfig`` (vllm/v1/attention/selector.py). Heads per rank come from its
``ModelConfig``; MLA dimensions, windows, soft caps and ALiBi are read in the model's Hugging Face config, as by
``attn-select explain --model``.
"""

from __future__ import annotations

from typing import Any, cast

from attn_select.errors import ModelError
from attn_select.layer.config import MLA_DIMS, AttentionConfig, CudaGraphLevel
from attn_select.layer.dtypes import DTypeName, canonical
from attn_select.layer.models import configs_from_model

DECODERS = ("decoder", "encoder_decoder")
"""Types of layers whose decodes vLLM captures."""


def kind_of(attn_config: Any) -> str:
    """Return the layer kind that a selector's question is about, as ``attn-select explain`` names it."""
    if attn_config.use_mla:
        return "sparse_mla" if attn_config.use_sparse else "mla"
    if attn_config.attn_type != "decoder":
        return "cross_attention" if attn_config.attn_type == "encoder_decoder" else _attn_type(attn_config)
    return "sliding_attention" if attn_config.has_sliding_window else "full_attention"


def layer_config(attn_config: Any, vllm_config: Any, num_heads: int | None) -> AttentionConfig:
    """Return what the layers that a selector asks about want."""
    # ``num_heads`` are query heads per rank where the selector is told them (MLA). Raises ConfigError for what
    # attn-select knows nothing of, such as a KV-cache dtype of vLLM's own, ModelError where the model's config
    # describes no such layers.
    model, parallel = _model_of(attn_config, vllm_config), vllm_config.parallel_config
    fields: dict[str, Any] = {
        "num_heads": num_heads or model.get_num_attention_heads(parallel),
        "block_size": attn_config.block_size,
        "kv_cache_dtype": attn_config.kv_cache_dtype or "auto",
        "sinks": attn_config.has_sink,
        "mm_prefix": attn_config.use_mm_prefix,
        "non_causal": attn_config.use_non_causal,
        "per_head_quant_scales": attn_config.use_per_head_quant_scales,
        "attn_type": _attn_type(attn_config),
    }
    read = _as_read(attn_config, model.hf_text_config)
    if attn_config.use_mla:
        fields |= {name: getattr(read, name) for name in (*MLA_DIMS, "sparse_top_k")}
    else:
        fields |= {"num_kv_heads": model.get_num_kv_heads(parallel), "head_size": attn_config.head_size}
        fields |= {"logits_soft_cap": read.logits_soft_cap, "alibi": read.alibi}
        if attn_config.has_sliding_window:
            fields["sliding_window"] = read.sliding_window or vllm_config.cache_config.sliding_window
    return config_of(vllm_config, attn_config.dtype, attn_config.use_batch_invariant, **fields)


def _model_of(attn_config: Any, vllm_config: Any) -> Any:
    """Return the ``ModelConfig`` of the layers: the drafter's where only its heads are as wide."""
    # A head of EAGLE is made under the engine's config, and nothing in the question says whose layers they are.
    model, drafter = vllm_config.model_config, getattr(vllm_config.speculative_config, "draft_model_config", None)
    if drafter is not None and attn_config.head_size == drafter.get_head_size() != model.get_head_size():
        return drafter
    return model


def _attn_type(attn_config: Any) -> str:
    return str(getattr(attn_config.attn_type, "value", attn_config.attn_type))


def _as_read(attn_config: Any, text: Any) -> AttentionConfig:
    """Return the layers as attn-select reads them in the model's config, of the kind that is asked about if any are."""
    kinds = configs_from_model(text).attention_configs
    same = [
        config for config in kinds if config.attn_type == _attn_type(attn_config) and config.mla == attn_config.use_mla
    ]
    if not same:
        seen = ", ".join(dict.fromkeys(f"{'MLA ' if c.mla else ''}{c.attn_type}" for c in kinds))
        raise ModelError(
            f"vLLM has {kind_of(attn_config)} layers, and the model's config describes {seen} layers alone"
        )
    windowed = [config for config in same if (config.sliding_window is not None) == attn_config.has_sliding_window]
    return (windowed or same)[0]


def config_of(vllm_config: Any, dtype: Any, batch_invariant: bool, **fields: Any) -> AttentionConfig:
    """Return the config of layers with these fields and what is the same for all layers of an engine."""
    return AttentionConfig(
        dtype=cast(DTypeName, canonical(str(dtype))),
        batch_invariant=bool(batch_invariant),
        decode_context_parallel_size=vllm_config.parallel_config.decode_context_parallel_size,
        num_speculative_tokens=_drafts(vllm_config),
        cuda_graph=wanted_graphs(vllm_config) if fields.get("attn_type", "decoder") in DECODERS else "NEVER",
        **fields,
    )


def _drafts(vllm_config: Any) -> int:
    """Return how many tokens a decode may have beside its first."""
    # The same as ``max_decode_query_len`` of vllm/v1/attention/backend.py, which older releases lack.
    speculative = vllm_config.speculative_config
    drafts = (speculative.num_speculative_tokens or 0) if speculative is not None else 0
    # vLLM's first runner appends the drafts that are made at once to the drafts that it verifies.
    appends = getattr(speculative, "parallel_drafting", False) and not vllm_config.use_v2_model_runner
    return 2 * drafts if appends else drafts


def scales_per_head(vllm_config: Any) -> bool:
    """Whether the checkpoint has an FP8 scale per KV head (``Attention.__init__`` of vLLM's layers asks likewise)."""
    scheme = getattr(getattr(vllm_config, "quant_config", None), "kv_cache_scheme", None)
    return scheme is not None and scheme.get("strategy") == "attn_head"


def wanted_graphs(vllm_config: Any) -> CudaGraphLevel:
    """Return the least level that lets vLLM capture whole decodes, where it is to capture them."""
    # Pieces between attention layers are captured with any backend.
    mode = vllm_config.compilation_config.cudagraph_mode
    if vllm_config.model_config.enforce_eager or mode is None or not mode.has_full_cudagraphs():
        return "NEVER"
    return "UNIFORM_BATCH" if vllm_config.speculative_config is not None else "UNIFORM_SINGLE_TOKEN_DECODE"
