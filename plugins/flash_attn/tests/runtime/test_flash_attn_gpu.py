"""FLASH_ATTN on a GPU: what emulated kernels cannot show."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("torch")

import flash_attn_layers as layers
import torch

from attn_select.reference.running import random_batch
from attn_select.runtime import Attention, Capacity

LSE = 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"sliding_window": 20}], ids=str)
def test_neither_build_nor_forward_waits_for_the_gpu(fields: dict[str, Any], graphs: bool) -> None:
    group = layers.on_gpu(**fields, group_cuda_graphs=graphs)
    common, cache = random_batch(group, [1, 9], [300, 20])
    layer = Attention(group, caller_writes=True)
    query = torch.randn(10, 4, 64, device="cuda", dtype=torch.bfloat16)
    layer(query, None, None, cache, group.build(common))
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that it does not see every synchronisation
            torch.cuda.set_sync_debug_mode("error")
        output = layer(query, None, None, cache, group.build(common))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.isfinite().all()


@pytest.mark.gpu
def test_real_cascade_gives_what_the_plain_path_gives() -> None:
    group = layers.on_gpu(group_capacity=Capacity(16, 512, 1024))
    layers.always_cascade(group)
    common, cache = random_batch(group, [1] * 7 + [20], [300 + i for i in range(8)], 256 // group.block_size)
    layer = Attention(group, caller_writes=True)
    query = torch.randn(27, 4, 64, device="cuda", dtype=torch.bfloat16)
    lses = [torch.empty(27, 4, device="cuda") for _ in range(2)]
    plain = layer(query, None, None, cache, group.build(common), None, lses[0])
    merged = layer(query, None, None, cache, group.build(common, 256), None, lses[1])
    torch.testing.assert_close(merged, plain, atol=2e-2, rtol=0)
    torch.testing.assert_close(lses[1], lses[0], atol=LSE, rtol=0)


@pytest.mark.gpu
def test_batch_invariant_requests_give_the_same_bits_in_any_batch() -> None:
    for head_size, window in ((64, None), (128, None), (128, 100), (256, None)):
        group = layers.on_gpu(head_size=head_size, batch_invariant=True, sliding_window=window, block_size=128)
        common, cache = random_batch(group, [1, 1, 60, 5], [500, 90, 60, 300])
        layer = Attention(group, caller_writes=True)
        query = torch.randn(67, 4, head_size, device="cuda", dtype=torch.bfloat16)
        together = layer(query, None, None, cache, group.build(common))
        for request in range(4):
            first, last = common.query_start_loc_cpu[request : request + 2].tolist()
            alone = layer(query[first:last], None, None, cache, group.build(common.requests(request, request + 1)))
            assert torch.equal(alone, together[first:last]), (head_size, window, request)
