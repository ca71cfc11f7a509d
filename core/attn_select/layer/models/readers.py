"""From the fields of one config to its distinct layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

from attn_select.errors import ModelError, show
from attn_select.layer.config import MLA_DIMS
from attn_select.layer.models import layer_types as types
from attn_select.layer.models import variants
from attn_select.layer.models.data_files import defaults
from attn_select.layer.models.fields import Fields
from attn_select.layer.models.kv_sharing import sharing
from attn_select.layer.models.layer_kind import Layer, Reading, Sparse, StateLayer
from attn_select.layer.models.state_layers import state_layer
from attn_select.layer.models.text import first_architecture
from attn_select.layer.models.unserved import KINDS, sparse_kind


def read(fields: Fields, mm_prefix: bool, drafts: bool = False) -> Reading:
    """Return the layers that ``fields`` describe."""
    if not fields.family.known:
        _refuse_fields_of_layers(fields)
    apart = fields.family.reader == "encoder_decoder"
    reading = _encoder_decoder(fields) if apart else _stack(fields, mm_prefix, drafts)
    if fields.family.note:
        reading.notes.append(f"{fields.family.model_type} {fields.family.note}")
    return reading


def _refuse_fields_of_layers(fields: Fields) -> None:
    """Raise where a config of an unknown model type says which layers attend, or to what."""
    for name in defaults()["of_layers"]:
        if (value := fields.raw.get(name)) is not None:
            text = (
                f"{name} = {show(value, 60)}: says which layers attend, or to what, and is not known of this model type"
            )
            raise ModelError(f"{fields.where}: {text}", hint=types.NO_MODEL_FITS, code="unknown-modification")


def _is_bidirectional(fields: Fields) -> bool:
    """BERT and its kin, and decoders turned into embedding models (vLLM reads ``is_causal`` in llama.py, gemma3.py)."""
    if fields.family.reader == "encoder_only":
        return not fields.flag("is_decoder")
    return fields.raw.get("is_causal") is False or fields.raw.get("use_bidirectional_attention") in (True, "all")


def _stack(fields: Fields, mm_prefix: bool, drafts: bool) -> Reading:
    """Read one stack of layers: a decoder, or an encoder without one."""
    kinds = types.layer_types(fields)
    for_drafts = types.draft_types(fields, kinds)
    shared = sharing(fields, kinds)
    bidirectional = _is_bidirectional(fields)
    base = _base(fields, "encoder_only" if bidirectional else "decoder", mm_prefix and not bidirectional)
    window = variants.sliding_window(fields, bidirectional)
    chunk = fields.tokens("attention_chunk_size")
    top_k = fields.tokens("index_topk") if base.mla else None
    heads = variants.per_layer(fields, "num_attention_heads_per_layer", len(kinds))
    kv_heads = variants.per_layer(fields, "num_key_value_heads_per_layer", len(kinds))
    rows: dict[tuple[str, int | None, int | None], list[int]] = {}
    counted = [*kinds, *(for_drafts if drafts else ())]
    for place, kind in enumerate(counted):
        rows.setdefault((kind, _at(heads, place), _at(kv_heads, place)), []).append(place)
    left_out: Counter[str] = Counter()
    unserved: list[tuple[Sparse, Sequence[int]]] = []
    reading = Reading([], [], shared, unserved)
    for (kind, own_heads, own_kv_heads), places in rows.items():
        count = len(places)
        if kind in (types.LINEAR, types.CONV, types.HYBRID):
            state = state_layer(fields)
            if isinstance(state, StateLayer):
                reading.layers.append((state, places))
            else:
                left_out[f"{types.LINEAR if kind == types.HYBRID else kind}, which are {state}"] += count
        if kind in (types.LINEAR, types.CONV):
            continue
        if kind in KINDS and not (kind == types.INDEXED and base.mla):
            unserved.append((sparse_kind(fields, kind, base), places))
            continue
        if kind not in types.ATTENTION:
            left_out[kind] += count
            continue
        layer = base._replace(
            num_heads=own_heads or base.num_heads,
            num_kv_heads=own_kv_heads or base.num_kv_heads,
            sliding_window=window if kind == types.SLIDING else None,
            sparse_top_k=top_k if kind in (types.FULL, types.INDEXED) else None,
            attention_chunk_size=chunk if kind == types.CHUNKED else None,
        )
        if kind == types.CROSS:
            layer = layer._replace(attn_type="encoder_decoder", mm_prefix=False)
        if variant := variants.VARIANTS.get(fields.family.variant or ""):
            layer = variant(fields, kind, layer)
        reading.layers.append((layer, places))
        if kind == types.SLIDING and window is None:
            reading.notes.append(f"{count} sliding_attention layers, but no sliding_window: counted as full attention")
        if kind == types.CHUNKED and chunk is None:
            reading.notes.append(
                f"{count} chunked_attention layers, but no attention_chunk_size: counted as full attention"
            )
    _say_what_is_left_out(fields, reading, left_out, len(counted))
    reading.notes.extend(_what_layers_do_otherwise(fields, base, top_k))
    if for_drafts:
        what = "layers that only drafts run, with caches of their own"
        so = "counted" if drafts else "left out (--speculative-tokens N counts them)"
        reading.notes.append(f"{fields.name_of(types.DRAFT_LAYERS)} = {len(for_drafts)}: {what}, {so}")
    return reading


def _what_layers_do_otherwise(fields: Fields, base: Layer, top_k: int | None) -> Iterator[str]:
    """Yield what a model does that no field of ``AttentionConfig`` says, where its layers are read all the same."""
    if top_k is not None and (pool := fields.integer("index_kpool") or 1) > 1:  # Glm5NextTextConfig
        what = f"its indexer scores pools of {pool} keys, which its cache holds instead of single ones"
        here = "the indexer's bytes here, and attn_select.runtime's indexer, are of single keys"
        yield f"index_kpool = {pool}: {what}; {here}"
    if base.mm_prefix and fields.family.variant == "gemma4":
        # transformers 5.23.0 modeling_gemma4.py create_masks_for_vision_model; vLLM's gemma4_mm.py. vLLM wants backends
        # with image ranges for all layers of the model, so full ones are read as having some.
        yield "full_attention layers stay causal over images: give their group no mm_prefix_ranges"
        yield "windows end images too, which the runtime's mm_prefix_ranges do not say: an image sees all of itself"
    if fields.family.model_type == "minicpm" and isinstance(
        fields.get("sparse_config"), dict
    ):  # MiniCPM 4.1: vLLM 0.33.0 model_executor/models/minicpm.py
        yield "sparse_config: read as dense attention, as vLLM 0.33.0 runs it; SGLang has sparse backends for it"


def _at(listed: Sequence[Any] | None, place: int) -> Any:
    """Return the entry of one layer; layers for drafts behind the list's end are as its last."""
    return listed[min(place, len(listed) - 1)] if listed else None


