"""FLASH_ATTN's layer: what reaches the kernel, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import flash_attn_layers as layers
import torch

from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.reference.running import random_batch
from attn_select.runtime import Attention, Scales
from attn_select.runtime.kv_cache import key_value_views
from attn_select.testing import selection_of
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN

Emulate = Callable[[str], list[dict[str, Any]]]
FA3 = ["vllm", "flash-attn-3", "sglang-kernel", "sgl-kernel"]
FA2 = ["vllm", "flash-attn"]
LSE = 2e-3


# --- FA2's rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", FA2)
def test_fa2_decodes_beside_a_request_without_a_query(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, "a100")
    common, cache = random_batch(group, [1, 0, 1], [30, 7, 9])
    output, _ = layers.run(group, common, cache)
    assert calls[0]["max_seqlen_q"] == 2
    assert output.isfinite().all()
    common, cache = random_batch(group, [1, 1], [30, 9])
    layers.run(group, common, cache)
    assert calls[1]["max_seqlen_q"] == 1


@pytest.mark.parametrize("provider", FA2)
@pytest.mark.parametrize("window", [None, 7, 400])
def test_fa2s_alibi_constants_are_taken_out_of_the_lse(provider: str, window: int | None, emulate: Emulate) -> None:
    emulate(provider)
    group = layers.made(provider, "a100", alibi=True, sliding_window=window)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    layer = Attention(group, caller_writes=True, alibi_slopes=slopes)
    common, cache = random_batch(group, [1, 12, 3], [30, 12, 5])
    output, lse = layers.run(group, common, cache, layer)
    expected = layers.reference(group, common, cache, layer, alibi_slopes=slopes)
    torch.testing.assert_close(lse.double(), expected[1], atol=LSE, rtol=0)
    torch.testing.assert_close(output.double(), expected[0], atol=2e-2, rtol=0)


# --- Layouts, token pools, padding ----------------------------------------------------------------


@pytest.mark.parametrize("provider", FA3)
def test_layouts_are_strided_views(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    outputs = []
    for layout in (FLASH_ATTN_NHD, FLASHINFER_NHD, FLASHINFER_HND):
        group = layers.made(provider, layout=layout, block_size=16)
        assert group.kv_layout == layout
        common, cache = random_batch(group, [1, 4], [33, 20])
        key, value = key_value_views(cache, layout, group.config)
        draw = torch.Generator().manual_seed(3)
        for view in (key, value):
            view.copy_(torch.randn(view.shape, generator=draw))
        outputs.append(layers.run(group, common, cache)[0])
        passed = layers.calls_of(calls)[-1]
        k = passed["k"] if provider == "vllm" else passed["k_cache"]
        assert k.data_ptr() == key.data_ptr()
        assert k.stride() == key.stride()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(("provider", "gpu"), [*((p, "h100") for p in FA3), *((p, "a100") for p in FA2)])
def test_rows_behind_the_batch_are_left_alone(provider: str, gpu: str, emulate: Emulate) -> None:
    emulate(provider)
    group = layers.made(provider, gpu)
    common, cache = random_batch(group, [1, 2], [33, 20])
    output, lse = layers.run(group, common, cache, padding=4)
    assert output[:3].isfinite().all()
    assert lse[:3].isfinite().all()
    assert output[3:].isnan().all()
    assert lse[3:].isnan().all()


def test_a_step_without_tokens_calls_nothing(emulate: Emulate) -> None:
    calls = emulate("vllm")
    group = layers.made("vllm")
    common, cache = random_batch(group, [0], [20])
    layers.run(group, common, cache, padding=2)
    assert not layers.calls_of(calls)


@pytest.mark.parametrize("provider", FA2)
@pytest.mark.parametrize(
    "fields", [{}, {"alibi": True}, {"sliding_window": 5}, {"attn_type": "encoder_decoder"}], ids=str
)
def test_fa2_is_given_no_request_without_keys(provider: str, fields: dict[str, Any], emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, "a100", **fields)
    layer = Attention(group, caller_writes=True, alibi_slopes=torch.full((4,), 0.5) if "alibi" in fields else None)
    common, cache = random_batch(group, [1, 2, 1], [33, 2, 1])
    wanted, wanted_lse = layers.run(group, common, cache, layer)
    table = common.block_table_tensor.clone()
    common.block_table_tensor[1] = 10**6  # stale
    common.seq_lens = common.seq_lens_cpu = torch.tensor([33, 0, 1], dtype=torch.int32)
    calls.clear()
    output, lse = layers.run(group, common, cache, layer)
    assert not output[1:3].any()
    assert lse[1:3].isneginf().all()
    kept = torch.tensor([0, 3])
    assert torch.equal(output[kept], wanted[kept])
    assert torch.equal(lse[kept], wanted_lse[kept])
    assert calls[0]["block_table"][1].tolist() == [0] * table.shape[1]
    quiet = layer(torch.randn(4, 4, 64).bfloat16(), None, None, cache, group.build(common))
    assert not quiet[1:3].any()


@pytest.mark.parametrize("provider", FA2)
def test_fa2s_guarded_batch_stays_in_place_for_graphs(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, "a100", group_cuda_graphs=True)
    addresses = []
    for seq_lens in ([33, 5, 1], [2, 40, 9]):
        common, cache = random_batch(group, [1, 1, 1], seq_lens)
        common.seq_lens = common.seq_lens * torch.tensor([1, 0, 1], dtype=torch.int32)
        calls.clear()
        output, lse = layers.run(group, common, cache)
        assert not output[1].any()
        assert lse[1].isneginf().all()
        assert lse[0].isfinite().all()
        lens = calls[0]["seqused_k" if provider == "vllm" else "cu_seqlens_k"]
        addresses.append((lens.data_ptr(), calls[0]["block_table"].data_ptr()))
        # Without LSE the outputs are right as they are, and the captured step has no kernel more.
        quiet = Attention(group, caller_writes=True)(
            torch.randn(3, 4, 64).bfloat16(), None, None, cache, group.build(common)
        )
        assert not quiet[1].any()
        assert calls[-1]["block_table"] is common.block_table_tensor
    assert addresses[0] == addresses[1]


# --- Terms of the layer ---------------------------------------------------------------------------


@pytest.mark.parametrize("provider", ["vllm", "sglang-kernel"])
def test_sinks_are_passed_in_bfloat16_and_are_the_lse_of_rows_without_keys(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, sinks=True)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25])
    common, cache = random_batch(group, [1, 1], [33, 1])
    common.seq_lens = torch.tensor([33, 0], dtype=torch.int32)
    output, lse = layers.run(group, common, cache, Attention(group, caller_writes=True, sinks=sinks))
    passed = layers.calls_of(calls)[-1]["s_aux" if provider == "vllm" else "sinks"]
    assert passed.dtype == torch.bfloat16
    assert not output[1].any()
    assert torch.equal(lse[1], sinks)


@pytest.mark.parametrize("provider", FA3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fp8_brings_descales_and_converts(provider: str, dtype: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group = layers.made(provider, kv_cache_dtype="fp8_e4m3", dtype=dtype, per_head_quant_scales=True)
    scales = Scales.make("cpu", q=0.02, k=torch.tensor([0.5, 0.25]), v=torch.tensor([2.0, 1.0]), num_kv_heads=2)
    layer = Attention(group, caller_writes=True, scales=scales)
    common, cache = random_batch(group, [1, 2, 1], [33, 20, 4])
    output, _ = layers.run(group, common, cache, layer)
    assert output.dtype == getattr(torch, dtype)
    assert output.isfinite().all()
    passed = layers.calls_of(calls)[-1]
    assert passed["q"].dtype == torch.float8_e4m3fn
    assert passed["k_descale"].tolist() == [[0.5, 0.25]] * 3
    assert passed["v_descale"].tolist() == [[2.0, 1.0]] * 3
    assert passed["q_descale"].unique().tolist() == pytest.approx([0.02])
    writes_own = passed.get("out") is None
    assert writes_own == (dtype == "float16" or provider in ("flash-attn-3", "sgl-kernel"))
    other = Attention(group, caller_writes=True, scales=Scales.make("cpu", k=4.0, num_kv_heads=2))
    layers.run(group, common, cache, other)
    assert layers.calls_of(calls)[-1]["k_descale"].unique().tolist() == [4.0]


def test_a_step_that_is_not_causal_sees_a_window_to_both_sides(emulate: Emulate) -> None:
    calls = emulate("vllm")
    group = layers.made("vllm", sliding_window=5)
    common, cache = random_batch(group, [4], [20])
    layers.run(group, common, cache)
    common.causal = False
    layers.run(group, common, cache)
    causal, both = layers.calls_of(calls)
    assert (causal["causal"], causal["window_size"]) == (True, (4, 0))
    assert (both["causal"], both["window_size"]) == (False, (4, 4))


@pytest.mark.parametrize(("provider", "gpu"), [("vllm", "h100"), ("vllm", "a100")])
def test_blocks_are_split(provider: str, gpu: str, emulate: Emulate) -> None:
    """Sizes that Mamba states lead to, such as 544, run in blocks that no kernel reads whole."""
    emulate(provider)
    for size in (544, 64, 48):
        config = layers.small_layer(block_size=size)
        group = layers.group_of(selection_of(FLASH_ATTN, config, gpu, options={"provider": provider}))
        assert (group.block_size, group.kernel_block_size) == (size, 16)
    common, cache = random_batch(group, [1, 5], [30, 70])
    layer = Attention(group, caller_writes=True)
    assert cache.shape[2] == 16
    output, lse = layers.run(group, common, cache, layer)
    wanted = layers.reference(group, common, cache.view(2, -1, 48, *cache.shape[3:]), layer)
    torch.testing.assert_close(output.double(), wanted[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), wanted[1], atol=LSE, rtol=0)
