"""From a model's layers to attention configs: flags, tensor parallelism, dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attn_select.errors import ConfigError, ModelError, UnknownNameError, show
from attn_select.layer.config import MLA_DIMS, AttentionConfig
from attn_select.layer.features import FEATURES
from attn_select.layer.models.build_state import state_config
from attn_select.layer.models.checkpoint_cache import CheckpointCache
from attn_select.layer.models.layer_kind import Layer, StateLayer
from attn_select.layer.models.shares import divides, valid_ranks
from attn_select.layer.state import StateConfig

_CACHE_FIELDS = (
    "kv_cache_dtype",
    "block_size",
    *(feature.field for feature in FEATURES if feature.belongs_to == "cache"),
)
"""Flags that mean something only where there is a KV cache: encoders go without."""
_SELF_FIELDS = (
    *(feature.field for feature in FEATURES if feature.belongs_to == "past"),
    *("sparse_top_k", "mla", *MLA_DIMS),
)
"""Flags about a token's own past: not for the encoder and the cross-attention of an encoder-decoder model."""
_ZERO_IS_NONE = (*(feature.field for feature in FEATURES if feature.off is None), "sparse_top_k")
_DEEPSEEK_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""What ``mla`` alone means: DeepSeek-V2's and V3's (arXiv 2405.04434, table 1; 2412.19437, section 4.2)."""
_FLAGS = {
    "num_heads": ("num_attention_heads", "--num-heads"),
    "num_kv_heads": ("num_key_value_heads", "--num-kv-heads"),
    "head_size": ("head_dim (or hidden_size)", "--head-size"),
}


def build(
    layers: Sequence[tuple[Layer | StateLayer, Sequence[int]]],
    *,
    where: str | None,
    tensor_parallel_size: int,
    dtype: Any,
    cache: CheckpointCache,
    overrides: Mapping[str, Any],
    unserved: bool = False,
) -> tuple[list[tuple[str, list[int], AttentionConfig | StateConfig]], list[str]]:
    """Return kind, places in the model and config of every distinct layer, and the overrides that no layer has.

    ``where`` names the model in errors; None where flags alone describe the layer. ``cache`` is what the checkpoint
    says of its KV cache, ``unserved`` whether there are layers beside these. Overrides are ``AttentionConfig``
    fields, of which layers that keep a state take those that are no sizes, and ``StateConfig`` fields; head counts in
    them are totals, which tensor parallelism then divides.
    """
    known = dict.fromkeys((*AttentionConfig.model_fields, *StateConfig.model_fields, "mla"))
    for field in overrides:
        if field not in known:
            raise UnknownNameError("field", str(field), list(known))
    rows: dict[tuple[str, AttentionConfig | StateConfig], list[int]] = {}
    used: set[str] = set()
    of_attention = {f: value for f, value in overrides.items() if f == "mla" or f in AttentionConfig.model_fields}
    for layer, places in layers:
        if isinstance(layer, StateLayer):
            of_a_state, names = state_config(layer, where, tensor_parallel_size, dtype, overrides)
            used |= names
            rows.setdefault((of_a_state.recurrence, of_a_state), []).extend(places)
            continue
        values = _values(layer)
        values["dtype"] = dtype
        if "kv_cache_dtype" not in overrides:
            values |= cache.values(values)
        used |= _override(values, of_attention, of_a_model=where is not None)
        if where is not None:
            _check_complete(values, where, of_attention)
        _divide(values, tensor_parallel_size)
        config = AttentionConfig(**values)
        rows.setdefault((kind_of(config), config), []).extend(places)
    used |= {"dtype", *(("kv_cache_dtype", "num_speculative_tokens") if unserved else ())}
    unused = [field for field in overrides if field not in used]
    return [(kind, sorted(places), config) for (kind, config), places in rows.items()], unused


def kind_of(config: AttentionConfig) -> str:
    """Return the name of a layer's kind."""
    if config.attn_type == "encoder_decoder":
        return "cross_attention"
    name = "mla" if config.mla else "" if config.attn_type == "decoder" else config.attn_type
    if config.sparse:
        return "sparse_mla"
    if config.sliding_window is not None:
        return f"{name}_sliding" if name else "sliding_attention"
    if config.attention_chunk_size is not None:
        return "chunked_attention"
    return name or "full_attention"


