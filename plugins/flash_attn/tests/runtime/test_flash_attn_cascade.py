"""FLASH_ATTN attends to a prefix that all requests share once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import flash_attn_layers as layers
import torch

from attn_select.reference.running import random_batch
from attn_select.runtime import Attention, Capacity, Scales, ops
from attn_select.runtime.batch import prepare_batch

Emulate = Callable[[str], list[dict[str, Any]]]
FA3 = ["vllm", "flash-attn-3", "sglang-kernel", "sgl-kernel"]
FA2 = ["vllm", "flash-attn"]
LSE = 2e-3


def test_cascade_must_save_more_than_it_costs(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate("vllm")
    group = layers.made("vllm", num_heads=32, num_kv_heads=8, head_size=128, group_capacity=Capacity(64, 512, 8192))
    builder = group.distinct[0].builder
    lens = torch.full((64,), 8192, dtype=torch.int32)

    def worthwhile(requests: int, prefix: int) -> bool:
        common = prepare_batch([1] * requests, lens[:requests].tolist())
        return bool(builder.use_cascade_attention(prefix, common))

    slow = [worthwhile(*case) for case in ((64, 8192), (64, 4096), (64, 1024), (8, 8192), (7, 8192))]
    assert slow == [True, True, False, False, False]
    monkeypatch.setattr(ops, "implementation", lambda *_: (None, "acme.ops:merge"))
    builder = layers.made("vllm", num_heads=32, num_kv_heads=8, head_size=128).distinct[0].builder
    fast = [worthwhile(*case) for case in ((64, 8192), (64, 1024), (64, 256), (8, 8192), (8, 2048), (7, 8192))]
    assert fast == [True, True, False, True, False, False]


@pytest.mark.parametrize(("provider", "gpu"), [*((p, "h100") for p in FA3), *((p, "a100") for p in FA2)])
@pytest.mark.parametrize("fields", [{}, {"logits_soft_cap": 10.0}, {"dtype": "float16"}], ids=str)
def test_cascade_gives_what_the_plain_path_gives(
    provider: str, gpu: str, fields: dict[str, Any], emulate: Emulate
) -> None:
    calls = emulate(provider)
    group = layers.made(provider, gpu, group_capacity=Capacity(16, 512, 1024), **fields)
    layers.always_cascade(group)
    size = group.block_size
    common, cache = random_batch(group, [1] * 7 + [20], [256 + 10 + i for i in range(7)] + [290], 256 // size)
    plain, plain_lse = layers.run(group, common, cache)
    calls.clear()
    output, lse = layers.run(group, common, cache, common_prefix_len=256)
    prefix, rest = layers.calls_of(calls)
    assert (prefix["causal"], rest["causal"]) == (False, True)
    assert prefix["cu_seqlens_q"].tolist() == [0, 27]
    torch.testing.assert_close(output, plain, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse, plain_lse, atol=LSE, rtol=0)


@pytest.mark.parametrize("provider", ["vllm", "sglang-kernel"])
def test_cascade_counts_sinks_once_and_scales_both_parts(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, sinks=True, kv_cache_dtype="fp8_e4m3", group_capacity=Capacity(16, 512, 1024))
    layers.always_cascade(group)
    layer = Attention(group, caller_writes=True, sinks=torch.ones(4), scales=Scales.make("cpu", q=0.02, k=0.1, v=0.2))
    common, cache = random_batch(group, [1] * 8, [300] * 8, 256 // group.block_size)
    plain, plain_lse = layers.run(group, common, cache, layer)
    calls.clear()
    output, lse = layers.run(group, common, cache, layer, common_prefix_len=256)
    prefix, rest = layers.calls_of(calls)
    name = "s_aux" if provider == "vllm" else "sinks"
    assert prefix[name] is None
    assert rest[name] is not None
    assert prefix["k_descale"].shape == (1, 2)
    assert rest["k_descale"].shape == (8, 2)
    torch.testing.assert_close(output, plain, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse, plain_lse, atol=LSE, rtol=0)