def _say_what_is_left_out(fields: Fields, reading: Reading, left_out: Counter[str], total: int) -> None:
    """Name the layers that no config describes, and the layers that have neither attention nor a state."""
    without = Counter({kind: count for kind, count in left_out.items() if kind in types.NO_ATTENTION})
    lacking = left_out - without
    named = ", ".join(f"{count} {_what_it_is(kind)}" for kind, count in left_out.items())
    if reading.unserved:
        counts: Counter[str] = Counter()
        for sparse, places in reading.unserved:
            counts[sparse.kind] += len(places)
        named = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        reading.notes.append(f"{counts.total()} of {total} layers have no kernel here: {named}")
    if not reading.layers and not reading.unserved and lacking:
        raise ModelError(f"{fields.where}: no backend has a kernel for its layers ({named})")
    if not reading.layers and not reading.unserved:
        raise ModelError(f"{fields.where}: no layer has attention or a state ({named})")
    if without:
        named = ", ".join(f"{count} {kind}" for kind, count in without.items())
        reading.notes.append(f"{without.total()} of {total} layers have neither attention nor a state: {named}")
    if lacking:
        named = ", ".join(f"{count} {_what_it_is(kind)}" for kind, count in lacking.items())
        text = f"{lacking.total()} of {total} layers are left out, since no backend has a kernel for them: {named}"
        reading.notes.append(text)


