"""What ``explain`` says of FLASH_ATTN and FLASH_ATTN_MLA on GPUs that are not here: version, path and every reason."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig
from attn_select.testing import ask
from attn_select.testing.toolkit import GQA_FIELDS, MLA_FIELDS
from attn_select_flash_attn.plugin import attn_select_register_backends

SPECS = {spec.name: spec for spec in attn_select_register_backends()}
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {**GQA_FIELDS},
    "llama fp8": {**GQA_FIELDS, "kv_cache_dtype": "fp8"},
    "gpt-oss": {"num_heads": 64, "num_kv_heads": 8, "head_size": 64, "sinks": True, "sliding_window": 128},
    "deepseek": {**MLA_FIELDS},
    "deepseek fp8": {**MLA_FIELDS, "kv_cache_dtype": "fp8"},
    "deepseek sparse": {**MLA_FIELDS, "sparse_top_k": 2048},
}
NOT_HOPPER = "FA3 is Hopper's kernel, this is compute capability {}"
OLD = "compute capability 7.5 (supported: 8.0 and up)"
NO_SINKS = "attention sinks with 64 query heads"
DTYPE = "KV-cache dtype fp8_e4m3 (supported: auto, bfloat16)"


def said(name: str, layer: str, gpu: str, phase: Any) -> list[str]:
    """Return path and reason of a plan, or the reasons against."""
    dtype = "float16" if gpu == "t4" else "bfloat16"
    outcome = ask(SPECS[name], AttentionConfig(**LAYERS[layer], dtype=dtype), gpu, phase)
    if isinstance(outcome, BackendPlan):
        return [f"{outcome.path}: {outcome.because}"]
    return [reason.message for reason in outcome]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("layer", "gpu", "expected"),
    [
        ("llama", "h100", ["FA3: Hopper's own kernel"]),
        ("llama", "a100", [f"FA2: {NOT_HOPPER.format('8.0')}"]),
        ("llama", "b200", ["FA4: Blackwell's own kernel"]),
        ("llama", "t4", [OLD]),
        ("llama fp8", "h100", ["FA3: Hopper's own kernel"]),
        (
            "llama fp8",
            "a100",
            [
                "KV-cache dtype fp8_e4m3 (FA2 and FA3: 16-bit KV only, FP8 needs FA3 on compute capability 9.0 or FA4 "
                "on 10.x)"
            ],
        ),
        ("llama fp8", "b200", ["FA4: Blackwell's own kernel"]),
        ("gpt-oss", "h100", ["FA3: Hopper's own kernel"]),
        ("gpt-oss", "a100", [f"{NO_SINKS} (FA2: none; FA3: on compute capability 9.0 only)"]),
        ("gpt-oss", "b200", ["FA4: Blackwell's own kernel"]),
        ("gpt-oss", "t4", [OLD]),
        ("deepseek", "b200", ["serves no MLA layers"]),
    ],
)
def test_flash_attn(layer: str, gpu: str, phase: str, expected: list[str]) -> None:
    assert said("FLASH_ATTN", layer, gpu, phase) == expected


@pytest.mark.parametrize(
    ("layer", "gpu", "prefill", "decode"),
    [
        (
            "deepseek",
            "h100",
            ["FA3 varlen: Hopper's own kernel"],
            ["FA3 with q_v: FA3 scores the rope part and the latent apart and reads the latent once"],
        ),
        (
            "deepseek",
            "a100",
            [f"FA2 varlen: {NOT_HOPPER.format('8.0')}"],
            ["compute capability 8.0 (supported: 9.0)"],
        ),
        (
            "deepseek",
            "b200",
            ["FA4 varlen: Blackwell's own kernel"],
            ["compute capability 10.0 (supported: 9.0)"],
        ),
        ("deepseek", "t4", [OLD], ["compute capability 7.5 (supported: 9.0)"]),
        ("deepseek fp8", "h100", ["FA3 varlen: Hopper's own kernel"], [DTYPE]),
        (
            "deepseek fp8",
            "a100",
            [f"FA2 varlen: {NOT_HOPPER.format('8.0')}"],
            ["compute capability 8.0 (supported: 9.0)", DTYPE],
        ),
        ("deepseek sparse", "h100", ["serves no sparse MLA"], ["serves no sparse MLA"]),
        (
            "deepseek sparse",
            "b200",
            ["serves no sparse MLA"],
            ["serves no sparse MLA", "compute capability 10.0 (supported: 9.0)"],
        ),
        ("llama", "h100", ["serves MLA layers only"], ["serves MLA layers only"]),
    ],
)
def test_flash_attn_mla(layer: str, gpu: str, prefill: list[str], decode: list[str]) -> None:
    assert said("FLASH_ATTN_MLA", layer, gpu, "prefill") == prefill
    assert said("FLASH_ATTN_MLA", layer, gpu, "decode") == decode
