"""Multi-head latent attention: two forms that must agree, the 656-byte token, and a choice of tokens."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FP8_DS_MLA, MLA
from attn_select.reference.oracle_mla import (
    absorb_query,
    project_output,
    sparse_mla_reference,
)
from attn_select.testing import (
    attention_reference,
    gather_reference,
    pack_fp8_ds_mla,
    random_problem,
    unpack_fp8_ds_mla,
)

SMALL = {"num_heads": 3, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK = {"num_heads": 2, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def inputs(rows: int, seq_len: int, seed: int) -> tuple[Tensor, ...]:
    """q_nope, q_pe, kv_c, k_pe, w_uk, w_uv of the small config."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, 3, 8), (rows, 3, 4), (seq_len, 16), (seq_len, 4), (16, 3, 8), (16, 3, 6)
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    context=st.integers(0, 12),
    causal=st.booleans(),
    with_sinks=st.booleans(),
    cap=st.none() | st.floats(1.0, 30.0),
)
def test_absorbed_equals_decompressed(
    seed: int, rows: int, context: int, causal: bool, with_sinks: bool, cap: float | None
) -> None:
    q_nope, q_pe, kv_c, k_pe, w_uk, w_uv = inputs(rows, context + rows, seed)
    options = {
        "causal": causal,
        "sinks": torch.tensor([0.1, 2.0, -1.0]) if with_sinks else None,
        "logits_soft_cap": cap,
    }
    output, lse = decompressed(q_nope, q_pe, kv_c, k_pe, w_uk, w_uv, scale=0.2, **options)
    query = absorb_query(q_nope, q_pe, w_uk)
    keys = torch.cat([kv_c, k_pe], dim=-1)[:, None]
    latent, absorbed_lse = attention_reference(query, keys, kv_c[:, None], scale=0.2, **options)
    torch.testing.assert_close((project_output(latent, w_uv), absorbed_lse), (output, lse), rtol=1e-10, atol=1e-10)


