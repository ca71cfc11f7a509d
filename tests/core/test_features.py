"""The table of features: complete, agreed with by every reader, and the only place that a new feature is added to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import find, settings

import attn_select
from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Capabilities
from attn_select.decide import gate
from attn_select.layer.config import MLA_DIMS, AttentionConfig
from attn_select.layer.features import FEATURES, Feature
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.testing.conformance_configs import draw_case
from attn_select.testing.strategies import configs

MakeSpec = Callable[..., BackendSpec]
MakeCapabilities = Callable[..., Capabilities]

NOT_FEATURES = {
    *("num_heads", "num_kv_heads", "head_size", "v_head_size", "dtype", "kv_cache_dtype", "block_size", "attn_type"),
    *("sparse_top_k", "cuda_graph", *MLA_DIMS),
}
PLAIN: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
NEEDED: dict[str, dict[str, Any]] = {
    "per_head_quant_scales": {"kv_cache_dtype": "fp8"},
    "draft_tree": {"num_speculative_tokens": 3},
}
"""What a feature means nothing without."""
ROWS = pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.field)


def asking(feature: Feature) -> dict[str, Any]:
    """Return the fields of a layer that asks for one feature and for nothing else."""
    needed = NEEDED.get(feature.field, {})
    return {**PLAIN, **needed, feature.field: feature.examples[-1]}


def test_every_field_that_is_no_size_has_exactly_one_row() -> None:
    rows = [feature.field for feature in FEATURES]
    assert len(rows) == len(set(rows))
    assert set(rows) == set(AttentionConfig.model_fields) - NOT_FEATURES
    booleans = {name for name, item in AttentionConfig.model_fields.items() if item.annotation is bool}
    assert booleans == {feature.field for feature in FEATURES if feature.off is False}
    assert len({feature.code for feature in FEATURES}) == len({feature.flag for feature in FEATURES}) == len(rows)


@ROWS
def test_a_row_agrees_with_the_fields(feature: Feature) -> None:
    assert AttentionConfig.model_fields[feature.field].default == feature.off
    assert feature.fact in {item.name for item in fields(Capabilities)}
    for value in (*feature.examples, *([feature.most] if feature.most is not None else [])):
        config = AttentionConfig(**{**asking(feature), feature.field: value})
        assert getattr(config, feature.field) == value != feature.off
        if feature.not_in_encoders:
            with pytest.raises(attn_select.ConfigError, match=feature.not_in_encoders):
                AttentionConfig(**PLAIN, **{feature.field: value}, attn_type="encoder_only")


@ROWS
def test_a_row_is_a_reason_of_the_gate_and_words_of_explain(
    feature: Feature, spec: MakeSpec, capabilities: MakeCapabilities
) -> None:
    def ask(**facts: Any) -> Any:
        both = capabilities(kv_cache_dtypes=("bfloat16", "fp8_e4m3"), **facts)
        config = AttentionConfig(**asking(feature))
        where, libraries = Device("h100", (9, 0)), Environment(assume_installed=True)
        return gate.check(spec(capabilities={"decode": both}), config, where, libraries, BackendOptions(), "decode")

    value = feature.examples[-1]
    none, some = {bool: (False, True), tuple: ((), (value,)), int: (0, value)}[_kind(feature)]
    (reason,) = ask(**{feature.fact: none})
    assert (reason.code, reason.observed) == (feature.code, value)
    assert feature.what in reason.message
    assert isinstance(ask(**{feature.fact: some}), BackendPlan)
    said = attn_select.select(AttentionConfig(**asking(feature)), "h100").explain()
    assert feature.says.format(value) in said


def _kind(feature: Feature) -> type:
    return type(next(item.default for item in fields(Capabilities) if item.name == feature.fact).value)


@ROWS
def test_a_row_is_drawn_by_the_suite_and_by_the_strategies(
    feature: Feature, spec: MakeSpec, capabilities: MakeCapabilities
) -> None:
    value = feature.examples[-1]
    stored = {"kv_cache_dtypes": ("bfloat16", "fp8_e4m3")}
    lacking = spec(capabilities={"decode": capabilities(**stored, **_declared(feature, False))})
    having = spec(capabilities={"decode": capabilities(**stored, **_declared(feature, True))})
    outside = [draw_case(lacking, 0, index, [(4, 2)]) for index in range(1200)]
    assert {case.code for case in outside if case.changed == feature.field} == {feature.code}
    inside = [draw_case(having, 0, index, [(4, 2)]).config for index in range(200)]
    assert any(getattr(config, feature.field) == value for config in inside)
    layers = configs(mla=False, attn_type="decoder", kv_cache_dtype="fp8_e4m3")
    thorough = settings(database=None, derandomize=True, max_examples=2000)
    find(layers, lambda config: getattr(config, feature.field) != feature.off, settings=thorough)


def _declared(feature: Feature, has_it: bool) -> dict[str, Any]:
    kind, value = _kind(feature), feature.examples[-1]
    return {feature.fact: {bool: has_it, tuple: (value,) * has_it, int: value * has_it}[kind]}
