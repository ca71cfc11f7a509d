"""What ``explain`` says of FLASHMLA and FLASHMLA_SPARSE on GPUs that are not here: path and every reason."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig
from attn_select.testing import ask
from attn_select.testing.toolkit import GQA_FIELDS, MLA_FIELDS
from attn_select_flashmla.plugin import attn_select_register_backends

SPECS = {spec.name: spec for spec in attn_select_register_backends()}
LAYERS: dict[str, dict[str, Any]] = {
    "llama": {**GQA_FIELDS},
    "deepseek": {**MLA_FIELDS},
    "deepseek fp8": {**MLA_FIELDS, "kv_cache_dtype": "fp8"},
    "deepseek sparse": {**MLA_FIELDS, "sparse_top_k": 2048},
    "deepseek sparse fp8": {**MLA_FIELDS, "sparse_top_k": 2048, "kv_cache_dtype": "fp8_ds_mla"},
    "deepseek sparse fp8, 16 heads": {
        **MLA_FIELDS,
        "num_heads": 16,
        "sparse_top_k": 2048,
        "kv_cache_dtype": "fp8_ds_mla",
    },
}
READS_BF16 = "sparse bf16: the prefill kernel reads the bfloat16 cache"
SERVES_DECODE = "sparse bf16: the decode kernel reads FP8 only, so the prefill kernel serves decode"
COPY = "sparse bf16 over dequantised KV: from 32 query heads on the bfloat16 kernel is worth a copy"
FEW = "sparse FP8: below 32 query heads the decode kernel serves prefill without a bfloat16 copy"
FP8 = "sparse FP8: the decode kernel reads fp8_ds_mla"


def said(name: str, layer: str, gpu: str, phase: Any) -> list[str]:
    """Return path and reason of a plan, or the reasons against."""
    dtype = "float16" if gpu == "t4" else "bfloat16"
    outcome = ask(SPECS[name], AttentionConfig(**LAYERS[layer], dtype=dtype), gpu, phase)
    if isinstance(outcome, BackendPlan):
        return [f"{outcome.path}: {outcome.because}"]
    return [reason.message for reason in outcome]


@pytest.mark.parametrize(
    ("layer", "gpu", "expected"),
    [
        ("deepseek", "h100", ["dense: Hopper's dense decode"]),
        ("deepseek fp8", "h100", ["dense FP8: Hopper's dense decode"]),
        ("deepseek", "a100", ["compute capability 8.0 (supported: 9.0)"]),
        ("deepseek fp8", "a100", ["compute capability 8.0 (supported: 9.0)"]),
        ("deepseek", "b200", ["compute capability 10.0 (supported: 9.0)"]),
        ("deepseek", "t4", ["compute capability 7.5 (supported: 9.0)"]),
        ("deepseek sparse", "h100", ["serves no sparse MLA"]),
        ("llama", "b200", ["serves MLA layers only", "compute capability 10.0 (supported: 9.0)"]),
    ],
)
def test_flashmla(layer: str, gpu: str, expected: list[str]) -> None:
    assert said("FLASHMLA", layer, gpu, "decode") == expected
    assert said("FLASHMLA", layer, gpu, "prefill") == ["serves decode only"]


@pytest.mark.parametrize(
    ("layer", "gpu", "prefill", "decode"),
    [
        *(("deepseek sparse", gpu, READS_BF16, SERVES_DECODE) for gpu in ("h100", "b200")),
        *(("deepseek sparse fp8", gpu, COPY, FP8) for gpu in ("h100", "b200")),
        *(("deepseek sparse fp8, 16 heads", gpu, FEW, FP8) for gpu in ("h100", "b200")),
    ],
)
def test_flashmla_sparse(layer: str, gpu: str, prefill: str, decode: str) -> None:
    assert said("FLASHMLA_SPARSE", layer, gpu, "prefill") == [prefill]
    assert said("FLASHMLA_SPARSE", layer, gpu, "decode") == [decode]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("layer", "gpu", "expected"),
    [
        ("deepseek sparse", "a100", ["compute capability 8.0 (supported: 9.0, 10.x)"]),
        (
            "deepseek sparse",
            "t4",
            ["compute capability 7.5 (supported: 9.0, 10.x)", "dtype float16 (supported: bfloat16)"],
        ),
        ("deepseek", "b200", ["serves sparse MLA only"]),
        ("deepseek", "a100", ["serves sparse MLA only", "compute capability 8.0 (supported: 9.0, 10.x)"]),
        ("llama", "b200", ["serves MLA layers only"]),
    ],
)
def test_flashmla_sparse_refuses(layer: str, gpu: str, phase: str, expected: list[str]) -> None:
    assert said("FLASHMLA_SPARSE", layer, gpu, phase) == expected
