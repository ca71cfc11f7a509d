"""The presets: names that users type, values that agree with what others publish."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attn_select import AttentionConfig
from attn_select.layer.models import layer_kinds, load, presets
from attn_select.layer.state import StateConfig

# Layers, query heads, KV heads and head size as vLLM's own tests expect them of the published configs
# (tests/config/base_model_arch_groundtruth.json at 1ac8cdb4c760).
GROUND_TRUTH = {
    "deepseek-v3.2": (61, 128, 1, 576),
    "dbrx": (40, 48, 8, 128),
    "falcon-40b": (60, 128, 8, 64),
    "falcon-7b": (32, 71, 1, 64),
    "glm-4.5": (92, 96, 8, 128),
    "gpt-oss-20b": (24, 64, 8, 64),
    "llama-4-scout": (48, 40, 8, 128),
    "mpt-7b": (32, 32, 32, 128),
    "qwen3-next-80b-a3b": (12, 16, 2, 256),  # its linear layers are not ours
}


@pytest.mark.parametrize("name", presets())
def test_every_preset(name: str) -> None:
    preset = presets()[name]
    assert preset.name == name
    assert preset.description
    assert len(preset.source) > 20
    source = load(name)
    assert (source.name, source.source) == (name, preset.source)
    assert source.architecture
    assert source.model_type == source.raw["model_type"]
    found = layer_kinds(source)
    assert found.kinds
    assert not [warning for warning in found.warnings if "not known" in warning or "class defaults" in warning]
    for kind in found.kinds:  # the description says what a reader of the list needs
        shape = kind.config
        if isinstance(shape, StateConfig):
            assert f"{shape.num_heads}:{shape.num_v_heads} of {shape.head_size}" in preset.description
            continue
        size = f"{shape.kv_lora_rank} + {shape.qk_rope_head_dim}" if shape.mla else f"size {shape.head_size}"
        said = (size, f"{shape.num_heads}:{shape.num_kv_heads}", "encoder only")
        assert any(text in preset.description for text in said)


@pytest.mark.parametrize(("name", "expected"), GROUND_TRUTH.items())
def test_presets_beside_the_tests_of_vllm(name: str, expected: tuple[int, int, int, int]) -> None:
    kinds = [kind for kind in layer_kinds(load(name)).kinds if isinstance(kind.config, AttentionConfig)]
    assert sum(kind.count for kind in kinds) == expected[0]
    shapes = {(kind.config.num_heads, kind.config.num_kv_heads, kind.config.head_size) for kind in kinds}
    assert shapes == {expected[1:]}


def test_listing_presets_imports_nothing_heavy() -> None:
    code = (
        "import sys; from attn_select.layer import models; models.presets(); models.load('phi-2'); print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = result.stdout.split()
    assert "attn_select.layer.models" in loaded
    assert not {"pydantic", "torch", "transformers", "importlib.resources", "click"} & set(loaded)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b"),
        ("qwen/qwen3-next-80b-a3b-instruct", "qwen3-next-80b-a3b"),
        ("qwen3-next", "qwen3-next-80b-a3b"),
        ("Qwen3 Next", "qwen3-next-80b-a3b"),
    ],
)
def test_other_names_lead_to_a_preset(name: str, preset: str) -> None:
    assert load(name) == load(preset)
