"""From a model in any form to attention configs, in Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attn_select
from attn_select import AttentionConfig, configs_from_model
from attn_select.errors import ConfigError
from attn_select.layer.models import LayerKind
from attn_select.layer.models.kv_sharing import CacheOwners

GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 64,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "sliding_window": 32,
    "attn_logit_softcapping": 50.0,
    "torch_dtype": "bfloat16",
}
FULL = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64, logits_soft_cap=50.0)
OWN = CacheOwners(caches=2, indexers=0, kv_sources={})
EXPECTED = (
    LayerKind("sliding_attention", (0, 2), AttentionConfig(**FULL.model_dump() | {"sliding_window": 32}), OWN),
    LayerKind("full_attention", (1, 3), FULL, OWN),
)


class Configuration:
    """What transformers' configs have in common with any other object."""

    def to_dict(self) -> dict[str, Any]:
        return dict(GEMMA)


def test_every_form_of_a_model_gives_the_same_configs(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA))
    for model in (file, str(file), tmp_path, GEMMA, Configuration()):
        found = configs_from_model(model, tensor_parallel=2)
        assert found.kinds == EXPECTED
        assert found.configs == [kind.config for kind in EXPECTED]


def test_device_and_overrides() -> None:
    turing = configs_from_model(
        {**GEMMA, "model_type": "llama"}, device=attn_select.Device("t4", (7, 5)), overrides={"block_size": 32}
    )
    assert [(config.dtype, config.block_size) for config in turing.configs] == [("float16", 32)]
    assert any("has no bfloat16" in warning for warning in turing.warnings)


def test_torch_dtypes_are_dtypes() -> None:
    torch = pytest.importorskip("torch", exc_type=ImportError)
    raw = {**GEMMA, "model_type": "llama", "torch_dtype": torch.float16}
    (config,) = configs_from_model(raw).configs
    assert config.dtype == "float16"
    (config,) = configs_from_model(
        raw, overrides={"dtype": torch.bfloat16, "kv_cache_dtype": torch.float8_e4m3fn}
    ).configs
    assert (config.dtype, config.kv_cache_dtype) == ("bfloat16", "fp8_e4m3")
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        configs_from_model(raw, overrides={"dtype": torch.int8})


@pytest.mark.parametrize("value", [False, "no", [1]], ids=str)
def test_mla_is_asked_for_by_true_alone(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"mla = .* accepted is True") as caught:
        configs_from_model("llama-3-8b", overrides={"mla": value})
    assert caught.value.fields == ("mla",)


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, attn_select; attn_select.configs_from_model('llama-3-8b'); "
        "print([name for name in ('torch', 'transformers', 'huggingface_hub', 'click') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
