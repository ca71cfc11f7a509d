"""Sizes of the cache layouts."""

from __future__ import annotations

import pytest

from attn_select.layer import layouts
from attn_select.layer.config import AttentionConfig

GQA = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
SPARSE = {"num_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("layout", "fields", "expected"),
    [
        ("FLASH_ATTN_NHD", GQA, 4096),
        ("FLASHINFER_HND", {**GQA, "kv_cache_dtype": "fp8"}, 2048),
        ("FLASHINFER_HND", {**GQA, "kv_cache_dtype": "nvfp4"}, 2 * 8 * (128 // 2 + 128 // 16)),
        ("FLASH_ATTN_NHD", {**GQA, "v_head_size": 64}, 4096),
        ("FLASH_ATTN_NHD", {**GQA, "v_head_size": 256}, 8192),
        ("PAGED_ATTENTION", {**GQA, "dtype": "float32"}, 8192),
        ("MLA", SPARSE, 1152),
        ("MLA", {**SPARSE, "kv_cache_dtype": "fp8"}, 576),
        ("FP8_DS_MLA", {**SPARSE, "sparse_top_k": 2048, "kv_cache_dtype": "fp8_ds_mla"}, 656),
    ],
)
def test_bytes_per_token(layout: str, fields: dict[str, object], expected: int) -> None:
    assert layouts.bytes_per_token(layout, AttentionConfig(**fields)) == expected


def test_an_unknown_layout_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown KV-cache layout 'NHD'; known: FLASH_ATTN_NHD"):
        layouts.cache_shape("NHD", AttentionConfig(**GQA), 16)
