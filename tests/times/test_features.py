"""What of a layer and a batch a time is predicted by."""

from __future__ import annotations

import math

import pytest

from attn_select.layer.config import AttentionConfig
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.features import LAUNCH_US, Rates, step_features

H200 = Rates(4.19e6, 7.81e8, 132)
GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)


def values(batch: str, config: AttentionConfig = GQA) -> dict[str, float]:
    return step_features(config, parse_batch_shape(batch), H200).values


def test_the_floor_is_the_longer_of_bytes_and_products() -> None:
    moved = 64 * (4096 * 2 * 8 * 128 * 2 + 32 * 2 * 128 * 2 + 8 * 2 * 128 * 2 * 2)  # keys, queries, written keys
    decode = step_features(GQA, parse_batch_shape("64q1s4k"), H200).floor_us
    assert decode == pytest.approx(LAUNCH_US + moved / 4.19e6)
    flops = 2 * 32 * 2 * 128 * (8192 * 8193 / 2)
    assert step_features(GQA, parse_batch_shape("q8k"), H200).floor_us == pytest.approx(LAUNCH_US + flops / 7.81e8)


def test_unlike_lengths_stretch_a_step() -> None:
    """One long request among short ones: kernels that share keys out evenly are told apart from those that do not."""
    even, uneven = values("64q1s4k"), values("63q1s1k_q1s193k")
    assert even["uneven"] == 0
    assert uneven["uneven"] == pytest.approx(math.log2(193 / 4), abs=0.01)
    one_tile = values("q1s128k", AttentionConfig(num_heads=1, num_kv_heads=1, head_size=128))
    assert one_tile["fill"] == -3  # an eighth of the multiprocessors, and fewer
    waves = [
        values(f"{prompts}q128", AttentionConfig(num_heads=1, num_kv_heads=1, head_size=128)) for prompts in (132, 133)
    ]
    assert waves[1]["stretch"] - waves[0]["stretch"] > 0.5  # one tile more than there are multiprocessors


def test_mixed_steps_say_how_much_is_prefill() -> None:
    mixed = values("q2k_32q1s4k")
    assert (mixed["has_prefills"], mixed["has_decodes"]) == (1, 1)
    assert 0 < mixed["prefill_share"] < 1
    assert (values("q2k")["prefill_share"], values("32q1s4k")["prefill_share"]) == (1, 0)
    assert values("q1ks16k")["cached_per_new"] == pytest.approx(4)


def test_what_a_layer_asks_for() -> None:
    config = AttentionConfig(
        num_heads=24,
        num_kv_heads=2,
        head_size=96,
        sliding_window=512,
        kv_cache_dtype="fp8_e4m3",
        num_speculative_tokens=3,
    )
    found = values("64q4s4k", config)
    assert (found["window"], found["quantized"], found["sinks"]) == (1, 1, 0)
    assert (found["drafts"], found["query_rows"]) == (2, pytest.approx(math.log2(48)))
    assert found["padding"] == pytest.approx(math.log2(128 / 96))
    assert found["mean_keys"] == pytest.approx(math.log2(515))


def test_each_token_of_a_sparse_layer_has_tiles_of_its_own() -> None:
    latent = {"num_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert 2 ** values("q100s8k", AttentionConfig(**latent, sparse_top_k=2048))["tiles"] == pytest.approx(100)
    assert 2 ** values("q100s8k", AttentionConfig(**latent))["tiles"] == pytest.approx(16)


def test_a_latent_is_read_once() -> None:
    """Its keys are its values: the one multiprocessor reads what all the step reads."""
    rates = Rates(4.19e6, 7.81e8, 1)
    latent = AttentionConfig(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    stretch = step_features(latent, parse_batch_shape("16q1s64k"), rates).values["stretch"]
    assert stretch == pytest.approx(0, abs=0.1)
