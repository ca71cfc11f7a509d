"""A checkpoint's own quantised KV cache is the default of ``--kv-cache-dtype``, as in vLLM 0.33.0."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_select import AttentionConfig
from attn_select.errors import ModelError
from attn_select.layer.models import LayerKinds, configs_from_model

Kinds = Callable[..., LayerKinds]
FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
PACKED = {"quant_method": "compressed-tensors"}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
INT8 = {**PACKED, "kv_cache_scheme": {**SCHEME, "type": "int"}}
ENTRIES = {f"model.layers.{i}.self_attn": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"} for i in range(3)}


def config(quantization: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "llama", "dtype": "bfloat16", "quantization_config": quantization, **more}


def stored(found: LayerKinds) -> set[str]:
    return {c.kv_cache_dtype for c in found.attention_configs}


@pytest.mark.parametrize("name", ["kvq", "kvq2", "g4q"])
def test_configs_of_the_trial_are_stored_in_fp8(trial: Path, name: str) -> None:
    found = configs_from_model(str(trial / f"{name}.json"))
    assert stored(found) == {"fp8_e4m3"}
    assert any("stored in fp8_e4m3" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({**MODELOPT, "kv_cache_scheme": FP8}, "fp8_e4m3"),
        ({**MODELOPT, "kv_cache_scheme": "NVFP4"}, "nvfp4"),
        ({**MODELOPT, "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
        ({**MODELOPT, "kv_cache_scheme": {**FP8, "dynamic": True}}, "auto"),
        ({**MODELOPT, "kv_cache_quant_algo": "fp8"}, "fp8_e4m3"),
        ({**MODELOPT, "kv_cache_quant_algo": None}, "auto"),
        ({"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ({"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ({**PACKED, "kv_cache_scheme": SCHEME}, "fp8_e4m3"),
        ({**PACKED, "kv_cache_scheme": None}, "auto"),
    ],
)
def test_what_a_checkpoint_says(kinds: Kinds, quantization: dict[str, Any], dtype: str) -> None:
    assert stored(kinds(config(quantization))) == {dtype}


@pytest.mark.parametrize(
    "quantization",
    [
        {**MODELOPT, "kv_cache_quant_algo": "INT8"},
        {**MODELOPT, "kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        {**MODELOPT, "quantized_layers": ENTRIES},
        {"quant_method": "fp8", "kv_cache_quant_algo": "FP8"},
        {"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}},
    ],
)
def test_what_vllm_does_not_follow_is_said(kinds: Kinds, quantization: dict[str, Any]) -> None:
    found = kinds(config(quantization))
    assert stored(found) == {"auto"}
    assert any("quantization_config" in warning and "vLLM" in warning for warning in found.warnings)


def test_entries_of_layers_beside_the_checkpoints_own(kinds: Kinds) -> None:
    found = kinds(config({**MODELOPT, "kv_cache_quant_algo": "NVFP4", "quantized_layers": ENTRIES}))
    assert stored(found) == {"nvfp4"}
    assert any(warning.startswith("3 layers of quantization_config.quantized_layers") for warning in found.warnings)


def test_a_scale_per_head(kinds: Kinds) -> None:
    per_head = {**PACKED, "kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}
    assert [c.per_head_quant_scales for c in kinds(config(per_head)).attention_configs] == [True]
    plain = kinds(config(per_head), overrides={"kv_cache_dtype": "bfloat16"})
    assert [c.per_head_quant_scales for c in plain.attention_configs] == [False]


@pytest.mark.parametrize("scheme", [INT8, {**PACKED, "kv_cache_scheme": {**SCHEME, "strategy": "channel"}}])
def test_what_vllm_does_not_load_is_refused_by_name(kinds: Kinds, scheme: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="kv_cache_scheme") as caught:
        kinds(config(scheme))
    assert caught.value.code == "kv-cache-scheme"
    found = kinds(config(scheme), overrides={"kv_cache_dtype": "bfloat16"})
    assert stored(found) == {"bfloat16"}
    assert any("vLLM 0.33.0 does not load" in warning for warning in found.warnings)


def test_the_file_beside_an_older_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    for name in (tmp_path, tmp_path / "config.json"):
        (layer,) = configs_from_model(str(name)).configs
        assert isinstance(layer, AttentionConfig)
        assert layer.kv_cache_dtype == "fp8_e4m3"
