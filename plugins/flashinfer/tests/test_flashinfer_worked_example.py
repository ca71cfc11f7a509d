"""A mixed batch in full: two decodes (1024 and 2048 tokens), two prefills (512 and 256), every number that is planned.

32 query and 8 KV heads of 128, blocks of 16, an FP8 e4m3 cache. The numbers follow from the lengths by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_groups as groups
import torch

from attn_select.reference.comparison import E4M3_ROUNDOFF
from attn_select.reference.oracle_paged import paged_reference
from attn_select.runtime import Attention, BlockPool, BlockTable, Capacity, Scales, prepare_batch
from attn_select_flashinfer.runtime.mha_calls import FIDecode, FIPrefill, TRTLLMDecode, TRTLLMPrefill

QUERY_LENS, SEQ_LENS = [1, 1, 512, 256], [1024, 2048, 512, 256]
FIELDS = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16, "kv_cache_dtype": "fp8_e4m3"}
NATIVE = {"use_trtllm": False}
SCALES = {"q": 0.02, "k": 0.015, "v": 0.01}
PATHS = {
    "hopper": ("h100", (9, 0), {}, "TRT-LLM (XQA)", "native fa3"),
    "hopper-native": ("h100", (9, 0), NATIVE, "native fa2", "native fa3"),
    "ampere": ("a100", (8, 0), {}, "native fa2", "native fa2"),
    "blackwell": ("b200", (10, 0), {}, "TRT-LLM (trtllm-gen)", "TRT-LLM (trtllm-gen)"),
}


def planned_batch(group: Any) -> tuple[Any, Any]:
    """Return the batch and its blocks: request r has the next blocks of the pool, counted from 1."""
    pool, table = BlockPool(241, 16), BlockTable(4, 128, 16, group.device)
    for request, seq_len in enumerate(SEQ_LENS):
        table.append_row(request, pool.allocate(request, seq_len))
    return prepare_batch(QUERY_LENS, SEQ_LENS, table), [list(pool.blocks(request)) for request in range(4)]


def check_metadata(metadata: Any, common: Any, blocks: list[list[int]], paths: tuple[str, str]) -> None:
    assert common.query_start_loc.tolist() == [0, 1, 2, 514, 770]
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len, common.max_seq_len) == (4, 770, 512, 2048)
    assert [len(row) for row in blocks] == [64, 128, 32, 16]
    slots = common.slot_mapping.tolist()
    assert slots[0] == blocks[0][63] * 16 + 15  # token 1023
    assert slots[1] == blocks[1][127] * 16 + 15  # token 2047
    assert slots[2:4] == [blocks[2][0] * 16, blocks[2][0] * 16 + 1]
    assert slots[514] == blocks[3][0] * 16
    assert slots[769] == blocks[3][15] * 16 + 15

    decode, prefill = metadata.parts[0].metadata.parts
    assert (decode.label, prefill.label) == paths
    assert (decode.start, decode.end, prefill.start, prefill.end) == (0, 2, 2, 770)
    if isinstance(decode, FIDecode):
        assert decode.lists.paged_kv_indptr.tolist() == [0, 64, 192]
        assert decode.lists.paged_kv_indices.tolist() == blocks[0] + blocks[1]
        assert decode.lists.paged_kv_last_page_len.tolist() == [16, 16]  # full last pages
    else:
        assert isinstance(decode, TRTLLMDecode)
        assert decode.block_tables.tolist() == [blocks[0] + [0] * 64, blocks[1]]
        assert decode.seq_lens.tolist() == [1024, 2048]
        assert (decode.q_len_per_req, decode.max_seq_len, decode.window_left, decode.mask) == (1, 2048, -1, None)
    if isinstance(prefill, FIPrefill):
        assert prefill.qo_indptr.tolist() == [0, 512, 768]
        assert prefill.lists.paged_kv_indptr.tolist() == [0, 32, 48]
        assert prefill.lists.paged_kv_indices.tolist() == blocks[2] + blocks[3]
        assert prefill.lists.paged_kv_last_page_len.tolist() == [16, 16]
        assert prefill.lists.seq_lens.tolist() == [512, 256]
        assert prefill.causal
    else:
        assert isinstance(prefill, TRTLLMPrefill)
        assert prefill.cum_seq_lens_q.tolist() == prefill.cum_seq_lens_kv.tolist() == [0, 512, 768]
        assert (prefill.max_q_len, prefill.seq_lens.tolist()) == (512, [512, 256])


def check_output(group: Any, common: Any) -> None:
    """Fill the cache, write the step's tokens, attend, and compare each phase with the oracle."""
    draw = torch.Generator().manual_seed(0)
    scales = Scales.make(group.device, SCALES["q"], SCALES["k"], SCALES["v"])
    layer = Attention(group, caller_writes=True, scales=scales)
    cache = group.allocate_kv_cache(241)
    cache.copy_((torch.randn(cache.shape, generator=draw) / SCALES["k"]).clamp(-448, 448).to(cache.dtype))
    query, key, value = (
        torch.randn(770, heads, 128, generator=draw).bfloat16().to(group.device) for heads in (32, 8, 8)
    )
    output = layer(query, key, value, cache, group.build(common))
    for phase, rows in (("decode", slice(0, 2)), ("prefill", slice(2, 770))):
        plan = group.selection.plans[phase]
        expected, _ = paged_reference(
            query, cache, group.kv_layout, common.block_table_tensor, common.query_start_loc, common.seq_lens,
            group.config, layer.terms.scale, k_scale=SCALES["k"], v_scale=SCALES["v"],
            query_dtype=plan.query_dtype if plan.query_dtype == "fp8_e4m3" else None, q_scale=SCALES["q"],
        )  # fmt: skip
        error = float((output[rows].double() - expected[rows]).norm() / expected[rows].norm())
        exact = plan.query_dtype == "bfloat16" and plan.kernel_name != "xqa"
        assert error < (4 * 2.0**-8 if exact else E4M3_ROUNDOFF), (plan.kernel_name, error)


@pytest.mark.parametrize("case", PATHS)
def test_the_worked_example(case: str, emulate: Callable[..., Any]) -> None:
    gpu, capability, options, *paths = PATHS[case]
    emulate(capability)
    group = groups.made(gpu, options=options, group_capacity=Capacity(8, 1024, 2048), **FIELDS)
    common, blocks = planned_batch(group)
    check_metadata(group.build(common), common, blocks, (paths[0], paths[1]))
    check_output(group, common)
    ran = groups.builder_of(group).ran
    assert ran == {f"decode: {paths[0]}": 2, f"prefill: {paths[1]}": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["hopper", "hopper-native"])
def test_the_worked_example_on_hopper(case: str) -> None:
    _, capability, options, *paths = PATHS[case]
    if torch.cuda.get_device_capability() != capability:
        pytest.skip("needs a CUDA device of compute capability 9.0")
    group = groups.on_gpu(options=options, group_capacity=Capacity(8, 1024, 2048), **FIELDS)
    common, blocks = planned_batch(group)
    check_metadata(group.build(common), common, blocks, (paths[0], paths[1]))
    check_output(group, common)
