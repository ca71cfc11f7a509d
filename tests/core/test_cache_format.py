"""What two sides must share to exchange cache blocks, and the id of it."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select import AttentionConfig, select
from attn_select.layer.cache_format import CacheFormat

GQA = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
LATENT = {"num_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
PINNED = {
    "kv1-04fc50e12331": ("FLASH_ATTN_NHD", 16, 16, GQA),
    "kv1-a943a2bdb697": ("FLASHINFER_HND", 16, 16, GQA),
}
"""Ids that peers of other releases have: where one of them changes, ``cache_format.VERSION`` must too."""


def made(layout: str = "FLASH_ATTN_NHD", block_size: int = 16, kernel: int = 16, **fields: Any) -> CacheFormat:
    return CacheFormat(AttentionConfig(**{**GQA, **fields}), layout, block_size, kernel)


@pytest.mark.parametrize("fingerprint", PINNED)
def test_ids_stay_the_same_in_every_release(fingerprint: str) -> None:
    layout, block_size, kernel, fields = PINNED[fingerprint]
    assert CacheFormat(AttentionConfig(**fields), layout, block_size, kernel).fingerprint == fingerprint


@pytest.mark.parametrize(
    ("fact", "other"),
    [
        ("dtype", made(kv_cache_dtype="fp8_e4m3")),
        ("scales", made(kv_cache_dtype="fp8_e4m3")),
        ("num_kv_heads", made(num_kv_heads=4)),
        ("head_size", made(head_size=64)),
        ("value_head_size", made(v_head_size=64)),
        ("decode_context_parallel_size", made(decode_context_parallel_size=2)),
        ("block_size", made(block_size=32)),
        ("layout", made("FLASHINFER_NHD")),
    ],
)
def test_each_fact_changes_the_id_and_is_named(fact: str, other: CacheFormat) -> None:
    assert other.fingerprint != made().fingerprint
    assert made().differences(other)[fact] == (made().facts()[fact], other.facts()[fact])


def test_scales_per_head_and_the_interleave_of_ranks_count() -> None:
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    assert made(**fp8).differences(made(**fp8, per_head_quant_scales=True)) == {"scales": ("per_tensor", "per_head")}
    two = AttentionConfig(**GQA, decode_context_parallel_size=2)
    near, far = (CacheFormat(two, "FLASH_ATTN_NHD", 16, 16, interleave) for interleave in (1, 8))
    assert near.differences(far) == {"interleave": (1, 8)}


def test_what_moves_no_byte_does_not_count() -> None:
    assert not made(num_heads=64, sliding_window=128).differences(made())
    # Tokens of this layout lie one behind the other, whatever blocks a kernel reads them in.
    assert not made(block_size=64, kernel=16).differences(made(block_size=64, kernel=64))
    one_head = {"num_kv_heads": 1}
    assert made("FLASHINFER_HND", **one_head).fingerprint == made("FLASHINFER_NHD", **one_head).fingerprint


def test_kernel_blocks_count_where_a_block_holds_keys_and_then_values() -> None:
    small, large = (made("FLASHINFER_NHD", 64, kernel) for kernel in (16, 64))
    assert small.differences(large) == {"kernel_block_size": (16, 64)}


def test_a_selection_has_the_id_of_its_cache() -> None:
    selection = select(AttentionConfig(**GQA), "h100")
    assert selection.cache_fingerprint == selection.cache_format.fingerprint == "kv1-04fc50e12331"
    latent = select(AttentionConfig(**LATENT), "h100").cache_format
    assert latent.facts()["value_head_size"] == 512
    encoder = AttentionConfig(num_heads=8, head_size=64, attn_type="encoder_only")
    assert select(encoder, "h100").cache_fingerprint is None
