"""What reaches the TRT-LLM kernels: workspaces, drafts, scales, quantised outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_groups as groups
import torch

from attn_select.reference.running import random_batch
from attn_select.runtime import Attention, BatchError, Scales

Emulate = Callable[..., Any]
NATIVE = {"use_trtllm": False}
MIB = 1 << 20
LSE = 2e-3
E4M3 = torch.float8_e4m3fn
PREFILL_RUN = "BatchPrefillWithPagedKVCacheWrapper.run"
DECODE_RUN = "BatchDecodeWithPagedKVCacheWrapper.run"


def parts_of(metadata: Any) -> list[Any]:
    return metadata.parts[0].metadata  # type: ignore[no-any-return]


def test_native_scratch_and_the_zeroed_buffer_are_apart_and_sized_by_options(emulate: Emulate) -> None:
    emulate()
    group = groups.made(options={"native_workspace_bytes": 32 * MIB, "trtllm_workspace_bytes": 48 * MIB})
    builder = groups.builder_of(group)
    assert builder.workspace.numel() == 48 * MIB
    assert not builder.workspace.any()
    scratch = builder.native.pool.scratch
    assert scratch.numel() == 32 * MIB
    assert scratch.untyped_storage().data_ptr() != builder.workspace.untyped_storage().data_ptr()
    assert {p: plan.workspace_bytes for p, plan in group.selection.plans.items()} == {
        "prefill": 40 * MIB,
        "decode": 48 * MIB,
    }


def test_scratch_that_is_too_small_names_the_option(emulate: Emulate) -> None:
    emulate()
    fields = {"num_heads": 128, "num_kv_heads": 8, "head_size": 128}
    group = groups.made(options={**NATIVE, "native_workspace_bytes": 16 * MIB}, **fields)
    common, _ = random_batch(group, [1] * 16, [1000] * 16)
    with pytest.raises(BatchError, match=r"scratch of 16777216 bytes is too small .*\n.*native_workspace_bytes"):
        group.build(common)


@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_xqa_takes_drafts_of_equal_length_together(fields: dict[str, Any], emulate: Emulate) -> None:
    world = emulate()
    group = groups.made(num_speculative_tokens=2, **fields)
    layer = Attention(group, caller_writes=True, scales=Scales.make("cpu", q=0.02, k=0.5, v=0.25))
    common, cache = random_batch(group, [3, 3, 1, 2, 9], [30, 17, 5, 2, 40])
    output, _ = groups.run(group, common, cache, layer, lse=False)
    expected, _ = groups.reference(group, common, cache, layer)
    torch.testing.assert_close(output.double(), expected, atol=0.2 if fields else 2e-2, rtol=0)
    calls = world.named("trtllm_batch_decode_with_kv_cache")
    assert [call["q_len_per_req"] for call in calls] == [3, 1, 2]
    assert [call["backend"] for call in calls] == ["xqa"] * 3
    assert calls[0]["mask"].dtype == torch.uint16
    assert calls[0]["mask"].tolist() == [[[1, 0], [3, 0], [7, 0]]] * 2
    assert calls[1]["mask"] is None


def test_xqa_masks_nothing_where_attention_is_not_causal(emulate: Emulate) -> None:
    world = emulate()
    group = groups.made(num_speculative_tokens=2)
    layer = Attention(group, caller_writes=True)
    common, cache = random_batch(group, [3, 3], [30, 17])
    common.causal = False
    output, _ = groups.run(group, common, cache, layer, lse=False)
    expected, _ = groups.reference(group, common, cache, layer)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
    assert world.named("trtllm_batch_decode_with_kv_cache")[0]["mask"].tolist() == [[[7, 0]] * 3] * 2
    fp8 = groups.made(num_speculative_tokens=2, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(
        BatchError, match=r"not causal and has queries of 3 tokens, which TRT-LLM \(XQA\) decodes causally"
    ):
        fp8.build(common)


def test_masks_of_many_drafts_fill_words_of_16_bits() -> None:
    from attn_select_flashinfer.runtime.mha import draft_mask

    rows = draft_mask(34, True).tolist()
    assert (len(rows), len(rows[0])) == (34, 4)
    assert rows[0] == [1, 0, 0, 0]
    assert rows[17] == [0xFFFF, 3, 0, 0]
    assert rows[33] == [0xFFFF, 0xFFFF, 3, 0]
    assert draft_mask(2, False).tolist() == [[3, 0], [3, 0]]


def test_trtllm_gen_runs_drafts_and_chunks(emulate: Emulate) -> None:
    world = emulate((10, 0))
    group = groups.made("b200", num_speculative_tokens=2)
    layer = Attention(group, caller_writes=True)
    common, cache = random_batch(group, [3, 1, 2, 9, 12], [30, 5, 2, 40, 12])
    output, lse = groups.run(group, common, cache, layer)
    expected, expected_lse = groups.reference(group, common, cache, layer)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=LSE, rtol=0)
    decodes = world.named("trtllm_batch_decode_with_kv_cache")
    assert [(call["q_len_per_req"], call["backend"], call["mask"]) for call in decodes] == [
        (3, "trtllm-gen", None),
        (1, "trtllm-gen", None),
        (2, "trtllm-gen", None),
    ]
    (prefill,) = world.named("trtllm_batch_context_with_kv_cache")
    assert prefill["cum_seq_lens_q"].tolist() == [0, 9, 21]
    assert prefill["cum_seq_lens_kv"].tolist() == [0, 40, 52]
    assert (prefill["max_q_len"], prefill["batch_size"], prefill["kv_layout"]) == (12, 2, "HND")
    groups.run(group, common, cache, layer)  # the counters of decode are still zero behind a prefill with LSE


def test_trtllm_gen_takes_an_fp8_query_and_scales_as_numbers(emulate: Emulate) -> None:
    world = emulate((10, 0))
    group = groups.made("b200", kv_cache_dtype="fp8_e4m3", output_quantization="fp8")
    layer = Attention(group, caller_writes=True, scale=0.2, scales=Scales.make("cpu", q=0.02, k=0.5, v=0.25))
    common, cache = random_batch(group, [1, 9], [30, 40])
    query, output_scale = groups.drawn_query(group, 10), torch.tensor(0.04)
    output = torch.empty(10, 4, 64, dtype=E4M3)
    layer.forward(query, None, None, cache, group.build(common), output, None, output_scale)
    expected, _ = groups.reference(group, common, cache, layer)
    error = (output.double() * 0.04 - expected).norm() / expected.norm()
    assert error < 0.1
    for name in ("trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"):
        (call,) = world.named(name)
        assert call["query"].dtype == call["out"].dtype == E4M3
        assert (call["bmm1_scale"], call["bmm2_scale"]) == pytest.approx((0.2 * 0.02 * 0.5, 0.25 / 0.04))


def test_fp4_output_brings_its_block_scales(emulate: Emulate) -> None:
    calls: list[dict[str, Any]] = []

    def record(query: Any, kv_cache: Any, **call: Any) -> None:
        calls.append(call)

    names = ("trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache")
    emulate((10, 0), **dict.fromkeys(names, record))
    group = groups.made("b200", kv_cache_dtype="fp8_e4m3", output_quantization="fp4")
    common, cache = random_batch(group, [1, 9], [30, 40])
    output, blocks = torch.empty(10, 4, 32, dtype=torch.uint8), torch.empty(128, 16, dtype=E4M3)
    Attention(group, caller_writes=True).forward(
        groups.drawn_query(group, 10), None, None, cache, group.build(common), output, None, torch.tensor(3.0), blocks
    )
    assert [(c["out"].scale_start_index, c["out"].original_shape, c["out_dtype"], c["o_sf_scale"]) for c in calls] == [
        (0, (1, 4, 64), "nvfp4", 3.0),
        (1, (9, 4, 64), "nvfp4", 3.0),
    ]
    assert all(call["out"].scale is blocks for call in calls)