def _what_it_is(kind: str) -> str:
    what = types.UNSUPPORTED.get(kind)
    return f"{kind}, which attend to {what}" if what else kind


def _base(fields: Fields, attn_type: str, mm_prefix: bool) -> Layer:
    """Read what all layers of a stack have in common."""
    heads = fields.heads("num_attention_heads")
    mla = _mla(fields, heads)
    size = None if mla else fields.head_size(heads)
    return Layer(
        num_heads=heads,
        num_kv_heads=1 if mla else variants.kv_heads(fields, heads),
        head_size=size,
        v_head_size=None if mla else _v_head_size(fields),
        attn_type=attn_type,
        logits_soft_cap=fields.positive("attn_logit_softcapping"),
        alibi=variants.alibi(fields),
        sinks=variants.sinks(fields),
        position_bias=variants.position_bias(fields),
        dual_chunk=variants.dual_chunk(fields),
        mm_prefix=mm_prefix,
        mla=mla,
    )


def _mla(fields: Fields, heads: int | None) -> tuple[int, int, int, int] | None:
    """Return MLA's dims. A DeepSeek config's ``head_dim``, the width of the rotary part, means nothing here."""
    if fields.raw.get("use_mla") is False or not fields.integer("kv_lora_rank", 0):
        return None
    dims = [fields.size(name) for name in MLA_DIMS]
    if dims[2] is None:  # GLM-5 Next: 0 says that keys have no rotary part
        dims[2] = fields.integer("qk_rope_head_dim", 0, 8192)
    if dims[3] is None and fields.family.model_type == "minicpm3":  # MiniCPM3Config
        hidden = fields.integer("hidden_size")
        dims[3] = hidden // heads if hidden and heads and 0 < hidden // heads <= 8192 else None
    if missing := [name for name, value in zip(MLA_DIMS, dims, strict=True) if value is None]:
        text = f"{', '.join(missing)} missing beside kv_lora_rank = {dims[0]}: MLA needs all four"
        raise ModelError(f"{fields.where}: {text}")
    return cast(tuple[int, int, int, int], tuple(dims))


def _v_head_size(fields: Fields) -> int | None:
    if "kv_lora_rank" in fields.family.defaults and "v_head_dim" not in fields.raw:
        return None  # the default belongs to MLA, which this config switches off
    return fields.size("v_head_dim")


def _encoder_decoder(fields: Fields) -> Reading:
    """Whisper, BART, T5 and their kin: no grouped heads, one width for all."""
    name = first_architecture(fields.raw)
    alone = "encoder" if name.endswith("EncoderModel") else "decoder" if name.endswith("ForCausalLM") else None
    reading = Reading([], [])
    for side, kinds in (("encoder", ("encoder",)), ("decoder", ("decoder", "encoder_decoder"))):
        if alone not in (None, side):
            continue
        heads = fields.heads(f"{side}_attention_heads")
        count = fields.heads(f"{side}_layers")
        if count is None:
            raise ModelError(f"{fields.where}: {side}_layers is missing", hint=types.NO_MODEL)
        bias = variants.position_bias(fields)
        layer = Layer(num_heads=heads, num_kv_heads=heads, head_size=fields.head_size(heads), position_bias=bias)
        if alone:
            kinds = ("encoder_only",) if alone == "encoder" else ("decoder",)
        for kind in kinds:  # cross-attention has no distances
            own = layer._replace(attn_type=kind, position_bias=bias and kind != "encoder_decoder")
            reading.layers.append((own, range(count)))
    return reading
