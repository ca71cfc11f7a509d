"""Bytes, FLOPs and the least time of a step, against counts by hand."""

from __future__ import annotations

import pytest

from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import lookup
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.roofline import keys_read, roofline_us, step_work, visible_keys

GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
MLA = AttentionConfig(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
H100 = lookup("h100")


def seen(query_len: int, seq_len: int, limit: int, causal: bool) -> list[set[int]]:
    """The positions that each query sees, one by one."""
    found = []
    for query in range(seq_len - query_len, seq_len):
        last = query if causal else seq_len - 1
        found.append(set(range(max(0, last + 1 - limit), last + 1)))
    return found


@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 1), (1, 100), (7, 7), (5, 30), (30, 31)])
@pytest.mark.parametrize("window", [None, 1, 6, 29, 200])
def test_keys_are_counted_as_one_by_one(query_len: int, seq_len: int, window: int | None) -> None:
    config = GQA.model_copy(update={"sliding_window": window})
    each = seen(query_len, seq_len, window or seq_len, causal=True)
    assert visible_keys(config, query_len, seq_len) == sum(len(keys) for keys in each)
    assert keys_read(config, query_len, seq_len) == len(set().union(*each))


def test_sparse_queries_see_their_choice() -> None:
    config = MLA.model_copy(update={"sparse_top_k": 64})
    assert visible_keys(config, 1, 1000) == 64
    assert (keys_read(config, 1, 1000), keys_read(config, 4, 1000), keys_read(config, 1, 20)) == (64, 256, 20)


def test_decode_by_hand() -> None:
    work = step_work(GQA, parse_batch_shape("4q1s1k"))
    token = 8 * 128 * 2 * 2  # K and V of eight heads in 16 bits
    assert work.kv_bytes == 4 * 1024 * token
    assert work.query_bytes == 4 * 32 * 128 * 2 * 2
    assert work.cache_write_bytes == 4 * 2 * token
    assert work.flops == 4 * 1024 * 32 * 2 * 2 * 128
    assert step_work(GQA, parse_batch_shape("4q1s1k"), attention_alone=True).cache_write_bytes == 0


def test_mla_decodes_read_latents_and_prefills_decompress() -> None:
    decode = step_work(MLA, parse_batch_shape("8q1s2k"))
    assert decode.kv_bytes == 8 * 2048 * 576 * 2
    assert decode.query_bytes == 8 * 16 * (576 + 512) * 2
    assert decode.cache_write_bytes == 8 * 2 * 576 * 2
    assert decode.attention_flops == 8 * 2048 * 16 * 2 * (576 + 512)
    assert decode.projection_flops == 2 * 8 * 16 * 512 * 256
    weights = 16 * 512 * 256 * 2
    assert decode.projection_bytes - weights == 8 * 16 * (128 + 128 + 2 * 512) * 2
    parts = decode.kv_bytes, decode.query_bytes, decode.cache_write_bytes, decode.projection_bytes
    assert decode.bytes == sum(parts)
    prefill = step_work(MLA, parse_batch_shape("2q2k"))
    assert prefill.cache_write_bytes == 2 * 2048 * 2 * 576 * 2
    assert prefill.kv_bytes == 2 * 2048 * 16 * (192 + 128) * 2
    assert prefill.query_bytes == 2 * 2048 * 16 * (192 + 128) * 2
    assert prefill.projection_bytes - weights == 2 * 2048 * (512 + 16 * (128 + 128)) * 2
    assert prefill.projection_flops == 2 * 2 * 2048 * 16 * 512 * 256
    assert prefill.attention_flops == 2 * (2048 * 2049 / 2) * 16 * 2 * (192 + 128)
    assert step_work(MLA, parse_batch_shape("2q2k"), attention_alone=True).projection_flops == 0


@pytest.mark.parametrize("config", [GQA, MLA])
def test_ranks_share_the_keys_and_each_serves_the_heads_of_all(config: AttentionConfig) -> None:
    batch = parse_batch_shape("8q1s2k")
    one, two = (step_work(config.model_copy(update={"decode_context_parallel_size": n}), batch) for n in (1, 2))
    assert (two.kv_bytes, two.attention_flops) == (one.kv_bytes / 2, one.attention_flops)
    assert (two.query_bytes, two.projection_flops) == (one.query_bytes, one.projection_flops)


def test_a_mixed_batch_is_the_sum_of_its_requests() -> None:
    whole, parts = step_work(GQA, parse_batch_shape("2q512s8k_32q1s2k")), ["2q512s8k", "32q1s2k"]
    for name in ("kv_bytes", "query_bytes", "cache_write_bytes", "flops", "bytes"):
        assert getattr(whole, name) == sum(getattr(step_work(GQA, parse_batch_shape(each)), name) for each in parts)


def test_time_is_the_longer_of_bytes_and_flops() -> None:
    decode, prefill = parse_batch_shape("64q1s4k"), parse_batch_shape("q8k")
    assert roofline_us(GQA, decode, H100) == pytest.approx(step_work(GQA, decode).bytes / 3350e3)
    assert roofline_us(GQA, prefill, H100) == pytest.approx(step_work(GQA, prefill).flops / 989e6)
    fp8 = GQA.model_copy(update={"kv_cache_dtype": "fp8_e4m3"})
    assert roofline_us(fp8, prefill, H100) == pytest.approx(step_work(GQA, prefill).flops / 1978e6)
