"""Families in which kinds of layers have sizes of their own, or that spell a common thing in their own way."""

from __future__ import annotations

from collections.abc import Callable

from attn_select.errors import ModelError
from attn_select.layer.models import layer_types as types
from attn_select.layer.models.fields import MAX_LAYERS, Fields
from attn_select.layer.models.layer_kind import Layer


def sliding_window(fields: Fields, bidirectional: bool) -> int | None:
    """Return the window of the sliding layers in tokens, the query's own included; None where there is none."""
    family = fields.family
    if family.variant == "modernbert":  # local_attention spans both sides; modeling_modernbert.py adds the token itself
        both = fields.tokens("local_attention")
        return both // 2 + 1 if both else None
    if family.variant == "mimo" and (before := fields.tokens("sliding_window_size")):
        return before + 1  # MiMoV2FlashConfig: that many tokens before the query
    found = types.window(fields)
    if family.model_type == "dots3_note_text" and fields.get("use_sliding_window") is None:
        return found or 512  # Dots3NoteTextConfig
    if found and family.model_type in ("embedding_gemma2_text", "openai_privacy_filter"):
        return found + 1  # so far to each side (transformers 5.24.0 masking_utils.py), and the token itself
    if found and bidirectional and family.model_type in ("gemma3_text", "gemma4_text"):
        return found // 2 + 1  # both sides, as their config classes have it
    return found


def kv_heads(fields: Fields, heads: int | None) -> int | None:
    """Return the number of KV heads: the field where there is one, else one per query head."""
    if fields.family.variant == "chatglm":
        return fields.heads("multi_query_group_num") if fields.flag("multi_query_attention") else heads
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):  # Falcon, StarCoder
        return 1
    inner = fields.raw.get("attn_config")
    if isinstance(inner, dict) and inner.get("attn_type") == "multiquery_attention":  # MPT
        return 1
    return fields.heads("num_key_value_heads") or heads


def alibi(fields: Fields) -> bool:
    """Return whether the model biases scores by distance (ALiBi)."""
    if fields.family.variant == "baichuan":
        return fields.integer("hidden_size") not in (None, 4096)
    return fields.family.alibi or fields.flag("alibi") or fields.raw.get("position_embedding_type") == "alibi"


_BIASES = ("relative_attention_num_buckets", "rel_extent", "d_rel")
"""Fields of models that add a bias per head and distance: T5's (T5Config), and two of Inkling (InklingTextConfig)."""


def position_bias(fields: Fields) -> bool:
    """Return whether the model adds a bias for each head and distance to the scores, whatever its type."""
    embedding = fields.raw.get("position_embedding_type")  # BERT's relative_key, relative_key_query
    relative = isinstance(embedding, str) and embedding.startswith("relative")
    return relative or fields.family.position_bias or any(fields.raw.get(name) is not None for name in _BIASES)


def dual_chunk(fields: Fields) -> bool:
    """Return whether positions count within chunks (Qwen2.5-1M; vLLM 0.33.0 rotary_embedding/dual_chunk_rope.py)."""
    found = fields.get("dual_chunk_attention_config")
    if found is not None and not isinstance(found, dict):
        raise fields.wrong("dual_chunk_attention_config", found, "an object, or null")
    return bool(found)


def sinks(fields: Fields) -> bool:
    """Return whether all layers have a learned sink logit per head: the field where there is one (HYV4Config)."""
    if fields.raw.get("learnable_sink") is not None:
        return fields.flag("learnable_sink")
    return fields.family.sinks


def _gemma4(fields: Fields, kind: str, layer: Layer) -> Layer:
    """Full layers are wider than sliding ones, and may have fewer KV heads: where keys are values (Gemma4TextConfig),
    or in any case (DiffusionGemma, EmbeddingGemma 2)."""
    if kind != types.FULL:
        return layer
    kv = None
    if fields.family.variant == "gemma4_ungated" or fields.flag("attention_k_eq_v"):
        kv = fields.heads("num_global_key_value_heads")
    if kv is None and fields.family.model_type == "embedding_gemma2_text":
        kv = 1
    size = fields.size("global_head_dim") or 512
    return layer._replace(head_size=size, num_kv_heads=kv or layer.num_kv_heads)


