"""Our tables and our readings beside the config classes of the transformers library, which imports without torch."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest

from attn_select.errors import ModelError
from attn_select.layer.models import configs_from_model, layer_kinds, load
from attn_select.layer.models.data_files import defaults, family
from attn_select.layer.models.fields import Fields
from attn_select.layer.models.layer_kind import Layer, StateLayer
from attn_select.layer.models.layer_types import layer_types
from attn_select.layer.models.readers import read
from attn_select.layer.models.variants import sliding_window
from attn_select.layer.state import StateConfig

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # not ours
    transformers = pytest.importorskip(
        "transformers", reason="the transformers library is not installed", exc_type=ImportError
    )

TABLE = defaults()
RELEASE = TABLE["source"].split()[1].rstrip(",")
SAME_MAJOR = transformers.__version__.partition(".")[0] == RELEASE.partition(".")[0]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not SAME_MAJOR, reason=f"the table is of transformers {RELEASE}, installed is {transformers.__version__}"
    ),
]

# What the table may hold of a class: names as in config.json, or the usual one that the class maps to its own.
FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "attention_chunk_size", "attn_logit_softcapping"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk", "alibi", "multi_query"),
    *("new_decoder_architecture", "encoder_layers", "decoder_layers", "encoder_attention_heads"),
    *("decoder_attention_heads", "attn_layer_period", "attn_layer_offset", "local_attention", "block_types"),
    *("global_attn_every_n_layers", "sliding_window_pattern", "no_rope_layer_interval"),
    "num_kv_shared_layers",
)
# What it may hold of a class whose layers keep a state, by the name that the reader asks for.
STATE_FIELDS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "mamba_num_heads", "mamba_head_dim"),
    *("mamba_groups", "mamba_state_size", "mamba_conv_kernel", "mamba_expand", "mamba_chunk_size", "mamba_d_ssm"),
)
# Of kinds of attention that have no kernel here.
SPARSE_FIELDS = {
    "deepseek_v4": ("index_n_heads", "index_head_dim"),
    "glm5_next_text": ("index_kpool",),
    "minimax_m3_vl_text": ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks"),
}
# Of MLA the width of the rotary part and the heads before compression, neither of them what the names say.
MLA_TRAPS = ("head_dim", "num_key_value_heads")
PAIR_TRAPS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")  # the encoder's, under a second name
TYPES = sorted(TABLE["types"])


def config_class(model_type: str) -> Any:
    return transformers.CONFIG_MAPPING[model_type]


def build(model_type: str, **values: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return config_class(model_type)(**values)


def class_default(model_type: str, field: str) -> Any:
    """Return the default that the class itself declares for a field, None where it has none."""
    cls = config_class(model_type)
    row = TABLE["types"][model_type]
    for name in (*row.get("names", {}).get(field, ()), field):
        declared = cls.__dataclass_fields__.get(cls.attribute_map.get(name, name))
        if declared is None:
            continue
        value = declared.default_factory() if declared.default_factory is not MISSING else declared.default
        if value is not None and not isinstance(value, property):
            return list(value) if isinstance(value, tuple) else value
    return None


@pytest.mark.parametrize("model_type", TYPES)
def test_every_default_is_the_classes_own(model_type: str) -> None:
    """In both directions: what the table holds the class declares, and the other way around."""
    row = TABLE["types"][model_type]
    elsewhere = {"mpt": {"alibi": True}, "dbrx": {"num_key_value_heads": 1}}.get(model_type, {})
    found = {}
    of_states = {"minimax": ("block_size",)}.get(model_type, STATE_FIELDS) if "state" in row else ()
    for field in (*FIELDS, *of_states, *SPARSE_FIELDS.get(model_type, ())):
        skipped = ("linear_num_heads",) if model_type == "bailing_hybrid" else ()  # overwritten
        skipped += MLA_TRAPS if "kv_lora_rank" in row["defaults"] else ()
        skipped += PAIR_TRAPS if row.get("reader") == "encoder_decoder" else ()
        value = class_default(model_type, field)
        if value == "auto" or (field == "mamba_expand" and "mamba_head_dim" in found):  # the one follows from the other
            continue
        if field not in skipped and value is not None and (value is not False or field == "use_sliding_window"):
            found[field] = value
    assert row["defaults"] == found | elsewhere


def test_defaults_inside_other_objects() -> None:
    assert build("mpt").attn_config.alibi is True
    assert build("dbrx").num_key_value_heads == 1


def resolved(config: Any, field: str) -> Any:
    return getattr(config, field, None)


# Lists of one length: Nemotron-H and Zamba 2 write theirs out, GPT-Neo's default is for 24 layers.
FIXED = ("nemotron_h", "zamba2", "longcat_flash", "gpt_neo")
STACKS = [t for t in TYPES if TABLE["types"][t].get("reader") != "encoder_decoder"]
WINDOWED = [t for t in STACKS if "max_window_layers" in TABLE["types"][t]["defaults"]]
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((t, {}) for t in STACKS),
    *((t, {"num_hidden_layers": n}) for n in (7, 12) for t in STACKS if t not in FIXED),
    *((t, {"num_hidden_layers": 9, "use_sliding_window": True, "max_window_layers": 4}) for t in WINDOWED),
    *((t, {"num_hidden_layers": 10, "sliding_window_pattern": 3}) for t in ("cohere2", "gemma3_text", "exaone4")),
    *((t, {"num_hidden_layers": 10, "full_attention_interval": 3}) for t in ("qwen3_next", "qwen3_5_text")),
    ("modernbert", {"num_hidden_layers": 10, "global_attn_every_n_layers": 4}),
    ("afmoe", {"num_hidden_layers": 10, "global_attn_every_n_layers": 3}),
    ("llama4_text", {"num_hidden_layers": 10, "no_rope_layer_interval": 3}),
    ("llama4_text", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1]}),
    ("smollm3", {"num_hidden_layers": 9, "use_sliding_window": True, "sliding_window": 64}),
    ("smollm3", {"num_hidden_layers": 9, "sliding_window": 64}),
    ("jamba", {"num_hidden_layers": 10, "attn_layer_period": 3, "attn_layer_offset": 1}),
    ("zamba", {"num_hidden_layers": 20, "attn_layer_period": 4, "attn_layer_offset": 2}),
    ("bamba", {"num_hidden_layers": 10, "attn_layer_indices": [2, 7]}),
    ("lfm2", {"num_hidden_layers": 6, "full_attn_idxs": [2, 5]}),
    ("nemotron_h", {"hybrid_override_pattern": "M-M*-ME*"}),
    ("recurrent_gemma", {"num_hidden_layers": 10, "block_types": ["attention", "recurrent"]}),
    ("gpt_neo", {"num_layers": 6, "attention_types": [[["global", "local", "local"], 2]]}),
    ("kimi_linear", {"num_hidden_layers": 4, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3, 4]}}),
    ("granitemoehybrid", {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]}),
    ("mistral", {"num_hidden_layers": 3, "sliding_window": None}),
    ("qwen2", {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}),
]


@pytest.mark.parametrize(("model_type", "values"), SETTINGS, ids=[f"{t}-{i}" for i, (t, _) in enumerate(SETTINGS)])
def test_layer_types_are_the_classes_own(model_type: str, values: dict[str, Any]) -> None:
    """The kind of every single layer, with what the class has by default and with other settings."""
    config = build(model_type, **values)
    indexer = {"indexer_n_heads": 4} if model_type == "qwen4_exp_text" else {}  # its sparse layers have one
    fields = Fields({**values, **indexer}, family(model_type), "a config")
    ours = layer_types(fields)
    listed = resolved(config, "layer_types")
    if model_type == "gpt_neo":
        listed = [{"global": "full_attention", "local": "sliding_attention"}[kind] for kind in config.attention_layers]
    elif model_type == "mllama_text_model":
        cross = config.cross_attention_layers
        listed = ["cross_attention" if i in cross else "full_attention" for i in range(config.num_hidden_layers)]
    elif listed is None:
        window = resolved(config, "sliding_window")
        listed = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    same = {"conv": "linear_attention", "moe": "linear_attention", "mlp": "linear_attention"}  # none is attention
    if "hybrid" in fields.family.spellings:  # attention beside convolutions
        same |= {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
    same |= {"qsa": "indexed_attention", "msa": "minimax_m3_sparse"}
    same |= {"deepseek_v4_csa": "compressed_sparse_attention", "deepseek_v4_hca": "heavily_compressed_attention"}
    assert [same.get(kind, kind) for kind in ours] == [same.get(kind, kind) for kind in listed]


ODD = {
    "glm4_moe": "hidden_size = 4096 by num_attention_heads = 96",  # no published config has it
    "glm4v_moe_text": "hidden_size = 4096 by num_attention_heads = 96",
    "qwen3_omni_moe_text": "hidden_size = 2048 by num_attention_heads = 28",
}
"""Types whose class defaults are no attention layers."""


def state_of_the_class(model_type: str, config: Any) -> tuple[Any, ...]:
    """Return key heads, value heads, their sizes and the width of the convolution as the class resolves them."""
    kind = TABLE["types"][model_type]["state"]
    if kind == "gated_delta_net":
        heads = config.linear_num_key_heads, config.linear_num_value_heads
        return *heads, config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    if kind == "kda":
        heads, size = config.linear_num_heads, config.linear_head_dim
        return heads, heads, size, size, config.linear_conv_kernel_dim
    if kind == "lightning":
        heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        return heads, heads, size, size, 0

    def first(*names: str) -> Any:
        return next(getattr(config, name) for name in names if getattr(config, name, None) is not None)

    return (
        first("mamba_ngroups", "mamba_n_groups", "n_groups"),
        first("n_mamba_heads", "mamba_n_heads", "mamba_num_heads", "num_heads"),
        first("ssm_state_size", "mamba_d_state", "state_size"),
        first("mamba_headdim", "mamba_d_head", "mamba_head_dim", "head_dim"),
        first("mamba_d_conv", "conv_kernel"),
    )


@pytest.mark.parametrize("model_type", [name for name in TYPES if "state" in TABLE["types"][name]])
def test_sizes_of_states_are_the_classes_own(model_type: str) -> None:
    """What a config asks for that leaves everything out."""
    reading = read(Fields({}, family(model_type), "a config"), mm_prefix=False)
    (state,) = {layer for layer, _ in reading.layers if isinstance(layer, StateLayer)}
    config = StateConfig(**{name: value for name, value in state._asdict().items() if value is not None})
    found = (config.num_heads, config.num_v_heads, config.head_size, config.v_head_size, config.conv_kernel_size)
    assert found == state_of_the_class(model_type, build(model_type))


@pytest.mark.parametrize("model_type", TYPES)
def test_sizes_are_the_classes_own(model_type: str) -> None:
    """Heads, KV heads, head sizes and windows of a config that leaves everything out."""
    config = whole = build(model_type)
    fields = Fields({}, family(model_type), "a config")
    if model_type in ODD:
        with pytest.raises(ModelError, match=ODD[model_type]):
            read(fields, mm_prefix=False)
        return
    if model_type in ("bamba", "granitemoehybrid"):  # without attention by default
        fields = Fields({"layer_types": ["full_attention"], "num_hidden_layers": 1}, family(model_type), "a config")
    layers = [layer for layer, _ in read(fields, mm_prefix=False).layers if isinstance(layer, Layer)]
    assert layers or model_type in ("mamba2", "deepseek_v4", "unlimited_ocr_text")  # these two: without a kernel here
    if family(model_type).reader == "encoder_decoder":
        sides = [config.encoder_attention_heads if hasattr(config, "encoder_attention_heads") else config.num_heads]
        sides += [getattr(config, "decoder_attention_heads", config.num_attention_heads)] * 2
        assert [layer.num_heads for layer in layers] == [layer.num_kv_heads for layer in layers] == sides
        width = resolved(config, "d_kv")
        assert [layer.head_size for layer in layers] == [width or config.hidden_size // n for n in sides]
        return
    window = sliding_window(fields, bidirectional=False)
    if model_type in ("modernbert", "embedding_gemma2_text", "openai_privacy_filter"):
        assert window == config.sliding_window + 1  # modeling_modernbert.py, masking_utils.py: the token itself
    else:
        name = "window_size" if model_type == "gpt_neo" else "sliding_window"
        assert window == (resolved(config, name) or None)
    for layer in layers:
        if whole.is_heterogeneous:  # kinds of layers with their own sizes: asking the whole config for one raises
            kind = "sliding_attention" if layer.sliding_window else "full_attention"
            kind = "indexed_attention" if layer.sparse_top_k else kind
            config = whole.per_layer_config[whole.layer_types.index(kind)]
        if layer.mla:
            dims = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            assert layer.mla == tuple(getattr(config, name) for name in dims)
            assert layer.sparse_top_k == (None if layer.sliding_window else resolved(config, "index_topk"))
            assert layer.num_heads == config.num_attention_heads
            continue
        assert layer.num_heads == config.num_attention_heads
        assert layer.head_size == (resolved(config, "head_dim") or config.hidden_size // config.num_attention_heads)
        kv_heads = resolved(config, "num_key_value_heads") or resolved(config, "num_kv_heads")
        if resolved(config, "multi_query") and not resolved(config, "new_decoder_architecture"):
            kv_heads = 1
        if model_type == "mimo_v2_flash" and layer.sliding_window:
            kv_heads *= 2  # modeling_mimo_v2_flash.py
        assert layer.num_kv_heads == (kv_heads or layer.num_heads)
        assert layer.v_head_size in (None, resolved(config, "v_head_dim"))
        assert layer.logits_soft_cap == resolved(config, "attn_logit_softcapping")


@pytest.mark.parametrize(("wrapper", "text"), TABLE["wrappers"].items())
def test_text_part_of_multimodal_models(wrapper: str, text: str) -> None:
    config = build(wrapper)
    config = getattr(config, "thinker_config", config)
    assert config.get_text_config(decoder=True).model_type == text
    assert family(text).known


UNREAD = """bert-generation blip blip-2 chameleon cosmos3_omni cpmant evolla florence2 git gpt-sw3 idefics instructblip
instructblipvideo kosmos-2 kosmos-2.5 megatron-bert modernbert-decoder moshi moss_transcribe_diarize
musicgen musicgen_melody mvp pi0 pix2struct pp_chart2table pp_formulanet prophetnet rembert roc_bert
roformer trocr udop xlm xmod"""
"""Types of transformers' generating models, with and without images, that no reader knows: a config of one is read by
the usual field names, with a warning. A type that leaves this list has a row in the table."""


@pytest.mark.skipif(transformers.__version__ != RELEASE, reason=f"the list is of transformers {RELEASE}")
def test_types_that_no_reader_knows() -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto", reason="needs torch", exc_type=ImportError)
    known = {name for part in ("types", "remote", "wrappers", "remote_wrappers", "unsupported") for name in TABLE[part]}
    asked = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert asked - known == set(UNREAD.split())


def test_remote_types_have_no_class() -> None:
    """Otherwise their defaults belong in the table of classes."""
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    assert not set(TABLE["remote"]) & set(known)
    assert not set(TABLE["remote_wrappers"]) & set(known)
    assert all(row["source"] for row in TABLE["remote"].values())


def test_published_config_as_transformers_reads_it(published: Path) -> None:
    """An object of its class gives the same layers as its file, which test_published.py writes down."""
    raw = json.loads((published / "config.json").read_text())
    model_type = {"kimi_k2": "deepseek_v3"}.get(raw["model_type"], raw["model_type"])  # as vLLM 0.33.0 reads it
    if published.name == "llava-v1.5-7b":
        model_type = "llama"  # the original LLaVA: the text model's fields beside the vision tower's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_class(model_type).from_dict(raw | {"model_type": model_type})
    assert configs_from_model(config).kinds == layer_kinds(load(str(published))).kinds