def decompressed(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, w_uk: Tensor, w_uv: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attend to the keys and values that the latents stand for."""
    k_nope, values = (torch.einsum("sr,rhp->shp", kv_c.double(), weight.double()) for weight in (w_uk, w_uv))
    keys = torch.cat([k_nope, k_pe.double()[:, None].expand(-1, q_pe.shape[1], -1)], dim=-1)
    return attention_reference(torch.cat([q_nope, q_pe], dim=-1), keys, values, **options)


def test_decompressed_by_hand() -> None:
    q_nope, q_pe, kv_c, k_pe, w_uk, w_uv = inputs(1, 3, 5)
    output, lse = decompressed(q_nope, q_pe, kv_c, k_pe, w_uk, w_uv, scale=0.2)
    for head in range(3):
        scores = [
            0.2 * float(q_nope[0, head] @ (w_uk[:, head].T @ kv_c[s]) + q_pe[0, head] @ k_pe[s]) for s in range(3)
        ]
        weights = [math.exp(score) for score in scores]
        total = sum(w * (w_uv[:, head].T @ kv_c[s]) for s, w in enumerate(weights))
        torch.testing.assert_close(output[0, head], total / sum(weights))
        assert float(lse[0, head]) == pytest.approx(math.log(sum(weights)))


def test_the_656_bytes() -> None:
    """Byte for byte as FlashMLA's README has them."""
    latent = torch.zeros(512)
    latent[0], latent[127], latent[128], latent[300], latent[511] = 448.0, -1.0, 3.0, 0.0, 900.0
    rope = torch.arange(64.0)
    packed = pack_fp8_ds_mla(latent, rope)
    assert packed.dtype == torch.uint8
    assert packed.shape == (656,)
    data = bytes(packed.tolist())
    smallest = 2.0 ** math.ceil(math.log2(1e-4))
    assert struct.unpack("<4f", data[512:528]) == (1.0, 2.0**-7, smallest, 4.0)  # 3/448 and 900/448, rounded up
    assert data[0] == 0x7E  # 448, the largest e4m3
    assert data[127] == 0xB8  # -1
    assert packed[128:129].view(torch.float8_e4m3fn).float() == 3.0 * 2**7
    assert not any(data[256:384])
    assert data[528:] == struct.pack("<64H", *(struct.unpack("<I", struct.pack("<f", n))[0] >> 16 for n in range(64)))
    numbers = unpack_fp8_ds_mla(packed)
    assert numbers[:512].tolist()[:129] == latent.double().tolist()[:129]
    assert float(numbers[511]) == 4 * 224  # 900 / 4 = 225 lies between the e4m3 numbers 224 and 240
    assert torch.equal(numbers[512:], rope.double())


@given(
    seed=st.integers(0, 2**31),
    exponent=st.floats(-20, 20),
    power_of_two_scales=st.booleans(),
    shape=st.sampled_from([(3,), (2, 4)]),
)
def test_packing_and_back(seed: int, exponent: float, power_of_two_scales: bool, shape: tuple[int, ...]) -> None:
    """e4m3 keeps four significant bits of what is not small beside its tile's largest; the rope part is exact."""
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(*shape, 512, generator=generator) * 2.0**exponent
    rope = torch.randn(*shape, 64, generator=generator).bfloat16()
    packed = pack_fp8_ds_mla(latent, rope, power_of_two_scales=power_of_two_scales)
    assert packed.shape == (*shape, 656)
    numbers = unpack_fp8_ds_mla(packed)
    assert torch.equal(numbers[..., 512:], rope.double())
    tiles, back = latent.double().reshape(*shape, 4, 128), numbers[..., :512].reshape(*shape, 4, 128)
    largest = tiles.abs().amax(dim=-1, keepdim=True)
    floor = 2.0**-13 if power_of_two_scales else 0.0  # the smallest scale: 1e-4 rounded up
    # Half a step: 2**-4 of the number, and 2**-10 of the scale among the subnormal ones.
    step = torch.maximum(tiles.abs() * 2**-4, torch.maximum(2 * largest / 448, torch.tensor(floor)) * 2**-10)
    assert ((tiles - back).abs() <= step * (1 + 1e-6)).all()
    if power_of_two_scales:
        scales = packed[..., 512:528].contiguous().view(torch.float32)
        assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
        assert torch.equal(numbers.bfloat16().double(), numbers)  # what FlashMLA computes with


@pytest.mark.parametrize(("layout", "kv_cache_dtype"), [(MLA, "auto"), (FP8_DS_MLA, "fp8_ds_mla")])
def test_sparse_over_all_tokens_is_dense(layout: str, kv_cache_dtype: str) -> None:
    config = AttentionConfig(**DEEPSEEK, sparse_top_k=64, kv_cache_dtype=kv_cache_dtype)
    problem = random_problem(4, config, layout, requests=[(3, 40), (1, 64), (5, 5)])
    cache = problem.written_cache()
    sparse = problem.reference()
    assert sparse[0].isfinite().all()
    start = 0
    for row, (query_len, seq_len) in zip(problem.block_table, problem.requests, strict=True):
        rows = slice(start, start + query_len)
        start += query_len
        slots = torch.tensor([int(row[p // 16]) * 16 + p % 16 for p in range(seq_len)])
        keys, _ = gather_reference(cache, layout, slots, config)
        dense, lse = attention_reference(problem.absorbed[rows], keys, keys[..., :512], scale=problem.scale)
        torch.testing.assert_close((sparse[0][rows], sparse[1][rows]), (project_output(dense, problem.weights[1]), lse))


def test_sparse_attends_to_the_choice_alone() -> None:
    """Padding may stand anywhere, a slot that stands twice counts twice, and nobody else's slot is read."""
    config = AttentionConfig(**SMALL, sparse_top_k=4)
    problem = random_problem(5, config, MLA, requests=[(3, 20)])
    cache = problem.written_cache()
    slots = problem.slot_mapping[:2]
    kept = cache.flatten(0, 1)[slots].clone()
    cache.fill_(math.nan)
    cache.flatten(0, 1)[slots] = kept
    a, b = slots.tolist()
    indices = torch.tensor([[-1, a, -1, b], [a, a, b, -1], [-1, -1, -1, -1]])
    output, lse = sparse_mla_reference(problem.absorbed, cache, MLA, indices, config, problem.scale)

    def by_hand(row: int, chosen: list[int]) -> tuple[Tensor, Tensor]:
        tokens = torch.stack([cache.flatten(0, 1)[slot] for slot in chosen]).double()
        scores = problem.scale * problem.absorbed[row] @ tokens.T
        return scores.softmax(dim=-1) @ tokens[:, :16], scores.logsumexp(dim=-1)

    torch.testing.assert_close((output[0], lse[0]), by_hand(0, [a, b]))
    torch.testing.assert_close((output[1], lse[1]), by_hand(1, [a, a, b]))
    assert not output[2].any()
    assert lse[2].isneginf().all()