def _values(layer: Layer) -> dict[str, Any]:
    """Return the fields of ``AttentionConfig`` that a layer sets, head counts still the model's totals."""
    values = layer._asdict()
    values |= zip(MLA_DIMS, values.pop("mla") or (), strict=False)
    if layer.v_head_size == layer.head_size:
        del values["v_head_size"]
    return {field: value for field, value in values.items() if value is not None}


def _override(values: dict[str, Any], overrides: Mapping[str, Any], of_a_model: bool) -> set[str]:
    """Apply the flags that fit this layer; return their names."""
    attn_type = overrides.get("attn_type", values["attn_type"])
    skipped: tuple[str, ...] = ()
    if of_a_model and attn_type in ("encoder", "encoder_only"):
        skipped += _CACHE_FIELDS
    if of_a_model and attn_type in ("encoder", "encoder_decoder") and "attn_type" not in overrides:
        skipped += _SELF_FIELDS
    given = {field: value for field, value in overrides.items() if field not in skipped and field != "dtype"}
    used = set(given)
    mla = given.pop("mla", None)
    if mla is not None and mla is not True:
        raise ConfigError(f"mla = {mla!r}: accepted is True: MLA with DeepSeek's dims", fields=["mla"])
    if mla:
        if "kv_lora_rank" in values:  # the model's own dims stay
            used.remove("mla")
        else:
            given = _DEEPSEEK_DIMS | given
    heads = given.get("num_heads")
    if heads is not None and "num_kv_heads" not in given and values.get("num_kv_heads") == values.get("num_heads"):
        values.pop("num_kv_heads", None)  # one KV head per query head stays so
    if any(dim in given for dim in MLA_DIMS):
        for field in ("num_kv_heads", "head_size", "v_head_size"):  # they follow from MLA's dims
            values.pop(field, None)
    values |= given
    for field in _ZERO_IS_NONE:
        if type(values.get(field)) in (int, float) and values[field] == 0:
            del values[field]
    return used


def _check_complete(values: Mapping[str, Any], where: str, overrides: Mapping[str, Any]) -> None:
    needed = ("num_heads",) if "kv_lora_rank" in values else ("num_heads", "head_size")
    if missing := [field for field in needed if field not in values]:
        names = " and ".join(_FLAGS[field][0] for field in missing)
        flags = " and ".join(_FLAGS[field][1] for field in missing)
        raise ModelError(f"{where}: {names} missing", hint=f"pass {flags}")
    heads, kv_heads = values["num_heads"], values.get("num_kv_heads")
    of_the_model = "num_heads" not in overrides and "num_kv_heads" not in overrides
    if of_the_model and kv_heads is not None and heads % kv_heads:
        text = f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}"
        raise ModelError(f"{where}: {text}", hint="pass --num-kv-heads")


def _divide(values: dict[str, Any], ranks: int) -> None:
    """Replace the totals by one rank's share: KV heads below the number of ranks are replicated, one each."""
    for field in ("num_heads", "num_kv_heads"):
        value = values.get(field, 1)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{field} = {show(value)}: expected an integer from 1", fields=[field])
    heads, kv_heads = values.get("num_heads"), values.get("num_kv_heads")
    if heads is None or ranks == 1:
        return
    if "kv_lora_rank" in values:
        kv_heads = None  # the latent is the same on all ranks
    if not divides(ranks, heads, kv_heads):
        at_fault = "num_heads" if heads % ranks else "num_kv_heads"
        problem = "does not divide" if heads % ranks else "neither divides nor is a multiple of"
        raise ConfigError(
            f"tensor_parallel_size = {ranks} {problem} {at_fault} = {values[at_fault]}",
            fields=["tensor_parallel_size", at_fault],
            hint=valid_ranks(heads, kv_heads),
        )
    values["num_heads"] = heads // ranks
    if kv_heads is not None:
        values["num_kv_heads"] = max(1, kv_heads // ranks)