def _mimo(fields: Fields, kind: str, layer: Layer) -> Layer:
    """Sliding layers have sinks and their own counts (vLLM's mimo_v2.py; without those, modeling_mimo_v2_flash.py)."""
    if kind != types.SLIDING:
        return layer._replace(sinks=fields.flag("add_full_attention_sink_bias"))
    sinks = fields.get("add_swa_attention_sink_bias")
    own = layer._replace(num_kv_heads=2 * layer.num_kv_heads if layer.num_kv_heads else None)
    return _swa(fields, kind, own)._replace(
        v_head_size=fields.size("swa_v_head_dim") or layer.v_head_size,
        sinks=sinks is None or fields.flag("add_swa_attention_sink_bias"),
    )


def _swa(fields: Fields, kind: str, layer: Layer) -> Layer:
    """Sliding layers may have counts and a width of their own (Inkling, Step 5)."""
    if kind != types.SLIDING:
        return layer
    return layer._replace(
        num_heads=fields.heads("swa_num_attention_heads") or layer.num_heads,
        num_kv_heads=fields.heads("swa_num_key_value_heads") or layer.num_kv_heads,
        head_size=fields.size("swa_head_dim") or layer.head_size,
    )


def _dots3_note(fields: Fields, kind: str, layer: Layer) -> Layer:
    """Sliding layers have another latent and other heads (Dots3NoteTextConfig)."""
    if kind != types.SLIDING or not layer.mla:
        return layer
    head, nope = fields.size("swa_head_dim") or 256, fields.size("swa_qk_nope_head_dim") or 192
    rope = fields.size("swa_qk_rope_head_dim") or head - nope
    rank, value = fields.integer("swa_kv_lora_rank") or 1024, fields.size("swa_v_head_dim") or 128
    return layer._replace(num_heads=fields.heads("swa_num_attention_heads") or 64, mla=(rank, nope, rope, value))


def _step3p5(fields: Fields, kind: str, layer: Layer) -> Layer:
    """Sliding layers take their head counts from ``attention_other_setting`` (Step3p7TextConfig)."""
    other = fields.raw.get("attention_other_setting")
    if kind != types.SLIDING or not isinstance(other, dict):
        return layer
    inner = Fields(other, fields.family, f"{fields.where}: attention_other_setting")
    heads, kv, size = (other.get(name) for name in ("num_attention_heads", "num_attention_groups", "head_dim"))
    return layer._replace(
        num_heads=inner.heads("num_attention_heads") if heads is not None else layer.num_heads,
        num_kv_heads=inner.heads("num_key_value_heads") if kv is not None else layer.num_kv_heads,
        head_size=inner.size("head_dim") if size is not None else layer.head_size,
    )


def _zamba(fields: Fields, kind: str, layer: Layer) -> Layer:
    """The shared attention block works on twice the hidden size (ZambaConfig, Zamba2Config)."""
    hidden, heads = fields.integer("hidden_size"), layer.num_heads
    if fields.size("attention_head_dim") or not hidden or not heads:
        return layer
    return layer._replace(head_size=min(2 * hidden // heads, 8192))


VARIANTS: dict[str, Callable[[Fields, str, Layer], Layer]] = {
    "dots3_note": _dots3_note,
    "gemma4": _gemma4,
    "gemma4_ungated": _gemma4,
    "mimo": _mimo,
    "step3p5": _step3p5,
    "swa": _swa,
    "zamba": _zamba,
}


def per_layer(fields: Fields, name: str, count: int) -> list[int] | None:
    """Return head counts given one by one for ``count`` layers, or None."""
    if fields.family.variant == "nemotron_nas" and name == "num_key_value_heads_per_layer":
        return _nemotron_nas(fields)
    listed = fields.list_of(int, name, "head counts, one per layer")
    if listed is None:
        return None
    if len(listed) != count:
        raise ModelError(f"{fields.where}: {name} has {len(listed)} entries for {count} layers")
    for index, value in enumerate(listed):
        if not 1 <= value <= MAX_LAYERS:
            raise fields.wrong(f"{name}[{index}]", value, f"an integer from 1 to {MAX_LAYERS}")
    return listed


def _nemotron_nas(fields: Fields) -> list[int]:
    heads = fields.heads("num_attention_heads")
    counts: list[int] = []
    for block in types.blocks(fields):
        group = types.attention_block(fields, block).get("n_heads_in_group")
        if group is not None and (type(group) is not int or group < 1 or heads is None or heads % group):
            name = "block_configs[].attention.n_heads_in_group"
            raise fields.wrong(name, group, f"a divisor of {heads} heads, or null")
        counts.append((heads or 1) // (group or 1))
    return counts
