"""AttentionConfig: strict values, contradictions that name their fields, and nothing but ConfigError."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.errors import AttnSelectError, ConfigError
from attn_select.layer import dtypes
from attn_select.layer.config import CUDA_GRAPH_LEVELS, MLA_DIMS, PHASES, AttentionConfig, AttentionType, CudaGraphLevel

FIELDS = AttentionConfig.model_fields
PLAIN = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
MLA = {"num_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SPARSE = {**MLA, "sparse_top_k": 2048}


def refused(**values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        AttentionConfig(**values)
    error = caught.value
    assert error.fields
    assert len(set(error.fields)) == len(error.fields)
    assert all(field in error.message for field in error.fields)
    assert error.message.isprintable()
    assert error.to_dict()["code"] == "invalid-config"
    return error


def test_defaults() -> None:
    config = AttentionConfig(num_heads=32, head_size=128)
    assert config.num_kv_heads == 32
    assert (config.dtype, config.kv_cache_dtype, config.cache_dtype) == ("bfloat16", "auto", "bfloat16")
    assert (config.mla, config.sparse, config.has_cache, config.phases) == (False, False, True, PHASES)
    assert config.value_head_size == 128
    assert AttentionConfig(**PLAIN, v_head_size=64).value_head_size == 64


def test_mla_fills_in_the_latent_width_and_its_one_head() -> None:
    config = AttentionConfig(**MLA)
    assert (config.head_size, config.num_kv_heads, config.mla, config.sparse) == (576, 1, True, False)
    assert AttentionConfig(**MLA, head_size=576, num_kv_heads=1) == config
    assert AttentionConfig(**{**MLA, "qk_rope_head_dim": 0}).head_size == 512
    assert AttentionConfig(**SPARSE).sparse


@pytest.mark.parametrize("attn_type", get_args(AttentionType))
def test_phases(attn_type: str) -> None:
    config = AttentionConfig(**PLAIN, attn_type=attn_type)
    cached = attn_type in ("decoder", "encoder_decoder")
    assert (config.has_cache, config.phases) == (cached, PHASES if cached else ("prefill",))


def test_names_agree_with_the_tables() -> None:
    """The Literals that pydantic checks and the tuples that everybody else reads."""
    assert get_args(CudaGraphLevel) == CUDA_GRAPH_LEVELS
    for name, valid in (("dtype", dtypes.DTYPES), ("kv_cache_dtype", dtypes.KV_CACHE_DTYPES)):
        for value in valid:
            extra = {"sparse_top_k": 2048} if value == "fp8_ds_mla" else {}
            shape = MLA if extra else PLAIN
            assert getattr(AttentionConfig(**shape, **extra, **{name: value}), name) == value
    for value in dtypes.OUTPUT_QUANTIZATIONS:
        assert AttentionConfig(**PLAIN, output_quantization=value).output_quantization == value


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("fp8", "fp8_e4m3"),
        (" bf16 ", "bfloat16"),
        ("torch.float16", "float16"),
        ("e4m3", "fp8_e4m3"),
        ("e5m2", "fp8_e5m2"),
        ("torch.float8_e4m3fn", "fp8_e4m3"),
        ("torch.float", "float32"),
        ("fp32", "float32"),
    ],
)
def test_dtypes_by_their_other_names(written: str, expected: str) -> None:
    assert AttentionConfig(**PLAIN, kv_cache_dtype=written).kv_cache_dtype == expected
    assert AttentionConfig(**PLAIN, kv_cache_dtype=written) == AttentionConfig(**PLAIN, kv_cache_dtype=expected)
    assert AttentionConfig(**PLAIN, kv_cache_dtype=written).cache_dtype == expected


def test_a_copy_with_other_values_is_checked() -> None:
    config = AttentionConfig(**MLA)
    assert config.model_copy() == config
    sparse = config.model_copy(update={"sparse_top_k": 2048})
    assert (sparse, sparse.sparse) == (AttentionConfig(**SPARSE), True)
    with pytest.raises(ConfigError) as caught:
        config.model_copy(update={"v_head_dim": None})
    assert caught.value.fields == ("v_head_dim",)
    assert config == AttentionConfig(**MLA)


def test_a_dump_leaves_out_defaults_where_asked() -> None:
    config = AttentionConfig(**PLAIN, dtype="bf16", sinks=True)
    assert list(config.model_dump()) == list(FIELDS)
    assert config.model_dump(exclude_defaults=True) == {**PLAIN, "sinks": True}
    assert repr(config).startswith("AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, v_head_size=None, ")
    assert "value_head_size" not in repr(config)


INTEGERS = [name for name in FIELDS if name not in {"logits_soft_cap", "dtype", "kv_cache_dtype", "attn_type"}]
INTEGERS = [
    name
    for name in INTEGERS
    if FIELDS[name].annotation is not bool and name not in {"output_quantization", "cuda_graph"}
]
BOOLEANS = [name for name in FIELDS if FIELDS[name].annotation is bool]
NAMES = ["dtype", "kv_cache_dtype", "attn_type", "output_quantization", "cuda_graph"]


def values_for(field: str) -> dict[str, Any]:
    """A config to which ``field`` belongs."""
    return dict(SPARSE if field in (*MLA_DIMS, "sparse_top_k") else PLAIN)


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", ["32", 32.0, True, -1, 2**31, [32], {}, float("nan"), b"32"])
def test_integers_are_strict(field: str, value: Any) -> None:
    error = refused(**{**values_for(field), field: value})
    assert error.fields == (field,)
    assert f"{field} = " in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize("field", INTEGERS)
def test_zero_is_for_speculative_tokens_and_the_rope_part_only(field: str) -> None:
    values = {**values_for(field), field: 0}
    if field in ("num_speculative_tokens", "qk_rope_head_dim"):
        assert getattr(AttentionConfig(**values), field) == 0
    else:
        assert field in refused(**values).fields


@pytest.mark.parametrize("field", BOOLEANS)
@pytest.mark.parametrize("value", [1, 0, "true", "no", None, 1.0, []])
def test_booleans_are_strict(field: str, value: Any) -> None:
    error = refused(**PLAIN, **{field: value})
    assert error.fields == (field,)
    assert f"{field} = {value!r}: input should be a valid boolean" in error.message


@pytest.mark.parametrize("field", NAMES)
@pytest.mark.parametrize("value", ["", "int8", 8, None, ["bfloat16"], "x" * 10_000, "a\x1b[0m"])
def test_names_list_what_is_accepted(field: str, value: Any) -> None:
    error = refused(**PLAIN, **{field: value})
    assert error.fields == (field,)
    accepted = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_ds_mla", "attn_type": "encoder_decoder"}
    assert accepted.get(field, "") in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize("value", ["30", True, 0, -1.0, float("inf"), float("nan"), 10**400, [30]])
def test_soft_cap_is_a_positive_number(value: Any) -> None:
    assert refused(**PLAIN, logits_soft_cap=value).fields == ("logits_soft_cap",)


def test_an_unknown_field_comes_with_the_nearest() -> None:
    error = refused(**PLAIN, sliding_windows=128)
    assert error.fields == ("sliding_windows",)
    assert error.hint == "did you mean sliding_window?"
    assert "num_heads" in str(refused(**PLAIN, zzz=1).hint)


# Contradictions: values, and the fields that are named.
ENCODER = {**PLAIN, "attn_type": "encoder_only"}
CONTRADICTIONS: list[Any] = [
    ({**PLAIN, "num_kv_heads": 5}, ("num_kv_heads", "num_heads")),
    ({**PLAIN, "kv_lora_rank": 512}, MLA_DIMS[1:]),
    ({**PLAIN, "v_head_dim": 128}, MLA_DIMS[:3]),
    ({**MLA, "qk_rope_head_dim": None}, ("qk_rope_head_dim",)),
    ({**MLA, "head_size": 512}, ("head_size", "kv_lora_rank", "qk_rope_head_dim")),
    ({**MLA, "num_kv_heads": 128}, ("num_kv_heads",)),
    ({**MLA, "v_head_size": 128}, ("v_head_size",)),
    ({**MLA, "attn_type": "encoder_decoder"}, ("attn_type",)),
    ({**PLAIN, "sparse_top_k": 2048}, ("sparse_top_k", *MLA_DIMS)),
    ({**MLA, "kv_cache_dtype": "fp8_ds_mla"}, ("kv_cache_dtype", "sparse_top_k")),
    ({**ENCODER, "kv_cache_dtype": "fp8"}, ("kv_cache_dtype", "attn_type")),
    ({**ENCODER, "non_causal": True}, ("non_causal", "attn_type")),
    ({**ENCODER, "mm_prefix": True}, ("mm_prefix", "attn_type")),
    ({**ENCODER, "num_speculative_tokens": 3}, ("num_speculative_tokens", "attn_type")),
    ({**ENCODER, "decode_context_parallel_size": 2}, ("decode_context_parallel_size", "attn_type")),
    ({**ENCODER, "attention_chunk_size": 16}, ("attention_chunk_size", "attn_type")),
    ({**PLAIN, "attention_chunk_size": 16, "sliding_window": 8}, ("attention_chunk_size", "sliding_window")),
    ({**PLAIN, "attention_chunk_size": 16, "mm_prefix": True}, ("attention_chunk_size", "mm_prefix")),
    ({**PLAIN, "attention_chunk_size": 16, "attn_type": "encoder_decoder"}, ("attention_chunk_size", "attn_type")),
    ({**PLAIN, "draft_tree": True}, ("draft_tree", "num_speculative_tokens")),
    ({**PLAIN, "draft_tree": True, "num_speculative_tokens": 3, "non_causal": True}, ("draft_tree", "non_causal")),
    (
        {**PLAIN, "draft_tree": True, "num_speculative_tokens": 3, "attn_type": "encoder_decoder"},
        ("draft_tree", "attn_type"),
    ),
    (
        {**PLAIN, "draft_tree": True, "num_speculative_tokens": 3, "attention_chunk_size": 16},
        ("attention_chunk_size", "draft_tree"),
    ),
    ({**MLA, "attention_chunk_size": 16}, ("attention_chunk_size", "kv_lora_rank")),
    ({**PLAIN, "per_head_quant_scales": True}, ("per_head_quant_scales", "kv_cache_dtype")),
]


@pytest.mark.parametrize(("values", "fields"), CONTRADICTIONS)
def test_contradictions(
    values: dict[str, Any],
    fields: tuple[str, ...],
) -> None:
    error = refused(**values)
    assert error.fields == fields
    assert set(error.fields) <= set(FIELDS)


def test_all_contradictions_at_once() -> None:
    error = refused(**{**ENCODER, "num_kv_heads": 5, "mm_prefix": True, "sparse_top_k": 8})
    assert error.fields == ("num_kv_heads", "num_heads", "sparse_top_k", *MLA_DIMS, "mm_prefix", "attn_type")
    assert refused(num_heads="a", head_size=-1, alibi=3).fields == ("num_heads", "head_size", "alibi")


ALLOWED: list[dict[str, Any]] = [
    # Unusual, and for the gate to judge: no kernel may have it, but it means something.
    {**MLA, "sliding_window": 128, "sinks": True, "logits_soft_cap": 30.0, "alibi": True},
    {**MLA, "kv_cache_dtype": "fp8", "per_head_quant_scales": True, "block_size": 48},
    {**SPARSE, "kv_cache_dtype": "fp8_ds_mla", "block_size": 1},
    {**PLAIN, "sinks": True, "alibi": True, "sliding_window": 1, "logits_soft_cap": 1},
    {**PLAIN, "dtype": "float32", "kv_cache_dtype": "fp8"},
    {**PLAIN, "non_causal": True, "sliding_window": 4096, "mm_prefix": True},
    {**PLAIN, "attention_chunk_size": 8192, "alibi": True, "sinks": True, "num_speculative_tokens": 3},
    {**ENCODER, "v_head_size": 64, "sliding_window": 128, "block_size": 16, "kv_cache_dtype": "bfloat16"},
    {**PLAIN, "attn_type": "encoder_decoder", "num_speculative_tokens": 3, "kv_cache_dtype": "fp8"},
    {"num_heads": 1, "head_size": 1, "block_size": 1},
    {"num_heads": 2**31 - 1, "head_size": 8192},
]


@pytest.mark.parametrize("values", ALLOWED)
def test_what_contradicts_nothing(values: dict[str, Any]) -> None:
    config = AttentionConfig(**values)
    assert AttentionConfig(**config.model_dump()) == config


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 600),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(
        [*dtypes.KV_CACHE_DTYPES, *get_args(AttentionType), *CUDA_GRAPH_LEVELS, "fp8", "none", 8, 16, 64, 512]
    ),
    st.lists(st.integers(), max_size=2),
    st.binary(max_size=3),
)
KEYS = st.one_of(st.sampled_from(list(FIELDS)), st.text(max_size=8))


def is_about(error: AttnSelectError, fields: set[str]) -> None:
    assert isinstance(error, ConfigError)
    assert error.fields
    assert set(error.fields) <= fields
    assert error.message.isprintable()


@given(st.dictionaries(KEYS, ANYTHING, max_size=8), st.sampled_from([{}, PLAIN, MLA, SPARSE, ENCODER]))
def test_any_arguments_give_a_config_or_a_config_error(values: dict[str, Any], base: dict[str, Any]) -> None:
    values = {**base, **values}
    try:
        config = AttentionConfig(**values)
    except AttnSelectError as error:
        is_about(error, {*FIELDS, *values})
        return
    assert isinstance(hash(config), int)
    assert AttentionConfig(**config.model_dump()) == config
    assert config.num_heads % config.num_kv_heads == 0
    assert config.mla == all(getattr(config, name) is not None for name in MLA_DIMS)
    assert config.mla or not config.sparse
    for name, value in values.items():
        if name not in ("dtype", "kv_cache_dtype"):
            assert getattr(config, name) == value
            assert type(getattr(config, name)) is type(value) or name == "logits_soft_cap"
